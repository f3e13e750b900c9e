"""Conversion: the kernels it lands on, its accuracy, its bytes and its silence."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import interpreter as litert
from numpy.typing import NDArray

from broker.contract import errors, specs
from learner import config
from learner.networks import forward, layers, networks
from learner.quantize.tflite import convert

ROOT = Path(__file__).parents[4]
CASES = {
    "vector": ((4,), "float32"),
    "matrix": ((3, 2), "float32"),
    "bytes": ((6,), "uint8"),
    "frames": ((36, 36, 3), "uint8"),
}
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "dynamic": 0.03, "int8": 0.06}  # of the range of the outputs


def observations(shape: tuple[int, ...], dtype: str, n: int = 300) -> NDArray[Any]:
    rng = np.random.default_rng(1)
    if dtype == "uint8":
        return rng.integers(0, 256, (n, *shape)).astype(np.uint8)
    scale = np.array([0.01, 30.0] * (shape[-1] // 2), np.float32)
    return (rng.normal(size=(n, *shape)) * scale + 2 * scale).astype(np.float32)


def policy_for(shape: tuple[int, ...], dtype: str, x: NDArray[Any]) -> layers.PolicyLayers:
    spec = specs.EnvSpec(specs.ObservationSpec(shape, dtype), specs.ActionSpec("discrete", n=3))
    network = networks.QNetwork.build(spec, (32, 32), True, np.random.default_rng(0))
    # Biases too: the converter drops a bias that is zero.
    weights = [(a.T + np.linspace(0, 0.01, len(a), dtype=np.float32)).T for a in network.initial().values()]
    return network.policy_layers(weights, networks.Normalizer.fitted(spec.observation, x, floor=1e-3))


def run(model: bytes, x: NDArray[Any]) -> NDArray[np.float32]:
    interpreter = litert.Interpreter(model_content=model, num_threads=1)
    entry, exit_ = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    interpreter.resize_tensor_input(entry, x.shape)
    interpreter.allocate_tensors()
    assert interpreter._get_ops_details()[-1]["op_name"] == "DELEGATE"
    interpreter.set_tensor(entry, x.astype(np.float32))
    interpreter.invoke()
    result: NDArray[np.float32] = interpreter.get_tensor(exit_)
    return result


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", TOLERANCE)
def test_takes_raw_observations_and_answers_as_the_policy_does(case: str, precision: str) -> None:
    x = observations(*CASES[case])
    policy = policy_for(*CASES[case], x)
    expected = forward.run(policy, list(layers.arrays(policy).values()), x.astype(np.float32)).numpy()
    answer = run(convert.convert(policy, x, precision), x)
    assert answer == pytest.approx(expected, abs=TOLERANCE[precision] * float(np.ptp(expected)))


def test_int8_is_full_integer_delegated_and_per_channel() -> None:
    x = observations(*CASES["vector"])
    interpreter = litert.Interpreter(model_content=convert.convert(policy_for(*CASES["vector"], x), x, "int8"))
    interpreter.allocate_tensors()
    operators = [o["op_name"] for o in interpreter._get_ops_details()]
    assert operators == ["MUL", "ADD", "QUANTIZE", *["FULLY_CONNECTED"] * 3, "DEQUANTIZE", "DELEGATE"]
    (entry,), (exit_,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert (entry["dtype"], entry["shape"].tolist()) == (np.float32, [1, 4])
    assert (exit_["dtype"], exit_["shape"].tolist()) == (np.float32, [1, 3])
    tensors = {t["index"]: t for t in interpreter.get_tensor_details()}
    for operator in interpreter._get_ops_details()[3:6]:
        dtypes = [tensors[i]["dtype"] for i in (*operator["inputs"], *operator["outputs"])]
        assert dtypes == [np.int8, np.int8, np.int32, np.int8]
        kernel = tensors[operator["inputs"][1]]
        assert len(kernel["quantization_parameters"]["scales"]) == kernel["shape"][0]


def test_narrow_features_survive_beside_wide_ones() -> None:
    """Without folding, a feature that moves by 0.01 beside one that moves by 30 has no level of its own."""
    x = observations(*CASES["vector"])
    kernel = np.array([[100.0], [0.01], [0.0], [0.0]], np.float32)  # both features matter equally
    policy = (layers.Dense(np.hstack([kernel, -kernel]).T, np.full(2, 0.1, np.float32), "none"),)
    expected = x @ policy[0].kernel.T + policy[0].bias
    folded = run(convert.convert(policy, x, "int8"), x)
    plain = run(convert._run_converter(policy, x.astype(np.float32), "int8"), x)
    assert np.abs(folded - expected).max() < 0.02 * np.ptp(expected)
    assert np.abs(plain - expected).max() > 0.1 * np.ptp(expected)


SCRIPT = """
import hashlib
from tests.learner.quantize.tflite import test_convert as t
from learner import config
from learner.quantize.tflite import convert
for case in ("vector", "frames"):
    x = t.observations(*t.CASES[case])
    policy = t.policy_for(*t.CASES[case], x)
    for precision in config.PRECISIONS:
        print(hashlib.sha256(convert.convert(policy, x, precision)).hexdigest())
"""


def test_same_numbers_give_the_same_bytes_in_every_process_and_nothing_is_said_about_it() -> None:
    x = observations(*CASES["vector"])
    policy = policy_for(*CASES["vector"], x)
    own = [hashlib.sha256(convert.convert(policy, x, p)).hexdigest() for p in config.PRECISIONS]
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.split()[:4] == own  # nor does it matter what this process converted before
    for phrase in ("fully_quantize", "trackable_obj", "Statistics for quantized inputs"):
        assert phrase not in runs[0].stderr


def test_errors_of_the_converter_are_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> bytes:
        print("a line that matters", file=sys.__stderr__, flush=True)
        raise RuntimeError("cannot convert")

    monkeypatch.setattr("tensorflow.lite.TFLiteConverter.convert", fail)
    x = observations(*CASES["vector"])
    with pytest.raises(RuntimeError, match="cannot convert"):
        convert.convert(policy_for(*CASES["vector"], x), x, "int8")
    assert "a line that matters" in capfd.readouterr().err


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    x = observations(*CASES["vector"])
    policy = policy_for(*CASES["vector"], x)
    last = policy[-1]
    assert isinstance(last, layers.Dense)
    last.kernel[1, 3] = value
    with pytest.raises(errors.PolicyError, match="NaN or infinite") as caught:
        convert.convert(policy, x, "int8")
    assert caught.value.reason == "not_finite"


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="unknown precision 'int4'"):
        convert.convert((), np.zeros((1, 4)), "int4")
