"""Experience on its way: kept until the learner's receipt says that it has it.

What an actor recorded survives the loss of broker, network, learner, and of the actor's own process: a message is
accepted once it is in a file (journal.py), and what earlier boots left is sent first. A full spool drops its oldest
messages, and counts their steps.

The learner takes messages in order and waits for those it lacks, unless a message says that its actor holds nothing
older (`oldest`). So what follows a gap is sent only when it is the oldest one held, and then it says so.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import codec, errors, frames, messages, specs
from broker.program import stopwatch
from edge_actor import config
from edge_actor.experience import journal, trajectory, window

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Held:
    boot: int
    seq: int
    oldest: int  # as its bytes say
    steps: int
    record: journal.Record | None
    body: bytes = b""  # only where there is no record

    @property
    def size_bytes(self) -> int:
        """Bytes of its body."""
        return self.record.length if self.record else len(self.body)


class Spool:
    """Numbers, holds and sends experience.

    Args:
        boot: This process's number.
        fingerprint: Of the environment's spec.
        seal: Bytes of an encoded message, ready to publish.
        files: Where it is kept, with what earlier boots left there.
        clock: Monotonic time, in seconds.
        date: Unix time, in seconds; None where this board cannot know it.

    Attributes:
        steps: Steps that were added since the start.
        steps_dropped: Steps that left without a receipt since the start.
        times: `spool`: packing, encoding and keeping a message; `seal` and `send`: signing it, handing it to the link.
    """

    def __init__(
        self,
        boot: int,
        fingerprint: str,
        seal: Callable[[bytes], bytes],
        files: journal.Journal,
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float | None] = time.time,
    ) -> None:
        self._boot = boot
        self._fingerprint = fingerprint
        self._seal = seal
        self._files = files
        self._date = date
        self._window = window.Window(clock)
        self._held = collections.deque(_Held(r.boot, r.seq, r.oldest, r.steps, r) for r in files.records)
        self._newest: tuple[_Held | None, bytes] = (None, b"")  # its body need not be read back
        self._unwritten_bytes = 0
        self._failing = False
        self._failed_at = 0  # seq
        self._sent = self._sent_bytes = 0  # of the held messages, from the left
        self._left = self._left_bytes = 0  # of those dropped, which are on their way all the same
        self._left_last = (0, 0)
        self._seq = 0
        self._ledger = ""
        self.steps = 0
        self.steps_dropped = 0
        self.times = stopwatch.Stopwatch("spool", "seal", "send")

    @classmethod
    def open(
        cls,
        boot: int,
        fingerprint: str,
        seal: Callable[[bytes], bytes],
        files: journal.Journal,
        clock: Callable[[], float] = time.monotonic,
        date: Callable[[], float | None] = time.time,
    ) -> Spool:
        """Returns a spool of what the files hold, without what could never be sent; arguments as of the class."""
        made = cls(boot, fingerprint, seal, files, clock, date)
        if too_large := [held for held in made._held if held.size_bytes > specs.MAX_EXPERIENCE_BYTES]:
            made._discard(too_large)
        if made._held:
            steps = sum(held.steps for held in made._held)
            _log.info("the spool holds %d messages of earlier boots, %d steps", len(made._held), steps)
        return made

    def __len__(self) -> int:
        """Returns the messages held."""
        return len(self._held)

    @property
    def unsent(self) -> bool:
        """Returns whether something waits for `pump`."""
        return (
            self._sent < len(self._held)
            and self._window.has_room(self._sent + self._left, self._sent_bytes + self._left_bytes)
            and not self._must_wait(self._sent)
        )

    @property
    def is_half_full(self) -> bool:
        """Returns whether whoever can wait with more should."""
        return self._files.size_bytes + self._unwritten_bytes > self._files.limit_bytes // 2

    def add(self, segments: trajectory.Segments, assigned_epoch: int, epoch: int, version: int) -> None:
        """Accepts segments that the policy `(epoch, version)` chose, under an assignment of `assigned_epoch`."""
        with self.times.time("spool"):
            self._add(segments, assigned_epoch, epoch, version)

    def _add(self, segments: trajectory.Segments, assigned_epoch: int, epoch: int, version: int) -> None:
        self._seq += 1
        observation = segments.observation
        if observation.dtype == np.uint8:
            observation = frames.pack(observation)
        room = observation.nbytes + segments.action.nbytes + segments.reward.nbytes  # nearly all of it
        while self._held and not self._files.has_room(room + self._unwritten_bytes):
            self._drop()
        oldest = next((held.seq for held in self._held if held.boot == self._boot), self._seq)
        message = messages.Experience(
            boot=self._boot,
            seq=self._seq,
            oldest=oldest,
            step=self.steps,
            fingerprint=self._fingerprint,
            assigned_epoch=assigned_epoch,
            epoch=epoch,
            version=version,
            draw=segments.draw,
            length=segments.length,
            env_index=segments.env_index,
            row=segments.row,
            terminated=segments.terminated,
            truncated=segments.truncated,
            episode_return=segments.episode_return,
            episode_length=segments.episode_length,
            observation=observation,
            action=segments.action,
            reward=segments.reward,
            log_prob=segments.log_prob,
            created_ms=int(1e3 * (self._date() or 0.0)),
        )
        body = codec.encode(message)
        self._held.append(self._keep(oldest, segments.steps, body))
        self._newest = (self._held[-1], body)
        self.steps += segments.steps

    def pump(self, publish: Callable[[bytes], bool]) -> None:
        """Sends what was not sent yet, until `publish` refuses or the window is full."""
        if self._sent + self._left and self._window.is_overdue:
            self.rewind()
            self._window.narrow()
        while self.unsent:
            held = self._held[self._sent]
            body = self._body(held)
            if body is None:
                continue
            with self.times.time("seal"):
                sealed = self._seal(body)
            with self.times.time("send"):
                is_taken = publish(sealed)
            if not is_taken:
                return
            if self._sent + self._left == 0:
                self._window.restart()
            self._sent += 1
            self._sent_bytes += held.size_bytes

    def rewind(self) -> None:
        """Sends everything that is held once more: the connection is new, or the ledger is."""
        self._sent = self._sent_bytes = self._left = self._left_bytes = 0
        self._window.restart()

    def follow_learner(self, session: str) -> None:
        """Takes note of a learner that takes experience. A new session never saw what was sent before it came."""
        if self._window.follow_learner(session):
            self.rewind()

    def acknowledge(self, receipt: messages.Receipt) -> None:
        """Lets go of what the learner has."""
        if receipt.ledger != self._ledger:
            if self._ledger:
                self.rewind()
            self._ledger = receipt.ledger
        if self._left and (receipt.boot, receipt.seq) >= self._left_last and receipt.boot == self._left_last[0]:
            self._left = self._left_bytes = 0
            self._window.widen()
        while self._held and self._held[0].boot == receipt.boot and self._held[0].seq <= receipt.seq:
            self._pop()
            self._window.widen()

    def vitals(self) -> dict[str, Any]:
        """Returns what is held and what was dropped, by fields of `messages.Vitals`."""
        files = self._files
        share = min(1.0, (files.size_bytes + self._unwritten_bytes) / files.limit_bytes) if files.limit_bytes else 1.0
        return {"messages_held": len(self), "steps_dropped": self.steps_dropped, "spool_share": share}

    def close(self) -> None:
        """Leaves what is held to the next boot."""
        for held in self._held:
            if held.record is None:
                with contextlib.suppress(OSError):  # said when it began
                    self._files.append(held.boot, held.seq, held.oldest, held.steps, held.body)
        self._files.close()

    def _must_wait(self, index: int) -> bool:
        """Returns whether a message follows a gap, and is not the oldest held."""
        if index == 0:
            return False
        before, held = self._held[index - 1], self._held[index]
        return (before.boot, before.seq + 1) != (held.boot, held.seq)

    def _body(self, held: _Held) -> bytes | None:
        """Returns what is to be sent of the message at `_sent`; None if it is unreadable, and now gone."""
        if held.record is None:
            body = held.body
        elif held is self._newest[0]:
            body = self._newest[1]
        else:
            try:
                body = self._files.read(held.record)
            except OSError as error:
                self._lose(held, str(error))
                return None
        if self._sent > 0 or held.oldest == held.seq:
            return body
        try:
            return codec.with_oldest(body, held.seq)
        except errors.DecodeError as error:
            self._lose(held, error.what)
            return None

    def _lose(self, held: _Held, why: str) -> None:
        """Drops the message at `_sent`."""
        _log.warning("message %d.%d of the spool cannot be read, and is lost: %s", held.boot, held.seq, why)
        del self._held[self._sent]
        if held.record is not None:
            self._files.release(held.record)
        self.steps_dropped += held.steps

    def _discard(self, too_large: list[_Held]) -> None:
        """Drops messages of an earlier release: no broker takes them, and each attempt would end the connection."""
        self.steps_dropped += sum(held.steps for held in too_large)
        self._held = collections.deque(held for held in self._held if held.size_bytes <= specs.MAX_EXPERIENCE_BYTES)
        for held in too_large:
            if held.record is not None:
                self._files.release(held.record)
        _log.warning(
            "%d messages of the spool have more than %d bytes and can never be sent: dropped, %d steps",
            len(too_large),
            specs.MAX_EXPERIENCE_BYTES,
            self.steps_dropped,
        )

    def _keep(self, oldest: int, steps: int, body: bytes) -> _Held:
        """Writes a message down; in memory it stays only while no file can be written."""
        tries = 0
        while True:
            try:
                record = self._files.append(self._boot, self._seq, oldest, steps, body)
            except OSError as error:
                tries += 1
                self._failed_at = self._seq
                if not self._failing:
                    self._failing = True
                    _log.warning("the spool cannot be written (%s); acting on", error)
                if tries == 1 or (error.errno in _FULL and self._drop_until_a_file_goes()):
                    continue  # another file may do
                self._unwritten_bytes += len(body)
                return _Held(self._boot, self._seq, oldest, steps, None, body)
            if self._failing and self._seq - self._failed_at > window.LIMIT:  # not just until the next file is full
                self._failing = False
                _log.info("the spool can be written again")
            return _Held(self._boot, self._seq, oldest, steps, record)

    def _drop_until_a_file_goes(self) -> bool:
        before = self._files.size_bytes
        while self._held and self._held[0].record is not None and self._files.size_bytes == before:
            self._drop()
        return self._files.size_bytes < before

    def _drop(self) -> None:
        was_sent, held = self._sent > 0, self._pop()
        self.steps_dropped += held.steps
        if was_sent:
            self._left += 1
            self._left_bytes += held.size_bytes
            self._left_last = (held.boot, held.seq)

    def _pop(self) -> _Held:
        held = self._held.popleft()
        if self._sent:
            self._sent -= 1
            self._sent_bytes -= held.size_bytes
        if held.record is None:
            self._unwritten_bytes -= len(held.body)
        else:
            self._files.release(held.record)
        return held


def from_settings(
    settings: config.ActorConfig,
    state_dir: Path,
    boot: int,
    fingerprint: str,
    seal: Callable[[bytes], bytes],
    date: Callable[[], float | None] = time.time,
) -> Spool:
    """Opens the spool that the settings ask for; see Spool and journal.Journal for the rest."""
    directory = journal.default_directory(state_dir, settings.spool_dir)
    files = journal.Journal.open(directory, settings.spool_bytes)
    return Spool.open(boot, fingerprint, seal, files, date=date)
