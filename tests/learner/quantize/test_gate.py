"""The gate's measures by hand, and each of its refusals."""

from __future__ import annotations

import dataclasses
import threading
from concurrent import futures

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import specs
from learner import config
from learner.networks import layers
from learner.quantize import calibrate, gate
from learner.quantize.tflite import convert, interpreter, quantizer

SETTINGS = config.GateConfig()
X = np.random.default_rng(0).uniform(-1, 1, (500, 2)).astype(np.float32)


def linear(kernel: list[list[float]], bias: list[float]) -> layers.PolicyLayers:
    """Returns a layer of a kernel [inputs, outputs]."""
    return (layers.Dense(np.array(kernel, np.float32).T, np.array(bias, np.float32), "none"),)


SOUND = linear([[1.0, -1.0], [0.5, -0.5]], [0.1, -0.1])


def model(policy: layers.PolicyLayers, precision: str = "float32", x: NDArray[np.float32] = X) -> bytes:
    return convert.convert(policy, x, precision)


def clipped(policy: layers.PolicyLayers, limit: float) -> bytes:
    """An int8 model of one layer whose outputs end at +-limit."""
    ranges, _ = calibrate.measure(policy, X, len(X))
    narrow = dataclasses.replace(ranges, outputs=((-limit, limit),))
    return quantizer.Quantizer().quantize(policy, narrow, X)


def judge(
    int8: bytes, float32: bytes, x: NDArray[np.float32], settings: config.GateConfig, previous: bytes | None = None
) -> gate.ChoiceVerdict:
    exact, _, _ = interpreter.run(float32, x)
    return gate.judge(int8, exact, x, settings, previous)


def test_a_faithful_policy_passes() -> None:
    verdict = judge(model(SOUND, "int8"), model(SOUND), X, SETTINGS)
    assert verdict.passed
    assert verdict.reason == ""
    assert verdict.agreement_weighted > 0.999
    assert verdict.agreement > 0.98
    assert verdict.ties < 0.02
    assert 0 < verdict.error_mean < verdict.error_max < 0.03
    assert verdict.saturation < 0.02


def test_measures_by_hand() -> None:
    """Two fp32 models, so that no rounding is in the way: outputs (x, 0) beside (x + 1, 0)."""
    x = np.array([[3.0, 0.0], [1.0, 0.0], [-0.5, 0.0], [-1.0, 0.0], [-2.5, 0.0]], np.float32)
    policies = [linear([[1.0, 0.0], [0.0, 0.0]], [bias, 0.0]) for bias in (0.0, 1.0)]
    exact, shifted = (convert.convert(policy, x, "float32", per_feature=False) for policy in policies)
    verdict = judge(shifted, exact, x, SETTINGS)
    # Actions of `exact`: 0 0 1 1 1; of `shifted` (4, 2, 0.5, 0, -1.5 against 0): 0 0 0 tie 1, and a tie gives action 0.
    assert verdict.agreement == pytest.approx(3 / 5)
    assert verdict.agreement_weighted == pytest.approx((3 + 1 + 2.5) / (3 + 1 + 0.5 + 1 + 2.5))
    assert verdict.ties == pytest.approx(1 / 5)
    assert verdict.error_max == pytest.approx(1.0, abs=1e-6)
    assert verdict.error_mean == pytest.approx(0.5, abs=1e-6)
    assert verdict.saturation == 0.0
    assert (verdict.passed, verdict.reason) == (False, "disagrees")


def test_the_policy_published_last_is_skipped() -> None:
    int8 = model(SOUND, "int8")
    verdict = judge(int8, model(SOUND), X, SETTINGS, previous=int8)
    assert (verdict.passed, verdict.reason) == (False, "identical")
    other = model(linear([[1.0, -1.0], [0.4, -0.4]], [0.1, -0.1]), "int8")
    assert judge(int8, model(SOUND), X, SETTINGS, previous=other).passed


def test_a_policy_that_acts_otherwise_is_refused() -> None:
    verdict = judge(model(linear([[-1.0, 1.0], [-0.5, 0.5]], [0.1, -0.1]), "int8"), model(SOUND), X, SETTINGS)
    assert (verdict.passed, verdict.reason) == (False, "disagrees")


def test_outputs_that_never_change_are_refused() -> None:
    verdict = judge(model(linear([[0.0, 0.0], [0.0, 0.0]], [1.0, -1.0])), model(SOUND), X, SETTINGS)
    assert (verdict.passed, verdict.reason) == (False, "dead")


def test_q_values_far_above_their_gaps_are_refused_and_their_advantages_pass() -> None:
    """Values near 95 with gaps of 0.05 do not survive 256 levels; without the mean they do."""
    gap = 0.05
    values = linear([[gap, -gap], [20.0, 20.0]], [95.0, 95.0])
    verdict = judge(model(values, "int8"), model(values), X, SETTINGS)
    assert not verdict.passed
    assert verdict.ties > 0.4
    lenient = config.GateConfig(gate_agreement_min=0.0)
    assert judge(model(values, "int8"), model(values), X, lenient).reason == "ties"
    (last,) = values
    assert isinstance(last, layers.Dense)
    advantages = (layers.centred(last),)
    assert judge(model(advantages, "int8"), model(advantages), X, SETTINGS).passed


