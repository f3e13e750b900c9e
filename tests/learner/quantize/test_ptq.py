"""Rewriting for int8: the same choices, by hand and by property; and that int8 really gets closer to fp32."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner.networks import layers
from learner.quantize import calibrate, compare, fp32, input_scaling, ptq
from learner.quantize.tflite import interpreter, quantizer
from tests.learner import reference

FloatArray = NDArray[np.float32]


def dense(kernel: object, bias: object, activation: layers.Activation = "none") -> layers.Dense:
    """Returns a layer of a kernel [inputs, outputs]."""
    return layers.Dense(np.array(kernel, np.float32).T, np.array(bias, np.float32), activation)


def channels(low: list[float], high: list[float], mean: list[float]) -> ptq.Channels:
    return ptq.Channels(*(np.array(a, np.float32) for a in (low, high, mean)))


def kernels(policy: layers.PolicyLayers) -> list[list[list[float]]]:
    found = [layer.kernel for layer in policy if isinstance(layer, layers.Weighted)]
    return [k.round(5).tolist() for k in found]


def network(rng: np.random.Generator, activation: layers.Activation = "relu") -> layers.PolicyLayers:
    """5 -> 16 -> 16 -> 4 with channels and inputs of very different sizes, and outputs far from 0."""
    widths = (5, 16, 16, 4)
    stack = []
    for i, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
        kernel = rng.normal(size=(n_in, n_out)) * np.exp(rng.normal(size=n_out)) / np.sqrt(n_in)
        stack.append(dense(kernel, rng.normal(size=n_out), activation if i < 2 else "none"))
    last = stack[-1]
    return (*stack[:-1], dense(last.kernel.T + 10 * rng.normal(size=(16, 1)), last.bias + 500))


@pytest.mark.parametrize("activation", ["relu", "none", "tanh"])
def test_the_rewritten_policy_chooses_as_before(activation: layers.Activation) -> None:
    rng = np.random.default_rng(0)
    policy = network(rng, activation)
    x = rng.normal(size=(600, 5)).astype(np.float32)
    rewritten, ranges, exact = ptq.Calibrator().prepare(policy, x, 400)
    before = reference.outputs(policy, x)
    assert exact.shape == before.shape
    decided = np.ptp(np.partition(before, -2, axis=1)[:, -2:], axis=1) > 1e-3
    assert (exact.argmax(1) == before.argmax(1))[decided].all()
    assert exact - exact.mean(1, keepdims=True) == pytest.approx(before - before.mean(1, keepdims=True), abs=2e-3)
    assert reference.outputs(rewritten, x) == pytest.approx(exact, abs=1e-4 * float(np.ptp(before)))
    assert ranges.outputs[-1][1] - ranges.outputs[-1][0] < 0.2 * np.ptp(before)


def test_without_centring_outputs_stay_what_they_are() -> None:
    rng = np.random.default_rng(1)
    policy = network(rng)
    x = rng.normal(size=(500, 5)).astype(np.float32)
    rewritten, ranges, exact = ptq.Calibrator(("cross_layer_equalization", "bias_correction")).prepare(policy, x, 500)
    before = reference.outputs(policy, x)
    assert exact == pytest.approx(before, abs=1e-2)
    assert ranges.outputs[-1] == pytest.approx((before.min(), before.max()), abs=1e-2)
    assert reference.outputs(rewritten, x) == pytest.approx(before, rel=0.02)


def test_what_all_outputs_have_in_common_is_taken_out() -> None:
    """Outputs (3 x + 7 + 1, 3 x + 7 - 1): the middle is 3 x + 7, and what remains is +1 and -1."""
    x = np.linspace(-1, 1, 101, dtype=np.float32)[:, None]
    policy = (dense([[3.0, 3.0]], [8.0, 6.0]),)
    (level,) = ptq.centre_outputs(policy, x, reference.outputs(policy, x))
    assert isinstance(level, layers.Dense)
    assert level.kernel[:, 0].tolist() == pytest.approx([0, 0], abs=1e-6)
    assert level.bias.tolist() == pytest.approx([1, -1], abs=1e-5)
    # A third output far below leaves the middle of the best two 2 x + 19 above the mean; that much is a regression's,
    # whose ridge is a hundredth of the sum of squares of the one input
    policy = (dense([[3.0, 3.0, -3.0]], [8.0, 6.0, -50.0]),)
    (level,) = ptq.centre_outputs(policy, x, reference.outputs(policy, x))
    assert isinstance(level, layers.Dense)
    assert level.kernel[:, 0].tolist() == pytest.approx([2 - 2 / 1.01] * 2 + [-4 - 2 / 1.01], rel=1e-3)
    assert level.bias.tolist() == pytest.approx([1, -1, -57], abs=1e-4)
    tanh = (dense([[3.0, 1.0]], [0.0, 0.0], "tanh"),)
    _, ranges, exact = ptq.Calibrator().prepare(tanh, x, 101)
    assert exact == pytest.approx(np.tanh(x * [3, 1]), abs=1e-5)
    (output,) = ranges.outputs
    assert output == pytest.approx((-3.0, 3.0))  # in front of tanh, as TFLite wants it


@pytest.mark.parametrize(("head", "ends"), [("gaussian", (-9.0, 9.0)), ("squashed_gaussian", (-3.0, 3.0))])
def test_where_actors_clip_outputs_int8_may_saturate(head: specs.Head, ends: tuple[float, float]) -> None:
    x = np.linspace(-1, 1, 101, dtype=np.float32)[:, None]
    policy = (dense([[9.0, 4.0]], [0.0, 0.0]),)
    narrow = (dense([[0.5, 2.0]], [0.0, 0.0]),)
    _, ranges, _ = ptq.Calibrator(ptq.STEPS_BY_HEAD[head]).prepare(policy, x, 101)
    assert ranges.outputs[-1] == pytest.approx(ends)
    _, ranges, _ = ptq.Calibrator(ptq.STEPS_BY_HEAD[head]).prepare(narrow, x, 101)
    assert ranges.outputs[-1] == pytest.approx((-2.0, 2.0)), "no wider than what was seen"


def test_channels_get_the_same_size() -> None:
    """Activations reach 8 and 1, weights 1 and 8: factors 8^0.75 and 8^-0.25, as powers of two 4 and 1/2."""
    policy = (dense([[8.0, 4.0]], [16.0, 0.5], "relu"), dense([[1.0, -0.5], [2.0, 8.0]], [0.0, 1.0]))
    seen = [channels([-1], [1], [0]), channels([0, 0], [8, 1], [4, 0.5]), channels([0, 0], [1, 1], [0, 0])]
    exponents = ptq.equalization_exponents(policy, seen)
    assert exponents[0].tolist() == [2, -1]


def test_a_channel_that_was_never_active_gets_a_factor_too_and_tanh_gets_none() -> None:
    policy = (dense([[1.0, 1.0]], [0.0, 0.0], "relu"), dense([[1.0], [1.0]], [0.0]))
    seen = [channels([-1], [1], [0]), channels([0, 0], [10, 0], [1, 0]), channels([0], [1], [0])]
    # 10^0.75 = 2^2.5; the second channel counts as a tenth of the first, so 1
    assert ptq.equalization_exponents(policy, seen)[0].tolist() == [2, 0]
    bounded = (dense([[1.0, 1.0]], [0.0, 0.0], "tanh"), policy[1])
    assert ptq.equalization_exponents(bounded, seen)[0].tolist() == [0, 0]


def test_factors_stay_until_they_are_off_by_more_than_two() -> None:
    policy = (dense([[1.0, 1.0, 1.0]], [0.0, 0.0, 0.0], "relu"), dense([[1.0], [1.0], [1.0]], [0.0]))

    def exponents(*peaks: float, kept: list[FloatArray]) -> list[FloatArray]:
        zeros = [0.0] * len(peaks)
        seen = [channels([-1], [1], [0]), channels(zeros, [2 ** (p / 0.75) for p in peaks], zeros), None]
        return ptq.equalization_exponents(policy, seen, kept)  # type: ignore[arg-type]

    first = exponents(1.0, 2.0, 3.0, kept=[])
    assert first[0].tolist() == [1, 2, 3]
    assert exponents(1.9, 1.1, 3.0, kept=first)[0].tolist() == [1, 2, 3]
    assert exponents(2.2, 2.0, 1.8, kept=first)[0].tolist() == [2, 2, 2]


def test_ranges_with_hysteresis_stay_while_they_fit() -> None:
    rng = np.random.default_rng(5)
    policy = network(rng)
    x = rng.normal(size=(500, 5)).astype(np.float32)
    x[:, 4] = x[:, 4] > 0  # a switch, whose ends must stay exact
    calibrator = ptq.Calibrator(hysteresis=True)
    first = calibrator.prepare(policy, x, 500)[1]
    fresh = ptq.Calibrator().prepare(policy, x, 500)[1]
    assert first.hysteresis
    for wide, exact in zip(first.outputs, fresh.outputs, strict=True):
        scale = (wide[1] - wide[0]) / 255
        assert 1.06 <= scale * 255 / (exact[1] - min(0, exact[0])) <= 1.06 * 1.126
        assert float(np.frexp(np.float32(scale))[0] * 16).is_integer(), "four significant bits"
    inner = x[np.abs(x[:, :4]).max(1) < np.abs(x[:, :4]).max(1).max()]  # without the row that reaches farthest
    again = calibrator.prepare(policy, inner, len(inner))[1]
    assert again.outputs == first.outputs
    assert first.affine is not None
    assert again.affine is not None
    assert again.affine.gain.tolist() == first.affine.gain.tolist()
    wider = calibrator.prepare(policy, 1.2 * x, 500)[1]
    assert wider.outputs[0][1] > first.outputs[0][1]
    assert wider.affine is not None
    assert (wider.affine.gain < first.affine.gain).all()
    narrow = calibrator.prepare(policy, 0.1 * x, 500)[1]  # far too wide for that
    assert narrow.outputs[0][1] < 0.5 * wider.outputs[0][1]
    assert narrow.affine is not None
    assert (narrow.affine.gain > 5 * first.affine.gain).all()


def test_a_hi_lo_feature_may_go_an_eighth_beyond_what_was_seen() -> None:
    x = np.linspace(-1, 3, 101, dtype=np.float32)[:, None]
    wider, seen = [-1.5, 3.5], [-1.0, 3.0]
    cases: tuple[tuple[tuple[ptq.Step, ...], list[float]], ...] = (
        (ptq.STEPS, wider),
        (("cross_layer_equalization",), seen),
    )
    for steps, ends in cases:
        affine = ptq.Calibrator(steps).prepare((dense([[0.5, -0.2]], [0.0, 0.1]),), x, len(x))[1].affine
        assert affine is not None
        assert np.array(ends) * affine.gain + affine.offset == pytest.approx(input_scaling.ENDS, abs=1e-6)


def test_a_wide_layer_has_a_range_for_what_it_has_not_seen() -> None:
    """Its middle fits each of fewer observations than inputs, and tells of no others."""
    rng = np.random.default_rng(5)
    frame = rng.normal(size=(12, 256)) / np.sqrt(12)
    policy = (dense(frame, np.zeros(256), "relu"), dense(rng.normal(size=(256, 6)), np.zeros(6)))
    x = rng.normal(size=(2064, 12)).astype(np.float32)
    _, params, exact = ptq.Calibrator().prepare(policy, x, 64)
    low, high = params.outputs[-1]
    best, runner_up = compare.best_two(exact[64:])
    assert ((best < low) | (runner_up > high)).mean() < 0.01, "of what may tie at an end"
    middle = np.partition(exact, -2, axis=1)[:, -2:].mean(1)
    before = reference.outputs(policy, x)
    beyond = np.partition(before, -2, axis=1)[:, -2:].mean(1) - before.mean(1)
    assert middle[64:].std() < 1.05 * beyond[64:].std(), "what is subtracted makes it no worse"


def test_no_part_of_the_sample_is_foretold_by_itself() -> None:
    """Each quarter has a middle of its own, and a feature that no other has: from the others nobody can know it."""
    part = np.arange(64) % 4
    inputs = np.eye(4, dtype=np.float32)[part]
    middle = 10 + np.array([-1.5, -0.5, 0.5, 1.5], np.float32)[part]
    outputs = middle[:, None] * np.array([1, 1, -2], np.float32)  # their mean is 0
    _, _, common = ptq._common(dense(np.zeros((4, 3)), np.zeros(3)), inputs, outputs)
    others = 10 - (middle - 10) / 3  # the mean of the other quarters
    assert common == pytest.approx(others, abs=1e-3)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e-12, 1.0, 1e15, 1e25])
def test_inputs_of_any_size_are_fitted_or_left(size: float) -> None:
    rng = np.random.default_rng(1)
    inputs = (size * rng.normal(size=(40, 8))).astype(np.float32)
    inputs[1::4] *= 1e6 if size < 1.0 else 1.0  # one part has what the others lack
    last = dense(rng.normal(size=(8, 3)), rng.normal(size=3))
    with np.errstate(over="ignore", invalid="ignore"):
        kernel, bias, common = ptq._common(last, inputs, fp32.linear_outputs(last, inputs))
    assert all(np.isfinite(found).all() for found in (kernel, bias, common))


def test_the_range_holds_every_close_call() -> None:
    """Best and runner-up: (5, 1), (0.5, -9), (-2, -3), (7, 6.5). Gaps 4, 9.5, 1, 0.5: their median is 2.5."""
    outputs = np.array([[5, 1, -20], [-9, 0.5, -9], [-3, -30, -2], [7, 6.5, 0]], np.float32)
    # 1.5 times the worst best is -3, 1.5 times the best runner-up 9.75, but nothing was above 7
    assert ptq.decisive_range(outputs) == (-3.0, 7.0)
    two = np.array([[3.0, -3.0], [-2.0, 2.0], [40.0, -40.0]], np.float32)
    assert ptq.decisive_range(two) == (-6.0, 6.0)  # no runner-up is above 0, so the median gap decides


def test_convolutions_choose_as_before_too() -> None:
    rng = np.random.default_rng(2)
    conv = layers.Conv2D(
        (rng.normal(size=(8, 3, 3, 2)) * np.exp(rng.normal(size=(8, 1, 1, 1)))).astype(np.float32),
        np.ones(8, np.float32),
        2,
        "relu",
    )
    policy = (conv, layers.Flatten(), dense(rng.normal(size=(4 * 4 * 8, 3)), rng.normal(size=3)))
    frames = rng.integers(0, 256, (200, 9, 9, 2)).astype(np.uint8)
    rewritten, ranges, exact = ptq.Calibrator().prepare(policy, frames, 100)
    before = reference.outputs(policy, frames)
    assert (exact.argmax(1) == before.argmax(1)).mean() > 0.99
    assert ranges.affine is None
    assert ranges.input[1] > 250
    assert (reference.outputs(rewritten, frames).argmax(1) == before.argmax(1)).mean() > 0.95


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_odd_policies_break_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    hidden, zero = dense([[1, -2, 0], [3, 1, 0]], [0, 0, 0], "relu"), dense(np.zeros((3, 2)), [0, 0])
    for policy in ((hidden, zero), (dense(hidden.kernel.T, [-99] * 3, "relu"), zero), (dense(np.eye(2), [5, 5]),)):
        rewritten, _, exact = ptq.Calibrator().prepare(policy, x, 50)
        assert layers.finite(rewritten)
        assert np.abs(exact).max() < 10
    huge = (dense(hidden.kernel.T * 1e10, [0, 0, 0], "relu"), dense(np.eye(3, 2) * 1e15, [0, 0]))
    assert layers.finite(ptq.Calibrator().prepare(huge, x, 50)[0])
    broken = (dense([[1, np.inf, 0], [3, 1, 0]], [0, 0, 0], "relu"), dense(np.eye(3, 2), [0, 0]))
    rewritten, ranges, _ = ptq.Calibrator().prepare(broken, x, 50)
    with pytest.raises(errors.PolicyError, match="NaN or infinite"):
        quantizer.Quantizer().quantize(rewritten, ranges, x)


def test_int8_gets_closer_to_fp32() -> None:
    rng = np.random.default_rng(3)
    policy = network(rng)
    x = (rng.normal(size=(3000, 5)) * [1, 5, 0.1, 1, 30]).astype(np.float32)
    x[:, 3] = x[:, 3] > 2  # a switch that is mostly off
    policy = layers.absorb(policy, 1 / x.std(0), np.zeros(5))
    quantize = quantizer.Quantizer().quantize
    plain, exact = calibrate.measure(policy, x, 1000)
    rewritten, ranges, _ = ptq.Calibrator().prepare(policy, x, 1000)
    before = compare.states(exact[1000:], interpreter.run(quantize(policy, plain, x[:1000]), x[1000:])[0])
    after = compare.states(exact[1000:], interpreter.run(quantize(rewritten, ranges, x[:1000]), x[1000:])[0])
    assert before.ties > 0.3
    assert after.ties < 0.05
    assert before.agreement < 0.8
    assert after.agreement > 0.95
