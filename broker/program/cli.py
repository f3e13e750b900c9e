"""Ends every command in the same way: errors in three lines on stderr, a traceback only with -v, a named exit code.

A crash in native code (a runtime, TensorFlow) says where Python stood, also while stderr is held back.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

from broker.contract import errors
from broker.program import storage


def run(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command and turns what it raises into its exit code (errors.py draws the tree).

    Args:
        command: Parses its arguments and returns an exit code.
        argv: Arguments without the program name; None takes the process's own.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    verbose = "-v" in args or "--verbose" in args
    if not faulthandler.is_enabled():
        faulthandler.enable(os.dup(2))
    try:
        return command(args)
    except errors.ActorqError as error:
        return _ended(error, verbose=verbose)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_went_away():
            sys.stderr.close()  # Python would complain once more at exit
            return errors.EXIT_OK
        if isinstance(error, OSError) and storage.of_disk(error):
            return _ended(storage.explained(error), verbose=verbose)
        traceback.print_exc()
        print(f"error: unexpected {type(error).__name__}: {error}\n  to do: please report this", file=sys.stderr)
        return errors.EXIT_UNEXPECTED


def _ended(error: errors.ActorqError, *, verbose: bool) -> int:
    if verbose:
        traceback.print_exc()
    if not error.said:
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


_ERROR = re.compile(r"^(?:actorq-[\w -]+: )?error: ", re.MULTILINE)
"""How a command's error begins: a line of ours, or of argparse, which names the command first."""


def as_said(
    stderr: str, code: int, kind: type[errors.ActorqError] = errors.ActorqError, where: str = ""
) -> errors.ActorqError:
    """Returns the error that one of our commands ended with, by what it printed and its exit code.

    Args:
        stderr: What it printed; without an error among it, its last line is told.
        code: Its exit code; negative: the signal that ended it.
        kind: The error's type.
        where: What it was asked to do; told if it named no place itself.
    """
    *before, text = _ERROR.split(stderr)
    if not before:
        text = f"a command ended with {code}: {(stderr.strip().splitlines() or ['without a word'])[-1]}"
    what, _, todo = text.strip().partition("\n  to do: ")
    what, _, named = what.partition("\n  where: ")
    error = kind(what, where=named or where, todo=todo)
    if code > 0:
        error.exit_code = code
    return error


def _reader_went_away() -> bool:
    """Returns whether stdout is a pipe that nobody reads any longer: a socket that broke must not pass for it."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def on_stop_signal(stop: Callable[[], None]) -> None:
    """Calls `stop` at the first SIGTERM or SIGINT; a second one ends the process as Python would.

    On a thread of its own: a handler runs in the middle of what the main thread does, which may hold the very lock that
    `stop` needs. `threading.Event.wait` holds the lock of `set` each time it begins and ends.
    """
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may interrupt anything

    def handle(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        asked.put(None)

    def wait() -> None:
        asked.get()
        stop()

    threading.Thread(target=wait, name="stop", daemon=True).start()
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
