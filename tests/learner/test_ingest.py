"""Each genuine message once; everything else counted under its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from broker import codec, errors, messages, signing, specs
from learner import ingest
from tests.learner import fleet_examples

MAC = signing.ActorMac(b"k" * 32)
TOPIC = "actorq/lab/actor/pi/experience"


def make(max_policy_lag: int = 0) -> ingest.Ingest:
    return ingest.Ingest({"pi": MAC}, "ledger", fleet_examples.SPEC, (1, 2), max_policy_lag)


def offer(to: ingest.Ingest, experience: messages.Experience, version: int = 5) -> messages.Experience | None:
    opened = to.open("pi", TOPIC, MAC.seal(TOPIC, codec.encode(experience)))
    return opened if opened is not None and to.approve(opened, version) else None


def test_accepts_a_genuine_message_and_receipts_it() -> None:
    found = make()
    accepted = offer(found, fleet_examples.experience())
    assert accepted is not None
    np.testing.assert_array_equal(accepted.reward, np.ones(3, np.float32))
    assert found.receipt("pi") == messages.Receipt("ledger", 1, 1)
    assert not found.refused


def test_accepts_each_message_once() -> None:
    found = make()
    assert offer(found, fleet_examples.experience()) is not None
    assert offer(found, fleet_examples.experience()) is None
    assert found.refused == {"duplicate": 1}


def test_leaves_a_gap_to_be_filled() -> None:
    found = make()
    offer(found, fleet_examples.experience(seq=1))
    assert offer(found, fleet_examples.experience(seq=3)) is None
    assert found.refused == {"gap": 1}
    assert found.receipt("pi") == messages.Receipt("ledger", 1, 1)
    assert offer(found, fleet_examples.experience(seq=2)) is not None
    assert offer(found, fleet_examples.experience(seq=3)) is not None


def test_passes_over_what_the_actor_dropped() -> None:
    found = make()
    offer(found, fleet_examples.experience(seq=1))
    assert offer(found, fleet_examples.experience(seq=7, oldest=7, step=20)) is not None
    assert found.receipt("pi") == messages.Receipt("ledger", 1, 7)
    assert found.steps_missed == 17, "20 were recorded before, 3 arrived"
    assert offer(found, fleet_examples.experience(seq=8, oldest=8, step=23)) is not None
    assert found.steps_missed == 17


def test_what_went_to_a_session_before_is_not_missed() -> None:
    found = make()
    assert offer(found, fleet_examples.experience(seq=7, oldest=7, step=500)) is not None
    assert found.steps_missed == 0


def test_counts_anew_for_a_new_boot_and_refuses_the_old_one() -> None:
    found = make()
    offer(found, fleet_examples.experience(seq=1))
    assert offer(found, fleet_examples.experience(boot=2, seq=1)) is not None
    assert offer(found, fleet_examples.experience(boot=1, seq=2)) is None
    assert found.refused == {"duplicate": 1}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("fingerprint", {"fingerprint": "0" * 16}),
        ("epoch", {"assigned_epoch": 3}),
        ("epoch", {"assigned_epoch": 0}),
        ("version", {"epoch": 3}),
        ("version", {"epoch": -1}),
        ("version", {"epoch": 2, "version": 6}),
        ("version", {"version": -1}),
        ("shape", {"length": np.array([2, 2], np.int32)}),
        ("shape", {"length": np.array([3, 0], np.int32)}),
        ("shape", {"length": np.array([4, -1], np.int32)}),
        ("shape", {"terminated": np.ones(1, np.uint8)}),
        ("shape", {"observation": np.zeros((5, 3), np.float32)}),
        ("shape", {"observation": np.zeros((4, 4), np.float32)}),
        ("shape", {"observation": np.zeros((5, 4), np.uint8)}),
        ("shape", {"action": np.zeros(3, np.float32)}),
        ("shape", {"action": np.zeros((3, 1), np.int32)}),
        ("shape", {"log_prob": np.zeros(2, np.float32)}),
        ("value", {"reward": np.array([1, np.nan, 1], np.float32)}),
        ("value", {"observation": np.full((5, 4), np.inf, np.float32)}),
        ("value", {"episode_return": np.array([1, -np.inf], np.float32)}),
        ("value", {"terminated": np.array([1, 2], np.uint8)}),
        ("value", {"env_index": np.array([0, -1], np.int32)}),
        ("action", {"action": np.array([0, 1, 2], np.int32)}),
        ("action", {"action": np.array([0, -1, 0], np.int32)}),
    ],
)
def test_refuses_what_does_not_fit_but_receipts_it(reason: str, changes: dict[str, Any]) -> None:
    found = make()
    assert offer(found, fleet_examples.experience(**changes)) is None
    assert found.refused == {reason: 1}
    assert found.receipt("pi") == messages.Receipt("ledger", 1, 1), "else its actor would send it for ever"
    assert found.steps_refused == 3


def test_refuses_steps_of_policies_that_are_too_old() -> None:
    found = make(max_policy_lag=3)
    assert offer(found, fleet_examples.experience(seq=1, epoch=2, version=2)) is not None
    assert offer(found, fleet_examples.experience(seq=2, epoch=2, version=1)) is None
    assert offer(found, fleet_examples.experience(seq=3, epoch=2, version=0)) is not None, "random steps have no age"
    assert offer(found, fleet_examples.experience(seq=4, epoch=1, version=9)) is None, "of a session before this one"
    assert found.refused == {"stale": 2}


def test_takes_what_an_older_policy_chose_for_this_run() -> None:
    found = ingest.Ingest({"pi": MAC}, "ledger", fleet_examples.SPEC, (7, 7))
    assert offer(found, fleet_examples.experience(seq=1, assigned_epoch=7, epoch=3, version=900)) is not None
    assert offer(found, fleet_examples.experience(seq=2, assigned_epoch=7, epoch=0, version=0)) is not None


def test_refuses_what_is_not_sealed_by_the_actor_without_reading_it() -> None:
    found = make()
    body = codec.encode(fleet_examples.experience())
    forged = signing.ActorMac(b"x" * 32).seal(TOPIC, body)
    elsewhere = MAC.seal("actorq/lab/actor/other/experience", body)
    for payload in (forged, elsewhere, body, b""):
        assert found.open("pi", TOPIC, payload) is None
    assert found.open("stranger", TOPIC, MAC.seal(TOPIC, body)) is None
    assert found.refused == {"signature": 4, "unknown_actor": 1}
    assert found.receipt("pi") is None
    assert found.receipt("stranger") is None


def test_refuses_junk_under_a_genuine_mac() -> None:
    found = make()
    assert found.open("pi", TOPIC, MAC.seal(TOPIC, b"junk")) is None
    assert found.refused == {"size": 1}


def test_checks_continuous_actions_against_their_bounds() -> None:
    spec = specs.EnvSpec(
        fleet_examples.SPEC.observation, specs.ActionSpec("continuous", shape=(2,), low=(-1.0, -2.0), high=(1.0, 2.0))
    )
    inside = np.array([[1, 2], [-1, -2], [0, 0]], np.float32)
    ingest.check_arrays(fleet_examples.experience(action=inside), spec)
    with pytest.raises(errors.DecodeError, match="out of bounds"):
        ingest.check_arrays(fleet_examples.experience(action=inside * np.float32(1.01)), spec)
