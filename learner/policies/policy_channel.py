"""Gets policies to actors in few bytes: whole ones, patches on those, and pieces from one policy to the next.

    retained      W0 ──────────── p4 ──────────── p8 ─ ...        W: whole policy, p: patch on it
    streamed       └ s1 ─ s2 ─ s3    └ s5 ─ s6 ─ s7 └ ...         s: pieces on the policy just before

A step from the policy before is the smallest, since little changes between two publishes, but whoever misses one is
lost. So every two seconds, and when nothing follows, the newest policy goes out as a patch on the whole one, which is
retained: an actor that joins, or lost something, needs these two. Where policies come more slowly than that there is
nothing in between.

A small step is one piece. A large policy goes out in several, while the rest of it is still being made and before the
gate has judged it: the actor unpacks and adds them up meanwhile. What makes it a policy is the last one, with its
manifest; without that they are nothing. The retained patch takes several times as long, and waits until an actor acts
on the policy.

Patches grow with distance. Renewing the whole policy when the next patch would be larger than the mean of all that was
retained since, itself included, makes that mean the smallest possible as long as they grow.

Half of a float is noise that nothing packs. Where nothing leaves this machine, coding a large policy of floats costs
more than its bytes: its pieces go as they are, and what is retained is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from broker.contract import messages, topics
from learner.policies import outgoing_policy

RETAIN_PERIOD_S = 2.0
"""The longest that an actor which missed a step stays behind."""
PATIENCE = 2
"""The number of periods that a large policy may wait to be retained; if until then it never was time, it goes whole."""

AHEAD_BYTES = 2_000_000
"""Policies from here on go ahead in pieces."""


_NO_BYTES = np.zeros(0, np.uint8)


class Sender(Protocol):
    """Signs and sends; `Session` is one."""

    @property
    def is_local(self) -> bool:
        """Returns whether nothing that is sent leaves this machine."""

    def retain(self, topic: str, message: messages.Message) -> int:
        """Sends a retained message; returns its size in bytes."""

    def tell(self, topic: str, message: messages.Message) -> int:
        """Sends a message to those who listen; returns its size in bytes, or 0 if it cannot go out now."""

    def forget(self, topic: str) -> None:
        """Takes back what is retained."""


@dataclass(slots=True)
class Traffic:
    """Counts of what was sent: policies sent whole, and as patches or in steps. Bytes include seals."""

    policies: int = 0
    whole: int = 0
    whole_bytes: int = 0
    patches: int = 0
    patch_bytes: int = 0

    @property
    def mean_bytes(self) -> float | None:
        """Bytes per policy; None before the first."""
        return (self.whole_bytes + self.patch_bytes) / self.policies if self.policies else None


class PolicyChannel:
    """Sends the policies of one channel, in the order of their versions within one epoch.

    Args:
        sender: Signs and sends.
        names: Topics of the fleet.
        name: The channel's name.
        enabled: False sends whole policies only.
        word: Bytes of a policy's numbers, as in `policy_patch.difference`.
        clock: Monotonic seconds.

    Attributes:
        traffic: What was sent.
        patch_ms: How long the newest policy waited for its difference.
        pieces_ms: What was done beside the making of the newest policy: its digest, or its pieces.
        send_ms: What encoding, signing and handing to the socket took of the newest policy, but for pieces ahead.
    """

    def __init__(
        self,
        sender: Sender,
        names: topics.Topics,
        name: str,
        *,
        enabled: bool = True,
        word: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = sender
        self._whole_topic, self._patch_topic = names.policy(name), names.policy_patch(name)
        self._piece_topic = names.policy_piece(name)
        self._enabled, self._word = enabled, word
        self._clock = clock
        self._whole = self._newest = (0, b"")
        self._manifest: messages.Manifest | None = None
        self._retained_at = 0.0
        self._is_retained = True
        self._attempts = 0
        self._retained_bytes: list[int] = []  # of the whole policy, and of each patch on it
        self.traffic = Traffic()
        self.patch_ms = self.pieces_ms = self.send_ms = 0.0

    def begin(self, order: messages.Order, beside: futures.Executor | None = None) -> outgoing_policy.OutgoingPolicy:
        """Returns what takes in the next policy's bytes, as they become known, and then goes to `send`.

        Args:
            order: Epoch and version that the policy will have, if it goes out.
            beside: As in `OutgoingPolicy`.
        """
        is_large = self._enabled and len(self._newest[1]) >= AHEAD_BYTES
        is_retained = self._clock() - self._retained_at > RETAIN_PERIOD_S * (PATIENCE if is_large else 1)
        version, base = self._whole if is_retained else self._newest
        if not self._enabled or (is_retained and not self._is_patched(len(base))):
            base = b""
        self._attempts += 1
        first = messages.PolicyPiece(*order, version, self._attempts, 0, 0, None, _NO_BYTES)
        send_piece = self._send_ahead if is_large and not is_retained else None
        quick = self._sender.is_local
        return outgoing_policy.OutgoingPolicy(
            base, first, is_retained=is_retained, send_piece=send_piece, word=self._word, quick=quick, beside=beside
        )

    def send(self, manifest: messages.Manifest, model: bytes, outgoing: outgoing_policy.OutgoingPolicy) -> None:
        """Sends a policy in the way that takes the fewest bytes.

        Args:
            manifest: The policy's, with the digest that `outgoing` gave.
            model: The policy's bytes.
            outgoing: What took them in, since the policy before was sent.
        """
        self.traffic.policies += 1
        patch = outgoing.patch(model)
        self.patch_ms, self.pieces_ms, self.send_ms = outgoing.patch_ms, outgoing.pieces_ms, 0.0
        if patch is None:
            self._send_whole(manifest, model)
        elif outgoing.is_retained:
            self._send_patch(manifest, model, patch)
        elif outgoing.is_lost or not self._send_last(outgoing.last_piece(_changes(manifest), patch)):
            self._retain(manifest, model)
        self._manifest, self._newest = manifest, (manifest.version, model)

    @property
    def is_due(self) -> bool:
        """Returns whether the newest policy should be retained: no other has followed it for a while."""
        has_waited = self._clock() - self._retained_at > RETAIN_PERIOD_S
        return has_waited and self._manifest is not None and not self._is_retained

    def retain_newest(self, *, at_once: bool = False) -> None:
        """Retains the newest policy if no other has followed it for a while; `at_once` if none will."""
        if self._manifest is not None and not self._is_retained and (at_once or self.is_due):
            self._retain(self._manifest, self._newest[1])

    def clear(self) -> None:
        """Takes back what is retained; the next policy goes out whole."""
        self._sender.forget(self._whole_topic)
        self._sender.forget(self._patch_topic)
        self._whole = self._newest = (0, b"")
        self._manifest, self._is_retained, self._retained_bytes = None, True, []

    def _retain(self, manifest: messages.Manifest, model: bytes) -> None:
        base = self._whole[1]
        if not self._enabled or len(base) != len(model) or not self._is_patched(len(model)):
            self._send_whole(manifest, model)
        else:
            self._send_patch(manifest, model, outgoing_policy.difference(base, model, self._word))

    def _is_patched(self, size: int) -> bool:
        """Returns whether a retained policy of this size may be a patch."""
        return self._word == 1 or size < AHEAD_BYTES or not self._sender.is_local

    def _send_whole(self, manifest: messages.Manifest, model: bytes) -> None:
        manifest = outgoing_policy.with_digest(manifest, model)
        size = self._send_retained(self._whole_topic, messages.Policy(manifest, np.frombuffer(model, np.uint8)))
        self._sender.forget(self._patch_topic)  # its base is retained no longer
        self._whole, self._retained_bytes = (manifest.version, model), [size]
        self.traffic.whole += 1
        self.traffic.whole_bytes += size

    def _send_patch(self, manifest: messages.Manifest, model: bytes, patch: outgoing_policy.Patch) -> None:
        so_far = self._retained_bytes
        if len(patch) > sum(so_far) / len(so_far):
            self._send_whole(manifest, model)
            return
        changes = _changes(outgoing_policy.with_digest(manifest, model))
        message = messages.PolicyPatch(*manifest.order, self._whole[0], changes, patch)
        size = self._send_retained(self._patch_topic, message)
        so_far.append(size)
        self._count_delta(size)

    def _send_last(self, piece: messages.PolicyPiece) -> bool:
        began = time.perf_counter()
        size = self._sender.tell(self._piece_topic, piece)
        self.send_ms += (time.perf_counter() - began) * 1e3
        if size:
            self._is_retained = False
            self._count_delta(size)
        return size > 0

    def _send_ahead(self, piece: messages.PolicyPiece) -> bool:
        size = self._sender.tell(self._piece_topic, piece)
        self.traffic.patch_bytes += size
        return size > 0

    def _send_retained(self, topic: str, message: messages.Message) -> int:
        began = time.perf_counter()
        size = self._sender.retain(topic, message)
        self.send_ms += (time.perf_counter() - began) * 1e3
        self._retained_at, self._is_retained = self._clock(), True
        return size

    def _count_delta(self, size: int) -> None:
        self.traffic.patches += 1
        self.traffic.patch_bytes += size


def _changes(manifest: messages.Manifest) -> messages.ManifestChanges:
    """Returns what a policy's message says of its manifest; its base says the rest."""
    return messages.ManifestChanges(manifest.sha256 or None, manifest.created_s, manifest.expires_s)
