"""Overwriting a converted model of float activations against TFLiteConverter, byte by byte."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from broker.contract import errors
from broker.program import logs
from learner.networks import layers
from learner.quantize.tflite import convert, quantizer
from tests.learner.quantize.tflite import test_requantize as examples

PRECISIONS = ("float32", "float16", "dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("case", "draws"),
    [("256x2", 10), ("three layers", 20), ("dueling", 5), ("tanh", 5), ("2048x2", 2), ("nature", 2)],
)
def test_the_same_numbers_give_the_converters_bytes(case: str, draws: int, precision: str) -> None:
    architecture, spec = examples._policy(case)
    if case == "tanh":
        bounds = np.linspace(1, 2, 6, dtype=np.float32)
        architecture = (*architecture, layers.Rescale(bounds, bounds))
    rng = np.random.default_rng(1)
    quantize = quantizer.Quantizer()
    for draw in range(draws):
        policy = examples._draw(architecture, rng)
        observations = examples._observations(spec, rng, 64)
        expected = convert.convert(policy, observations, precision)
        assert quantize.convert(policy, observations, precision) == expected, f"draw {draw}"
    assert quantize.fallbacks == 0


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fewer_bits_are_the_converters_too(precision: str, bits: int) -> None:
    architecture, spec = examples._policy("64x2")
    rng = np.random.default_rng(2)
    policy, observations = examples._draw(architecture, rng), examples._observations(spec, rng, 64)
    expected = convert.convert(policy, observations, precision, weight_bits=bits)
    assert quantizer.Quantizer().convert(policy, observations, precision, weight_bits=bits) == expected


def test_pieces_make_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, spec = examples._policy("256x2")
    rng = np.random.default_rng(3)
    monkeypatch.setattr("learner.quantize.tflite.requantize.PIECE_BYTES", 100_000)
    given: list[bytes] = []
    model = quantizer.Quantizer().convert(
        examples._draw(architecture, rng),
        examples._observations(spec, rng, 64),
        "float32",
        lambda piece: given.append(bytes(piece)),
    )
    assert b"".join(given) == model
    assert len(given) == -(-len(model) // 100_000)


@pytest.mark.parametrize(
    ("precision", "weight_bits", "shrink", "is_faithful"),
    [
        ("float32", 8, 1.0, True),
        ("float32", 4, 1.0, False),
        ("float16", 8, 1.0, True),
        ("float16", 8, 1e-6, False),
        ("dynamic", 8, 1.0, False),
    ],
)
def test_a_model_is_faithful_if_it_holds_the_policys_numbers(
    precision: str, weight_bits: int, shrink: float, is_faithful: bool
) -> None:
    architecture, spec = examples._policy("64x2")
    rng = np.random.default_rng(6)
    policy = examples._draw(architecture, rng)
    layers.arrays(policy)["1/kernel"][3] *= np.float32(shrink)
    quantize = quantizer.Quantizer()
    quantize.convert(policy, examples._observations(spec, rng, 64), precision, weight_bits=weight_bits)
    assert quantize.is_faithful == is_faithful


def test_a_large_model_has_few_pieces_and_each_is_final() -> None:
    architecture, spec = examples._policy("2048x2")
    rng = np.random.default_rng(7)
    quantize, given = quantizer.Quantizer(), list[bytes]()
    for _ in range(2):
        given.clear()
        model = quantize.convert(
            examples._draw(architecture, rng),
            examples._observations(spec, rng, 64),
            "float32",
            lambda piece: given.append(bytes(piece)),
        )
        assert b"".join(given) == model
        assert 4 < len(given) <= 9


@pytest.mark.parametrize(
    ("precision", "weight", "said"),
    [("float16", 1e5, "beyond what float16 holds"), ("dynamic", 0.0, "nothing but zeros")],
)
def test_what_the_template_cannot_hold_goes_to_the_converter_and_is_said_once(
    precision: str, weight: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    architecture, spec = examples._policy("256x2")
    rng = np.random.default_rng(4)
    observations = examples._observations(spec, rng, 64)
    quantize = quantizer.Quantizer()
    drawn = list(examples._draw(architecture, rng))
    middle = drawn[1]
    assert isinstance(middle, layers.Dense)
    drawn[1] = dataclasses.replace(middle, kernel=np.full_like(middle.kernel, weight))
    with caplog.filtering(logs.Once()):
        for _ in range(2):
            expected = convert.convert(tuple(drawn), observations, precision)
            assert quantize.convert(tuple(drawn), observations, precision) == expected
    assert quantize.fallbacks == 2
    (line,) = [record.getMessage() for record in caplog.records if record.name == quantizer.__name__]
    assert said in line


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_are_not_finite_are_refused(precision: str) -> None:
    architecture, spec = examples._policy("64x2")
    rng = np.random.default_rng(5)
    policy = examples._draw(architecture, rng)
    layers.arrays(policy)["1/kernel"][0, 0] = np.nan
    with pytest.raises(errors.PolicyError, match="NaN or infinite"):
        quantizer.Quantizer().convert(policy, examples._observations(spec, rng, 64), precision)
