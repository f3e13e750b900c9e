"""Runtimes of a user's own: named by a setting of this machine, checked before they act."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from broker.contract import errors, messages, specs
from edge_actor import __main__ as command_line
from edge_actor import config
from edge_actor.bench import config as bench_config
from edge_actor.fleet import bench_order
from edge_actor.policies import policy, runtimes
from tests.edge_actor.policies import plugins
from tests.edge_actor.policies.models import files

HERE = plugins.__name__
CARTPOLE = specs.EnvSpec(specs.ObservationSpec((4,), "float32"), specs.ActionSpec("discrete", n=2))


def test_a_plug_in_acts_in_the_place_of_the_interpreter() -> None:
    acting = policy.Policy(b"not even a model", "q_values", CARTPOLE, 1, runtime=f"{HERE}:Numpy", threads=3)
    assert acting.act(np.array([[0.0, 1.0, 0.0, 0.0]], np.float32)) == 1
    assert acting.act(np.array([[1.0, 0.0, 0.0, 0.0]], np.float32)) == 0
    assert acting.delegate == "numpy"
    assert isinstance(acting.interpreter, plugins.Numpy)
    assert acting.interpreter.arguments == (b"not even a model", 1, 3, messages.MAX_POLICY_BYTES)


def test_it_is_named_before_there_is_a_policy() -> None:
    assert runtimes.describe(f"{HERE}:Numpy") == "numpy-double 1.0"


def test_the_tflite_runtimes_are_found_as_before() -> None:
    built = runtimes.build(files.INT8.read_bytes(), 2)
    assert runtimes.describe("auto") == str(built.runtime)
    assert built.input.shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Runtime", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{HERE}:Missing", f"{HERE} has no class Missing"),
        (f"{HERE}:not_a_class", f"{HERE} has no class not_a_class"),
        (f"{HERE}:Nameless", "the class has no attribute runtime"),
    ],
)
def test_what_cannot_be_used_is_said_at_the_start(name: str, message: str) -> None:
    with pytest.raises(errors.RuntimeMissing, match=message) as caught:
        runtimes.describe(name)
    assert caught.value.todo


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithoutOutput", "has no output"),
        ("WrongDtype", "has an input that is no float32 array"),
        ("Broken", "cannot load the model: OSError: no such device: /dev/hailo0"),
    ],
)
def test_what_it_builds_is_checked(name: str, message: str) -> None:
    with pytest.raises(errors.PolicyError, match=message):
        runtimes.build(b"", 1, runtime=f"{HERE}:{name}")


@pytest.mark.parametrize("name", ["tensorrt", ":", "a:", ":b", "a:b:c", "a b:c", "../a:b", "a.py:b/c"])
def test_other_names_are_no_runtimes(name: str) -> None:
    with pytest.raises(errors.ConfigError, match="is none of auto, .*, and no MODULE:CLASS"):
        config.ActorConfig(runtime=name)


def test_the_network_names_no_code() -> None:
    """The one message that carries settings is the order of a benchmark, and a benchmark knows TFLite runtimes only."""
    with pytest.raises(errors.ConfigError, match="is none of"):
        bench_config.BenchConfig(runtime=f"{HERE}:Numpy")
    order = messages.Command("1", "bench", 1, options={"runtime": f"{HERE}:Numpy", "quick": "1"})
    reports: list[messages.Report] = []
    bench_order.Benchmark().run(order, reports.append)
    assert "is none of" in reports[-1].error


def test_evaluate_takes_it_and_names_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["evaluate", str(files.INT8), "--env", "CartPole-v1", "--episodes", "1", "--json"]
    assert command_line.main([*command, "--runtime", f"{HERE}:Numpy"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["runtime"], told["delegate"]) == ("numpy-double 1.0", "numpy")
    assert command_line.main([*command, "--runtime", "nowhere:Runtime"]) == errors.RuntimeMissing.exit_code
    assert "the runtime nowhere:Runtime cannot be imported" in capsys.readouterr().err