def test_ranges_that_do_not_hold_what_is_seen_later_are_refused() -> None:
    """Once the best two both grow beyond the range, int8 cannot tell them apart."""
    growing = linear([[1.0, 0.7, -1.7], [0.0, 0.0, 0.0]], [0.0, 0.0, 0.0])
    verdict = judge(clipped(growing, 0.2), model(growing), X, SETTINGS)
    assert (verdict.passed, verdict.reason) == (False, "saturated")
    assert verdict.saturation > 0.1


def test_answers_that_are_not_finite_are_refused() -> None:
    huge = linear([[3e38, -3e38], [3e38, -3e38]], [3e38, -3e38])
    verdict = judge(model(SOUND), model(huge), 10 * X, SETTINGS)
    assert (verdict.passed, verdict.reason) == (False, "not_finite")


def test_near_ties_hardly_count() -> None:
    """Outputs that cross at x0 = 0: disagreement only close to it, so the weighted share stays high."""
    exact = linear([[1.0, -1.0], [0.0, 0.0]], [0.0, 0.0])
    nudged = linear([[1.0, -1.0], [0.0, 0.0]], [0.1, -0.1])
    verdict = judge(model(nudged), model(exact), X, SETTINGS)
    assert verdict.agreement < 0.97
    assert verdict.agreement_weighted > 0.99
    assert verdict.passed


def test_outputs_that_are_clear_may_saturate() -> None:
    """One output at an end of the range beside another that is not: what is lost there decides nothing."""
    verdict = judge(clipped(SOUND, 0.2), model(SOUND), X, SETTINGS)
    assert verdict.passed
    assert verdict.agreement > 0.98
    assert verdict.saturation == 0.0
    assert verdict.error_max < 0.02


def test_a_model_that_the_runtime_refuses_is_held_back() -> None:
    """A layer that is nearly dead: the factor from its sums to its outputs exceeds what XNNPACK takes."""
    rng = np.random.default_rng(0)
    policy = (
        layers.Dense(rng.normal(size=(8, 2)).astype(np.float32) * 100, np.zeros(8, np.float32), "relu"),
        layers.Dense(rng.normal(size=(8, 8)).astype(np.float32), np.full(8, -1e6, np.float32), "relu"),
        layers.Dense(rng.normal(size=(3, 8)).astype(np.float32), np.zeros(3, np.float32), "none"),
    )
    verdict = judge(model(policy, "int8"), model(policy), X, SETTINGS)
    assert (verdict.passed, verdict.reason) == (False, "unrunnable")


ACTION = specs.ActionSpec("continuous", shape=(2,), low=(0.0, -4.0), high=(4.0, 4.0))


def test_errors_of_actions_are_relative_to_their_bounds() -> None:
    """fp32 beside fp32 with other biases: the first element is off by 0.2 of 4, the second by 0.08 of 8."""
    exact, other = linear([[1.0, 0.0], [0.0, 1.0]], [2.0, 0.0]), linear([[1.0, 0.0], [0.0, 1.0]], [2.2, -0.08])
    outputs, _, _ = interpreter.run(model(exact), X)
    verdict = gate.judge_actions(model(other), outputs, X, ACTION, SETTINGS)
    assert verdict.action_error_mean == pytest.approx(0.05, rel=1e-4)
    assert verdict.action_error_p99 == pytest.approx(0.05, rel=1e-4)
    assert (verdict.passed, verdict.reason) == (False, "disagrees")
    lenient = config.GateConfig(gate_action_error_max=0.06, gate_action_error_p99_max=0.06)
    assert gate.judge_actions(model(other), outputs, X, ACTION, lenient).passed


def test_a_policy_that_always_acts_alike_may_be_published() -> None:
    constant = linear([[0.0, 0.0], [0.0, 0.0]], [1.0, -1.0])
    outputs, _, _ = interpreter.run(model(constant), X)
    assert gate.judge_actions(model(constant), outputs, X, ACTION, SETTINGS).passed
    previous = model(constant)
    assert gate.judge_actions(previous, outputs, X, ACTION, SETTINGS, previous).reason == "identical"
    assert gate.judge_policy(model(constant), outputs, X, ACTION, SETTINGS).measures.keys() == {
        "action_error_mean",
        "action_error_p99",
    }


