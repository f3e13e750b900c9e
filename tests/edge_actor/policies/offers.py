"""Signed policies, whole, as patches and in pieces, and a receiver that takes them without a network."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import codec, messages, signing, topics
from edge_actor.environment import env
from edge_actor.policies import assembly, policy, policy_store, receiver
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner

CARTPOLE = env.make("CartPole-v1").spec
MODEL = files.INT8.read_bytes()
SEALER = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
VERIFIER = signing.LearnerVerifier(SEALER.public_key)
NAMES = topics.Topics("f")
Offer = tuple[assembly.Message, bytes]


def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
    return policy.from_manifest(manifest, model, spec=CARTPOLE, batch=1, runtime="auto", threads=1)


def variant(version: int) -> bytes:
    """A sound model that differs from every other version's: another weight."""
    data = bytearray(MODEL)
    data[len(data) // 5] = version  # amid the weights
    return bytes(data)


def sealed(message: assembly.Message) -> Offer:
    topics_by_kind = {
        messages.Policy: NAMES.policy("main"),
        messages.PolicyPatch: NAMES.policy_patch("main"),
        messages.PolicyPiece: NAMES.policy_piece("main"),
    }
    return message, SEALER.seal(topics_by_kind[type(message)], codec.encode(message))


def whole(version: int = 1, model: bytes | None = None, **changes: Any) -> Offer:
    fields: dict[str, Any] = {"fingerprint": CARTPOLE.fingerprint, "version": version} | changes
    return sealed(fake_learner.policy(variant(version) if model is None else model, **fields))


def patch(base: int, version: int, **changes: Any) -> Offer:
    fields: dict[str, Any] = {"fingerprint": CARTPOLE.fingerprint, "version": version} | changes
    return sealed(fake_learner.patch(variant(base), variant(version), base_version=base, **fields))


def step(base: int, version: int, **changes: Any) -> Offer:
    fields: dict[str, Any] = {"fingerprint": CARTPOLE.fingerprint, "version": version} | changes
    return sealed(fake_learner.step(variant(base), variant(version), base_version=base, **fields))


class Receiver(receiver.PolicyReceiver):
    """With an event that says when something can be built."""

    def __init__(self, store: Path, *, patience_s: float = 1.0) -> None:
        self.event = threading.Event()
        super().__init__(
            build,
            CARTPOLE,
            policy_store.PolicyStore(store, VERIFIER.public_key),
            patience_s=patience_s,
            on_ready=self.event.set,
        )

    @property
    def held(self) -> assembly.Assembly:
        return self._assembly

    def acts(self) -> int | None:
        """Builds as the acting loop does; the version that acts then, or None if nothing was to be built."""
        built = self.newest() if self.has_work else None
        return built.order.version if built else None
