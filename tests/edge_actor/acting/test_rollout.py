"""Bursts: what is asked of policy and exploration, and that grouping changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_actor.acting import exploration, rollout
from edge_actor.environment import env
from edge_actor.experience import trajectory
from edge_actor.policies import interpreter, policy
from tests.edge_actor.policies.models import files
from tests.edge_actor.policies.test_policy import FixedOutput
from tests.fakes import fake_learner
from tests.fakes.environments import toys

CARTPOLE = env.make("CartPole-v1").spec


def play(name: str, acting: policy.Policy | None, n_envs: int, groups: list[int], **assigned: Any) -> Any:
    """Plays bursts of these lengths into one message."""
    environment = env.make(name, n_envs)
    record = trajectory.Trajectory(environment.spec, n_envs, 1000 * n_envs)
    explorer = exploration.Explorer(environment.spec.action, n_envs, 0, lambda: record.recorded)
    explorer.assign(fake_learner.assignment(1, **assigned))
    record.start(environment.reset(seed=0)[0])
    for group in groups:
        goal = record.used + group
        while record.used < goal:
            rollout.burst(environment, acting, explorer, record, goal - record.used)
    return record.flush()


def same(a: trajectory.Segments, b: trajectory.Segments) -> None:
    for field in ("length", "observation", "action", "reward", "log_prob", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("acting", [True, False])
def test_grouping_changes_nothing(n_envs: int, acting: bool) -> None:
    made = policy.Policy(files.INT8.read_bytes(), "q_values", CARTPOLE, n_envs) if acting else None
    assigned = {"epsilon_start": 0.9, "epsilon_end": 0.1, "epsilon_decay_steps": 500}
    whole = play("CartPole-v1", made, n_envs, [600], **assigned)
    parts = play("CartPole-v1", made, n_envs, [1, 2, 300, 7, 290], **assigned)
    same(whole, parts)
    assert whole.steps > 500 * n_envs


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed_gaussian"])
def test_stochastic_heads_record_a_log_probability_per_step(
    monkeypatch: pytest.MonkeyPatch, head: str, n_envs: int
) -> None:
    name = "Countdown-v0" if head == "categorical" else f"{toys.__file__}:Robot"
    spec = env.make(name).spec
    output = [[0.0, 1.0]] if head == "categorical" else [[0.5, 0.5, -1.0, -1.0]]
    fixed = FixedOutput(output * n_envs, spec.observation.size)
    monkeypatch.setattr(interpreter, "Interpreter", lambda *args, **kwargs: fixed)
    acting = policy.Policy(b"", head, spec, n_envs)
    whole = play(name, acting, n_envs, [40], epsilon_start=1.0, epsilon_end=1.0)  # epsilon is not theirs
    same(whole, play(name, acting, n_envs, [3, 1, 30, 6]))
    assert len(whole.log_prob) == whole.steps
    assert len(np.unique(whole.action)) > 1
    if head == "categorical":
        logits = np.log(np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum())
        assert whole.log_prob == pytest.approx(logits[whole.action])
    elif head == "squashed_gaussian":
        low, high = np.array(spec.action.low), np.array(spec.action.high)
        assert ((low <= whole.action) & (whole.action <= high)).all()
        a = (whole.action - (low + high) / 2) / ((high - low) / 2)
        log_std = -1.5 + 3.5 * np.tanh(-1.0)
        z = (np.arctanh(a) - 0.5) / np.exp(log_std)
        slope = (high - low) / 2 * (1 - a**2)
        density = -0.5 * z * z - log_std - 0.5 * np.log(2 * np.pi) - np.log(slope)
        assert whole.log_prob == pytest.approx(density.sum(1), abs=1e-3)
    else:
        z = (whole.action - 0.5) / np.exp(-1.0)
        assert whole.log_prob == pytest.approx((-0.5 * z * z + 1.0 - 0.5 * np.log(2 * np.pi)).sum(1), abs=1e-4)


def test_a_burst_until_the_end_stops_there_and_wastes_no_random_row() -> None:
    made = policy.Policy(files.INT8.read_bytes(), "q_values", CARTPOLE, 1)
    environment = env.make("CartPole-v1")

    def cut(until_end: bool) -> trajectory.Segments:
        record = trajectory.Trajectory(CARTPOLE, 1, 1000)
        explorer = exploration.Explorer(CARTPOLE.action, 1, 0, lambda: record.recorded)
        explorer.assign(fake_learner.assignment(1, epsilon_start=0.9, epsilon_end=0.9))
        record.start(environment.reset(seed=0)[0])
        ends = 0
        while record.used < 300:
            rollout.burst(environment, made, explorer, record, 300 - record.used, until_end=until_end)
            ends += int(record.ended[0])
        assert not until_end or ends >= 5
        return record.flush()

    same(cut(until_end=True), cut(until_end=False))


def test_exploring_steps_cost_no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy.Policy(files.INT8.read_bytes(), "q_values", CARTPOLE, 1)
    monkeypatch.setattr(made, "act", lambda row: pytest.fail("asked"))
    assert play("CartPole-v1", made, 1, [100], epsilon_start=1.0, epsilon_end=1.0).steps > 80


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_deterministic_policy_explores_with_noise_inside_the_bounds(
    monkeypatch: pytest.MonkeyPatch, n_envs: int
) -> None:
    name = "Pendulum-v1"  # episodes of 200 steps, actions in -2..2
    spec = env.make(name).spec
    fixed = FixedOutput([[1.9]] * n_envs, spec.observation.size)
    monkeypatch.setattr(interpreter, "Interpreter", lambda *args, **kwargs: fixed)
    acting = policy.Policy(b"", "deterministic", spec, n_envs)
    assigned = {"noise_std": 0.1, "noise_correlation_steps": 4.0, "epsilon_start": 0.2, "epsilon_end": 0.2}
    whole = play(name, acting, n_envs, [500], **assigned)
    same(whole, play(name, acting, n_envs, [1, 198, 1, 1, 100, 199], **assigned))
    assert whole.action.shape == (whole.steps, 1)
    assert np.abs(whole.action).max() <= 2.0
    assert 0.2 < (whole.action == 2.0).mean() < 0.6, "clipped in the record too: half of what noise raises by 0.1"
    quiet = play(name, acting, n_envs, [100])
    assert set(quiet.action.ravel().tolist()) == {np.float32(1.9)}
    assert quiet.log_prob.size == 0
