"""Every command of `actorq-learner` can be asked for help, and is the one that the parser names."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from learner import __main__ as program


@pytest.mark.parametrize("name", program._COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main([name, "--help"])
    assert not ended.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"usage: actorq-learner {name} ")
    assert " ".join((program._COMMANDS[name].run.__doc__ or "?").split()[:3]) in said, "what it does"


def test_the_parser_has_the_commands_of_the_table() -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    for one in program._COMMANDS.values():
        one.add(commands)
    assert list(commands.choices) == list(program._COMMANDS)


def test_help_lists_every_command_and_loads_no_tensorflow() -> None:
    said, modules = _run(["--help"])
    assert all(f"\n    {name} " in said for name in program._COMMANDS)
    assert "'learner.commands.train'" in modules
    assert "'tensorflow'" not in modules and "'keras'" not in modules


def test_what_quantize_refuses_by_its_arguments_loads_no_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "out.json").touch()
    said, modules = _run(["quantize", "agent.zip", "--env", "CartPole-v1", "-o", str(tmp_path / "out.tflite")])
    assert said.startswith("error: the file exists")
    assert "'tensorflow'" not in modules and "'keras'" not in modules


def _run(arguments: list[str]) -> tuple[str, str]:
    """Returns what the program says, and the modules that it has loaded then."""
    code = (
        "import sys\nfrom learner import __main__ as it\nsys.stderr = sys.stdout\n"
        f"try: it.main({arguments})\nfinally: print([*sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.rpartition("\n[")
    return said, modules
