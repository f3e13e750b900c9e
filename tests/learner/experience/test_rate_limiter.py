"""The arithmetic of samples per insert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import errors
from learner.experience import rate_limiter


def test_waits_for_the_first_transitions_and_then_keeps_the_band() -> None:
    limiter = rate_limiter.RateLimiter(samples_per_insert=4.0, min_size=100, error_buffer=40.0)
    limiter.insert(99)
    assert not limiter.may_sample(1)
    limiter.insert(1)
    assert limiter.may_sample(40)  # D falls from its target 400 to the band's lower edge 360
    assert not limiter.may_sample(41)
    limiter.sample(40)
    assert not limiter.may_sample(1)
    limiter.insert(10)  # brings D back up by 40
    assert limiter.may_sample(40)


def test_grants_what_the_learner_has_paid_for() -> None:
    limiter = rate_limiter.RateLimiter(samples_per_insert=4.0, min_size=100, error_buffer=40.0)
    assert limiter.steps_granted() == 110  # 110 * 4 - 0 = 440 = target + buffer
    limiter.insert(110)
    assert limiter.steps_granted() == 110
    limiter.sample(8)
    assert limiter.steps_granted() == 112


def test_either_side_gets_as_much_room_as_the_other_fills_in_some_time() -> None:
    limiter = rate_limiter.RateLimiter(samples_per_insert=4.0, min_size=100, error_buffer=40.0)
    limiter.took(40, 1.0)
    limiter.widen(10.0, inserted_per_s=2.0)
    assert limiter.steps_granted() == 200  # 200 * 4 - 0 = 800 = target + 10 * 40, though nothing was sampled
    limiter.insert(100)
    assert limiter.may_sample(80)  # 10 * 2 * 4
    assert not limiter.may_sample(81), "a learner that may run ahead the further the faster it runs would never stop"
    limiter.took(440, 1.0)
    limiter.widen(10.0, inserted_per_s=0.5)
    assert limiter.steps_granted() == 300, "smoothed: 80 samples/s"
    assert not limiter.may_sample(41)
    limiter.widen(0.0, inserted_per_s=9.0)
    assert limiter.steps_granted() == 110


def test_never_grants_less_than_learning_needs_to_start() -> None:
    limiter = rate_limiter.RateLimiter(samples_per_insert=0.001, min_size=50, error_buffer=1.0)
    limiter.insert(10)
    assert limiter.steps_granted() >= 50


@given(
    samples_per_insert=st.floats(0.05, 200),
    min_size=st.integers(1, 5000),
    call=st.integers(1, 4096),
    extra=st.floats(0, 1000),
)
def test_neither_side_waits_for_the_other_and_the_ratio_is_kept(
    samples_per_insert: float, min_size: int, call: int, extra: float
) -> None:
    error_buffer = max(call, samples_per_insert, 1.0) + extra
    limiter = rate_limiter.RateLimiter(samples_per_insert, min_size, error_buffer)
    granted = 0
    for _ in range(30):
        assert limiter.steps_granted() >= granted
        granted = limiter.steps_granted()
        limiter.insert(granted - limiter.inserted)
        assert limiter.may_sample(call)
        while limiter.may_sample(call):
            limiter.sample(call)
    # After a round of each, samples per transition beyond min_size lie within the buffer of the ratio asked for.
    lead = (limiter.inserted - min_size) * samples_per_insert - limiter.sampled
    assert abs(lead) <= error_buffer + 1e-6 * limiter.sampled


def test_state_is_taken_back() -> None:
    limiter = rate_limiter.RateLimiter(2.0, 10, 20.0)
    limiter.insert(30)
    limiter.sample(7)
    other = rate_limiter.RateLimiter(2.0, 10, 20.0)
    other.restore(limiter.state())
    assert (other.steps_granted(), other.may_sample(33), other.may_sample(54)) == (
        limiter.steps_granted(),
        limiter.may_sample(33),
        limiter.may_sample(54),
    )


@pytest.mark.parametrize(("ratio", "size", "buffer"), [(0.0, 1, 9.0), (1.0, 0, 9.0), (8.0, 1, 7.0), (0.1, 1, 0.5)])
def test_settings_that_would_stop_both_sides_are_refused(ratio: float, size: int, buffer: float) -> None:
    with pytest.raises(errors.ConfigError, match="leave no step"):
        rate_limiter.RateLimiter(ratio, size, buffer)


def test_begins_with_fewer_and_a_restored_one_does_not_wait_again() -> None:
    limiter = rate_limiter.RateLimiter(samples_per_insert=4.0, min_size=100, error_buffer=40.0)
    limiter.insert(30)
    limiter.begin()
    assert limiter.may_sample(40)
    limiter.sample(40)
    resumed = rate_limiter.RateLimiter(samples_per_insert=4.0, min_size=100, error_buffer=40.0)
    resumed.restore(limiter.state())
    assert resumed.steps_granted() == limiter.steps_granted()
    resumed.insert(10)
    assert resumed.may_sample(40)