def test_a_squashed_gaussian_is_judged_by_its_mode_and_measured_by_its_divergence() -> None:
    """fp32 beside fp32 whose mean is off by 0.2 where it is 0: the action by 0.2 of -1 to 1, whatever the deviation."""
    one = specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    exact, other = linear([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.5]), linear([[0.0, 0.0], [0.0, 0.0]], [0.2, 0.5])
    outputs, _, _ = interpreter.run(model(exact), X)
    found = gate.judge_policy(model(other), outputs, X, one, SETTINGS, head="squashed_gaussian")
    assert (found.passed, found.reason) == (False, "disagrees")
    std = np.exp(-1.5 + 3.5 * np.tanh(0.5))
    kl = 0.5 * (0.2 / std) ** 2
    half = np.tanh(0.2) / 2
    assert found.measures == pytest.approx(
        {"action_error_mean": half, "action_error_p99": half, "kl_mean": kl, "kl_p99": kl}, rel=1e-4
    )
    exact, other = linear([[0.0, 0.0], [0.0, 0.0]], [9.0, 0.5]), linear([[0.0, 0.0], [0.0, 0.0]], [3.5, 0.5])
    outputs, _, _ = interpreter.run(model(exact), X)
    found = gate.judge_policy(model(other), outputs, X, one, SETTINGS, head="squashed_gaussian")
    assert found.passed
    assert set(found.measures.values()) == {0.0}, "actors clip both means to 3"


@pytest.mark.parametrize("action", [specs.ActionSpec("discrete", n=2), ACTION])
def test_fp32_may_still_be_computing_while_int8_runs(action: specs.ActionSpec) -> None:
    int8, exact = model(SOUND, "int8"), interpreter.run(model(SOUND), X)[0]
    later: futures.Future[NDArray[np.float32]] = futures.Future()
    timer = threading.Timer(0.05, later.set_result, [exact])
    timer.start()
    assert gate.judge_policy(int8, later, X, action, SETTINGS) == gate.judge_policy(int8, exact, X, action, SETTINGS)
    timer.join()


@pytest.mark.parametrize(
    ("exact", "head", "reason"),
    [
        ([[1.0, 2.0], [1.0, 3.0]], "q_values", ""),
        ([[1.0, 2.0], [1.0, 2.0]], "q_values", "dead"),
        ([[1.0, 2.0], [1.0, 2.0]], "categorical", ""),
        ([[1.0, 2.0], [1.0, 2.0]], "deterministic", ""),
        ([[1.0, np.inf], [1.0, 2.0]], "q_values", "not_finite"),
        ([[1.0, 2.0], [np.nan, 2.0]], "deterministic", "not_finite"),
    ],
)
def test_of_a_file_with_the_policys_numbers_only_the_policy_is_judged(
    exact: list[list[float]], head: specs.Head, reason: str
) -> None:
    verdict = gate.judge_faithful(np.array(exact, np.float32), head)
    assert (verdict.passed, verdict.reason) == (not reason, reason)
    assert verdict.measures == {}, "nothing was compared"


DISCRETE = specs.ActionSpec("discrete", n=2)


def test_a_sampled_policy_is_judged_by_its_distribution_and_not_by_ties() -> None:
    nearly_even = linear([[1e-3, -1e-3], [0.0, 0.0]], [0.0, 0.0])
    int8 = model(linear([[1e-9, -1e-9], [0.0, 0.0]], [1e-9, 0.0]))
    exact, _, _ = interpreter.run(model(nearly_even), X)
    assert gate.judge(int8, exact, X, SETTINGS).reason in ("dead", "disagrees", "ties", "saturated")
    verdict = gate.judge_policy(int8, exact, X, DISCRETE, SETTINGS, head="categorical")
    assert verdict.passed
    assert verdict.measures["kl_mean"] < 1e-5
    assert gate.judge_policy(int8, exact, X, DISCRETE, SETTINGS, int8, "categorical").reason == "identical"


def test_a_sampled_policy_that_does_otherwise_is_held_back() -> None:
    exact, _, _ = interpreter.run(model(SOUND), X)
    other = model(linear([[3.0, -3.0], [0.5, -0.5]], [0.1, -0.1]))
    verdict = gate.judge_policy(other, exact, X, DISCRETE, SETTINGS, head="categorical")
    assert (verdict.passed, verdict.reason) == (False, "diverges")
    loose = dataclasses.replace(SETTINGS, gate_kl_max=10.0, gate_kl_p99_max=10.0)
    assert gate.judge_policy(other, exact, X, DISCRETE, loose, head="categorical").passed
    nan = gate.judge_policy(other, exact * np.nan, X, DISCRETE, loose, head="categorical")
    assert nan.reason == "not_finite"


def test_a_gaussian_is_judged_in_units_of_its_deviation() -> None:
    action = specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    passed = {}
    for log_std in (0.0, -3.0):
        exact, _, _ = interpreter.run(model(linear([[1.0, 0.0], [0.5, 0.0]], [0.0, log_std])), X)
        other = model(linear([[1.0, 0.0], [0.5, 0.0]], [0.05, log_std]))
        passed[log_std] = gate.judge_policy(other, exact, X, action, SETTINGS, head="gaussian").passed
    assert passed == {0.0: True, -3.0: False}
