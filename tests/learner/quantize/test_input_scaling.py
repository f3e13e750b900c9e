"""Per-feature input scaling: ranges by hand, compensation exact, flatbuffer surgery checked by running it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from ai_edge_litert import interpreter as litert
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import calibrate, input_scaling
from learner.quantize.tflite import convert, graph_edits, interpreter, quantizer


def dense(rng: np.random.Generator, n_in: int, n_out: int) -> layers.Dense:
    return layers.Dense(
        rng.normal(size=(n_out, n_in)).astype(np.float32), rng.normal(size=n_out).astype(np.float32), "none"
    )


def test_ranges_by_hand() -> None:
    x = np.array([[0.0, -10.0, 5.0], [4.0, 30.0, 5.0], [1.0, 0.0, 5.0]], np.float32)
    affine = input_scaling.from_ranges(x)
    high = 127 / 128  # 255 steps of 1/128 above -1: both ends are levels of int8
    assert affine.apply(x)[:2, :2].tolist() == [pytest.approx([-1, -1]), pytest.approx([high, high])]
    assert affine.gain[:2].tolist() == pytest.approx([255 / 128 / 4, 255 / 128 / 40])
    assert affine.gain[2] == pytest.approx(255 / 128 / 2 / 5e-3)  # stood still at 5: may move by a thousandth of that
    assert affine.apply(x)[:, 2].tolist() == pytest.approx([(high - 1) / 2] * 3, abs=1e-4)


@given(
    low=st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3),
    width=st.lists(st.floats(0, 1e3, width=32), min_size=3, max_size=3),
)
def test_whatever_was_seen_lies_within_the_range(low: list[float], width: list[float]) -> None:
    x = (np.array(low) + np.linspace(0, 1, 7)[:, None] * np.array(width)).astype(np.float32)
    assert np.abs(input_scaling.from_ranges(x).apply(x)).max() <= 1 + 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_compensated_dense_layer_is_the_same_function_of_raw_observations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(100, 4)) * [0.01, 1, 20, 300] + [0, 5, -100, 1000]).astype(np.float32)
    raw = dense(rng, 4, 6)
    affine = input_scaling.from_ranges(x)
    (scaled,) = input_scaling.compensate((raw,), affine)
    assert isinstance(scaled, layers.Dense)
    expected = x.astype(np.float64) @ raw.kernel.T + raw.bias
    given_ = affine.apply(x).astype(np.float64) @ scaled.kernel.T + scaled.bias
    assert given_ == pytest.approx(expected, abs=1e-6 * np.abs(expected).max())


def test_absorb_is_exact_in_front_of_a_convolution_and_behind_a_flatten() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 3, 2))
    kernel = rng.normal(size=(4, 3, 3, 2)).astype(np.float32)
    conv = layers.Conv2D(kernel, np.ones(4, np.float32), 1, "none")
    (rewritten,) = layers.absorb((conv,), np.array([0.5]), np.array([2.0]))
    assert isinstance(rewritten, layers.Conv2D)
    whole = [np.einsum("bhwc,ohwc->bo", v, k.kernel) + k.bias for v, k in ((x * 0.5 + 2, conv), (x, rewritten))]
    assert whole[1] == pytest.approx(whole[0], abs=1e-5)

    raw = dense(rng, 6, 2)
    gain = np.arange(1.0, 7.0).reshape(2, 3)
    flatten, first = layers.absorb((layers.Flatten(), raw), gain, np.zeros((2, 3)))
    assert flatten == layers.Flatten()
    assert isinstance(first, layers.Dense)
    assert first.kernel == pytest.approx(raw.kernel * gain.reshape(6))


def test_inserted_operations_run_in_front_of_the_model() -> None:
    model = _identity_model(4)
    affine = input_scaling.Affine(np.array([1, 2, 3, 4], np.float32), np.array([0, 0.5, -1, 10], np.float32))
    x = np.array([[1, 1, 1, 1], [0, -2, 0.25, 7]], np.float32)
    before, after = _run(model, x), _run(graph_edits.insert_scaling(model, affine), x)
    assert before.tolist() == x.tolist()
    assert after.tolist() == affine.apply(x).tolist()


def test_input_keeps_its_place_shape_and_a_name_of_its_own() -> None:
    folded = graph_edits.insert_scaling(
        _identity_model(3), input_scaling.Affine(np.ones(3, np.float32), np.zeros(3, np.float32))
    )
    interpreter = litert.Interpreter(model_content=folded)
    (entry,) = interpreter.get_input_details()
    assert (entry["name"], entry["shape"].tolist(), entry["dtype"]) == ("observation", [1, 3], np.float32)


def _identity_model(width: int) -> bytes:
    eye = layers.Dense(np.eye(width, dtype=np.float32), np.zeros(width, np.float32), "none")
    return convert._run_converter((eye,), np.zeros((2, width), np.float32), "float32")


def _run(model: bytes, x: NDArray[np.float32]) -> NDArray[np.float32]:
    interpreter = litert.Interpreter(model_content=model, num_threads=1)
    entry, exit_ = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    interpreter.resize_tensor_input(entry, x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(entry, x)
    interpreter.invoke()
    result: NDArray[np.float32] = interpreter.get_tensor(exit_)
    return result


def test_appended_operations_bring_actions_to_their_bounds_and_the_template_keeps_them() -> None:
    rng = np.random.default_rng(0)
    bounds = layers.Rescale(np.array([2.0, 0.5], np.float32), np.array([1.0, -3.0], np.float32))
    last = layers.Dense(rng.normal(size=(2, 8)).astype(np.float32), np.array([0.1, 0.2], np.float32), "tanh")
    policy = (dataclasses.replace(dense(rng, 3, 8), activation="relu"), last, bounds)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    exact = _run(convert.convert(policy, x, "float32"), x)
    inner = _run(convert.convert(policy[:-1], x, "float32"), x)
    assert exact == pytest.approx(inner * bounds.gain + bounds.offset, abs=1e-6)
    assert np.abs(exact - bounds.offset).max() > 0.4

    ranges, outputs = calibrate.measure(policy, x, len(x))
    assert outputs == pytest.approx(exact, abs=1e-5)
    quantizing = quantizer.Quantizer()
    model = quantizing.quantize(policy, ranges, x)
    assert quantizing.fallbacks == 0
    assert np.abs(_run(model, x) - exact).max() < 0.03 * 4


def test_a_hi_lo_input_keeps_twelve_bits_of_the_observation() -> None:
    """A steep policy: with 8 bits of observation each level moves its action by 0.3."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (2000, 3)).astype(np.float32)
    first = layers.Dense(np.diag(np.array([20, -20, 20], np.float32)), np.array([0.5, 1.0, 1.5], np.float32), "relu")
    last = layers.Dense(rng.uniform(0.5, 1.5, (2, 3)).astype(np.float32), np.array([0.1, 0.2], np.float32), "tanh")
    policy = (first, last)
    affines = [input_scaling.from_ranges(x, hi_lo=hi_lo) for hi_lo in (False, True)]
    halves = affines[1].apply(x).reshape(len(x), 2, 3)
    assert halves[:, 0] + halves[:, 1] / input_scaling.LO_GAIN == pytest.approx(affines[0].apply(x), abs=1e-6)
    assert np.abs(halves[:, 1]).max() <= input_scaling.LO_GAIN * input_scaling.STEP / 2 + 1e-6

    for hi_lo in (False, True):
        quantizing = quantizer.Quantizer()
        ranges, exact = calibrate.measure(policy[:1], x, len(x), hi_lo=hi_lo)
        model = quantizing.quantize(policy[:1], ranges, x)
        error = np.abs(_run(model, x) - exact).max()
        # Half a step of the input is 0.08 here, half a step of the output 0.04
        assert (error < 1.3 * float(exact.max()) / 510) == hi_lo
        whole = quantizing.quantize(policy, calibrate.measure(policy, x, len(x), hi_lo=hi_lo)[0], x)
        assert quantizing.fallbacks == 0
        assert interpreter.kernels(whole) == "XNNPACK"
