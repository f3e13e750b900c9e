"""Commands end in one way: each error with its own code, three lines on stderr, a traceback only when asked for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from broker.contract import errors
from broker.program import cli

EXIT_CODES = {
    errors.ActorqError: 1,
    errors.ConfigError: 10,
    errors.EnvironmentFailure: 11,
    errors.SpecError: 12,
    errors.BrokerUnreachable: 13,
    errors.FleetBusy: 14,
    errors.IdentityError: 15,
    errors.PolicyError: 16,
    errors.RunError: 17,
    errors.RuntimeMissing: 18,
    errors.NotSolved: 19,
    errors.ActorRefused: 20,
    errors.NothingLearned: 23,
    errors.Undelivered: 24,
    errors.OrderRefused: 25,
    errors.ReleaseError: 26,
    errors.DecodeError: 21,
    errors.SignatureError: 21,
    errors.StorageError: 22,
}


def family(cls: type[errors.ActorqError]) -> set[type[errors.ActorqError]]:
    """All that the contract has; a module's own, like the ledger's, end with the code of what they derive from."""
    return {cls}.union(*map(family, (one for one in cls.__subclasses__() if one.__module__ == errors.__name__)))


def raising(error: BaseException) -> int:
    def command(argv: Sequence[str]) -> int:
        raise error

    return cli.run(command, [])


def test_every_error_has_its_code_here() -> None:
    assert family(errors.ActorqError) == {*EXIT_CODES, errors.MessageError}


@pytest.mark.parametrize(("cls", "code"), EXIT_CODES.items())
def test_exit_codes_and_three_lines(
    cls: type[errors.ActorqError], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert raising(cls("it broke", where="here", todo="mend it")) == code
    assert capsys.readouterr().err == "error: it broke\n  where: here\n  to do: mend it\n"


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = dict(re.findall(r"── (\w+) +(\d+)", errors.__doc__ or ""))
    assert {name: int(code) for name, code in drawn.items()} == {
        cls.__name__: cls.exit_code for cls in errors.ActorqError.__subclasses__()
    }


def test_codes_are_distinct() -> None:
    codes = [cls.exit_code for cls in errors.ActorqError.__subclasses__()]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & {errors.EXIT_OK, errors.EXIT_USAGE, errors.EXIT_UNEXPECTED, errors.EXIT_INTERRUPTED}


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_unexpected_shows_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(ZeroDivisionError("oops")) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "error: unexpected ZeroDivisionError: oops" in err


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_adds_a_traceback(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command(argv: Sequence[str]) -> int:
        raise errors.RunError("it broke")

    assert cli.run(command, [flag]) == 17
    assert "Traceback" in capsys.readouterr().err


def test_the_commands_own_code_is_kept() -> None:
    assert cli.run(len, ["a", "b", "c"]) == 3


def test_arguments_default_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "one", "two"])
    assert cli.run(len, None) == 2


def test_an_error_without_place_or_advice_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    raising(errors.RunError("it broke"))
    assert capsys.readouterr().err == "error: it broke\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_and_the_second_ends(signum: int) -> None:
    """A stop that hangs must still be endable by a second Ctrl-C."""
    code = """
import os, time
from broker.program import cli
cli.on_stop_signal(lambda: os.write(1, b"stopping\\n"))  # not print: the signal may come within the one below
print("ready", flush=True)
while True:
    time.sleep(0.05)  # not signal.pause: a signal that comes just before it would wait for the next one
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, signum)
        assert child.stdout.readline() == "stopping\n"
        os.kill(child.pid, signum)
        assert child.wait(10) != 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_may_come_while_the_lock_is_held_that_stopping_needs(signum: int) -> None:
    """`Event.wait` holds it when it begins and ends; `set` in the handler would wait for the thread it interrupted."""
    code = f"""
import os, sys, threading
from broker.program import cli
stop = threading.Event()
cli.on_stop_signal(stop.set)
with stop._cond:
    os.kill(os.getpid(), {int(signum)})
sys.exit(0 if stop.wait(10.0) else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30.0).returncode == 0


def test_a_broken_socket_is_not_taken_for_a_reader_that_went_away(capfd: pytest.CaptureFixture[str]) -> None:
    assert raising(BrokenPipeError("a socket")) == errors.EXIT_UNEXPECTED
    assert "BrokenPipeError" in capfd.readouterr().err


@pytest.mark.parametrize("before", ["", "usage: much\nactorq-learner demo: "])
def test_what_a_command_ended_with_is_raised_again(before: str) -> None:
    told = errors.SpecError("no such action, parse error: 7", where="a toy", todo="take another")
    again = cli.as_said(f"INFO: no error: begins\n{before}error: {told}\n", told.exit_code, where="elsewhere")
    assert (str(again), again.exit_code) == (str(told), told.exit_code)


@pytest.mark.parametrize(
    ("stderr", "code", "what"),
    [
        ("INFO: begins\nKilled by a library\n", -9, "a command ended with -9: Killed by a library"),
        ("", 3, "a command ended with 3: without a word"),
    ],
)
def test_what_a_command_ended_with_that_told_no_error(stderr: str, code: int, what: str) -> None:
    error = cli.as_said(stderr, code, errors.EnvironmentFailure, "a toy")
    assert str(error) == f"{what}\n  where: a toy"
    assert error.exit_code == (code if code > 0 else errors.EnvironmentFailure.exit_code)
