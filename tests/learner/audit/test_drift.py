"""When an actor has left what its policy was made for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import messages
from learner.audit import drift, model_store
from learner.files import records, run_directory
from learner.networks import layers
from learner.quantize.tflite import convert, interpreter
from tests.learner.audit import acting


class Site:
    """A learner's look at one actor, whose clock the test moves."""

    def __init__(self, path: Path, env: str = "CartPole-v1", head: str = "q_values") -> None:
        self.actor = acting.Actor(env, message_steps=64, epsilon_start=0.1, epsilon_end=0.1)
        self.model = acting.model(self.actor.spec, head)
        self.policy = self.actor.policy(self.model, head)
        self.now = 0.0
        models = model_store.ModelStore(lambda order: None)
        self.drift = drift.Drift(self.actor.spec, path, records.Records(), models, clock=lambda: self.now)
        models.note(messages.Order(1, 1), self.model)
        self.file = path / run_directory.DRIFT

    def act(self) -> messages.Experience:
        """Returns the next message, whose observations lie well within the ranges."""
        sent = self.actor.act(self.policy)
        return dataclasses.replace(sent, observation=sent.observation.astype(np.float32) / 4.0)

    def take(self, experience: messages.Experience) -> None:
        self.now += 100 * drift.PERIOD_S  # it has rested
        self.drift.consider("pi", experience)
        self.drift.wait()

    def told(self) -> dict[str, float]:
        return self.drift.metrics()


@pytest.mark.parametrize("hi_lo", [False, True])
def test_ranges_are_those_beyond_which_the_model_answers_no_longer(hi_lo: bool) -> None:
    rng = np.random.default_rng(0)
    reach = np.array([0.2, 2.0, 20.0], np.float32)
    seen = rng.uniform(-1, 1, (256, 3)).astype(np.float32) * reach + np.float32(0.5)
    dense = layers.Dense((np.eye(3) / reach).astype(np.float32), np.full(3, 0.1, np.float32), "none")
    model = convert.convert((dense,), seen, "int8", per_feature=True, hi_lo=hi_lo)
    found = drift.input_ranges(model, 3)
    assert found is not None
    low, high = found
    assert (low <= seen.min(0)).all() and (high >= seen.max(0)).all()
    width = high - low
    assert width == pytest.approx(seen.max(0) - seen.min(0), rel=0.08)
    ends, _ = interpreter.answer(model, np.stack([low, high]))
    beyond, _ = interpreter.answer(model, np.stack([low - width, high + width]))
    assert (ends == beyond).all(), "all beyond them is one"
    assert drift.count_outside(np.stack([low - 0.01 * width, seen[0], high + 0.01 * width]), found).tolist() == [
        2,
        2,
        2,
    ]


def test_a_float_policy_has_no_ranges() -> None:
    spec = acting.Actor("CartPole-v1").spec
    assert drift.input_ranges(acting.model(spec, precision="float32"), spec.observation.size) is None


