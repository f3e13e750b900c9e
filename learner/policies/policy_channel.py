"""How policies get to actors in few bytes: keyframes, deltas from a keyframe, and deltas from one policy to the next.

    retained      K0 ──────────── a4 ──────────── a8 ─ ...        a: delta from the keyframe
    passing by     └ s1 ─ s2 ─ s3    └ s5 ─ s6 ─ s7 └ ...         s: delta from the policy just before

A delta from the policy before is the smallest, since little changes between two publishes, but whoever misses one is
lost. So every two seconds, and when nothing follows, the newest policy goes out as a delta from the keyframe, which is
retained: an actor that joins, or lost something, needs that and the keyframe. Where policies come more slowly than that
there is nothing in between.

A large policy from one to the next goes out in parts, while the rest of it is still being made and before the gate has
judged it: the actor unpacks and adds them up meanwhile. What makes it a policy is the delta behind them, which names
them; without that they are nothing. The retained one takes several times as long, and waits until an actor acts on it.

Deltas from a keyframe grow with distance. Renewing it when the next one would be larger than the mean of all since the
keyframe, itself included, makes that mean the smallest possible as long as they grow.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from broker.contract import messages, policy_patch, topics
from learner.policies import outgoing_policy
from learner.quantize import kernels

RETAIN_PERIOD_S = 2.0
"""The most that an actor which missed a delta stays behind."""
PATIENCE = 2
"""So many times as long a large policy may wait to be retained; if until then it never was the time, it goes whole."""

PARTS_BYTES = 2_000_000
"""Policies from here on go in parts."""


class Sender(Protocol):
    """Signs and sends; `Session` is one."""

    @property
    def is_local(self) -> bool:
        """Whether nothing that is sent leaves this machine."""

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
        delta_ms: Of the newest policy: waiting for its difference.
        parts_ms: Of the newest policy, beside what makes it: its digest, or its difference if that goes in parts.
        send_ms: Of the newest policy: encoding, signing and handing to the socket, without parts.
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
        self._name, self._part_topic = name, names.part(name)
        self._keyframe_topic, self._delta_topic = names.keyframe(name), names.delta(name)
        self._enabled = enabled
        self._clock = clock
        self._keyframe = self._newest = (0, b"")
        self._manifest: messages.Manifest | None = None
        self._retained_at = 0.0
        self._is_retained = True
        self._drafts = 0
        self._from_keyframe: list[int] = []  # bytes of the keyframe, and of each delta from it
        self.traffic = Traffic()
        self.delta_ms = self.parts_ms = self.send_ms = 0.0

    def draft(self, order: tuple[int, int], beside: futures.Executor | None = None) -> outgoing_policy.Draft:
        """What takes in the next policy's bytes, as they become known, and then goes to `send`.

        Args:
            order: Epoch and version that the policy will have, if it goes out.
            beside: As of `drafts.Draft`.
        """
        is_large = self._enabled and len(self._newest[1]) >= PARTS_BYTES
        retained = self._clock() - self._retained_at > RETAIN_PERIOD_S * (PATIENCE if is_large else 1)
        version, base = self._keyframe if retained else self._newest
        if not self._enabled:
            base = b""
        if retained or not is_large:
            return outgoing_policy.Draft(base, version, retained=retained, beside=beside)
        self._drafts += 1
        send_part = functools.partial(self._send_part, order, version, self._drafts)
        quick = self._sender.is_local
        return outgoing_policy.Draft(
            base, version, retained=False, number=self._drafts, send_part=send_part, quick=quick, beside=beside
        )

    def send(self, manifest: messages.Manifest, model: bytes, draft: outgoing_policy.Draft) -> None:
        """Sends a policy in the way that takes the fewest bytes.

        Args:
            manifest: Of the policy, with the draft's digest.
            model: Its bytes.
            draft: That took them in, since the policy before was sent.
        """
        self.traffic.policies += 1
        patch = draft.patch(model)
        self.delta_ms, self.parts_ms, self.send_ms = draft.delta_ms, draft.parts_ms, 0.0
        if patch is None:
            self._send_keyframe(manifest, model)
        elif draft.retained:
            self._send_retained(manifest, model, draft.version, patch)
        elif draft.lost or not self._send_step(messages.PolicyDelta.of(manifest, draft.version, patch, draft.number)):
            self._send_from_keyframe(manifest, model)
        self._manifest, self._newest = manifest, (manifest.version, model)

    @property
    def is_due(self) -> bool:
        """The newest policy should be retained: no other has followed it for a while."""
        has_waited = self._clock() - self._retained_at > RETAIN_PERIOD_S
        return has_waited and self._manifest is not None and not self._is_retained

    def settle(self, *, at_once: bool = False) -> None:
        """Call again and again: retains the newest policy if no other has followed it; `at_once` if none will."""
        if self._manifest is not None and not self._is_retained and (at_once or self.is_due):
            self._send_from_keyframe(self._manifest, self._newest[1])

    def _send_keyframe(self, manifest: messages.Manifest, model: bytes) -> None:
        manifest = outgoing_policy.digested(manifest, model)
        size = self._retain(self._keyframe_topic, messages.Policy(manifest, np.frombuffer(model, np.uint8)))
        self._sender.forget(self._delta_topic)  # its base is retained no longer
        self._keyframe, self._from_keyframe = (manifest.version, model), [size]
        self.traffic.keyframes += 1
        self.traffic.keyframe_bytes += size

    def _send_from_keyframe(self, manifest: messages.Manifest, model: bytes) -> None:
        version, base = self._keyframe
        if not self._enabled or len(base) != len(model):
            self._send_keyframe(manifest, model)
        else:
            patch = policy_patch.difference(base, model, kernels.pack)
            self._send_retained(manifest, model, version, patch)

    def _send_retained(
        self, manifest: messages.Manifest, model: bytes, base: int, patch: outgoing_policy.Patch
    ) -> None:
        so_far = self._from_keyframe
        if len(patch) > sum(so_far) / len(so_far):
            self._send_keyframe(manifest, model)
            return
        manifest = outgoing_policy.digested(manifest, model)
        size = self._retain(self._delta_topic, messages.PolicyDelta.of(manifest, base, patch))
        so_far.append(size)
        self._count_delta(size)

    def _send_step(self, message: messages.PolicyDelta) -> bool:
        began = time.perf_counter()
        size = self._sender.tell(self._delta_topic, message)
        self.send_ms += (time.perf_counter() - began) * 1e3
        if size:
            self._is_retained = False
            self._count_delta(size)
        return size > 0

    def _send_part(
        self, order: tuple[int, int], base: int, draft: int, start: int, end: int, patch: outgoing_policy.Patch
    ) -> bool:
        part = messages.PolicyPart(self._name, *order, base, draft, start, end, patch)
        size = self._sender.tell(self._part_topic, part)
        self.traffic.delta_bytes += size
        return size > 0

    def _retain(self, topic: str, message: messages.Message) -> int:
        began = time.perf_counter()
        size = self._sender.retain(topic, message)
        self.send_ms += (time.perf_counter() - began) * 1e3
        self._retained_at, self._is_retained = self._clock(), True
        return size

    def _count_delta(self, size: int) -> None:
        self.traffic.deltas += 1
        self.traffic.delta_bytes += size
