"""A learner that stands by: it hears the live one, and goes on with that one's run once it is gone.

Two things must be so. The fleet hears no learner: its will or its goodbye came, or its heartbeat stays away. And the
run directory's lock is free, which the kernel, or the server of shared storage, holds for as long as the process lives:
so one that computes for long, stands still or is cut off from its brokers is never taken for dead. The lock also
decides between several that stand by: one gets it, and the others hear that one beat. Nothing is said to the fleet
before; then all is as with --resume, whose higher epoch silences whatever there is of the one before.

Where there is no run directory that both reach (`wait_apart`), silence is all that tells, so it must last for longer;
and chance decides between several: each waits for a while of its own more, and hears the one that was first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import random
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from broker.contract import codec, errors, messages, signing, specs, topics
from broker.fleet import identity
from broker.program import logs
from learner import config
from learner.experience import ledger
from learner.files import run_directory
from learner.fleet import brokers, gathering, session

_log = logging.getLogger(__name__)
_POLL_S = 0.2  # between two looks at the lock
_APART = 2.0
"""Silences of a learner, whose lock cannot be looked at, until it counts as gone; and one more by chance."""
_WAITING = 64
"""What a learner says that may wait to be looked at, while shared storage takes its time: half a minute's heartbeats,
and a policy's each. Beyond it the oldest goes: what follows says more."""
_UNUSED_BEATS = 3
"""Heartbeats of a live learner during which nobody has the run directory: then it is not that learner's."""


def wait(settings: config.TrainConfig, path: Path, stop: threading.Event) -> run_directory.RunDirectory | None:
    """Waits until the learner that is live on the fleet is gone; returns its run directory, which is ours then.

    Args:
        settings: Fleet and brokers.
        path: The live learner's run directory.
        stop: Ends the wait.

    Returns:
        None if the run has ended by itself: solved, or all its steps taken.

    Raises:
        SpecError: The live learner trains on another task.
        RunError: It has another run directory, or this one cannot be used.
        BrokerUnreachable: No broker answered.
        Stopped: `stop` was set meanwhile.
    """
    with _listening(settings, path) as standby:
        return standby.wait(stop)


def wait_apart(settings: config.TrainConfig, stop: threading.Event) -> None:
    """Waits until no learner has been heard on the fleet for a while, where its run directory is out of reach.

    A learner that is cut off from its brokers, or stands still, counts as gone as well: once it hears of its successor,
    it ends.

    Args:
        settings: Fleet and brokers.
        stop: Ends the wait.

    Raises:
        BrokerUnreachable: No broker answered.
        Stopped: `stop` was set meanwhile.
    """
    with _listening(settings, None) as standby:
        standby.wait_apart(stop)


@contextlib.contextmanager
def _listening(settings: config.TrainConfig, path: Path | None) -> Iterator[Standby]:
    fleet = identity.Fleet.open(settings.fleet, create=False)
    standby = Standby(settings, path, fleet, fleet.tls())
    standby.brokers.start()
    try:
        yield standby
    finally:
        standby.brokers.close()


