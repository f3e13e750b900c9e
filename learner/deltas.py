"""How policies get to actors in few bytes: keyframes, deltas from a keyframe, and deltas from one policy to the next.

    retained      K0 ──────────── a4 ──────────── a8 ─ ...        a: delta from the keyframe
    passing by     └ s1 ─ s2 ─ s3    └ s5 ─ s6 ─ s7 └ ...         s: delta from the policy just before

A delta from the policy before is the smallest, since little changes between two publishes, but whoever misses one is
lost. So every two seconds, and when nothing follows, the newest policy goes out as a delta from the keyframe, which is
retained: an actor that joins, or lost something, needs that and the keyframe. Where policies come more slowly than that
there is nothing in between.

Deltas from a keyframe grow with distance. Renewing it when the next one would be larger than the mean of all since the
keyframe, itself included, makes that mean the smallest possible as long as they grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from broker import delta, messages, topics

RETAIN_PERIOD_S = 2.0
"""The most that an actor which missed a delta stays behind."""

Piece = bytes | memoryview
"""Some bytes of a policy."""


class Sender(Protocol):
    """Signs and sends; `Session` is one."""

    def retain(self, topic: str, message: messages.Message) -> int:
        """Sends a retained message; its size in bytes."""

    def tell(self, topic: str, message: messages.Message) -> int:
        """Sends a message to those who listen; its size in bytes, or 0 if it cannot go out now."""

    def forget(self, topic: str) -> None:
        """Takes back what is retained."""


@dataclass(slots=True)
class Traffic:
    """What was sent. `bytes` are whole payloads, seals included."""

    policies: int = 0
    keyframes: int = 0
    keyframe_bytes: int = 0
    deltas: int = 0
    delta_bytes: int = 0

    @property
    def mean_bytes(self) -> float | None:
        """Per policy."""
        return (self.keyframe_bytes + self.delta_bytes) / self.policies if self.policies else None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A policy's difference from the keyframe, to be retained, or else from the policy just before."""

    base: int
    patch: NDArray[np.uint8]
    retained: bool


class Channel:
    """The policies of one channel, in the order of their versions within one epoch.

    Args:
        sender: Signs and sends.
        names: Topics of the fleet.
        name: Of the channel.
        enabled: False sends keyframes only.
        clock: Monotonic seconds.

    Attributes:
        traffic: What was sent.
        delta_ms: Of the newest policy: taking its difference.
        send_ms: Of the newest `send`: encoding, signing and handing to the socket.
    """

    def __init__(
        self,
        sender: Sender,
        names: topics.Topics,
        name: str,
        *,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = sender
        self._keyframe_topic, self._delta_topic = names.keyframe(name), names.delta(name)
        self._enabled = enabled
        self._clock = clock
        self._keyframe = self._newest = (0, b"")
        self._manifest: messages.Manifest | None = None
        self._retained_at = 0.0
        self._is_retained = True
        self._from_keyframe: list[int] = []  # bytes of the keyframe, and of each delta from it
        self.traffic = Traffic()
        self.delta_ms = self.send_ms = 0.0

    def draft(self, pieces: Iterable[Piece]) -> Draft | None:
        """The difference that `send` will want; None where the policy can only go out whole.

        It may be taken on another thread, while the policy is still being made or it is not yet clear whether it goes
        out.

        Args:
            pieces: The policy's bytes in their order, as they become known.
        """
        self.delta_ms = 0.0
        return self._difference(pieces, retained=self._clock() - self._retained_at > RETAIN_PERIOD_S)

    def send(self, manifest: messages.Manifest, model: bytes, draft: Draft | None) -> None:
        """Sends a policy in the way that takes the fewest bytes.

        Args:
            manifest: Of the policy.
            model: Its bytes.
            draft: What `draft` gave for them, since the policy before was sent.
        """
        self.send_ms = 0.0
        self.traffic.policies += 1
        if draft is None:
            self._send_keyframe(manifest, model)
        elif draft.retained or not self._send_step(manifest, draft):
            self._send_retained(manifest, model, draft)
        self._manifest, self._newest = manifest, (manifest.version, model)

    @property
    def is_due(self) -> bool:
        """The newest policy should be retained: no other has followed it for a while."""
        has_waited = self._clock() - self._retained_at > RETAIN_PERIOD_S
        return has_waited and self._manifest is not None and not self._is_retained

    def settle(self, *, at_once: bool = False) -> None:
        """Call again and again: retains the newest policy if no other has followed it; `at_once` if none will."""
        if self._manifest is not None and not self._is_retained and (at_once or self.is_due):
            self._send_retained(self._manifest, self._newest[1], None)

    def _send_keyframe(self, manifest: messages.Manifest, model: bytes) -> None:
        size = self._retain(self._keyframe_topic, messages.Policy(manifest, np.frombuffer(model, np.uint8)))
        self._sender.forget(self._delta_topic)  # its base is retained no longer
        self._keyframe, self._from_keyframe = (manifest.version, model), [size]
        self.traffic.keyframes += 1
        self.traffic.keyframe_bytes += size

    def _send_retained(self, manifest: messages.Manifest, model: bytes, draft: Draft | None) -> None:
        if draft is None or not draft.retained:
            draft = self._difference([model], retained=True)
        so_far = self._from_keyframe
        if draft is None or len(draft.patch) > sum(so_far) / len(so_far):
            self._send_keyframe(manifest, model)
            return
        size = self._retain(self._delta_topic, messages.PolicyDelta(manifest, draft.base, draft.patch))
        so_far.append(size)
        self._count_delta(size)

    def _send_step(self, manifest: messages.Manifest, draft: Draft) -> bool:
        message = messages.PolicyDelta(manifest, draft.base, draft.patch)
        began = time.perf_counter()
        size = self._sender.tell(self._delta_topic, message)
        self.send_ms = (time.perf_counter() - began) * 1e3
        if size:
            self._is_retained = False
            self._count_delta(size)
        return size > 0

    def _difference(self, pieces: Iterable[Piece], *, retained: bool) -> Draft | None:
        version, base = self._keyframe if retained else self._newest
        made = delta.Difference(base) if self._enabled else None
        for piece in pieces:
            began = time.perf_counter()
            if made is not None and made.size + len(piece) <= len(base):
                made.add(piece)
            else:
                made = None  # of another layout; what follows is of no use, but whoever gives it must be heard out
            self.delta_ms += (time.perf_counter() - began) * 1e3
        if made is None or made.size != len(base):
            return None
        began = time.perf_counter()
        patch = np.frombuffer(made.finish(), np.uint8)
        self.delta_ms += (time.perf_counter() - began) * 1e3
        return Draft(version, patch, retained)

    def _retain(self, topic: str, message: messages.Message) -> int:
        began = time.perf_counter()
        size = self._sender.retain(topic, message)
        self.send_ms = (time.perf_counter() - began) * 1e3
        self._retained_at, self._is_retained = self._clock(), True
        return size

    def _count_delta(self, size: int) -> None:
        self.traffic.deltas += 1
        self.traffic.delta_bytes += size
