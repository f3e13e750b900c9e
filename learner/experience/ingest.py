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
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from broker.contract import codec, errors, messages
from broker.program import logs, stopwatch
from learner.experience import age, ledger, validate
from learner.experience.buffers import memory

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
        ages: Tells what is too old for it; without, nothing is.

    Attributes:
        pending_steps: Steps that were received and are not yet in replay.
        held: Actors whose experience is committed and receipted, and does not enter replay, by name: ids of theirs and
            steps.
        ages: As given.
        times: `decode`: opening (but of frames) and validating, by messages; `replay_insert`, by messages.
    """

    def __init__(
        self,
        validator: validate.Validator,
        committed: ledger.Ledger,
        buffer: memory.Memory,
        ages: age.Ages | None = None,
    ) -> None:
        self._validator = validator
        self._ledger = committed
        self._replay = buffer
        self.ages = ages or age.Ages()
        self._waiting: list[validate.Validated] = []
        self._waiting_bytes = 0
        self.pending_steps = 0
        self.held: dict[str, collections.deque[tuple[int, int]]] = {}
        self._too_old: collections.deque[tuple[int, int]] = collections.deque()  # of this session: ids and steps
        self._released: collections.deque[tuple[int, int]] = collections.deque()  # first id, and the last one's end
        self.times = stopwatch.Stopwatch("decode", "replay_insert")
        self._under_way: list[validate.Validated] = []
        self._first_id = 0  # of those under way
        self._began_at = -math.inf  # the last commit
        self._inserted: collections.deque[tuple[int, int]] = collections.deque()  # ledger id, and its end in replay

    @property
    def loop_s(self) -> float:
        """Seconds of the loop that opening and inserting took."""
        spent = self.times.totals()
        return spent["decode"].seconds + spent["replay_insert"].seconds

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

    def receive(
        self,
        actor_id: str,
        topic: str,
        payload: bytes,
        version: int,
        opened: Callable[[], validate.Opened] | None = None,
    ) -> validate.Validated | None:
        """Validates one message; returns it if it is new, whether it is to enter replay or not.

        Args:
            actor_id: The actor whose topic it came by.
            topic: That topic.
            payload: The sealed message.
            version: The newest policy version published.
            opened: Where it was opened on another thread, what came of that (opening.py).
        """
        with self.times.time("decode"):
            validated = self._validator.validate(actor_id, topic, payload, version, opened)
        if validated is None:
            return None
        if validated.experience is not None and validated.entry.verdict == ledger.OK:
            validated = self._kept_out(actor_id, validated, validated.experience)
        self._waiting.append(validated)
        self.pending_steps += validated.entry.steps
        self._waiting_bytes += validated.entry.size_bytes
        return validated

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

    @property
    def steps_held(self) -> int:
        """Steps that are held back and still in the ledger."""
        return sum(steps for ids in self.held.values() for _, steps in ids)

    def keep_holding(self, actor_ids: Iterable[str]) -> None:
        """Goes on holding actors back that were by the session before.

        Raises:
            RunError: The ledger cannot be read.
        """
        for actor_id in actor_ids:
            self.held[actor_id] = collections.deque(self._ledger.held(actor_id))

    def hold(self, actor_id: str, since: tuple[int, int] | None) -> int:
        """Holds an actor's experience back from now on; takes out of replay what came since a message of it.

        To be called when nothing is pending. Receipts go on: the ledger has what is held.

        Args:
            actor_id: Whose.
            since: Boot and number of that message; None: since this session began.

        Returns:
            The steps taken out.

        Raises:
            StorageError, RunError: The ledger cannot be written.
        """
        taken = dict(self._ledger.hold(actor_id, since))
        for id_, end in self._inserted:
            if id_ in taken:
                self._replay.drop(end - taken[id_], end)
        self.held[actor_id] = collections.deque(taken.items())
        return sum(taken.values())

    def release(self, actor_id: str) -> list[messages.Experience]:
        """Inserts what was held of an actor into replay, the oldest first, and holds it back no longer.

        Returns:
            Those messages among them that were not there before.

        Raises:
            StorageError, RunError: The ledger cannot be read or written.
        """
        found = {}
        new = []
        for id_, verdict, body in self._ledger.bodies_held(actor_id):
            try:
                experience = self._validator.unpack_stored(codec.decode(messages.Experience, body))
            except errors.DecodeError:  # written by another release
                continue
            if not self._replay.fits(len(experience.reward), len(experience.length)):
                continue  # this session's is smaller
            found[id_] = experience
            if verdict == ledger.HELD:
                new.append(experience)
        self._ledger.decide(actor_id, keep=True)
        if found:
            self._insert(found)
            self._released.append((min(found), self._replay.inserted))
        del self.held[actor_id]
        return new

    def discard(self, actor_id: str) -> int:
        """Never gives out what was held of an actor, and holds it back no longer; returns the steps.

        Raises:
            StorageError, RunError: The ledger cannot be written.
        """
        self._ledger.decide(actor_id, keep=False)
        return sum(steps for _, steps in self.held.pop(actor_id))

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

    def _kept_out(
        self, actor_id: str, validated: validate.Validated, experience: messages.Experience
    ) -> validate.Validated:
        """Returns a sound message with the verdict that keeps it out of replay all the same, if one does."""
        if actor_id in self.held:
            verdict = ledger.HELD
        elif self.ages.is_too_old(actor_id, experience):
            verdict = ledger.TOO_OLD
            _log.warning(
                "what %s sends is over --max-experience-age-s: it is in the ledger, not in replay (steps_too_old)",
                actor_id,
                extra=logs.once(actor_id),
            )
        else:
            return validated
        return validated._replace(entry=validated.entry._replace(verdict=verdict))

    def _insert_committed(self) -> list[messages.Experience]:
        accepted = {
            id_: one.experience
            for id_, one in enumerate(self._under_way, self._first_id)
            if one.entry.verdict == ledger.OK and one.experience is not None
        }
        self._note_held()
        with self.times.time("replay_insert", len(accepted)):
            self._insert(accepted)
        self.ages.note_inserted(
            (self._under_way[id_ - self._first_id].entry.actor_id, one) for id_, one in accepted.items()
        )
        self._validator.note_committed([one.entry for one in self._under_way])
        self.pending_steps -= sum(one.entry.steps for one in self._under_way)
        self._under_way = []
        return list(accepted.values())

    def _note_held(self) -> None:
        """Keeps of what is held, and too old, as much as replay would: where nothing else comes, nothing makes room."""
        grown = set()
        for id_, one in enumerate(self._under_way, self._first_id):
            if one.entry.verdict == ledger.HELD and one.entry.actor_id in self.held:
                self.held[one.entry.actor_id].append((id_, one.entry.steps))
                grown.add(one.entry.actor_id)
            elif one.entry.verdict == ledger.TOO_OLD:
                self._too_old.append((id_, one.entry.steps))
        for ids in (self._too_old, *(self.held[actor_id] for actor_id in grown)):
            steps, forgotten = sum(steps for _, steps in ids), []
            while steps > self._replay.capacity:
                id_, brought = ids.popleft()
                forgotten.append(id_)
                steps -= brought
            if forgotten:
                self._ledger.forget(forgotten)

    def _insert(self, by_id: dict[int, messages.Experience]) -> None:
        ends = self._replay.inserted + np.cumsum([len(experience.reward) for experience in by_id.values()])
        self._replay.insert(*by_id.values())
        self._inserted.extend(zip(by_id, ends.tolist(), strict=True))

    def _needed_from(self) -> int:
        """Returns the id of the first message of which replay still has transitions."""
        while self._inserted and self._inserted[0][1] <= self._replay.oldest:
            self._inserted.popleft()
        while self._released and self._released[0][1] <= self._replay.oldest:
            self._released.popleft()
        return min([self._inserted[0][0], *(id_ for id_, _ in self._released)]) if self._inserted else 0
