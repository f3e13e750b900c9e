"""Policies: heads, sampling with log-probabilities, and what does not fit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, messages, specs
from edge_actor.environment import env
from edge_actor.policies import interpreter, policy
from tests.edge_actor.policies.models import files

CARTPOLE = env.make("CartPole-v1").spec
INT8 = files.INT8.read_bytes()


PAIR = specs.ActionSpec("multi_discrete", shape=(2,), low=(0.0, 0.0), high=(2.0, 1.0))


class FixedOutput:
    """An interpreter whose output is what a test says; `row` is added, broadcast."""

    def __init__(self, output: Any, inputs: int) -> None:
        self.output = np.array(output, np.float32)
        self.input = np.zeros((len(self.output), inputs), np.float32)
        self.delegate = "none"

    def invoke(self) -> None:
        pass


def with_output(monkeypatch: pytest.MonkeyPatch, head: str, action: specs.ActionSpec, output: Any) -> policy.Policy:
    fixed = FixedOutput(output, 3)
    monkeypatch.setattr(interpreter, "Interpreter", lambda *args, **kwargs: fixed)
    spec = specs.EnvSpec(specs.ObservationSpec((3,)), action)
    return policy.Policy(b"", head, spec, len(fixed.output))


def sampled(made: policy.Policy, noise: Any) -> tuple[Any, Any]:
    """Actions [T, ...] of as many steps as there is noise, and their log-probabilities [T, batch]."""
    samples, row = made.sampler(noise), np.zeros((made.batch, 3), np.float32)
    actions = np.array([samples.act(row) for _ in noise])
    return actions, samples.log_probs(actions[:, None] if made.batch == 1 else actions)


def test_greedy_actions_of_one_and_of_many_are_the_same() -> None:
    one, many = policy.Policy(INT8, "q_values", CARTPOLE, 1), policy.Policy(INT8, "q_values", CARTPOLE, 32)
    rows = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
    chosen = many.act(rows)
    assert [one.act(row[None]) for row in rows] == chosen.tolist()
    assert set(chosen.tolist()) == {0, 1}
    assert type(one.act(rows[:1])) is int


@pytest.mark.parametrize(
    "values", [[1.0, 1.0], [0.0, 2.0], [3.0, -1.0], [0.0, 5.0, 1.0], [2.0, 2.0, 2.0], [-3.0, -2.0, -1.0]]
)
def test_the_first_of_the_largest_is_chosen(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    made = with_output(monkeypatch, "q_values", specs.ActionSpec("discrete", n=len(values)), [values])
    assert made.act(np.zeros((1, 3), np.float32)) == np.argmax(values)


def test_raw_uint8_frames_are_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_output(monkeypatch, "q_values", specs.ActionSpec("discrete", n=2), [[0.0, 1.0]])
    made.act(np.array([[0, 128, 255]], np.uint8))
    assert made.interpreter.input.tolist() == [[0.0, 128.0, 255.0]]


def test_categorical_samples_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    probability = np.array([0.7, 0.2, 0.1])
    made = with_output(monkeypatch, "categorical", specs.ActionSpec("discrete", n=3), [np.log(probability) + 5.0])
    noise = np.random.default_rng(0).gumbel(size=(20_000, 1, 3)).astype(np.float32)
    chosen, log_probs = sampled(made, noise)
    assert np.bincount(chosen) / len(chosen) == pytest.approx(probability, abs=0.01)
    assert log_probs.ravel() == pytest.approx(np.log(probability)[chosen], abs=1e-5)
    assert made.act(np.zeros((1, 3), np.float32)) == 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("choices", [2, 5, 16, 17, 300])
def test_a_choice_is_the_largest_of_logits_and_noise_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, choices: int, batch: int
) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(batch, choices)).astype(np.float32)
    made = with_output(monkeypatch, "categorical", specs.ActionSpec("discrete", n=choices), logits)
    noise = rng.gumbel(size=(200, batch, choices)).astype(np.float32)
    chosen, log_probs = sampled(made, noise)
    expected = (logits + noise).argmax(2)
    assert chosen.tolist() == (expected[:, 0] if batch == 1 else expected).tolist()
    log_softmax = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for at in range(batch):
        assert log_probs[:, at] == pytest.approx(log_softmax[at][expected[:, at]], abs=1e-5)


@pytest.mark.parametrize("head", ["categorical", "gaussian", "squashed_gaussian"])
def test_each_step_has_the_log_probability_of_its_own_outputs_and_noise(
    monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Outputs are those of the step, though all log-probabilities are worked out behind the last one."""
    action = specs.ActionSpec("discrete", n=4) if head == "categorical" else TORQUES
    made = with_output(monkeypatch, head, action, [[0.0] * 4])
    noise = np.random.default_rng(0).normal(size=(5, 1, action.size)).astype(np.float32)
    outputs = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    samples, row = made.sampler(noise), np.zeros((1, 3), np.float32)
    actions: list[Any] = []
    for step, output in enumerate(outputs):
        made.interpreter.output[0] = output
        if step == 2:  # it only resets
            samples.skip()
            actions.append(np.zeros_like(actions[0]))
        else:
            actions.append(samples.act(row))
    found = samples.log_probs(np.array(actions)[:, None])
    for step in (0, 1, 3, 4):
        alone = with_output(monkeypatch, head, action, outputs[step : step + 1])
        (chosen,), log_prob = sampled(alone, noise[step : step + 1])
        np.testing.assert_array_equal(chosen, actions[step])
        np.testing.assert_array_equal(log_prob, found[step : step + 1])
    assert len(np.unique(found)) == 5
    for steps in (1, 2, 4):  # a burst that ended early, or whose environment raised behind the policy
        prefix = samples.log_probs(np.array(actions)[:steps, None])
        np.testing.assert_allclose(prefix, found[:steps], rtol=1e-6)
    assert made.sampler(noise).log_probs(np.array(actions)[:0, None]).shape == (0, 1)


