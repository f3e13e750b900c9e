"""Ray, where workers live: the only file that imports it, and only once workers are asked for.

A cluster that is started here listens on 127.0.0.1 alone, with a token of its own and without dashboard. One that is
named is used with the token of its users: whoever may speak to a Ray cluster runs what they like on its machines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

from broker.contract import address, errors
from broker.program import logs
from learner.run.workers import shard

_log = logging.getLogger(__name__)
EXTRA = "pip install 'actorq-fleet[ray]'"
OBJECTS_BYTES = 256_000_000
"""Shared memory for batches on their way from a local worker."""
CALLS_AT_ONCE = 2
"""Calls that a worker answers at the same time: a report that waits for news must not hold up a batch."""
_LEAST = (2, 52)
_PORT = 6379
_CONNECT_S = 3.0


class Worker(Protocol):
    """A process with a `shard.Shard` in it."""

    def ask(self, method: str, *arguments: Any) -> futures.Future[Any]:
        """Calls a method of the shard; the future raises `Died` if the process ends before it answers."""

    def kill(self) -> None:
        """Ends the process, if it lives."""


class Died(Exception):
    """A worker's process has ended, or cannot be started; says what Ray knows of it."""


class Cluster(Protocol):
    """A place where workers can be started."""

    def start_worker(self) -> Worker: ...

    def close(self) -> None: ...


def check(where: str) -> None:
    """Checks that there can be workers, before anybody waits for actors.

    Args:
        where: Address of a Ray cluster; empty: one on this machine.

    Raises:
        RuntimeMissing: Ray is not installed, or too old.
        ConfigError: The cluster would be used without a token.
    """
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise errors.RuntimeMissing(
            "--ingest-workers needs Ray, which is not installed", todo=f"{EXTRA}, or leave --ingest-workers out"
        ) from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _LEAST:
        raise errors.RuntimeMissing(
            f"--ingest-workers needs Ray {_LEAST[0]}.{_LEAST[1]} or newer, which asks for a token, and {found} is here",
            todo=EXTRA,
        )
    if not where:
        return
    address.Address.parse(where)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise errors.ConfigError(
            "a Ray cluster is used with a token only: whoever reaches it without one runs what they like there",
            where=f"--ray {where}",
            todo="set RAY_AUTH_MODE=token here and where the cluster is started (docs/fleet/scale.md)",
        )
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    if not os.environ.get("RAY_AUTH_TOKEN") and not Path(token).is_file():
        raise errors.ConfigError(
            "the Ray cluster's token is not on this machine",
            where=token,
            todo="copy it from the cluster's head (`ray get-auth-token` prints it there), readable by you alone",
        )


class Process(shard.Shard):
    """A shard in a process of its own: what it logs, its reports tell. Ray would print it, and more, to our stdout."""

    def release_name(self) -> str:
        logs.configure(_Telling(self))
        return super().release_name()


class _Telling(logging.Handler):
    def __init__(self, to: shard.Shard) -> None:
        super().__init__()
        self._shard = to

    def emit(self, record: logging.LogRecord) -> None:
        self._shard.keep_record(record.levelno, self.format(record))


class RayCluster:
    """A Ray cluster that this process is connected to, as `open` gives it.

    Args:
        ray: The module.
        ahead: Workers to start before anybody asks for them.
    """

    @classmethod
    def open(cls, where: str, workers: int) -> RayCluster:
        """Starts a cluster on this machine for so many workers, or connects to the one that is named.

        Raises:
            RuntimeMissing: It cannot be started, is not there, or does not let us in.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it tells its makers otherwise
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "actorq"}
        if where:
            parsed = address.Address.parse(where)
            where = where if ":" in where else f"{where}:{_PORT}"
            _reach(parsed.host, int(where.rpartition(":")[2]), where)
            options["address"] = where
        else:
            # Read when Ray is imported. Its processes inherit them, as they do where our own modules are
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else 127.0.0.1 is made this machine's own address
            os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
            root = str(Path(__file__).parents[3])
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
            options |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            options |= {"num_cpus": workers, "object_store_memory": OBJECTS_BYTES}
        with _signals_kept():
            try:
                import ray

                ray.init(**options)
            except Exception as error:  # of many kinds, some of them RuntimeError alone
                first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                raise errors.RuntimeMissing(
                    f"Ray does not {'let us in' if where else 'start'}: {first}",
                    where=f"--ray {where}" if where else "this machine",
                    todo="see that address and token are those of the cluster, and that Ray and Python are of the same "
                    "releases here and there"
                    if where
                    else "see /tmp/ray/session_latest/logs",
                ) from error
        return cls(ray, 0 if where else workers)  # others may need the CPUs of one that is named

    def __init__(self, ray: Any, ahead: int) -> None:
        self._ray = ray
        self._shard = ray.remote(Process)
        self._ahead: list[Worker] = [self._started() for _ in range(ahead)]

    def start_worker(self) -> Worker:
        """Begins to start a process; what it is asked waits until it is there."""
        return self._ahead.pop() if self._ahead else self._started()

    def _started(self) -> Worker:
        options = {"num_cpus": 1, "max_concurrency": CALLS_AT_ONCE, "max_restarts": 0}
        return _RayWorker(self._ray, self._shard.options(**options).remote())

    def close(self) -> None:
        """Leaves the cluster, once; one that was started here ends."""
        with _signals_kept():
            self._ray.shutdown()


class _RayWorker:
    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    def ask(self, method: str, *arguments: Any) -> futures.Future[Any]:
        answered: futures.Future[Any] = futures.Future()

        def pass_on(done: futures.Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answered.set_result(done.result())
            else:
                answered.set_exception(Died(str(error).strip()))

        try:
            getattr(self._handle, method).remote(*arguments).future().add_done_callback(pass_on)
        except self._ray.exceptions.RayError as error:
            answered.set_exception(Died(str(error)))
        return answered

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it is gone already
            self._ray.kill(self._handle)


def _reach(host: str, port: int, where: str) -> None:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise errors.RuntimeMissing(
            f"no Ray cluster answers: {error.strerror or error}",
            where=f"--ray {where}",
            todo="start it with `ray start --head`, or name the address that this printed",
        ) from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Puts our handlers of signals back in the place of Ray's: a learner that is told to end saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
