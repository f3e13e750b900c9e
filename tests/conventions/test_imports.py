"""Each package imports only what it may, seen from a fresh interpreter.

import-linter (setup.cfg) checks the imports that are written in our files. This module checks what really
arrives in a process, third-party packages included: an actor never holds TensorFlow, and ``--help`` never
waits for it.
"""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]

ML_FRAMEWORKS = {"tensorflow", "keras", "jax", "torch"}
TFLITE_RUNTIMES = {"ai_edge_litert", "tflite_runtime"}

# Rule 2 of the import rules: all that the actor's own files may name beside the standard library.
ACTOR_MAY_IMPORT = {"broker", "edge_actor", "gymnasium", "numpy", "psutil"} | TFLITE_RUNTIMES

# By package: the extras of setup.cfg that it uses beside install_requires, and what of them no file imports by name.
EXTRAS = {
    "broker": (("local",), {"gymnasium"}),  # with what its environments need
    "edge_actor": (("actor",), {"ai-edge-litert", "tflite-runtime"}),  # edge_actor/policies/interpreter.py finds one
    "learner": (("learner", "onnx", "ray", "watch"), {"tensorboard"}),  # reads what TensorFlow writes
}
NOT_DECLARED = {"reverb", "onnx", "onnxruntime", "stable-baselines3", "torch"}
"""Packages that benchmarks compare with, where they are installed (tests/peers.txt)."""

# Imports each module of the package named in argv[1]; prints them, and every top-level module then loaded.
IMPORT_ALL = """
import importlib, json, pkgutil, sys

package = importlib.import_module(sys.argv[1])
names = [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"imported": names, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""

# Prints the words of every subcommand of `python -m argv[1]`, as argparse learns of them.
LIST_SUBCOMMANDS = """
import argparse, contextlib, io, json, runpy, sys

commands = []
add_parser = argparse._SubParsersAction.add_parser

def recording_add_parser(action, name, **kwargs):
    commands.append([*action._prog_prefix.split()[1:], name])
    return add_parser(action, name, **kwargs)

argparse._SubParsersAction.add_parser = recording_add_parser
package = sys.argv[1]
sys.argv = ["command", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    runpy.run_module(package, run_name="__main__")
print(json.dumps(commands))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def import_all(package: str) -> dict[str, list[str]]:
    """Import every module of a package in a fresh interpreter: which those were, and what is loaded then."""
    finished = run_python("-c", IMPORT_ALL, package)
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, list[str]] = json.loads(finished.stdout.splitlines()[-1])
    return answer


def loaded_by(*arguments: str) -> set[str]:
    """Top-level modules that a command imports; it must succeed."""
    finished = run_python("-X", "importtime", *arguments)
    trace = [line for line in finished.stderr.splitlines() if line.startswith("import time:")]
    rest = [line for line in finished.stderr.splitlines() if not line.startswith("import time:")]
    assert finished.returncode == 0, "\n".join([" ".join(arguments), *rest])
    assert trace, "this Python printed no import trace"
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in trace}


def test_actor_never_loads_tensorflow_or_the_learner() -> None:
    answer = import_all("edge_actor")
    assert "edge_actor.__main__" in answer["imported"]
    assert not set(answer["loaded"]) & (ML_FRAMEWORKS | {"learner"})


NOT_IN_A_RUNNING_ACTOR = {"cryptography.x509", "tomllib", "broker.fleet.certificates", "edge_actor.run.check"}
"""What only makes certificates, reads settings files or checks a machine: memory of every board."""


def test_a_running_actor_holds_nothing_that_it_has_no_use_for() -> None:
    program = "import json, sys, edge_actor.__main__, edge_actor.run.service; print(json.dumps(sorted(sys.modules)))"
    finished = run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    loaded = set(json.loads(finished.stdout.splitlines()[-1]))
    assert "edge_actor.run.acting_loop" in loaded
    assert not loaded & NOT_IN_A_RUNNING_ACTOR
    bench = {name for name in loaded if name.startswith("edge_actor.bench.")}
    assert bench == {"edge_actor.bench.config"}


def test_broker_loads_neither_side_nor_any_framework() -> None:
    answer = import_all("broker")
    assert "broker.__main__" in answer["imported"]
    unwanted = ML_FRAMEWORKS | TFLITE_RUNTIMES | {"gymnasium", "learner", "edge_actor"}
    assert not set(answer["loaded"]) & unwanted


def test_learner_loads_neither_actor_nor_environment() -> None:
    answer = import_all("learner")
    assert "learner.__main__" in answer["imported"]
    assert "learner.run.workers.cluster" in answer["imported"]
    assert not set(answer["loaded"]) & {"edge_actor", "gymnasium", "ray"}


def test_a_learner_loads_tensorflow_without_keras_which_can_be_had_all_the_same() -> None:
    program = (
        "import sys; from learner.run import train; train._load_tensorflow(); import learner.run.build, tensorflow; "
        "unwanted = {'keras', 'matplotlib', 'pandas'} & set(sys.modules); tensorflow.keras.Sequential; "
        "print(unwanted or 'none', 'keras' in sys.modules)"
    )
    finished = run_python("-c", program)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "none True"


def written_imports(package: str) -> Iterator[tuple[str, str]]:
    """Yields where each import stands in the files of a package (`file:line`), and the module that it names."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name


def distributions(package: str) -> set[str]:
    """Returns the names on PyPI of all that the files of a package import from elsewhere."""
    ours = {"broker", "edge_actor", "learner", "tests"} | set(sys.stdlib_module_names)
    modules = {name.partition(".")[0] for _, name in written_imports(package)} - ours
    known = importlib.metadata.packages_distributions()
    return {normalized(name) for module in modules for name in known.get(module, [module])}


def normalized(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def declared(extra: str = "") -> set[str]:
    """Returns the names that setup.cfg lists for an extra, or for the package itself."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]
    return {normalized(re.match(r"[\w.-]+", line)[0]) for line in lines.split("\n") if line}  # type: ignore[index]


def test_actor_files_name_only_what_the_actor_may_import() -> None:
    allowed = ACTOR_MAY_IMPORT | set(sys.stdlib_module_names)
    found = [(where, name) for where, name in written_imports("edge_actor") if name.partition(".")[0] not in allowed]
    assert not found


@pytest.mark.parametrize("package", EXTRAS)
def test_a_package_declares_what_it_imports_and_nothing_else(package: str) -> None:
    extras, unseen = EXTRAS[package]
    base = declared()
    assert distributions(package) - base == base.union(*map(declared, extras)) - base - unseen
    assert base <= distributions("broker"), "what is not both sides' belongs to an extra"


def test_the_tests_import_only_what_is_declared() -> None:
    extras = ("actor", "learner", "watch", "local", "mujoco", "dev")
    assert distributions("tests") <= declared().union(*map(declared, extras)) | NOT_DECLARED


@pytest.mark.parametrize("package", ["broker", "edge_actor", "learner"])
def test_help_of_every_command_works_without_tensorflow(package: str) -> None:
    finished = run_python("-c", LIST_SUBCOMMANDS, package)
    assert finished.returncode == 0, finished.stderr
    subcommands = json.loads(finished.stdout.splitlines()[-1])
    assert subcommands, f"{package} offers no subcommands"

    for words in [[], *subcommands]:
        loaded = loaded_by("-m", package, *words, "--help")
        assert package in loaded, "the import trace does not even show the package"
        assert not loaded & ML_FRAMEWORKS, f"{package} {' '.join(words)} --help"