@pytest.mark.parametrize("head", ["gaussian", "squashed_gaussian"])
def test_actions_of_any_shape_are_those_of_one_environment_after_another(
    monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    action = specs.ActionSpec("continuous", shape=(2, 3), low=tuple(range(-6, 0)), high=tuple(range(1, 7)))
    rng = np.random.default_rng(0)
    outputs, noise = rng.normal(size=(4, 12)).astype(np.float32), rng.normal(size=(7, 4, 6)).astype(np.float32)
    chosen, log_probs = sampled(with_output(monkeypatch, head, action, outputs), noise)
    assert chosen.shape == (7, 4, 2, 3)
    for at in range(4):
        made = with_output(monkeypatch, head, action, outputs[at : at + 1])
        alone, alone_log_probs = sampled(made, noise[:, at : at + 1])
        np.testing.assert_array_equal(alone, chosen[:, at])
        np.testing.assert_array_equal(alone_log_probs[:, 0], log_probs[:, at])


@pytest.mark.parametrize("batch", [1, 2])
def test_several_choices_are_sampled_independently_and_their_log_probabilities_add_up(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    parts = [np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.6])]
    logits = np.concatenate([np.log(parts[0]) + 5.0, np.log(parts[1]) - 90.0])  # whatever the other one's level
    made = with_output(monkeypatch, "categorical", PAIR, [logits] * batch)
    noise = np.random.default_rng(0).gumbel(size=(20_000 // batch, batch, 5)).astype(np.float32)
    chosen, log_probs = sampled(made, noise)
    assert chosen.shape == (len(noise), *((batch,) if batch > 1 else ()), 2)
    pairs = chosen.reshape(-1, 2)
    found = np.bincount(pairs[:, 0] * 2 + pairs[:, 1], minlength=6) / len(pairs)
    assert found == pytest.approx(np.outer(*parts).ravel(), abs=0.01)
    expected = np.log(parts[0])[pairs[:, 0]] + np.log(parts[1])[pairs[:, 1]]
    assert log_probs.ravel() == pytest.approx(expected, abs=2e-5)
    assert made.act(np.zeros((batch, 3), np.float32)).tolist() == ([0, 1] if batch == 1 else [[0, 1]] * 2)


def test_action_values_have_no_sum_over_several_choices() -> None:
    with pytest.raises(errors.SpecError, match="'q_values' cannot choose multi_discrete actions"):
        specs.check_head("q_values", PAIR)


def test_gaussian_samples_and_gives_the_density(monkeypatch: pytest.MonkeyPatch) -> None:
    action = specs.ActionSpec("continuous", shape=(2,), low=(-9.0, -9.0), high=(9.0, 9.0))
    made = with_output(monkeypatch, "gaussian", action, [[1.0, -2.0, math.log(0.5), math.log(2.0)]] * 3)
    noise = np.array([[[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]], np.float32)
    (chosen,), log_probs = sampled(made, noise)
    assert chosen == pytest.approx(np.array([[1.0, 0.0], [1.5, -2.0], [1.0, -2.0]]))
    peak = -math.log(2 * math.pi)  # log 0.5 and log 2 cancel
    assert log_probs[0] == pytest.approx([peak - 0.5, peak - 0.5, peak])
    assert made.act(np.zeros((3, 3), np.float32)).tolist() == [[1.0, -2.0]] * 3


TORQUES = specs.ActionSpec("continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 0.5))


def test_squashed_gaussian_samples_and_gives_the_density_behind_tanh_and_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Computed by hand, with 0 for the deviation's output: its log is then -1.5, the middle of -5 to 2."""
    made = with_output(monkeypatch, "squashed_gaussian", TORQUES, [[0.5, -1.0, 0.0, 0.0]] * 2)
    noise = np.array([[[0.0, 0.0], [2.0, -1.0]]], np.float32)
    (chosen,), log_probs = sampled(made, noise)
    std = 0.22313016  # exp(-1.5)
    a = [[0.46211716, -0.76159416], [0.73808533, -0.84057509]]  # tanh of 0.5, -1.0, 0.5 + 2 std, -1.0 - std
    assert chosen == pytest.approx(np.array(a) * [2.0, 0.25] + [0.0, 0.25], abs=1e-6)
    assert np.tanh([0.5 + 2 * std, -1.0 - std]) == pytest.approx(a[1])
    for at, (one, other) in enumerate(a):
        # Two normal densities, over the slopes 2 (1 - a^2) and 0.25 (1 - a^2)
        normal = -0.5 * (noise[0, at] ** 2).sum() + 2 * 1.5 - math.log(2 * math.pi)
        expected = normal - math.log(2 * (1 - one**2)) - math.log(0.25 * (1 - other**2))
        assert log_probs[0][at] == pytest.approx(expected, abs=1e-5)
    mode = np.array(a[0]) * [2.0, 0.25] + [0.0, 0.25]
    assert made.act(np.zeros((2, 3), np.float32)) == pytest.approx(np.array([mode, mode]), abs=1e-6)
    assert made.stochastic


def test_the_density_of_a_squashed_gaussian_sums_to_one_over_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    action = specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(3.0,))
    made = with_output(monkeypatch, "squashed_gaussian", action, [[0.7, 0.3]])
    noise = np.linspace(-7, 7, 20_001, dtype=np.float32)
    chosen, log_probs = (found.ravel().astype(np.float64) for found in sampled(made, noise.reshape(-1, 1, 1)))
    density = np.exp(log_probs)
    assert np.sum(0.5 * (density[1:] + density[:-1]) * np.diff(chosen)) == pytest.approx(1.0, abs=2e-3)


def test_a_squashed_gaussian_stays_finite_and_within_the_bounds_where_tanh_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = specs.ActionSpec("continuous", shape=(2,), low=(0.1, -0.3), high=(0.7, 1e-3))
    made = with_output(monkeypatch, "squashed_gaussian", odd, [[60.0, -60.0, 40.0, 40.0]])
    noise = np.array([[[4.0, -4.0]]], np.float32)
    row = np.zeros((1, 3), np.float32)
    low, high = np.array(odd.low, np.float32), np.array(odd.high, np.float32)
    (chosen,), log_probs = sampled(made, noise)
    assert (chosen == [high[0], low[1]]).all()
    # The mean counts as 3, and deviations end at exp(2): so far out -log(1 - tanh(u)^2) is 2 |u| - 2 log 2
    u = 3.0 + 4.0 * math.exp(2.0)
    expected = 2 * (2 * u - 2 * math.log(2) - 0.5 * 16.0 - 2.0 - 0.5 * math.log(2 * math.pi))
    expected -= math.log(0.3) + math.log(0.1505)
    assert log_probs[0] == pytest.approx([expected], rel=1e-5)
    mode = made.act(row)
    share = (mode - low) / (high - low)
    assert share == pytest.approx(np.array([0.5 + math.tanh(3.0) / 2, 0.5 - math.tanh(3.0) / 2]), abs=1e-5)
    assert chosen.dtype == mode.dtype == np.float32


def test_the_density_is_that_of_the_outputs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The density of an int8 policy is int8's: fp32's outputs, of which these are the rounded ones, give another."""

    def log_prob(output: list[float]) -> float:
        made = with_output(monkeypatch, "squashed_gaussian", TORQUES, [output])
        return float(sampled(made, np.ones((1, 1, 2), np.float32))[1][0, 0])

    assert abs(log_prob([0.5, -1.0, 0.0, 0.0]) - log_prob([0.51, -1.0, 0.012, 0.0])) > 0.01


def test_deterministic_actions_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    action = specs.ActionSpec("continuous", shape=(2, 1), low=(-1.0, -1.0), high=(1.0, 1.0))
    made = with_output(monkeypatch, "deterministic", action, [[0.5, -0.25]])
    chosen = made.act(np.zeros((1, 3), np.float32))
    made.interpreter.output[...] = 0.0
    assert chosen.tolist() == [[0.5], [-0.25]]


def test_a_policy_for_another_spec_is_refused() -> None:
    other = specs.EnvSpec(specs.ObservationSpec((6,)), CARTPOLE.action)
    with pytest.raises(errors.PolicyError, match="needs \\(6,\\) to 2") as caught:
        policy.Policy(INT8, "q_values", other, 1)
    assert caught.value.reason == "spec"


def test_a_head_that_cannot_choose_such_actions_is_refused() -> None:
    with pytest.raises(errors.SpecError, match="gaussian"):
        policy.Policy(INT8, "gaussian", CARTPOLE, 1)


def test_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.PolicyError, match="NaN"):
        with_output(monkeypatch, "q_values", specs.ActionSpec("discrete", n=2), [[math.nan, 0.0]])


def test_order_comes_from_the_manifest() -> None:
    manifest: Any = SimpleNamespace(head="q_values", order=messages.Order(3, 8))
    made = policy.from_manifest(manifest, INT8, spec=CARTPOLE, batch=2, runtime="auto", threads=1)
    assert (made.order, made.batch) == ((3, 8), 2)
