"""Experience on its way: kept until the learner's receipt says that it has it.

In memory. What an actor recorded survives the loss of broker, network or learner, but not of the actor's own process.
A full spool drops its oldest messages, and counts their steps.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker import messages
from edge_actor import trajectory

WINDOW = 64
"""Messages sent and not receipted, at most: what a learner that stalls is sent before it answers."""
RESEND_S = 5.0
"""Without a receipt for so long, all is sent again: a broker may have dropped it in silence (FACTS.md, MQTT)."""


@dataclass(frozen=True, slots=True)
class _Held:
    seq: int
    steps: int
    payload: bytes


class Spool:
    """Numbers, holds and sends the experience of one boot.

    Args:
        boot: This process's number.
        fingerprint: Of the environment's spec.
        seal: Bytes of a message, ready to publish.
        limit_bytes: Most that is held; at least one message is.

    Attributes:
        steps: Steps that were added since the start.
        steps_dropped: Steps that left without a receipt.
    """

    def __init__(
        self,
        boot: int,
        fingerprint: str,
        seal: Callable[[messages.Experience], bytes],
        limit_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._boot = boot
        self._fingerprint = fingerprint
        self._seal = seal
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._held: collections.deque[_Held] = collections.deque()
        self._bytes = 0
        self._sent = 0  # of the held messages, from the left
        self._seq = 0
        self._ledger = ""
        self._progress_at = clock()
        self.steps = 0
        self.steps_dropped = 0

    def __len__(self) -> int:
        """Messages held."""
        return len(self._held)

    @property
    def unsent(self) -> bool:
        """Something waits for `pump`."""
        return self._sent < min(len(self._held), WINDOW)

    def add(self, segments: trajectory.Segments, assigned_epoch: int, epoch: int, version: int) -> None:
        """Accepts segments that the policy `(epoch, version)` chose, under an assignment of `assigned_epoch`."""
        self._seq += 1
        oldest = self._held[0].seq if self._held else self._seq
        message = messages.Experience(
            boot=self._boot,
            seq=self._seq,
            oldest=oldest,
            step=self.steps,
            fingerprint=self._fingerprint,
            assigned_epoch=assigned_epoch,
            epoch=epoch,
            version=version,
            length=segments.length,
            env_index=segments.env_index,
            terminated=segments.terminated,
            truncated=segments.truncated,
            episode_return=segments.episode_return,
            episode_length=segments.episode_length,
            observation=segments.observation,
            action=segments.action,
            reward=segments.reward,
            log_prob=segments.log_prob,
        )
        held = _Held(self._seq, segments.steps, self._seal(message))
        self._held.append(held)
        self._bytes += len(held.payload)
        self.steps += held.steps
        while self._bytes > self._limit_bytes and len(self._held) > 1:
            self.steps_dropped += self._pop().steps

    def pump(self, publish: Callable[[bytes], bool]) -> None:
        """Sends what was not sent yet, until `publish` refuses or the window is full."""
        if self._sent and self._clock() - self._progress_at > RESEND_S:
            self.rewind()
        while self._sent < min(len(self._held), WINDOW):
            if not publish(self._held[self._sent].payload):
                return
            if self._sent == 0:
                self._progress_at = self._clock()
            self._sent += 1

    def rewind(self) -> None:
        """Sends everything that is held once more: the connection is new, or the ledger is."""
        self._sent = 0
        self._progress_at = self._clock()

    def acknowledge(self, receipt: messages.Receipt) -> None:
        """Lets go of what the learner has."""
        if receipt.ledger != self._ledger:
            if self._ledger:
                self.rewind()
            self._ledger = receipt.ledger
        if receipt.boot != self._boot:
            return
        while self._held and self._held[0].seq <= receipt.seq:
            self._pop()
            self._progress_at = self._clock()

    def _pop(self) -> _Held:
        held = self._held.popleft()
        self._bytes -= len(held.payload)
        self._sent = max(0, self._sent - 1)
        return held