def test_a_sensor_that_goes_astray_is_named(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.file.write_text('{"pi": {"outside": "said by a learner that was killed"}}')
    for _ in range(8):
        site.take(site.act())
    told = site.told()
    assert told["observations_outside"] < 0.05 and not told["actors_drifting"]
    assert json.loads(site.file.read_text()) == {}
    for _ in range(8):
        sent = site.act()
        astray = sent.observation.astype(np.float32)
        astray[:, 2] += 10.0
        site.take(dataclasses.replace(sent, observation=astray))
    told = site.told()
    assert 0.4 < told["observations_outside"] < 0.6 and told["actors_drifting"] == 1
    assert "feature 2" in json.loads(site.file.read_text())["pi"]["outside"]
    for _ in range(16):
        site.take(site.act())
    assert not site.told()["actors_drifting"] and json.loads(site.file.read_text()) == {}
    site.drift.close()
    assert not site.file.exists()


def test_an_action_that_rests_at_a_bound_is_named_and_bang_bang_is_not(tmp_path: Path) -> None:
    site = Site(tmp_path, "Pendulum-v1", "deterministic")
    (high,), sign = site.actor.spec.action.high, 1.0
    for _ in range(16):
        sent = site.actor.act(site.policy)
        sign = -sign
        site.take(dataclasses.replace(sent, action=np.full_like(sent.action, sign * high)))
    told = site.told()
    assert 0.4 < told["actions_at_bound"] < 0.6 and "saturated" not in site.drift.alarms.get("pi", {})
    for _ in range(16):
        sent = site.actor.act(site.policy)
        site.take(dataclasses.replace(sent, action=np.full_like(sent.action, high)))
    assert site.told()["actions_at_bound"] == 1.0
    assert "element 0" in site.drift.alarms["pi"]["saturated"]
    site.drift.close()


def test_who_is_silent_does_not_drift(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for _ in range(8):
        sent = site.actor.act(site.policy)
        site.take(dataclasses.replace(sent, observation=sent.observation.astype(np.float32) + 100.0))
    assert site.told()["actors_drifting"] == 1
    site.now += 61.0
    assert site.told() == {"actors_drifting": 0}
    site.drift.close()


def episodes(returns: list[float], version: int = 1, *, begins: bool = True) -> messages.Experience:
    """Returns a message of whole episodes of ten steps; `begins`: all of them, else only what came of the first one."""
    n = len(returns)
    age = np.full(n, 10, np.int32)
    if not begins:
        age[0] = 25
    return messages.Experience(
        1, 1, 1, 0, "", 1, 1, version, 0,
        length=np.full(n, 10, np.int32), env_index=np.zeros(n, np.int32), row=np.arange(n, dtype=np.int32) * 10,
        terminated=np.ones(n, np.uint8), truncated=np.zeros(n, np.uint8),
        episode_return=np.array(returns, np.float32), episode_length=age,
        observation=np.zeros((11 * n, 4), np.float32), action=np.zeros(10 * n, np.int32),
        reward=np.ones(10 * n, np.float32),
    )  # fmt: skip


def test_returns_are_held_against_the_first_of_the_same_policy(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    site = Site(tmp_path)
    site.take(episodes(rng.normal(200, 40, 64).tolist()))
    assert abs(site.told()["return_fall_z"]) < 3
    site.take(episodes(rng.normal(100, 40, 32).tolist()))
    assert site.told()["return_fall_z"] > drift.FALL_Z
    assert "version 1" in site.drift.alarms["pi"]["returns"]
    site.take(episodes(rng.normal(100, 40, 33).tolist(), version=2, begins=False))
    assert "return_fall_z" not in site.told(), "a new policy has its own first ones"
    account = site.drift._accounts["pi"].returns
    assert account is not None and len(account.first) == 32 and not account.newest, "an older policy began the first"
    site.drift.close()


DRAWS: dict[str, Callable[[np.random.Generator], NDArray[Any]]] = {
    "normal": lambda rng: rng.normal(0, 1, 400),
    "cartpole": lambda rng: np.minimum(rng.exponential(400, 400), 500),
    "two values": lambda rng: (rng.random(400) < 0.9).astype(float),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_equal_returns_seldom_look_as_if_they_fell(draw: str) -> None:
    rng = np.random.default_rng(2)
    false, trials = 0, 200
    for _ in range(trials):
        drawn = DRAWS[draw](rng)
        windows = (drawn[end - 32 : end] for end in range(64, 400, 4))
        false += any(drift.fall(drawn[:32], window) > drift.FALL_Z for window in windows)
    print(f"{draw}: {false} of {trials}")
    assert false <= 0.05 * trials


def test_halved_returns_are_seen_within_a_window() -> None:
    rng = np.random.default_rng(3)
    first, took = rng.normal(200, 50, 32), []
    for _ in range(100):
        drawn = np.concatenate([rng.normal(200, 50, 32), rng.normal(100, 50, 64)])
        took.append(next(n for n in range(64) if drift.fall(first, drawn[n : n + 32]) > drift.FALL_Z))
    print(f"seen after {np.median(took):.0f} episodes (median), {max(took)} at most")
    assert np.median(took) <= 24 and max(took) <= 40
    assert drift.fall(np.full(32, 500.0), np.full(32, 500.0)) == 0.0


def test_a_sample_that_fails_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    monkeypatch.setattr(drift, "input_ranges", lambda *_: 1 / 0)
    site.drift.consider("pi", site.act())
    with pytest.raises(ZeroDivisionError):
        site.drift.wait()
    caplog.set_level("ERROR", "learner")
    site.drift.consider("pi", site.act())
    assert "a sample of drift failed" in caplog.text


def test_another_learner_s_file_is_left_alone(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.drift._is_ours = lambda: False
    site.file.write_text("{}")
    site.told()
    site.drift.close()
    assert site.file.read_text() == "{}"
