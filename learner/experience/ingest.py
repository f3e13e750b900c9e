"""Experience on its way in: validated, committed to the ledger, inserted into replay, receipted. In that order.

A learner killed before the commit has sent no receipt, and gets the message again; killed after it, it finds the
message in the ledger and rebuilds replay from there.
"""

from __future__ import annotations

import bisect
import collections
import logging
import math
import time
from collections.abc import Iterable, Iterator

import numpy as np

from broker.contract import codec, errors, messages
from broker.program import stopwatch
from learner.experience import ledger, memory, validate

_log = logging.getLogger(__name__)
LIMIT_BYTES = 32_000_000
"""Bytes of messages that wait for a commit. Beyond it the rest stays where it is, up to the socket."""
GROUP_S = 0.01
"""The least seconds from one commit's beginning to the next: each waits for the disk, and is followed by a signed
receipt for every actor in it, so that with commits back to back a busy learner spends a fifth of its time on those."""
GROUP_BYTES = 2_000_000
"""Bytes that do not wait for others."""


class Ingest:
    """Joins validator, ledger and replay.

    Args:
        validator: Decides what may enter.
        committed: The ledger, which has what was received before its receipt goes out.
        buffer: Replay, or whatever keeps experience in its place.

    Attributes:
        pending_steps: Steps that were received and are not yet in replay.
        times: `decode`: opening and validating, by messages; `replay_insert`, by messages.
    """

    def __init__(self, validator: validate.Validator, committed: ledger.Ledger, buffer: memory.Memory) -> None:
        self._validator = validator
        self._ledger = committed
        self._replay = buffer
        self._waiting: list[validate.Validated] = []
        self._waiting_bytes = 0
        self.pending_steps = 0
        self.times = stopwatch.Stopwatch("decode", "replay_insert")
        self._under_way: list[validate.Validated] = []
        self._first_id = 0  # of those under way
        self._began_at = -math.inf  # the last commit
        self._inserted: collections.deque[tuple[int, int]] = collections.deque()  # ledger id, and its end in replay

    @property
    def pending(self) -> bool:
        """Returns whether something was received and is not yet in replay."""
        return bool(self._waiting or self._under_way)

    @property
    def is_full(self) -> bool:
        """Returns whether nothing more should be received before the commit under way has ended."""
        return self._waiting_bytes > LIMIT_BYTES

    @property
    def due_in_s(self) -> float:
        """Seconds until what waits is to be committed; infinite if nothing does, or a commit has to end first."""
        if self._under_way or not self._waiting:
            return math.inf
        grouped = self._waiting_bytes >= GROUP_BYTES
        return 0.0 if grouped else max(0.0, self._began_at + GROUP_S - time.monotonic())

    def rebuild_replay(self) -> None:
        """Inserts what the ledger holds into replay, and from now on compares what comes with it. To be called first.

        Raises:
            RunError: The ledger cannot be read.
        """
        self._validator.compare_with(self._ledger.digest, self._ledger.conflicts(), self._note_conflict)
        unreadable = 0
        for id_, body in self._ledger.newest(self._replay.capacity):
            try:
                experience = codec.decode(messages.Experience, body)
                self._insert({id_: self._validator.unpack_stored(experience)})
            except (errors.DecodeError, errors.SpecError):  # another release, or another replay_capacity
                unreadable += 1
        if len(self._replay):
            _log.info("replay is rebuilt from the ledger: %d transitions", len(self._replay))
        if unreadable:
            _log.warning("%d messages of the ledger do not fit this replay, or this release", unreadable)

    def receive(self, actor_id: str, topic: str, payload: bytes, version: int) -> messages.Experience | None:
        """Validates one message; returns it if it could be read and is new, whether it is to enter replay or not.

        Args:
            actor_id: The actor whose topic it came by.
            topic: That topic.
            payload: The sealed message.
            version: The newest policy version published.
        """
        with self.times.time("decode"):
            validated = self._validator.validate(actor_id, topic, payload, version)
        if validated is None:
            return None
        self._waiting.append(validated)
        self.pending_steps += validated.entry.steps
        self._waiting_bytes += validated.entry.size_bytes
        return validated.experience

    def commit(self, *, wait: bool) -> list[messages.Experience]:
        """Commits what was received, and inserts what is durable into replay; returns the latter.

        Args:
            wait: Until all of it is; else a commit goes on meanwhile, or is not due yet (`due_in_s`), and what it holds
                comes with a later call.

        Raises:
            RunError: The ledger cannot be written.
        """
        inserted: list[messages.Experience] = []
        while self.pending:
            if self._under_way:
                if self._ledger.busy and not wait:
                    break
                self._ledger.wait()
                inserted += self._insert_committed()
            elif self._waiting:
                if not wait and self.due_in_s > 0:
                    break
                self._began_at = time.monotonic()
                self._under_way, self._waiting, self._waiting_bytes = self._waiting, [], 0
                self._first_id = self._ledger.begin([one.entry for one in self._under_way], self._needed_from()).start
                if not wait:
                    break
        return inserted

    def quarantine(self, transitions: Iterable[int]) -> list[ledger.Source]:
        """Keeps the messages that brought these transitions out of replay, now and after a restart; returns them.

        Args:
            transitions: Ids in replay.

        Raises:
            StorageError, RunError: The ledger cannot be written.
        """
        ends = [end for _, end in self._inserted]
        found = sorted({bisect.bisect_right(ends, transition) for transition in transitions})
        for at in found:
            self._replay.drop(ends[at - 1] if at else 0, ends[at])
        return self._ledger.quarantine([self._inserted[at][0] for at in found])

    def receipts(self) -> Iterator[tuple[str, messages.Receipt]]:
        """Yields, by actor, receipts for what actors need not keep any longer; each once."""
        return self._validator.receipts(self._ledger.id)

    def close(self) -> None:
        """Waits for the ledger, and closes it."""
        self._ledger.close()

    def _note_conflict(self, actor_id: str, boot: int, seq: int) -> None:
        self._ledger.note_conflict(actor_id, boot, seq)
        _log.warning(
            "actor %s: message %d of boot %d came with two contents: two machines count as one, and from there on this "
            "boot gets no receipts. Enrol one of them under a name of its own (actorq-broker enroll NAME), and start "
            "both again; what has no receipt stays in their spools",
            actor_id,
            seq,
            boot,
        )

    def _insert_committed(self) -> list[messages.Experience]:
        accepted = {
            id_: one.experience
            for id_, one in enumerate(self._under_way, self._first_id)
            if one.entry.body is not None and one.experience is not None
        }
        with self.times.time("replay_insert", len(accepted)):
            self._insert(accepted)
        self._validator.note_committed([one.entry for one in self._under_way])
        self.pending_steps -= sum(one.entry.steps for one in self._under_way)
        self._under_way = []
        return list(accepted.values())

    def _insert(self, by_id: dict[int, messages.Experience]) -> None:
        ends = self._replay.inserted + np.cumsum([len(experience.reward) for experience in by_id.values()])
        self._replay.insert(*by_id.values())
        self._inserted.extend(zip(by_id, ends.tolist(), strict=True))

    def _needed_from(self) -> int:
        """Returns the id of the first message of which replay still has transitions."""
        while self._inserted and self._inserted[0][1] <= self._replay.oldest:
            self._inserted.popleft()
        return self._inserted[0][0] if self._inserted else 0
