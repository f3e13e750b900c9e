"""Requantizing a template against TFLiteConverter, byte by byte.

The converter calibrates by itself, so the ranges that it saw are read on their way from its calibration to its
quantization, and given to ours. What both make of them must be the same file.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from tensorflow.lite.python import convert as tflite_convert
from tensorflow.lite.python import lite
from tensorflow.lite.python import schema_py_generated as schema

from broker.contract import errors, specs
from broker.program import logs
from learner.networks import layers, networks
from learner.quantize import calibrate, fp32, input_scaling, ptq, scales
from learner.quantize.tflite import convert, interpreter, quantizer, requantize, template

Arrays = NDArray[np.float32]
FRAMES = {"nature": (84, 84, 4), "impala-small": (84, 84, 4), "minatar": (10, 10, 6)}
"""Observations of what has convolutions."""


def _spec(*shape: int, dtype: str = "float32") -> specs.EnvSpec:
    return specs.EnvSpec(specs.ObservationSpec(shape, dtype), specs.ActionSpec("discrete", n=6))


def _policy(case: str) -> tuple[layers.PolicyLayers, specs.EnvSpec]:
    hidden = {"2048x2": (2048, 2048), "256x2": (256, 256), "three layers": (96, 64, 32)}.get(case, (64, 64))
    spec, chain = _spec(24), "auto"
    if case in FRAMES:
        spec, chain = _spec(*FRAMES[case], dtype="uint8"), case
        hidden = (512,) if case == "nature" else hidden
    network = networks.QNetwork.build(spec, hidden, case == "dueling", np.random.default_rng(0), chain)
    policy = network.policy_layers(list(network.initial().values()), networks.Normalizer.identity(spec.observation))
    if case in ("tanh", "hi/lo"):
        last = policy[-1]
        assert isinstance(last, layers.Dense)
        policy = (*policy[:-1], dataclasses.replace(last, activation="tanh"))
    if case == "hidden tanh":
        *hidden_layers, last = layers.weighted(policy)
        policy = (*(dataclasses.replace(layer, activation="tanh") for layer in hidden_layers), last)
    return policy, spec


def _draw(policy: layers.PolicyLayers, rng: np.random.Generator) -> layers.PolicyLayers:
    """Other weights of other sizes, as training makes them."""
    return layers.with_arrays(
        policy,
        [
            (a.std() + 0.02) * 10 ** rng.uniform(-0.5, 0.5) * rng.standard_normal(a.shape, np.float32)
            for a in layers.arrays(policy).values()
        ],
    )


def _observations(spec: specs.EnvSpec, rng: np.random.Generator, rows: int) -> NDArray[Any]:
    if spec.observation.dtype == "uint8":
        return rng.integers(0, 256, (rows, *spec.observation.shape), np.uint8)
    return (rng.standard_normal((rows, *spec.observation.shape)) * 10 ** rng.uniform(-1, 1, 24)).astype(np.float32)


def _reference(
    policy: layers.PolicyLayers, observations: NDArray[Any], per_channel: bool = True, hi_lo: bool = False
) -> tuple[bytes, calibrate.QuantParams]:
    """Returns what TFLiteConverter makes, and the ranges that its calibration handed to its quantization."""
    handed_on: list[bytes] = []

    def watched(calibrated: bytes, *args: Any, **kwargs: Any) -> bytes:
        handed_on.append(calibrated)
        quantized: bytes = tflite_convert.mlir_quantize(calibrated, *args, **kwargs)
        return quantized

    with mock.patch.object(lite, "_mlir_quantize", watched):
        model = convert.convert(policy, observations, "int8", per_channel=per_channel, hi_lo=hi_lo)
    affine = input_scaling.from_ranges(observations, hi_lo=hi_lo) if isinstance(policy[0], layers.Dense) else None
    return model, _ranges(handed_on[0], affine)


def _ranges(calibrated: bytes, affine: input_scaling.Affine | None) -> calibrate.QuantParams:
    model = schema.Model.GetRootAs(calibrated, 0)
    graph = model.Subgraphs(0)

    def span(tensor: int) -> tuple[float, float]:
        found = graph.Tensors(tensor).Quantization()
        return float(found.Min(0)), float(found.Max(0))

    weighted = (schema.BuiltinOperator.FULLY_CONNECTED, schema.BuiltinOperator.CONV_2D)
    operators = [graph.Operators(i) for i in range(graph.OperatorsLength())]
    return calibrate.QuantParams(
        span(graph.Inputs(0)),
        tuple(
            span(op.Outputs(0)) for op in operators if model.OperatorCodes(op.OpcodeIndex()).BuiltinCode() in weighted
        ),
        affine,
    )


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [True, False], ids=["per-channel", "per-tensor"])
@pytest.mark.parametrize(
    ("case", "draws"),
    [
        ("64x2", 50),
        ("256x2", 50),
        ("three layers", 50),
        ("dueling", 50),
        ("tanh", 50),
        ("hidden tanh", 20),
        ("hi/lo", 20),
        ("2048x2", 5),
        ("nature", 5),
        ("impala-small", 5),
        ("minatar", 20),
    ],
)
def test_the_same_ranges_give_the_converters_bytes(case: str, draws: int, per_channel: bool) -> None:
    architecture, spec = _policy(case)
    rng = np.random.default_rng(1)
    quantize = quantizer.Quantizer(per_channel=per_channel)
    for draw in range(draws):
        policy = _draw(architecture, rng)
        observations = _observations(spec, rng, 16 if case in FRAMES else 256)
        expected, ranges = _reference(policy, observations, per_channel, hi_lo=case == "hi/lo")
        assert quantize.quantize(policy, ranges, observations) == expected, f"draw {draw}"
    assert quantize.fallbacks == 0


def test_bytes_lose_nothing_but_128_on_their_way_into_int8() -> None:
    architecture, spec = _policy("minatar")
    rng = np.random.default_rng(2)
    quantize, calibrator = quantizer.Quantizer(), ptq.Calibrator(hysteresis=True)
    dim = _observations(spec, rng, 64) // 3  # whatever is seen, all bytes have a level of their own
    ranges, _ = calibrate.measure(architecture, dim, 32)
    assert ranges.input == (0.0, 255.0)
    prepared, params, _ = calibrator.prepare(_draw(architecture, rng), dim, 32)
    numbers = template.locate(quantize.quantize(prepared, params, dim), 3 + 1).numbers()
    assert (numbers["input/0/scale"].tolist(), numbers["input/0/zero_point"].tolist()) == ([1.0], [-128])
    assert quantize.fallbacks == 0


def test_own_ranges_differ_from_the_converters_by_rounding_alone() -> None:
    architecture, spec = _policy("256x2")
    rng = np.random.default_rng(2)
    quantize = quantizer.Quantizer()
    weights_differ = 0
    for _ in range(10):
        policy, observations = _draw(architecture, rng), _observations(spec, rng, 256)
        ranges, _ = calibrate.measure(policy, observations, len(observations))
        ours = template.locate(quantize.quantize(policy, ranges, observations), 3).numbers()
        theirs = template.locate(convert.convert(policy, observations, "int8"), 3).numbers()
        for name, number in ours.items():
            if name.endswith("scale"):  # sums in another order: the ends of the ranges move by a few last digits
                np.testing.assert_allclose(number, theirs[name], rtol=2e-6)
        weights_differ += sum(int((ours[n] != theirs[n]).sum()) for n in ours if n.endswith("weights"))
    assert weights_differ == 0  # weights do not depend on activations


def test_tiny_weights_keep_a_scale() -> None:
    architecture, spec = _policy("64x2")
    rng = np.random.default_rng(3)
    policy = _draw(architecture, rng)
    first, *rest = policy
    assert isinstance(first, layers.Dense)
    kernel = first.kernel.copy()
    kernel[0], kernel[1] = 0.0, 1e-9
    policy = (dataclasses.replace(first, kernel=kernel), *rest)
    observations = _observations(spec, rng, 64)
    expected, ranges = _reference(policy, observations)
    assert quantizer.Quantizer().quantize(policy, ranges, observations) == expected


@pytest.mark.parametrize("signs", list(itertools.product((-1.0, 1.0), repeat=3)))
def test_layers_of_one_weight_have_a_place_each(signs: tuple[float, ...]) -> None:
    """As where an agent's outputs are clipped, by three layers of one unit: in int8 each weight is 127 or -127."""
    rng = np.random.default_rng(4)
    clip = [
        layers.Dense(np.array([[sign]], np.float32), np.array([2.0 - sign], np.float32), "relu") for sign in signs[:2]
    ]
    policy = (
        layers.Dense(rng.uniform(-1, 1, (1, 2)).astype(np.float32), np.array([1.5], np.float32), "relu"),
        *clip,
        layers.Dense(np.array([[signs[2]]], np.float32), np.array([0.1], np.float32), "none"),
    )
    observations = rng.uniform(-1, 1, (64, 2)).astype(np.float32)
    fitted = ptq.Calibrator(ptq.STEPS[1:]).calibrate(policy, observations)
    quantize = quantizer.Quantizer()
    model = quantize.quantize(policy, fitted.params, observations)
    assert quantize.fallbacks == 0
    answered, _, _ = interpreter.run(model, observations)
    exact = fp32.outputs(policy, observations)
    assert np.abs(answered - exact).max() < 0.03 * np.ptp(exact)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    architecture, spec = _policy("64x2")
    rng = np.random.default_rng(4)
    policy = _draw(architecture, rng)
    observations = _observations(spec, rng, 64)
    ranges, _ = calibrate.measure(policy, observations, 64)
    quantize = quantizer.Quantizer()
    for name in layers.arrays(policy):
        arrays = {k: a.copy() for k, a in layers.arrays(policy).items()}
        arrays[name].flat[-1] = value
        broken = layers.with_arrays(policy, arrays.values())
        with pytest.raises(errors.PolicyError, match="NaN or infinite") as caught:
            quantize.quantize(broken, calibrate.measure(broken, observations, 64)[0], observations)
        assert caught.value.reason == "not_finite"
        with pytest.raises(errors.PolicyError, match="NaN or infinite"):
            quantize.quantize(broken, ranges, observations)


