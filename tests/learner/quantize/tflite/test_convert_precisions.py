"""Every precision on the runtimes that actors have: which kernels run, how true they are, how large the files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, specs
from learner import config
from learner.networks import layers, networks
from learner.quantize import gate
from learner.quantize.tflite import convert, interpreter
from tests import runtimes
from tests.learner import reference

ROOT = Path(__file__).parents[4]
SHAPE, ACTIONS = (8,), 4
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "dynamic": 0.01, "int8": 0.05}  # of the range of the outputs
KERNELS = {
    "ai-edge-litert": {"int8": "XNNPACK", "float32": "XNNPACK", "float16": "XNNPACK", "dynamic": "XNNPACK"},
    "tflite-runtime": {"int8": "built-in", "float32": "XNNPACK", "float16": "XNNPACK", "dynamic": "built-in"},
}

# In a process of its own, as on an actor: no TensorFlow beside the runtime.
RUN = """
import json, sys
import numpy as np
from edge_actor.policies import interpreter

directory, runtime = sys.argv[1:]
x = np.load(directory + "/observations.npy")
found = {}
for precision in ("int8", "float32", "float16", "dynamic"):
    with open(f"{directory}/{precision}.tflite", "rb") as file:
        built = interpreter.Interpreter(file.read(), len(x), runtime=runtime)
    built.input[...] = x
    built.invoke()
    found[precision] = {"delegate": built.delegate, "outputs": built.output.tolist()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def x() -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(400, *SHAPE)) * np.logspace(-2, 1, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def policy(x: Any) -> layers.PolicyLayers:
    spec = specs.EnvSpec(specs.ObservationSpec(SHAPE), specs.ActionSpec("discrete", n=ACTIONS))
    network = networks.QNetwork.build(spec, (64, 64), False, np.random.default_rng(0))
    weights = [(a.T + np.linspace(0, 0.01, len(a), dtype=np.float32)).T for a in network.initial().values()]
    return network.policy_layers(weights, networks.Normalizer.fitted(spec.observation, x, floor=1e-3))


@pytest.fixture(scope="module")
def models(policy: layers.PolicyLayers, x: Any) -> dict[str, bytes]:
    return {precision: convert.convert(policy, x, precision) for precision in config.PRECISIONS}


@pytest.mark.parametrize("runtime", KERNELS)
def test_actors_run_every_precision_and_say_by_which_kernels(
    runtime: str, policy: layers.PolicyLayers, models: dict[str, bytes], x: Any, tmp_path: Path
) -> None:
    python = runtimes.python(runtime)
    for precision, model in models.items():
        (tmp_path / f"{precision}.tflite").write_bytes(model)
    np.save(tmp_path / "observations.npy", x)
    run = subprocess.run(
        [python, "-c", RUN, str(tmp_path), runtime], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {precision: answer["delegate"] for precision, answer in found.items()} == KERNELS[runtime]
    exact = reference.outputs(policy, x)
    spread = float(np.ptp(exact))
    for precision, answer in found.items():
        assert np.array(answer["outputs"]) == pytest.approx(exact, abs=TOLERANCE[precision] * spread), precision


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "int4"}, "precision 'int4' is unknown"),
        ({"weight_bits": 9}, "must be 2 to 8"),
        ({"policy_expire_s": -1.0}, "must be 0 or positive"),
        ({"policy_expire_s": float("nan")}, "must be 0 or positive"),
    ],
)
def test_settings_of_a_run_name_only_what_there_is(change: dict[str, Any], message: str) -> None:
    train = dataclasses.replace(config.TrainConfig(), **change)
    with pytest.raises(errors.ConfigError, match=message):
        config.check(config.Settings(train, config.DqnConfig(), config.GateConfig()))


@pytest.mark.parametrize(("precision", "width"), [("int8", 8000), ("float16", 5000), ("float32", 4000)])
def test_a_network_that_no_actor_takes_is_a_clash(precision: str, width: int) -> None:
    train = config.TrainConfig(precision=precision)
    config.check(config.Settings(train, config.DqnConfig(hidden=(width // 2,) * 2), config.GateConfig()))
    with pytest.raises(errors.ConfigError, match=f"makes a {precision} policy of .* bytes; actors take 40,000,000"):
        config.check(config.Settings(train, config.DqnConfig(hidden=(width,) * 2), config.GateConfig()))


def test_sizes_fall_in_the_order_of_the_bits(models: dict[str, bytes]) -> None:
    size = {precision: len(model) for precision, model in models.items()}
    assert size["int8"] < size["float16"] < size["float32"]
    assert size["dynamic"] < size["float16"]


@pytest.mark.parametrize("precision", ["float32", "float16", "dynamic"])
def test_the_gate_lets_precisions_with_float_outputs_pass(
    precision: str, policy: layers.PolicyLayers, models: dict[str, bytes], x: Any
) -> None:
    verdict = gate.judge(models[precision], reference.outputs(policy, x), x, config.GateConfig())
    assert verdict.passed
    assert verdict.agreement > 0.98
    assert verdict.ties == verdict.saturation == 0


@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_fewer_bits_act_less_alike(precision: str, policy: layers.PolicyLayers, x: Any) -> None:
    exact = reference.outputs(policy, x)
    agreement = {
        bits: float(np.mean(interpreter.run(model, x)[0].argmax(1) == exact.argmax(1)))
        for bits in (2, 4, 8)
        for model in [convert.convert(policy, x, precision, weight_bits=bits)]
    }
    assert agreement[2] < agreement[4] < agreement[8]
    assert agreement[8] > 0.95
