"""A broker without TLS for benchmarks: Mosquitto where it is installed, else the embedded one; and which it is."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

from broker.contract import errors
from broker.program import children
from broker.serve.mosquitto import process


def kind() -> str:
    """Returns the kind of broker that `actorq-broker up` and the demo take on this machine."""
    return "mosquitto" if process.find() else "embedded"


@contextlib.contextmanager
def plain(fleet: str) -> Iterator[tuple[str, str]]:
    """Yields its address and its kind, for the row.

    Raises:
        RuntimeMissing: Neither is installed.
    """
    command = [sys.executable, "-m", "broker", "up", "--fleet", fleet, "--port", "0", "--json", "--kind", kind()]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=children.die_with_parent(),  # noqa: PLW1509  a killed benchmark leaves no broker
    ) as broker:
        try:
            assert broker.stdout is not None
            if not (line := broker.stdout.readline()):
                raise errors.RuntimeMissing("no broker starts", todo="sudo apt install mosquitto")
            ready = json.loads(line)
            yield f"127.0.0.1:{ready['port']}", ready["kind"]
        finally:
            broker.terminate()


def require_mosquitto() -> None:
    """Raises RuntimeMissing where TLS is wanted, which the embedded broker has not, and Mosquitto is not installed."""
    if process.find() is None:
        raise errors.RuntimeMissing("Mosquitto is not installed", todo="sudo apt install mosquitto")
