"""The benchmark's side of its processes: policies that are measured, and cores that are kept busy."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from broker.contract import errors
from edge_actor.bench import models

_SPIN = "import sys\nfrom broker.program import children\nchildren.die_with(int(sys.argv[1]))\nwhile True: pass"


class Child:
    """A `cell.Cell` in a process of its own, as `start` gives it.

    Attributes:
        facts: About its policy, as `cell.Cell.load` returns them.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.facts: dict[str, Any] = {}

    @classmethod
    def start(
        cls, shape: models.Shape, model: Path | None, *, runtime: str, delegated: bool, threads: int, log: Path
    ) -> Child:
        """Starts it and waits until the policy is loaded.

        Raises:
            PolicyError: The process ended instead.
        """
        threads = threads or len(os.sched_getaffinity(0))
        env = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        with open(log, "w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "edge_actor.bench.cell", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=env,
            )
        request = {"width": shape.width, "layers": shape.layers, "cnn": shape.cnn, "model": str(model or "")}
        child = cls(process, log)
        try:
            child.facts = child.ask(request | {"runtime": runtime, "delegated": delegated, "threads": threads})
        except BaseException:
            child.close()
            raise
        return child

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends one request, and waits for the answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        if not line:
            code = self._process.wait()
            said = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
            raise errors.PolicyError(f"the measured process ended with {code}: {said[-1] if said else 'no word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Within, so many processes compute all the time."""
    command = [sys.executable, "-c", _SPIN, str(os.getpid())]
    spinning = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(cores)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()
