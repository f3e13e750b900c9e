"""Fixtures for every folder: real brokers as processes of their own, and a home that is not the user's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from broker.program import children, logs
from broker.serve.mosquitto import process

KINDS = ("mosquitto", "embedded")
START_TIMEOUT_S = 20.0
_INSTALL = " is not installed (sudo apt install "
_LEFT_OUT = "left out"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Loggers are after a test as they were before it, whatever program was run in this process."""
    found = [logging.getLogger(name) for name in logs.PACKAGES]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in found]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def priority() -> Iterator[None]:
    """No test leaves this process at another priority: what later tests start would have it too, and time out."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture(autouse=True)
def actorq_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fleets and actors of a test live in its own directory."""
    home = tmp_path / "actorq-home"
    monkeypatch.setenv("ACTORQ_HOME", str(home))
    return home


def require(kind: str) -> None:
    """Leaves the test out where a broker is not installed; fails there in CI, which installs both."""
    if kind == "mosquitto":
        require_program(process.find(), "Mosquitto", "mosquitto")
    elif not importlib.util.find_spec("amqtt"):
        skip_or_fail("amqtt is not installed (the extra `local`)")


def require_program(found: str | None, name: str, package: str) -> None:
    """Leaves the test out where a program is not installed; how many these were is said once, at the end."""
    if not found:
        skip_or_fail(f"{name}{_INSTALL}{package})")


def skip_or_fail(missing: str) -> None:
    if os.environ.get("ACTORQ_CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def _to_install(report: object) -> str:
    """The Debian package for want of which a test was left out, if that is so."""
    reason = report.longrepr[2] if isinstance(report, pytest.TestReport) and isinstance(report.longrepr, tuple) else ""
    return reason.rpartition(_INSTALL)[2].rstrip(")") if _INSTALL in reason else ""


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Gives these a category of their own: of skipped ones, -ra would show more than a hundred lines."""
    return (_LEFT_OUT, "s", "LEFT OUT") if report.skipped and _to_install(report) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says once what to install to run all tests."""
    if reports := terminalreporter.stats.get(_LEFT_OUT):
        packages = " ".join(sorted({_to_install(report) for report in reports}))
        tests = "1 test was" if len(reports) == 1 else f"{len(reports)} tests were"
        terminalreporter.write_line(f"{tests} left out; to run all: sudo apt install {packages}", yellow=True)


class BrokerProcess:
    """A broker as users start it, `actorq-broker up`, that can be killed and started again on the same port."""

    def __init__(self, kind: str, tmpdir: str, arguments: Sequence[str] = ()) -> None:
        require(kind)
        self.kind = kind
        self._arguments = arguments
        self._env = {**os.environ, "TMPDIR": tmpdir}
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "broker", "up", "--kind", self.kind, "--port", str(self.port), "--json"]
            + [*self._arguments],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=self._env,
            preexec_fn=children.die_with_parent(),  # noqa: PLW1509  a killed test run leaves no broker
        )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        assert ready["kind"] == self.kind
        self.port, self.pid = ready["port"], ready["pid"]

    def kill(self) -> None:
        """Ends it as the power does: SIGKILL, no goodbye to anyone."""
        for pid in {self.pid, self.process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reap()
        wait_until(lambda: not answers(self.port), "the port is free")

    def restart(self) -> None:
        """Starts it again on the same port, having forgotten everything."""
        if self.process.returncode is None:
            self.kill()
        self.start()

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Ends it as Ctrl-C or a service manager does; returns the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signum)
        return self._reap()

    def _reap(self) -> int:
        code = self.process.wait(START_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def answers(port: int) -> bool:
    """True if someone listens there."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False


def runs(child: psutil.Process) -> bool:
    """Returns whether it has not ended; as process 1 of a container, tests are left with the zombies of others."""
    try:
        return bool(child.is_running() and child.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Waits for what sends no event; anything that does is awaited itself."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Returns the JSON lines of a file that is being written: a last one without its end is not there yet."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.fixture
def open_tmpdir() -> Iterator[str]:
    """Makes a TMPDIR for brokers that are killed: open to the user Mosquitto runs as, unlike root's tmp_path."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield name


@pytest.fixture
def start_broker(open_tmpdir: str) -> Iterator[Callable[[str], BrokerProcess]]:
    """Starts as many brokers as the test asks for, and stops them."""
    started: list[BrokerProcess] = []

    def start(kind: str) -> BrokerProcess:
        started.append(BrokerProcess(kind, open_tmpdir))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture(params=KINDS)
def real_broker(request: pytest.FixtureRequest, start_broker: Callable[[str], BrokerProcess]) -> BrokerProcess:
    """A running broker; the test runs once with each kind."""
    kind: str = request.param
    return start_broker(kind)


@pytest.fixture
def broker_address(real_broker: BrokerProcess) -> str:
    """`host:port` of a running broker; the test runs once with each kind."""
    return real_broker.address


@pytest.fixture
def mosquitto(start_broker: Callable[[str], BrokerProcess]) -> BrokerProcess:
    """A running Mosquitto."""
    return start_broker("mosquitto")