class Standby:
    """Hears what the fleet's learner says.

    Args:
        settings: Fleet and brokers.
        path: The run directory; None: out of reach.
        fleet: The fleet's keys.
        tls: The fleet's, for the brokers.

    Attributes:
        brokers: A link to each, which says nothing.
        passed_over: Messages that were heard and not looked at, because newer ones followed.
    """

    def __init__(
        self, settings: config.TrainConfig, path: Path | None, fleet: identity.Fleet, tls: ssl.SSLContext | None
    ) -> None:
        self._settings, self._path = settings, path
        self._keys = fleet.directory
        self._verifier = signing.LearnerVerifier(fleet.sealer.public_key)
        # Not a BoundedQueue: `_silences` waits for this one
        self._heard: queue.Queue[tuple[messages.LearnerState, bool]] = queue.Queue(_WAITING)
        self.passed_over = 0
        self._live: messages.LearnerState | None = None
        self._is_gone = False  # it, or its broker, said so
        self._unused_beats = 0
        self._verified = ""  # the session that was seen to have the run directory
        self._heard_at = time.monotonic()
        self.brokers = brokers.Brokers(
            settings.broker or fleet.brokers,
            f"actorq-{settings.fleet}-standby",
            username=identity.LEARNER_USER,
            password=fleet.password,
            tls=tls,
        )
        self.brokers.subscribe(topics.Topics(settings.fleet).learner_state, self._hear)

    def wait(self, stop: threading.Event) -> run_directory.RunDirectory | None:
        """Waits as `standby.wait` says; the brokers are connected."""
        path = self._path
        assert path is not None
        _log.info("standing by for the run %s on fleet %r at %s", path, self._settings.fleet, self.brokers.address)
        for silent_s in self._silences(stop):
            if not self._is_gone and silent_s < session.SILENCE_S:
                continue
            try:
                found = run_directory.RunDirectory.open(path, resume=True)
            except run_directory.InUse:
                _log.warning(
                    "fleet %r hears no learner, but a process still has the run %s: it lives, and is left alone",
                    self._settings.fleet,
                    path,
                    extra=logs.once(self._live and self._live.session),
                )
                continue
            return self._take_over(found, silent_s)
        raise gathering.Stopped

    def wait_apart(self, stop: threading.Event) -> None:
        """Waits as `standby.wait_apart` says; the brokers are connected."""
        needed_s = session.SILENCE_S * (_APART + random.random())
        _log.warning(
            "standing by on fleet %r at %s, without the run directory of its learner (--resume RUN names one that both "
            "reach): once no learner is heard for %.1f s, a new run begins with the policy that brokers retain. Lost "
            "are then replay, ledger, optimizer state, critics and counts of the run before",
            self._settings.fleet,
            self.brokers.address,
            needed_s,
        )
        for silent_s in self._silences(stop):
            if silent_s >= needed_s:
                who = f"the learner of epoch {self._live.epoch}" if self._live else "a learner"
                _log.warning("%s was not heard for %.1f s: this standby takes over, with a new run", who, silent_s)
                return
        raise gathering.Stopped

    def _silences(self, stop: threading.Event) -> Iterator[float]:
        """Yields the seconds since a learner was heard, whenever all that was heard is taken in, until stopped."""
        changes = -1
        while not stop.is_set():
            if changes != self.brokers.changes or not self.brokers.connected:
                changes, self._heard_at = self.brokers.changes, time.monotonic()  # who hears nothing knows nothing
            try:
                self._note(*self._heard.get(timeout=_POLL_S))
                continue
            except queue.Empty:
                pass
            if self.brokers.connected:
                yield time.monotonic() - self._heard_at

    def _take_over(self, found: run_directory.RunDirectory, silent_s: float) -> run_directory.RunDirectory | None:
        if found.ended_by_itself(self._settings.max_env_steps):
            return None
        why = "it is offline" if self._is_gone else f"nothing was heard for {silent_s:.1f} s"
        who = f"the learner of epoch {self._live.epoch} is gone" if self._live else "no learner is live"
        _log.warning("%s (%s): this standby takes over, and goes on with the run %s", who, why, self._path)
        return found

    def _hear(self, topic: str, payload: bytes, retained: bool) -> None:
        """Opens what came, on a network thread."""
        try:
            state = codec.decode(messages.LearnerState, self._verifier.open(topic, payload))
        except errors.MessageError as error:
            _log.warning(
                "what a learner says on fleet %r is not of this fleet's keys (%s). Are the keys in %s those of the "
                "live learner? Copy its directory here",
                self._settings.fleet,
                error.reason,
                self._keys,
                extra=logs.once("keys"),
            )
            return
        while True:
            try:
                self._heard.put_nowait((state, retained))
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._heard.get_nowait()
                    self.passed_over += 1
                _log.warning(
                    "the run directory takes long to answer: of what was heard meanwhile, the newest %d are kept",
                    _WAITING,
                    extra=logs.once("waiting"),
                )

    def _note(self, state: messages.LearnerState, retained: bool) -> None:
        """Takes in what a learner says of itself, or its broker of it."""
        if not state.online:
            if self._live is None or state.session == self._live.session:  # else of one before it
                self._is_gone = True
            return
        if self._live is not None and state.epoch < self._live.epoch:
            return  # it has lost the fleet, and does not know yet
        if self._live is None or self._live.session != state.session:
            self._unused_beats = 0
        self._live, self._is_gone, self._heard_at = state, False, time.monotonic()
        if not retained and self._verified != state.session and self._path is not None:
            self._verify(state, self._path)

    def _verify(self, live: messages.LearnerState, path: Path) -> None:
        """Looks whether the run directory is the live learner's: on shared storage, whether locks are shared as well.

        Raises:
            SpecError: It trains on another task.
            RunError: It has another run directory.
        """
        trained = _spec(path)
        if trained is not None and live.fingerprint and live.fingerprint != trained.fingerprint:
            raise errors.SpecError(
                "the run is of another task than the live learner trains on",
                where=f"run: {path}, {trained.describe()}; live learner: epoch {live.epoch}, "
                f"{live.env_id or 'any environment'}, spec {live.fingerprint}",
                todo="name the run directory of the live learner with --resume",
            )
        if run_directory.is_used(path):
            self._verified = live.session
            return
        self._unused_beats += 1
        if self._unused_beats >= _UNUSED_BEATS:
            raise errors.RunError(
                "the learner that is live on the fleet does not use this run directory",
                where=f"{path}, fleet {self._settings.fleet!r}, epoch {live.epoch}",
                todo="name its run directory with --resume; if this is it, on shared storage, then locks are not "
                "shared there (NFS 4 without `nolock` and `local_lock` shares them), and nothing tells if it lives",
            )


def _spec(path: Path) -> specs.EnvSpec | None:
    """Returns what a run trains on; None if it has not got so far, or its ledger cannot be read."""
    try:
        return specs.from_dict(json.loads(ledger.about(run_directory.ledgers(path)[0])["spec"]))
    except (errors.ActorqError, OSError, ValueError, KeyError, TypeError):
        return None
