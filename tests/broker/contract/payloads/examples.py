"""One message of every kind, and its bytes: in golden/ as committed, in golden_previous/ of the schema before.

`python -m tests.broker.contract.payloads.examples` writes golden/ anew: only together with a new SCHEMA_VERSION. Then
it first moves what is there to golden_previous/. Schema 11 is as the commit before the change wrote it:
`git show 68c8c0d^:tests/broker/contract/golden/KIND.hex`.
"""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import codec, messages, signing, specs

GOLDEN = Path(__file__).parent / "golden"
PREVIOUS = Path(__file__).parent / "golden_previous"
TOPIC = "actorq/lab/actor/pi-kitchen/receipt"
LEARNER = signing.LearnerSealer(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
ACTOR = signing.ActorMac(bytes(range(32, 64)))

MANIFEST = messages.Manifest(
    epoch=3,
    version=41,
    channel="main",
    length=6,
    sha256="bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721",
    fingerprint="0123456789abcdef",
    head="q_values",
    precision="int8",
    created_s=1800000000.25,
)
CHANGES = messages.ManifestChanges(MANIFEST.sha256, MANIFEST.created_s, MANIFEST.expires_s)
CARTPOLE = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2))

EXAMPLES: dict[str, messages.Message] = {
    "learner_state": messages.LearnerState(
        online=True,
        session="8f0e",
        epoch=3,
        heartbeat=17,
        env_id="CartPole-v1",
        fingerprint="0123456789abcdef",
        version=41,
    ),
    "policy": messages.Policy(MANIFEST, np.frombuffer(b"abcdef", np.uint8)),
    "policy_patch": messages.PolicyPatch(3, 41, 40, CHANGES, np.frombuffer(b"\x00\xff\x01", np.uint8)),
    "policy_piece": messages.PolicyPiece(3, 41, 40, 7, 2, 6, None, np.frombuffer(b"\x01\x00\xff", np.uint8)),
    "actor_state": messages.ActorState(
        online=True,
        session="77aa",
        boot=2,
        heartbeat=5,
        birth=messages.Birth(
            env_id="CartPole-v1",
            spec=CARTPOLE,
            n_envs=16,
            board="Raspberry Pi 5",
            python="3.11.2",
            runtime="ai-edge-litert 2.3.0",
            delegate="xnnpack",
            rate_hz=0.0,
        ),
        vitals=messages.Vitals(
            steps=1000,
            return_mean=37.5,
            temperature_c=None,
            refused={"signature": 2},
            stages={"environment": (1000, 0.25)},
            cpu_s=1.5,
            power_source="INA226 hwmon3",
            energy_j=12.5,
            energy_s=4.0,
            board_id="5ab1e0c0ffee1234",
            created_s=1.75e9,
        ),
    ),
    "assignment": messages.Assignment(
        session="77aa",
        epoch=3,
        boot=2,
        channel="main",
        slot=1,
        epsilon_start=1.0,
        epsilon_end=0.05,
        epsilon_decay_steps=10_000,
        epsilon_offset=250,
        seed=7,
        steps_granted=4096,
    ),
    # Two segments, of 2 and 1 actions: 3 and 2 observations.
    "experience": messages.Experience(
        boot=2,
        seq=9,
        oldest=8,
        step=1000,
        fingerprint=CARTPOLE.fingerprint,
        assigned_epoch=3,
        epoch=3,
        version=41,
        draw=70_000,
        length=np.array([2, 1], np.int32),
        env_index=np.array([0, 3], np.int32),
        row=np.array([0, 5], np.int32),
        terminated=np.array([1, 0], np.uint8),
        truncated=np.array([0, 1], np.uint8),
        episode_return=np.array([12.0, 500.0], np.float32),
        episode_length=np.array([12, 500], np.int32),
        observation=np.arange(20, dtype=np.float32).reshape(5, 4),
        action=np.array([0, 1, 1], np.int32),
        reward=np.array([1.0, 1.0, -0.5], np.float32),
    ),
    "receipt": messages.Receipt("ledger1", 2, 9),
    "command": messages.Command("c1", "evaluate", 2, 20, 7, MANIFEST, np.frombuffer(b"abcdef", np.uint8)),
    "report": messages.Report(
        "c1", "evaluate", "", {"delegate": "xnnpack"}, {"wall_s": 1.5}, np.array([500.0, 499.0], np.float32)
    ),
    "orders": messages.Orders(
        (
            messages.Instruction(1800000000000, "pause", 1800000060.5),
            messages.Instruction(1800000000001, "set", 1800000060.5, {"rate_hz": "50", "env_kwargs.wind": "true"}),
        )
    ),
    "answer": messages.Answer(1800000000000, "pause", "done", "paused", ("a line",)),
}


def rendered() -> dict[str, bytes]:
    """Bytes of every example, and of a receipt in both envelopes."""
    encoded = {kind: codec.encode(message) for kind, message in EXAMPLES.items()}
    sealed = {
        "sealed_by_learner": LEARNER.seal(TOPIC, encoded["receipt"]),
        "sealed_by_actor": ACTOR.seal(TOPIC, encoded["receipt"]),
    }
    return encoded | sealed


def golden(name: str, directory: Path = GOLDEN) -> bytes:
    """Committed bytes."""
    return bytes.fromhex((directory / f"{name}.hex").read_text())


if __name__ == "__main__":
    if int(codec.metadata(golden("receipt"))["schema"]) == messages.SCHEMA_VERSION - 1:
        shutil.rmtree(PREVIOUS)
        GOLDEN.rename(PREVIOUS)
    GOLDEN.mkdir(exist_ok=True)
    for name, payload in rendered().items():
        (GOLDEN / f"{name}.hex").write_text(textwrap.fill(payload.hex(), 100) + "\n")
