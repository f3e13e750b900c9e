"""Every command of `actorq-learner` can be asked for help, and is the one that the parser names."""

from __future__ import annotations

import argparse
import subprocess
import sys

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
    code = "import sys\nfrom learner import __main__ as it\ntry: it.main(['--help'])\nfinally: print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.rpartition("\n[")
    assert all(f"\n    {name} " in said for name in program._COMMANDS)
    assert "'learner.commands.train'" in modules
    assert "'tensorflow'" not in modules and "'keras'" not in modules
