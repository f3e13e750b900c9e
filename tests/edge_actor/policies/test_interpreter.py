"""Interpreters: the delegate they really have, and the models they refuse."""

from __future__ import annotations

import importlib.metadata
import sys

import numpy as np
import pytest

from broker.contract import errors
from edge_actor.policies import interpreter
from tests import runtimes
from tests.edge_actor.policies.models import files

FLOAT32_ON_TFLITE_RUNTIME = "XNNPACK" if sys.maxsize > 2**32 else "built-in"
"""Its wheel for 32-bit ARM was built without XNNPACK."""


@pytest.mark.isolated
@pytest.mark.parametrize(
    ("runtime", "model", "delegate"),
    [
        ("ai-edge-litert", files.INT8, "XNNPACK"),
        ("ai-edge-litert", files.FLOAT32, "XNNPACK"),
        ("tflite-runtime", files.INT8, "built-in"),
        ("tflite-runtime", files.FLOAT32, FLOAT32_ON_TFLITE_RUNTIME),
    ],
)
def test_says_which_kernels_run(runtime: str, model: object, delegate: str) -> None:
    built = interpreter.Interpreter(model.read_bytes(), 1, runtime=runtime)  # type: ignore[attr-defined]
    assert built.delegate == delegate
    assert str(built.runtime).startswith(f"{runtime} ")


def test_auto_prefers_the_runtime_that_delegates_int8() -> None:
    runtimes.python("ai-edge-litert")
    assert interpreter.find().name == "ai-edge-litert"


def test_a_batch_answers_like_its_rows() -> None:
    one, five = (interpreter.Interpreter(files.INT8.read_bytes(), batch) for batch in (1, 5))
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    five.input[...] = rows
    five.invoke()
    for k in range(5):
        one.input[0] = rows[k]
        one.invoke()
        np.testing.assert_array_equal(one.output[0], five.output[k])


@pytest.mark.isolated("tflite-runtime")
def test_both_runtimes_agree_to_a_quantization_step() -> None:
    runtimes.python("ai-edge-litert")
    answers = []
    for runtime in ("ai-edge-litert", "tflite-runtime"):
        built = interpreter.Interpreter(files.INT8.read_bytes(), 64, runtime=runtime)
        built.input[...] = np.random.default_rng(0).normal(size=(64, 4))
        built.invoke()
        answers.append(built.output.copy())
    step = np.diff(np.unique(answers[0])).min()
    steps_apart = np.abs(answers[0] - answers[1]) / step
    assert steps_apart.max() < 2.5  # each of three layers may differ by one
    assert np.mean(steps_apart > 0.5) < 0.2


@pytest.mark.isolated
@pytest.mark.parametrize("runtime", ["ai-edge-litert", "tflite-runtime"])
def test_junk_is_refused(runtime: str) -> None:
    """Even tflite-runtime refuses it, which left to itself ends the process on most of the files that were cut."""
    sound = files.INT8.read_bytes()
    cuts = [sound[:length] for length in (16, 64, 700, len(sound) // 2, len(sound) - 100, len(sound) - 4)]
    for junk in (b"", b"junk", bytes(4096), b"\0\0\0\0TFL3" + b"\xff" * 200, *cuts):
        with pytest.raises(errors.PolicyError) as caught:
            interpreter.Interpreter(junk, 1, runtime=runtime)
        assert caught.value.reason == "model"


def test_a_runtime_that_is_not_there() -> None:
    with pytest.raises(errors.RuntimeMissing, match="no TFLite runtime can be loaded"):
        interpreter.find("tensorflow-serving")


def test_tflite_runtime_beside_numpy_2_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads there, and would end with a SystemError at the first model."""
    monkeypatch.setattr(np, "__version__", "2.4.6")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.14.0")
    find = interpreter.find.__wrapped__  # without its cache
    with pytest.raises(errors.RuntimeMissing, match="built against numpy 1, and numpy 2.4.6 is installed"):
        find("tflite-runtime")
