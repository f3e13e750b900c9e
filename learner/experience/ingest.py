"""Experience on its way in: checked, committed to the ledger, then fed to replay, then receipted. In that order.

A learner killed before the commit has sent no receipt, and gets the message again; killed after it, it finds the
message in the ledger and rebuilds replay from there.
"""

from __future__ import annotations

import bisect
import collections
import math
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from broker.contract import codec, errors, messages
from learner.experience import ledger, replay, validate

LIMIT_BYTES = 32_000_000
"""Of messages that wait for a commit. Beyond it the rest stays where it is, up to the socket."""
GROUP_S = 0.01
"""From the beginning of one commit to that of the next, at least: each waits for the disk, and is followed by a signed
receipt for every actor in it, so that with commits back to back a busy learner spends a fifth of its time on those."""
GROUP_BYTES = 2_000_000
"""So much does not wait."""


class Intake:
    """Joins ingest, ledger and replay.

    Args:
        checks: Decides what may enter.
        book: Where it is written down.
        memory: Where it goes; what `book` has is fed to it now.
        say: Takes one line for people.

    Attributes:
        pending_steps: Steps that were taken and are not yet in replay.
    """

    def __init__(
        self, checks: validate.Ingest, book: ledger.Ledger, memory: replay.Replay, say: Callable[[str], None]
    ) -> None:
        self._checks = checks
        self._book = book
        self._replay = memory
        self._waiting: list[validate.Taken] = []
        self._waiting_bytes = 0
        self.pending_steps = 0
        self._under_way: list[validate.Taken] = []
        self._first_id = 0  # of those under way
        self._began_at = -math.inf  # the last commit
        self._fed: collections.deque[tuple[int, int]] = collections.deque()  # ledger id, and where it ends in replay
        self._say = say
        checks.consult(book.digest, book.conflicts(), self._conflict)
        self._refill(say)

    @property
    def pending(self) -> bool:
        """Something was taken and is not yet in replay."""
        return bool(self._waiting or self._under_way)

    @property
    def is_full(self) -> bool:
        """Nothing more should be taken before the commit under way has ended."""
        return self._waiting_bytes > LIMIT_BYTES

    @property
    def rest_s(self) -> float:
        """How long until what waits is to be committed; infinite if nothing does, or a commit has to end first."""
        if self._under_way or not self._waiting:
            return math.inf
        grouped = self._waiting_bytes >= GROUP_BYTES
        return 0.0 if grouped else max(0.0, self._began_at + GROUP_S - time.monotonic())

    def take(self, actor_id: str, topic: str, payload: bytes, version: int) -> messages.Experience | None:
        """Checks one message; returns it if it could be read and is new, whether it is to enter replay or not."""
        taken = self._checks.take(actor_id, topic, payload, version)
        if taken is None:
            return None
        self._waiting.append(taken)
        self.pending_steps += taken.entry.steps
        self._waiting_bytes += taken.entry.size_bytes
        return taken.experience

    def settle(self, *, wait: bool) -> list[messages.Experience]:
        """Commits what was taken, and feeds what is durable to replay; returns the latter.

        Args:
            wait: Until all of it is; else a commit goes on meanwhile, or is not due yet (`rest_s`), and what it holds
                comes with a later call.

        Raises:
            RunError: The ledger cannot be written.
        """
        fed: list[messages.Experience] = []
        while self.pending:
            if self._under_way:
                if self._book.busy and not wait:
                    break
                self._book.wait()
                fed += self._feed()
            elif self._waiting:
                if not wait and self.rest_s > 0:
                    break
                self._began_at = time.monotonic()
                self._under_way, self._waiting, self._waiting_bytes = self._waiting, [], 0
                self._first_id = self._book.begin([taken.entry for taken in self._under_way], self._needed_from()).start
                if not wait:
                    break
        return fed

    def quarantine(self, transitions: Iterable[int]) -> list[ledger.Source]:
        """Keeps the messages that brought these transitions out of replay, now and after a restart.

        Args:
            transitions: Ids in replay.

        Raises:
            StorageError, RunError: The ledger cannot be written.
        """
        ends = [end for _, end in self._fed]
        found = sorted({bisect.bisect_right(ends, transition) for transition in transitions})
        for at in found:
            self._replay.drop(ends[at - 1] if at else 0, ends[at])
        return self._book.quarantine([self._fed[at][0] for at in found])

    def receipts(self) -> Iterator[tuple[str, messages.Receipt]]:
        """What actors need not keep any longer, by actor; each once."""
        return self._checks.receipts(self._book.id)

    def close(self) -> None:
        """Waits for the ledger, and closes it."""
        self._book.close()

    def _conflict(self, actor_id: str, boot: int, seq: int) -> None:
        self._book.note_conflict(actor_id, boot, seq)
        self._say(
            f"actor {actor_id}: message {seq} of boot {boot} came with two contents: two machines count as one, and "
            "from there on this boot gets no receipts. Enrol one of them under a name of its own (actorq-broker enroll "
            "NAME), and start both again; what has no receipt stays in their spools"
        )

    def _feed(self) -> list[messages.Experience]:
        fed = {
            id_: taken.experience
            for id_, taken in enumerate(self._under_way, self._first_id)
            if taken.entry.body is not None and taken.experience is not None
        }
        self._insert(fed)
        self._checks.settle([taken.entry for taken in self._under_way])
        self.pending_steps -= sum(taken.entry.steps for taken in self._under_way)
        self._under_way = []
        return list(fed.values())

    def _insert(self, by_id: dict[int, messages.Experience]) -> None:
        ends = self._replay.inserted + np.cumsum([len(experience.reward) for experience in by_id.values()])
        self._replay.insert(*by_id.values())
        self._fed.extend(zip(by_id, ends.tolist(), strict=True))

    def _needed_from(self) -> int:
        """The first message of which replay still has transitions."""
        while self._fed and self._fed[0][1] <= self._replay.oldest:
            self._fed.popleft()
        return self._fed[0][0] if self._fed else 0

    def _refill(self, say: Callable[[str], None]) -> None:
        unreadable = 0
        for id_, body in self._book.newest(self._replay.capacity):
            try:
                experience = codec.decode(messages.Experience, body)
                self._checks.check_stored(experience)
                self._insert({id_: experience})
            except (errors.DecodeError, errors.SpecError):  # another release, or another replay_capacity
                unreadable += 1
        if len(self._replay):
            say(f"replay is rebuilt from the ledger: {len(self._replay)} transitions")
        if unreadable:
            say(f"{unreadable} messages of the ledger do not fit this replay, or this release")