def test_what_cannot_be_mapped_is_converted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    architecture, spec = _policy("64x2")
    rng = np.random.default_rng(5)
    policy = _draw(architecture, rng)
    first, second, last = policy
    assert isinstance(second, layers.Dense)
    dead = dataclasses.replace(second, bias=np.full_like(second.bias, -1e6))  # behind ReLU nothing but zeros
    policy = (first, dead, last)
    observations = _observations(spec, rng, 64)
    ranges, _ = calibrate.measure(policy, observations, 64)
    quantize = quantizer.Quantizer()
    with caplog.filtering(logs.Once()):
        for _ in range(2):
            assert quantize.quantize(policy, ranges, observations) == convert.convert(policy, observations, "int8")
    assert quantize.fallbacks == 2
    said = [record.getMessage() for record in caplog.records if record.name == quantizer.__name__]
    assert said == ["quantizing by TFLiteConverter, which is slower: a layer puts out nothing but zeros"]


@pytest.mark.parametrize("piece", [4096, 10_000, 40_000, 1 << 20])
def test_pieces_are_final_when_given_join_to_the_model_and_none_is_small(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, spec = _policy("256x2")
    rng = np.random.default_rng(8)
    observations = _observations(spec, rng, 64)
    quantize, given = quantizer.Quantizer(), list[bytes]()
    monkeypatch.setattr(requantize, "PIECE_BYTES", piece)
    for _ in range(2):
        policy = _draw(architecture, rng)
        ranges, _ = calibrate.measure(policy, observations, 64)
        given.clear()
        model = quantize.quantize(policy, ranges, observations, on_written=lambda part: given.append(bytes(part)))
    assert b"".join(given) == model
    assert len(given) == 1 or min(map(len, given)) >= piece // 4
    assert len(given) <= max(1, len(model) // piece + 1)


def test_biases_of_zero_need_no_other_template() -> None:
    architecture, spec = _policy("64x2")
    rng = np.random.default_rng(6)
    policy = _draw(architecture, rng)
    policy = layers.with_arrays(policy, [a * (a.ndim > 1) for a in layers.arrays(policy).values()])
    observations = _observations(spec, rng, 64)
    ranges, exact = calibrate.measure(policy, observations, 64)
    quantize = quantizer.Quantizer()
    model = quantize.quantize(policy, ranges, observations)
    assert quantize.fallbacks == 0
    outputs, _, _ = interpreter.run(model, observations)
    assert np.abs(outputs - exact).max() < 0.05 * np.ptp(exact)


def _one_layer(*weights: float) -> tuple[template.Template, layers.PolicyLayers, calibrate.QuantParams]:
    """One output without scaling of the input; its bias is 3."""
    kernel = np.array(weights, np.float32)[None]
    policy = (layers.Dense(kernel, np.array([3.0], np.float32), "none"),)
    x = np.ones((4, len(weights)), np.float32)
    ranges, _ = calibrate.measure(policy, x, 4, per_feature=False)
    return quantizer._build(policy, (len(weights),), quantizer._Input(False, False), per_channel=True), policy, ranges


def test_biases_take_back_the_mean_of_the_rounding_error() -> None:
    """Scale 1: weights 127 and 0.4 become 127 and 0, which at mean inputs of 1 and 5 takes 2 away."""
    target, policy, ranges = _one_layer(127.0, 0.4)
    mean = np.array([1.0, 5.0], np.float32)
    requantize.requantize(target, policy, dataclasses.replace(ranges, means=(mean,)))
    (place,) = target.layers
    assert place.weights.tolist() == [[127, 0]]
    assert place.bias * place.bias_scale == pytest.approx(3 + 5 * 0.4, abs=0.005)
    requantize.requantize(target, policy, ranges)
    assert place.bias * place.bias_scale == pytest.approx(3, abs=0.005)


def test_scales_with_hysteresis_stay_while_the_weights_fit() -> None:
    target, policy, ranges = _one_layer(127.0, 0.4)
    (place,), (layer,) = target.layers, policy
    assert isinstance(layer, layers.Dense)
    kept = dataclasses.replace(ranges, hysteresis=True)

    def scale(largest: float) -> float:
        kernel = np.array([[largest, 1.0]], np.float32)
        requantize.requantize(target, (dataclasses.replace(layer, kernel=kernel),), kept)
        assert abs(place.weights[0, 0] * place.weight_scale[0] - largest) <= place.weight_scale[0] / 2
        return float(place.weight_scale[0])

    first = scale(127.0)
    assert first == 1.125, "1.06, with four significant bits"
    assert scale(115.0) == scale(142.0) == first
    assert scale(143.0) == 1.25, "does not fit"
    assert scale(114.0) == 1.0, "would be too coarse"


def test_biases_with_hysteresis_are_coarse_beside_their_scale_and_fine_beside_the_outputs() -> None:
    target, policy, ranges = _one_layer(127.0, 0.4)
    (place,) = target.layers
    requantize.requantize(target, policy, dataclasses.replace(ranges, hysteresis=True))
    level = scales.activation_scale(*ranges.outputs[0])[0]
    assert 64 < level / place.bias_scale[0] < 128
    assert place.bias[0] % 8 == 0
    assert place.bias[0] * place.bias_scale[0] == pytest.approx(3, abs=float(level) / 16)
