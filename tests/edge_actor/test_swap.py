"""Policy swaps: what is refused and why, what acts, and what is on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker import codec, messages, signing
from edge_actor import env, policy, swap
from tests import conftest
from tests.edge_actor import fake_learner
from tests.edge_actor.models import files

CARTPOLE = env.make("CartPole-v1").spec
MODEL = files.INT8.read_bytes()
SEALER = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
VERIFIER = signing.LearnerVerifier(SEALER.public_key)
TOPIC = "actorq/f/policy/main/keyframe"


def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
    return policy.from_manifest(manifest, model, spec=CARTPOLE, batch=1, runtime="auto", threads=1)


def offered(model: bytes = MODEL, **changes: Any) -> tuple[messages.Policy, bytes]:
    message = fake_learner.policy(model, **({"fingerprint": CARTPOLE.fingerprint} | changes))
    return message, SEALER.seal(TOPIC, codec.encode(message))


class Swap(swap.Swap):
    """With an event that says when a policy is ready."""

    def __init__(self, store: Path, *, wants_slack: bool = False) -> None:
        self.event = threading.Event()
        self.lines: list[str] = []
        super().__init__(
            build, CARTPOLE, store, wants_slack=wants_slack, on_ready=self.event.set, on_log=self.lines.append
        )

    def take_next(self) -> policy.Policy:
        assert self.event.wait(5.0)
        self.event.clear()
        return self.take()


@pytest.fixture
def swapped(tmp_path: Path) -> Iterator[Swap]:
    made = Swap(tmp_path / "policy.sealed")
    made.start(VERIFIER, TOPIC)
    yield made
    made.close()


def test_a_policy_goes_through_all_phases_and_acts(tmp_path: Path) -> None:
    made = Swap(tmp_path / "policy.sealed", wants_slack=True)
    made.start(VERIFIER, TOPIC)
    assert made.phase is swap.Phase.NONE
    made.announce(1, 1)
    assert made.phase is swap.Phase.ANNOUNCED
    made.offer(*offered())
    assert made.phase is swap.Phase.VERIFIED
    assert made.has_work
    made.give_slack()
    assert made.event.wait(5.0)
    assert made.phase is swap.Phase.WARMED_UP
    taken = made.take()
    assert made.phase is swap.Phase.ACTIVE
    assert (taken.epoch, taken.version, taken.delegate) == (1, 1, "XNNPACK")
    assert not made.ready
    made.close()


def test_newer_ones_replace_it_also_of_a_new_epoch(swapped: Swap) -> None:
    for order in ((1, 5), (1, 6), (2, 1)):
        swapped.offer(*offered(epoch=order[0], version=order[1]))
        taken = swapped.take_next()
        assert (taken.epoch, taken.version) == order
    assert swapped.refused == {}


def test_the_same_again_is_no_refusal(swapped: Swap) -> None:
    swapped.offer(*offered())
    swapped.take_next()
    swapped.offer(*offered())
    assert swapped.refused == {}
    assert swapped.phase is swap.Phase.ACTIVE


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("older", {"version": 4}),
        ("older", {"epoch": 1, "version": 99}),
        ("sha256", {"version": 6, "sha256": "0" * 64}),
        ("length", {"version": 6, "length": 17}),
        ("size", {"version": 6, "length": messages.MAX_POLICY_BYTES + 1}),
        ("fingerprint", {"version": 6, "fingerprint": "0123456789abcdef"}),
        ("head", {"version": 6, "head": "gaussian"}),
        ("expired", {"version": 6, "expires_s": 1000.0}),
        ("model", {"version": 6, "model": b"junk" * 100}),
        ("model", {"version": 6, "model": MODEL[:1000]}),
    ],
)
def test_refusals_are_counted_and_the_acting_policy_stays(swapped: Swap, reason: str, changes: dict[str, Any]) -> None:
    swapped.offer(*offered(epoch=2, version=5))
    swapped.take_next()
    swapped.offer(*offered(**({"epoch": 2} | changes)))
    conftest.wait_until(lambda: swapped.refused, "it is refused")
    assert swapped.refused == {reason: 1}
    assert swapped.phase is swap.Phase.REFUSED
    assert not swapped.ready
    swapped.offer(*offered(epoch=2, version=7))  # and the next good one is taken
    assert swapped.take_next().version == 7


def test_other_channels_are_not_ours(swapped: Swap) -> None:
    swapped.offer(*offered(channel="canary"))
    assert swapped.phase is swap.Phase.NONE


def test_a_policy_that_never_expires_or_not_yet_is_good(swapped: Swap) -> None:
    swapped.offer(*offered(expires_s=4e9))
    assert swapped.take_next().version == 1


def test_the_last_good_policy_acts_after_a_restart_without_network(tmp_path: Path) -> None:
    store = tmp_path / "policy.sealed"
    first = Swap(store)
    first.start(VERIFIER, TOPIC)
    for version in (1, 2, 3):
        first.offer(*offered(version=version))
        first.take_next()
    first.close()

    second = Swap(store)
    second.start(VERIFIER, TOPIC)
    assert second.ready
    assert second.take().version == 3
    second.offer(*offered(version=2))
    assert second.refused == {"older": 1}
    second.close()


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + b"x", lambda b: b[:50], lambda b: b""])
def test_a_damaged_store_is_refused(tmp_path: Path, damage: Any) -> None:
    store = tmp_path / "policy.sealed"
    store.write_bytes(damage(offered()[1]))
    made = Swap(store)
    made.start(VERIFIER, TOPIC)
    assert not made.ready
    assert made.refused == {"stored": 1}
    assert "stored policy cannot be used" in made.lines[0]
    made.close()


def test_a_store_of_another_learner_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "policy.sealed"
    stranger = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
    store.write_bytes(stranger.seal(TOPIC, codec.encode(offered()[0])))
    made = Swap(store)
    made.start(VERIFIER, TOPIC)
    assert made.refused == {"stored": 1}
    made.close()


def test_without_slack_it_is_built_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "SLACK_WAIT_S", 0.05)
    made = Swap(tmp_path / "policy.sealed", wants_slack=True)
    made.start(VERIFIER, TOPIC)
    made.offer(*offered())
    assert made.take_next().version == 1
    made.close()


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    made = Swap(blocked / "policy.sealed")
    made.start(VERIFIER, TOPIC)
    made.offer(*offered())
    assert np.isin(made.take_next().act(np.zeros((1, 4), np.float32)), [0, 1])
    conftest.wait_until(lambda: "store" in made.refused or "stored" in made.refused, "counted")
    made.close()
