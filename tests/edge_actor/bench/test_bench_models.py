"""Benchmark policies: what the runtimes make of the files that are written without TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest

from edge_actor.bench import flatbuffer, models
from edge_actor.policies import interpreter
from tests.edge_actor.policies import test_interpreter

SHAPES = (models.Shape(64, 2), models.Shape(256, 3), models.CNN)


@pytest.mark.isolated
@pytest.mark.parametrize("runtime", ["ai-edge-litert", "tflite-runtime"])
@pytest.mark.parametrize("delegated", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_precision_computes_the_same_policy(runtime: str, delegated: bool, shape: models.Shape) -> None:
    policy = models.make(shape)
    rows = models.observations(shape, 8 if shape.cnn else models.CALIBRATION_ROWS)  # emulated, a convolution is dear
    expected = policy(rows)
    for precision, tolerance in (("float32", 1e-5), ("float16", 5e-3), ("int8", 0.05)):
        model = models.tflite(policy, precision)
        built = interpreter.Interpreter(model, len(rows), runtime=runtime, delegated=delegated)
        built.input[...] = rows
        built.invoke()
        error = np.abs(built.output - expected).mean() / np.ptp(expected)
        assert error < tolerance, precision
        kernels = "XNNPACK"
        if runtime == "tflite-runtime":
            kernels = "built-in" if precision == "int8" else test_interpreter.FLOAT32_ON_TFLITE_RUNTIME
        assert built.delegate == (kernels if delegated else "built-in")
        assert len(model) / shape.weights == pytest.approx(
            {"float32": 4, "float16": 2, "int8": 1}[precision], rel=0.25 + 6000 / shape.weights
        )


def test_a_policy_is_the_same_each_time() -> None:
    one, other = (models.tflite(models.make(SHAPES[0]), "int8") for _ in range(2))
    assert one == other


def test_a_flatbuffer_by_hand() -> None:
    # root table at 16 with vtable at 8: field 0 = int8 7, field 2 = a vector of two uint16
    written = flatbuffer.write({0: flatbuffer.Scalar("b", 7), 2: np.array([1, 2], np.uint16)}, b"TEST")
    assert written[:8] == (20).to_bytes(4, "little") + b"TEST"
    vtable = 20 - int.from_bytes(written[20:24], "little", signed=True)
    assert np.frombuffer(written[vtable:20], "<u2").tolist()[:5] == [10, 12, 4, 0, 8]
    assert written[24] == 7
    vector = 28 + int.from_bytes(written[28:32], "little")
    assert written[vector : vector + 8] == bytes([2, 0, 0, 0, 1, 0, 2, 0])
    assert (vector + 4) % 16 == 0  # as TFLite wants its buffers
