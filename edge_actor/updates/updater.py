"""Takes a release: fetches it, checks it, unpacks it and tries it out, on a thread beside the acting loop.

It decides nothing for good. What it finds goes into `result`; whoever gave the order writes that down, and has the
process end and the launcher start the release on trial.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from broker.contract import errors, release, topics
from edge_actor.updates import download, launcher, release_directory

_log = logging.getLogger(__name__)
TRIAL_S = (5.0, 3600.0)
_WINDOW = 2
"""Pieces that are asked for at once, so that a board of 512 MB holds few of them in memory."""
_QUEUED = 4 * _WINDOW
_ASK_AGAIN_S = 60.0
"""After so long without a piece: one was altered, or too many came at once."""
_GIVE_UP_S = 300.0
"""Seconds until the pieces asked for at once are given up. What is here stays, and the next order goes on with it."""
_CHECK_S = 180.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A release that was ordered: the order's number, what names its list, and how long its trial may last."""

    number: int
    digest: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an order. `outcome` is `ready` (NAME is to be tried), `done`, `refused` or `failed`."""

    wanted: Wanted
    outcome: str
    text: str
    name: str = ""
    serial: int = 0


class Updater:
    """Takes one release at a time.

    Args:
        directory: Of releases; None where the launcher did not start this process: it takes none.
        key: The release key's public half; empty: it takes none.
        names: Topics of the fleet.
        follow: Subscribes to these topics, and no others of releases.
        version: Of the program that runs.
        reserve_bytes: What must be left free on the disk.

    Attributes:
        result: What came of the last order; None while there is none, and taken away by who reads it.
        refused: What was not as it should be, by reason.
    """

    def __init__(
        self,
        directory: release_directory.ReleaseDirectory | None,
        key: bytes,
        names: topics.Topics,
        follow: Callable[[Iterable[str]], None],
        *,
        version: str,
        reserve_bytes: int,
    ) -> None:
        self.directory = directory
        self._key = key
        self._topics = names
        self._follow = follow
        self._version = version
        self._reserve_bytes = reserve_bytes
        # Not a BoundedQueue: `_arrivals` waits for this one
        self._arrived: queue.Queue[tuple[str, bytes]] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self.result: Result | None = None
        self.refused: dict[str, int] = {}

    @property
    def is_busy(self) -> bool:
        """Returns whether a release is being taken, or its result has not been read."""
        return self._thread is not None

    @property
    def leaves_room(self) -> bool:
        """Returns whether the disk has what must be left free.

        Raises:
            OSError: It cannot be asked.
        """
        return self.directory is None or self.directory.leaves(self._reserve_bytes)

    def why_not(self) -> str:
        """Returns why this actor takes no release, if that is so."""
        if not self._key:
            return "this board's bundle has no release key: make one (actorq-broker release-key), and enrol it anew"
        if self.directory is None:
            return "this actor was not started by actorq-launch, which would bring the old release back"
        if self.is_busy or self.directory.trial:
            return "another release is being taken"
        return ""

    def begin(self, wanted: Wanted) -> None:
        """Starts taking a release; `why_not` was asked."""
        self._thread = threading.Thread(target=self._run, args=(wanted,), name="update", daemon=True)
        self._thread.start()

    def pop_result(self) -> Result | None:
        """Returns what came of an order, once."""
        found, self.result = self.result, None
        if found is not None:
            self._thread = None
        return found

    def receive(self, topic: str, payload: bytes, retained: bool) -> None:
        """Takes what a broker sends; on the network thread. What nobody asked for, or is too large, is counted."""
        if not payload:
            return  # it was taken back
        if not self.is_busy or len(payload) > release.PIECE_BYTES:
            self._count("release_unasked")
            return
        try:
            self._arrived.put_nowait((topic, payload))
        except queue.Full:
            self._count("flood")  # it is asked for again

    def close(self) -> None:
        """Ends what is under way; what was fetched stays."""
        self._stopping.set()
        if (child := self._child) is not None:
            child.kill()
        if self._thread is not None:
            self._thread.join(5.0)

    # -- on its own thread --------------------------------------------------------------------------------------------

    def _run(self, wanted: Wanted) -> None:
        try:
            result = self._update(wanted)
        except errors.ReleaseError as error:
            self._count(error.reason)
            result = Result(wanted, "refused", error.what)
        except errors.ActorqError as error:
            result = Result(wanted, "failed", error.what)
        except OSError as error:
            result = Result(wanted, "failed", f"it cannot be kept here: {error.strerror or error}")
        except Exception as error:  # a bug in here must not leave the order without an answer
            result = Result(wanted, "failed", f"{type(error).__name__}: {error}")
        finally:
            self._follow(())
        if not self._stopping.is_set():
            self.result = result

    def _update(self, wanted: Wanted) -> Result:
        assert self.directory is not None
        at = self.directory
        at.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        listed = self._fetch_list(wanted)
        name = listed.name
        if name == at.running:
            return Result(wanted, "done", f"acts as release {name} already")
        self._check_age(listed)
        at.clear(keep=name)
        if not launcher.usable(at.root, name):
            held = download.Download.open(at.partial(name), listed)
            at.check_room(listed, held.fetched_bytes, self._reserve_bytes)
            self._fetch_pieces(held, len(listed.pieces))
            at.unpack(listed, name, held.path)
        self._try_out(name)
        at.forget_partial(name)
        return Result(wanted, "ready", f"tries release {name}", name, listed.serial)

    def _fetch_list(self, wanted: Wanted) -> release.Release:
        """Waits for the signed list that the order names."""
        signed: bytes | None = None
        for topic, payload in self._arrivals([self._topics.release_list]):
            if topic == self._topics.release_list and release.digest(payload) == wanted.digest:
                signed = payload
                break
            self._count("release_other")
        if signed is None:
            raise errors.Undelivered("the broker does not have the release that was ordered")
        return release.open_list(signed, self._key)

    def _check_age(self, listed: release.Release) -> None:
        assert self.directory is not None
        if listed.serial < self.directory.floor:
            raise errors.ReleaseError("it was signed before the release that was found good last", reason="release_old")
        if release.numbers(listed.version) < release.numbers(self._version) and not listed.downgrade:
            raise errors.ReleaseError(
                f"{listed.version} is older than {self._version}, which runs, and is not signed as a downgrade",
                reason="release_old",
            )

    def _fetch_pieces(self, held: download.Download, count: int) -> None:
        if held.missing and len(held.missing) < count:
            _log.info("update: goes on, %d of %d pieces are here", count - len(held.missing), count)
        while held.missing:
            window = {self._topics.release_piece(index): index for index in held.missing[:_WINDOW]}
            for topic, payload in self._arrivals(window):
                index = window.pop(topic, None)
                if index is not None and not held.add(index, payload):
                    self._count("release_piece")
                    window[topic] = index  # somebody altered it; it is asked for again
                if not window:
                    break
            if window:
                raise errors.Undelivered(
                    f"{len(held.missing)} of {count} pieces of the release do not come; order it again to go on"
                )

    def _arrivals(self, wanted: Iterable[str]) -> Iterable[tuple[str, bytes]]:
        """Yields what comes, asking again for `wanted` now and then, until nothing has come for long."""
        until_s = time.monotonic() + _GIVE_UP_S
        ask_s = 0.0
        while not self._stopping.is_set() and (now_s := time.monotonic()) < until_s:
            if now_s > ask_s:
                self._follow(())
                self._follow(list(wanted))
                ask_s = now_s + _ASK_AGAIN_S
            try:
                one = self._arrived.get(timeout=0.2)
            except queue.Empty:
                continue
            ask_s = time.monotonic() + _ASK_AGAIN_S
            yield one

    def _try_out(self, name: str) -> None:
        """Has the release look at this board, with the settings that this process has.

        Raises:
            ReleaseError: It finds something that it could not act with.
            Undelivered: This process ends.
        """
        assert self.directory is not None
        if self._stopping.is_set():
            raise errors.Undelivered("the actor ends")
        command, environment = launcher.as_release(self.directory.root, name)
        words = [*command[: command.index("edge_actor") + 1], "check", *sys.argv[2:], "--offline", "--json"]
        environment["PYTHONPATH"] = _without(environment["PYTHONPATH"], self.directory)
        self._child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        if self._stopping.is_set():  # `close` did not see it
            self._child.kill()
        try:
            said, _ = self._child.communicate(timeout=_CHECK_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            raise _unfit(name, f"its check took more than {_CHECK_S:g} s") from None
        code, self._child = self._child.returncode, None
        if code != errors.EXIT_OK:
            raise _unfit(name, f"its check ended with {code}: {_failure(said)}")

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


def _without(path: str, directory: release_directory.ReleaseDirectory) -> str:
    """Returns a PYTHONPATH without the release that runs, which stands behind the one that is tried."""
    own = str(directory.root / directory.running / "site") if directory.running else ""
    return os.pathsep.join(one for one in path.split(os.pathsep) if one != own)


def _failure(said: str) -> str:
    """Returns the first failure that a check reports; its last words where it did not come so far."""
    lines = said.strip().splitlines()
    for line in reversed(lines):
        try:
            found = [one for one in json.loads(line)["findings"] if one["state"] == "fail"]
            return f"{found[0]['name']}: {found[0]['what']}"[:300]
        except (ValueError, TypeError, KeyError, IndexError):
            continue
    return (lines[-1] if lines else "it said nothing")[:300]


def _unfit(name: str, why: str) -> errors.ReleaseError:
    return errors.ReleaseError(f"release {name} does not fit this board: {why}", reason="release_unfit")
