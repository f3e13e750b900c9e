"""Odd answers of an environment are found, said and counted; the steps before are kept, and the actor goes on."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, specs
from broker.program import logs
from edge_actor import config
from edge_actor.acting import evaluate, rollout, step_times, supervised_env
from edge_actor.board import board
from edge_actor.environment import answers, env, failure
from edge_actor.experience import trajectory
from edge_actor.fleet import vitals
from tests import conftest
from tests.edge_actor.run import test_acting_loop
from tests.edge_actor.run.test_acting_loop import site  # noqa: F401  its fixture
from tests.fakes.environments import toys

Site = test_acting_loop.Site
HERE = toys.__file__
SPEC = specs.EnvSpec(specs.ObservationSpec((2,)), specs.ActionSpec("discrete", n=2))
OF_THE_VECTOR = ("observation nan", "observation inf", "reward nan", "reward 2e9", "reward 1e39", "observation long")
"""Answers that SyncVectorEnv lets through, or fails at."""


def begun(environment: env.Environment, capacity: int = 64) -> trajectory.Trajectory:
    record = trajectory.Trajectory(environment.spec, environment.n_envs, capacity)
    record.start(environment.reset(seed=0)[0])
    return record


@pytest.mark.fault(7)
@pytest.mark.parametrize("at", [2, 6])
@pytest.mark.parametrize("what", toys.ODD)
def test_the_steps_before_an_odd_answer_are_kept_and_nothing_of_it(what: str, at: int) -> None:
    environment = env.make(f"{HERE}:Odd", 1, {"what": what, "at": at})
    record = begun(environment)
    with pytest.raises(errors.ActorqError) as caught:
        rollout.run(environment, [0] * 20, record)
    assert what.partition(" ")[0].rstrip("s") in caught.value.what or "booleans" in caught.value.what
    record.cut()
    segments = record.flush()
    assert segments.steps == at - 1
    assert np.isfinite(segments.reward).all()
    assert np.isfinite(segments.observation).all()
    assert len(segments.observation) == segments.steps + len(segments.length)
    assert segments.reward.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0][: at - 1]
    record.start(environment.reset()[0])
    rollout.run(environment, [0] * 9, record)
    assert record.steps > 6, "and it goes on"


@pytest.mark.fault(7)
@pytest.mark.parametrize("what", OF_THE_VECTOR)
def test_of_several_environments_too(what: str) -> None:
    environment = env.make(f"{HERE}:Odd", 2, {"what": what, "at": 5})
    record = begun(environment)
    with pytest.raises((errors.EnvironmentFailure, ValueError)):
        rollout.run(environment, [np.zeros(2, int)] * 20, record)
    record.cut()
    segments = record.flush()
    assert segments.steps == 8
    assert np.isfinite(segments.reward).all()
    assert np.isfinite(segments.observation).all()


@pytest.mark.fault(7)
def test_what_a_reset_answers_is_looked_at_too() -> None:
    environment = env.make(f"{HERE}:OldReset")
    record = trajectory.Trajectory(environment.spec, 1, 64)
    with pytest.raises(errors.EnvironmentFailure, match=r"shape \(\), the space says \(2,\)"):
        record.start(environment.reset()[0])
    for odd in (np.array([np.nan, 0]), np.array([1e39, 0])):
        with pytest.raises(errors.EnvironmentFailure, match="not finite"):
            record.start(odd)


@pytest.mark.fault(8)
def test_finite_observations_are_clipped_once_seen_before_the_policy_sees_them() -> None:
    """A lidar answers the largest float where nothing is."""
    seen: list[list[float]] = []
    far = [-3e38, 3e38]
    observation = np.array(far, np.float32)
    environment = env.make(f"{HERE}:Countdown")
    faulty = env.Environment(
        environment.name, SPEC, 1, False,
        step=lambda action: (observation, 1.0, False, False, {}), reset=lambda: (observation, {}),
        close=lambda: None, to_env=environment.to_env, no_action=0,
    )  # fmt: skip
    record = trajectory.Trajectory(SPEC, 1, 64)
    record.start(np.zeros(2, np.float32))
    rollout.run(faulty, [0] * 3, record)
    assert record.clips

    def act(row: Any) -> int:
        seen.append(row[0].tolist())
        return 0

    rollout._one(faulty, act, [None] * 3, record, lambda: None, step_times.StepTimes())
    limit = [-specs.MAX_MAGNITUDE, specs.MAX_MAGNITUDE]
    assert seen == [limit] * 3
    assert record.flush().observation.tolist() == [[0, 0]] + [limit] * 6
    assert observation.tolist() == np.array(far, np.float32).tolist(), "it is the environment's own"


@pytest.mark.parametrize("given", [1, 1.5, True, np.float16(2), np.ones(1), np.array(3), np.int64(4), 5e-324])
def test_numbers_of_every_kind_are_rewards(given: Any) -> None:
    assert answers.rewards([given, 2.0]).tolist() == [float(np.asarray(given).item()), 2.0]
    assert answers.reward(given) == float(np.asarray(given).item())


@pytest.mark.parametrize("given", [True, False, np.True_, 1, 0, np.array([True]), np.float32(0)])
def test_booleans_of_every_kind_are_ends(given: Any) -> None:
    assert answers.over(given) is bool(given)


def test_arrays_of_every_kind_are_observations() -> None:
    locked = np.array([1, 2], np.float32)
    locked.flags.writeable = False
    for given in (locked, [1, 2], (1.0, 2.0), np.array([1, 2]), np.array([1, 2], ">f8"), np.array([1, 9, 2])[::2]):
        assert answers.observation(given, (2,), "float32").tolist() == [1, 2]
    assert answers.observation(np.array([0, 255]), (2,), "uint8").tolist() == [0, 255]
    for odd in ([0, 256], [-1, 0], [0.5, 1]):
        with pytest.raises(errors.EnvironmentFailure):
            answers.observation(np.array(odd), (2,), "uint8")


@pytest.mark.fault(7)
def test_the_heartbeat_survives_what_goes_wrong_in_it(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [0]
    merge = vitals.merge

    def failing(*arguments: Any) -> messages.Vitals:
        calls[0] += 1
        if 1 < calls[0] < 6:
            raise ValueError("Out of range float values are not JSON compliant")
        return merge(*arguments)

    monkeypatch.setattr(vitals, "merge", failing)
    running = site.start()
    conftest.wait_until(lambda: len(site.learner.states) > 8, "it beats on")
    assert [line for line in caplog.messages if "Out of range" in line] == [
        "heartbeat, trouble number 1: ValueError: Out of range float values are not JSON compliant"
    ]
    assert running.actor.connection.link.connections == 1


@pytest.mark.fault(7)
def test_what_is_not_finite_is_left_out_of_the_vitals(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(board, "temperature_c", lambda: math.nan)
    site.start()
    assert site.learner.await_birth().vitals.temperature_c is None


@pytest.mark.fault(7)
def test_an_actor_meets_every_oddity_and_goes_on(site: Site) -> None:  # noqa: F811
    toys.OddOnes.made = 0
    running = site.start(env=f"{HERE}:OddOnes")
    site.assign(steps_granted=1 << 40, message_steps=64)
    site.await_vitals(lambda v: v.env_failures >= len(toys.ODD), "all are met")
    assert running.error is None
    assert test_acting_loop.acting(running).status.heartbeat.failures == 0
    assert test_acting_loop.acting(running).status.heartbeat._thread.is_alive()
    running.stop()
    assert running.error is None
    for message in site.learner.experience:
        assert np.isfinite(message.reward).all()
        assert np.isfinite(message.observation).all()
    test_acting_loop.check_continuity(site.learner.experience)


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OldGym", "expected 5, got 4) (step must answer observation, reward, terminated, truncated, info"),
        ("OldReset", "an observation has shape (), the space says (2,)"),
        ("Leaving", "SystemExit: 3"),
        ("Odd", ": a reward is nan, not a number within ±1e+09"),
    ],
)
def test_the_vitals_say_how_the_environment_fails(site: Site, name: str, words: str) -> None:  # noqa: F811
    running = site.start(env=f"{HERE}:{name}")
    site.assign(steps_granted=1 << 40)
    told = site.await_vitals(lambda v: v.env_failures >= 3, "it failed, and was tried again")
    assert words in told.env_failure
    assert running.error is None


def test_a_failure_is_one_printable_line() -> None:
    text = failure.text(ValueError("a\nb\x1b[31m\udc80" + "long " * 200))
    assert text.startswith("ValueError: a b [31m")
    assert text.isprintable() and len(text) == failure.LIMIT
    state = messages.ActorState(True, "s", 1, 1, vitals=messages.Vitals(env_failure=text))
    assert codec.decode(messages.ActorState, codec.encode(state)) == state
    with pytest.raises(AssertionError) as caught:
        toys.Speechless()
    text = failure.text(caught.value)
    assert text.startswith("AssertionError: no message, at ") and "toys.py" in text


def test_pauses_grow_only_while_it_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    made = env.make(f"{HERE}:Odd")
    tried = supervised_env.SupervisedEnv(made, config.ActorConfig(env=made.name))
    wake = threading.Event()
    pauses = []
    with caplog.filtering(logs.Once()):
        for steps in (0, 0, 0, 5, 9, 9):
            tried.rebuild(OSError("the wheel came off"), steps, lambda: False, wake)
            pauses.append(tried._pause_s / supervised_env._RETRY_FIRST_S)
    assert pauses == [2, 4, 8, 2, 2, 4]
    assert tried.failures == 6
    assert tried.failure == "step 10: OSError: the wheel came off"
    assert 1 <= len(caplog.messages) < 6, "and not all of them are said"


@pytest.mark.fault(7)
def test_an_environment_that_does_not_close_is_made_anew_all_the_same(
    site: Site,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.start(env=f"{HERE}:Stuck", env_kwargs='{"what": "reward huge", "at": 40}')
    site.assign(steps_granted=100, message_steps=10)
    site.learner.await_steps(100)
    assert "did not close" in caplog.text


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    "what", ["reward nan", "reward None", "observation short", "observation nan", "terminated nan"]
)
def test_an_evaluation_is_not_told_what_is_no_number(what: str) -> None:
    environment = env.make(f"{HERE}:Odd", 1, json.loads(json.dumps({"what": what, "at": 4})))
    with pytest.raises(errors.EnvironmentFailure):
        evaluate.run_at_random(environment, 3, 0)
    assert math.isfinite(evaluate.run_at_random(environment, 3, 0).values["return_mean"]), "the oddity is behind it"


def test_an_evaluation_acts_on_what_experience_would_have() -> None:
    seen: list[list[float]] = []
    given = iter([np.array([1, 3e38], np.float32), [1, 2], np.array([-3e38, 2e9]), np.array([3, 1e9], np.float32)])
    made = env.make(f"{HERE}:Countdown")
    over = iter([False, False, True])
    faulty = dataclasses.replace(
        made,
        step=lambda action: (next(given), 1.0, next(over), False, {}),
        reset=lambda seed: (next(given), {}),
    )

    def act(row: Any) -> int:
        seen.append(row[0].tolist())
        return 0

    evaluate._play(act, faulty, 1, 0, lambda: False, evaluate.NO_LIMITS)
    assert seen == [[1, specs.MAX_MAGNITUDE], [1, 2], [-specs.MAX_MAGNITUDE, specs.MAX_MAGNITUDE]]
