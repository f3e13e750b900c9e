"""Runs Mosquitto as a child of this process: found, started, waited for, reloaded, stopped, never left behind."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from broker.contract import address, errors
from broker.program import children
from broker.serve import listener
from broker.serve.mosquitto import access, config, sandbox, watch

_PATH_BESIDES = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
"""Directories where packages put it; Debian's user PATH lacks the first two."""
_START_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


def find() -> str | None:
    """Returns the path of the Mosquitto program; None if it is not installed."""
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:{_PATH_BESIDES}")


class Mosquitto:
    """A Mosquitto of its own, which runs from `start`, or as long as a `with` block.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes any free one.
        fleet: Whose topics the users may use.
        admission: Who is let in, over TLS; None lets in whoever reaches a loopback address, without.
        on_excess: Takes a user's name and what it did, when it uses more than any actor of ours (`watch`). Called on a
            thread of its own.

    Attributes:
        port: The port that it listens on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        fleet: str,
        admission: access.Admission | None = None,
        on_excess: Callable[[str, str], None] = lambda user, what: None,
    ) -> None:
        self.host, self.port = host, port
        self._fleet, self._admission, self._passwords = fleet, admission, access.Passwords()
        self._on_excess = on_excess
        self._last_lines: collections.deque[str] = collections.deque(maxlen=5)

    def start(self) -> Mosquitto:
        """Starts it, and waits until it serves. What it writes, warnings and errors, is logged.

        Raises:
            RuntimeMissing: Mosquitto is not installed.
            IdentityError: An address that others can reach was asked for without `admission`.
            ConfigError: The port is taken, or Mosquitto did not start; with what it said.
        """
        program = find()
        if program is None:
            raise errors.RuntimeMissing("Mosquitto is not installed", todo="sudo apt install mosquitto")
        if self._admission is None and not address.is_loopback(self.host):
            raise errors.IdentityError(
                "a broker that others can reach lets in enrolled actors only, over TLS",
                where=f"{self.host}, fleet {self._fleet}",
                todo="run `actorq-broker init`, then start again",
            )
        self.port = listener.reserve(self.host, self.port)
        self._program = program
        self._owner = _other_user()
        # A directory of its own under /tmp, because Mosquitto must reach its files as another user when we are root. It
        # stays ours: what that user could write there, root would follow.
        self._directory = Path(tempfile.mkdtemp(prefix="actorq-mosquitto-"))
        self._files = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self._let_read(self._files, 0o750)
            self._write_all(self._admission)
            self._run()
        except BaseException:
            self._remove_files()
            raise
        return self

    @property
    def pid(self) -> int:
        """The process id of Mosquitto."""
        return self._child.pid

    def __enter__(self) -> Mosquitto:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def reload(self, admission: access.Admission) -> None:
        """Lets in these from now on, under this certificate; disconnects who is connected and no longer among them."""
        self._write_admission(admission)
        self._child.send_signal(signal.SIGHUP)

    def restart(self, admission: access.Admission | None) -> None:
        """Ends Mosquitto in the middle of what it does, and starts it with these and without all that it held."""
        self._end(timeout_s=0.0)
        if admission is not None:
            self._write_admission(admission)
        self._run()

    def check(self) -> None:
        """Makes sure that Mosquitto still runs.

        Raises:
            BrokerUnreachable: It has ended by itself.
        """
        code = self._child.poll()
        if code is not None:
            raise errors.BrokerUnreachable(
                f"Mosquitto ended with {code}{self._said()}", where=f"{self.host}:{self.port}", todo="start it again"
            )

    def stop(self) -> None:
        """Ends Mosquitto, at the latest after two seconds, and removes its files."""
        self._end(_STOP_TIMEOUT_S)
        self._remove_files()

    def _run(self) -> None:
        self._child = self._spawn(self._program)
        self._reader = threading.Thread(
            target=self._read, args=(self._child, watch.Watch(self._on_excess)), name="mosquitto-log", daemon=True
        )
        self._reader.start()
        try:
            self._wait_until_up()
        except BaseException:
            self._end(_STOP_TIMEOUT_S)
            raise

    def _end(self, timeout_s: float) -> None:
        if timeout_s:
            self._child.terminate()
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(1.0)

    def _remove_files(self) -> None:
        os.close(self._files)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_all(self, admission: access.Admission | None) -> None:
        if admission is not None:
            self._write_admission(admission)
        directory = None if admission is None else self._directory
        self._write("mosquitto.conf", config.render(self.host, self.port, directory=directory))

    def _write_admission(self, admission: access.Admission) -> None:
        self._write("passwords", self._passwords.render(admission.users))
        self._write("access", access.render_acl(self._fleet))
        self._write("authority.pem", admission.authority.decode())
        self._write("broker.pem", admission.credential.decode())

    def _write(self, name: str, text: str) -> None:
        new = f".{name}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(new, flags, 0o600, dir_fd=self._files)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                self._let_read(descriptor, 0o640)
                file.write(text)
            # Mosquitto may be reading the one before
            os.rename(new, name, src_dir_fd=self._files, dst_dir_fd=self._files)
        except BaseException:
            os.unlink(new, dir_fd=self._files)
            raise

    def _let_read(self, descriptor: int, mode: int) -> None:
        """Lets the group of Mosquitto's user read, where it is not ours; write can only we."""
        if self._owner is not None:
            os.fchown(descriptor, -1, self._owner.pw_gid)
            os.fchmod(descriptor, mode)

    def _spawn(self, program: str) -> subprocess.Popen[str]:
        with sandbox.confine(Path(program), self._directory) as confine:
            die = children.die_with_parent()

            def in_child() -> None:
                confine()
                if die is not None:
                    die()

            return subprocess.Popen(
                [program, "-c", str(self._directory / "mosquitto.conf")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Not Mosquitto's own way of dropping root: a process that changes its user loses its death signal.
                user=self._owner.pw_uid if self._owner else None,
                group=self._owner.pw_gid if self._owner else None,
                extra_groups=() if self._owner else None,
                preexec_fn=in_child,  # noqa: PLW1509  four system calls, no more
                process_group=0,  # Ctrl-C is for us; we then stop Mosquitto in order
            )

    def _read(self, child: subprocess.Popen[str], counts: watch.Watch) -> None:
        for line in child.stderr or ():
            line = line.rstrip("\n")
            if not counts.count(line):
                self._last_lines.append(line.strip())
                _log.warning("%s", line.strip())

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                self._reader.join(1.0)
                raise errors.ConfigError(
                    f"Mosquitto did not start{self._said()}",
                    where=f"{self.host}:{self.port}",
                    todo="free the port or choose another one; --kind embedded needs no Mosquitto",
                )
            if self._serves():
                return
            time.sleep(0.01)
        raise errors.ConfigError("Mosquitto does not answer", where=f"{self.host}:{self.port}")

    def _serves(self) -> bool:
        """Returns whether its loop turns: it answers a goodbye, with another one or a TLS alert.

        That it listens is not enough: it does so before it has a handler for SIGHUP, and then `reload` ends it (in 23
        of 60 trials beside two busy processes).
        """
        with contextlib.suppress(OSError), socket.create_connection(_reachable(self.host, self.port), 0.5) as probe:
            probe.shutdown(socket.SHUT_WR)
            probe.recv(1)
            return True
        return False

    def _said(self) -> str:
        return ": " + "; ".join(self._last_lines) if self._last_lines else ""


def _reachable(host: str, port: int) -> tuple[str, int]:
    """Returns where to connect to a listener on `host`, which may be a wildcard."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def _other_user() -> pwd.struct_passwd | None:
    """The unprivileged user that Mosquitto runs as when we are root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("mosquitto")
    except KeyError:
        return pwd.getpwnam("nobody")
