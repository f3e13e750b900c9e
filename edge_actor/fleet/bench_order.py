"""A benchmark that the learner orders: run in a process of its own, reported row by row."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from broker.contract import messages
from edge_actor.bench import config

QUICK = "quick"
ROW = "row"
"""Label of a report that holds one row, as JSON."""
_REFUSED = ("meter", "meter_offset_s")  # files of this machine are no matter of the learner's


class Benchmark:
    """Runs one benchmark at a time; `stop` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, order: messages.Command, respond: Callable[[messages.Report], None]) -> None:
        """Answers an order: a report per row, and one without a row at the end, with the error if there was one."""
        for report in self._reports(order):
            respond(report)

    def stop(self) -> None:
        """Ends the one that runs, if there is one."""
        process = self._process
        if process is not None:
            process.terminate()

    def _reports(self, order: messages.Command) -> Iterator[messages.Report]:
        if wrong := [name for name in order.options if name in _REFUSED]:
            yield messages.Report(order.command_id, order.kind, error=f"not from the network: {', '.join(wrong)}")
            return
        options = dict(order.options)
        command = [sys.executable, "-m", "edge_actor", "bench", "--json"]
        command += ["--quick"] if options.pop(QUICK, "") else []
        environment = {config.ENV_PREFIX + name.upper(): value for name, value in options.items()}
        with tempfile.TemporaryDirectory(prefix="actorq-bench-") as directory, contextlib.ExitStack() as stack:
            said = stack.enter_context(open(Path(directory) / "said", "w+"))
            self._process = stack.enter_context(
                subprocess.Popen(
                    [*command, "-o", directory],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    env=os.environ | environment,
                )
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                yield messages.Report(order.command_id, order.kind, labels={ROW: line.strip()})
            code = self._process.wait()
            said.seek(0)
            error = "" if code == 0 else said.read().partition("error: ")[2].strip() or f"it ended with {code}"
        self._process = None
        yield messages.Report(order.command_id, order.kind, error=error)
