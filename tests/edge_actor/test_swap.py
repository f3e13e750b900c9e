"""Policy swaps: what is refused and why, what acts, and what is on disk."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker import codec, messages, signing, topics
from edge_actor import clock, env, interpreter, policy, policy_store, swap
from tests import conftest
from tests.edge_actor import fake_learner
from tests.edge_actor.models import files

CARTPOLE = env.make("CartPole-v1").spec
MODEL = files.INT8.read_bytes()
SEALER = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
VERIFIER = signing.LearnerVerifier(SEALER.public_key)
NAMES = topics.Topics("f")
Offer = tuple[messages.Policy | messages.PolicyDelta, bytes]


def build(manifest: messages.Manifest, model: bytes) -> policy.Policy:
    return policy.from_manifest(manifest, model, spec=CARTPOLE, batch=1, runtime="auto", threads=1)


def variant(version: int) -> bytes:
    """A sound model that differs from every other version's: another weight."""
    data = bytearray(MODEL)
    data[len(data) // 5] = version  # amid the weights
    return bytes(data)


def sealed(message: messages.Policy | messages.PolicyDelta) -> Offer:
    topic = NAMES.keyframe("main") if isinstance(message, messages.Policy) else NAMES.delta("main")
    return message, SEALER.seal(topic, codec.encode(message))


def keyframe(version: int = 1, model: bytes | None = None, **changes: Any) -> Offer:
    fields = {"fingerprint": CARTPOLE.fingerprint, "version": version} | changes
    return sealed(fake_learner.policy(variant(version) if model is None else model, **fields))


def delta(base: int, version: int, **changes: Any) -> Offer:
    fields = {"fingerprint": CARTPOLE.fingerprint, "version": version} | changes
    return sealed(fake_learner.policy_delta(variant(base), variant(version), base_version=base, **fields))


class Swap(swap.Swap):
    """With an event that says when something can be built."""

    def __init__(self, store: Path, *, patience_s: float = 1.0) -> None:
        self.event = threading.Event()
        self.lines: list[str] = []
        super().__init__(
            build,
            CARTPOLE,
            policy_store.PolicyStore(store, VERIFIER.public_key),
            patience_s=patience_s,
            on_ready=self.event.set,
            on_log=self.lines.append,
        )

    def acts(self) -> int | None:
        """Builds as the acting loop does; the version that acts then, or None if nothing was to be built."""
        built = self.build() if self.has_work else None
        return built.version if built else None


@pytest.fixture(autouse=True)
def synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now_s", time.time)


@pytest.fixture
def swapped(tmp_path: Path) -> Iterator[Swap]:
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    yield made
    made.close()


def test_a_policy_goes_through_all_phases_and_acts(swapped: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    assert swapped.phase is swap.Phase.NONE
    swapped.announce(1, 1)
    assert swapped.phase is swap.Phase.ANNOUNCED
    swapped.offer(*keyframe())
    assert swapped.phase is swap.Phase.VERIFIED
    assert swapped.has_work
    seen: list[swap.Phase] = []
    monkeypatch.setattr(swapped, "_build", lambda *what: (seen.append(swapped.phase), build(*what))[1])
    taken = swapped.build()
    assert taken is not None
    assert seen == [swap.Phase.BUILDING]
    assert swapped.phase is swap.Phase.ACTIVE
    kernels = "XNNPACK" if interpreter.find().name == "ai-edge-litert" else "built-in"
    assert (taken.epoch, taken.version, taken.delegate) == (1, 1, kernels)
    assert not swapped.has_work


def test_what_is_large_is_opened_on_a_thread_of_its_own(swapped: Swap) -> None:
    threads: list[str] = []

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        threads.append(threading.current_thread().name)
        if payload.startswith(b"bug"):
            raise ZeroDivisionError
        swapped.offer(*keyframe())

    put = swapped.queued(handle)
    put("topic", b"bug".ljust(swap.AT_ONCE_BYTES + 1), False)
    put("topic", b"good".ljust(swap.AT_ONCE_BYTES + 1), False)
    assert swapped.event.wait(5.0), "a bug in one message does not end the thread"
    assert threads == ["policy-checker"] * 2
    assert swapped.refused == {"fault": 1}
    assert swapped.acts() == 1


def test_what_is_small_is_opened_at_once_but_never_before_what_came_earlier(swapped: Swap) -> None:
    order: list[bytes] = []
    may_go_on = threading.Event()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        if len(payload) > 1:
            assert may_go_on.wait(5.0)
        order.append(payload[:1])

    put = swapped.queued(handle)
    put("topic", b"a", False)
    assert order == [b"a"]
    put("topic", b"b".ljust(swap.AT_ONCE_BYTES + 1), False)
    put("topic", b"c", False)
    assert order == [b"a"]
    may_go_on.set()
    conftest.wait_until(lambda: order == [b"a", b"b", b"c"], "in order")


def test_newer_ones_replace_it_also_of_a_new_epoch(swapped: Swap) -> None:
    for order in ((1, 5), (1, 6), (2, 1)):
        swapped.offer(*keyframe(epoch=order[0], version=order[1]))
        taken = swapped.build()
        assert taken is not None
        assert (taken.epoch, taken.version) == order
    assert swapped.refused == {}


def test_what_was_overtaken_is_never_built_and_waiting_is_bounded(tmp_path: Path) -> None:
    made = Swap(tmp_path, patience_s=0.05)
    made.offer(*keyframe(1))
    assert not made.overdue
    for version in range(2, 6):
        made.offer(*delta(1, version))
    conftest.wait_until(lambda: made.overdue, "it has waited, though newer ones came")
    assert made.acts() == 5
    assert made.build() is None
    assert not made.overdue


def test_the_same_again_is_no_refusal(swapped: Swap) -> None:
    for _ in range(2):
        swapped.offer(*keyframe(1))
        swapped.offer(*delta(1, 2))
        swapped.acts()
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
    swapped.offer(*keyframe(epoch=2, version=5))
    assert swapped.acts() == 5
    swapped.offer(*keyframe(**({"epoch": 2} | changes)))
    assert swapped.acts() is None
    assert swapped.refused == {reason: 1}
    assert swapped.phase is swap.Phase.REFUSED
    swapped.offer(*keyframe(epoch=2, version=7))  # and the next good one is taken
    assert swapped.acts() == 7


def test_other_channels_are_not_ours(swapped: Swap) -> None:
    swapped.offer(*keyframe(channel="canary"))
    assert swapped.phase is swap.Phase.NONE


def test_a_policy_that_never_expires_or_not_yet_is_good(swapped: Swap) -> None:
    swapped.offer(*keyframe(expires_s=4e9))
    assert swapped.acts() == 1


def test_nothing_expires_where_nobody_knows_the_time(
    tmp_path: Path, swapped: Swap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Pi that boots without a network believes in some year, and must act on all the same."""
    monkeypatch.setattr(clock, "now_s", lambda: None)
    swapped.offer(*keyframe(expires_s=1000.0))
    assert swapped.acts() == 1
    swapped.close()
    again = Swap(tmp_path)
    again.start(VERIFIER, NAMES)
    assert again.acts() == 1
    again.close()
    monkeypatch.setattr(clock, "now_s", time.time)
    third = Swap(tmp_path)
    third.start(VERIFIER, NAMES)
    assert third.acts() is None
    assert third.refused == {"expired": 1}
    third.close()


# -- deltas -----------------------------------------------------------------------------------------------------------


def test_a_chain_of_deltas_from_the_policy_before(swapped: Swap) -> None:
    swapped.offer(*keyframe(1))
    for version in range(2, 9):
        swapped.offer(*delta(version - 1, version))
        if version % 3 == 0:
            assert swapped.acts() == version
    newest = swapped._held.newest
    assert newest is not None
    assert newest.model == variant(8), "those that were never built are bases all the same"
    assert swapped.refused == {}


@pytest.mark.parametrize("delta_first", [False, True])
def test_a_late_joiner_needs_the_keyframe_and_one_delta_in_any_order(swapped: Swap, delta_first: bool) -> None:
    arrivals = [keyframe(10), delta(10, 17)]
    for offer in reversed(arrivals) if delta_first else arrivals:
        swapped.offer(*offer)
    assert swapped.acts() == 17
    assert swapped.refused == ({"base": 1} if delta_first else {})


def test_lost_deltas_are_mended_by_the_next_one_from_the_keyframe(swapped: Swap) -> None:
    swapped.offer(*keyframe(1))
    swapped.offer(*delta(1, 2))
    assert swapped.acts() == 2
    swapped.offer(*delta(3, 4))  # 3 is lost, and 4 cannot be made without it
    assert swapped.acts() is None
    assert swapped.refused == {"base": 1}
    assert swapped.phase is swap.Phase.ANNOUNCED
    assert swapped.announced == (1, 4)
    swapped.offer(*delta(1, 6))
    assert swapped.acts() == 6
    swapped.offer(*delta(6, 7))
    assert swapped.acts() == 7


def test_a_delta_for_an_unknown_keyframe_waits_for_it(swapped: Swap) -> None:
    swapped.offer(*keyframe(1))
    assert swapped.acts() == 1
    swapped.offer(*delta(20, 21))
    assert swapped.acts() is None
    swapped.offer(*keyframe(20))
    assert swapped.acts() == 21
    assert swapped.refused == {"base": 1}
    swapped.offer(*delta(20, 22, epoch=2))
    assert swapped.acts() is None, "the base belongs to the epoch"


def damaged(version: int, patch: bytes) -> Offer:
    """A genuine, signed delta whose patch is not what it should be."""
    message = delta(1, version)[0]
    assert isinstance(message, messages.PolicyDelta)
    return sealed(dataclasses.replace(message, patch=np.frombuffer(patch, np.uint8)))


@pytest.mark.parametrize(
    ("reason", "offer"),
    [
        ("patch", damaged(3, b"not zstd")),
        ("patch", damaged(3, b"")),
        ("patch", damaged(3, delta(1, 3)[0].patch.tobytes()[:-3])),  # type: ignore[union-attr]
        ("patch", damaged(3, fake_learner.delta.difference(b"short", b"patch"))),
        ("sha256", damaged(3, delta(1, 4)[0].patch.tobytes())),  # type: ignore[union-attr]
        ("length", delta(1, 3, length=17)),
        ("size", delta(1, 3, length=messages.MAX_POLICY_BYTES + 1)),
        ("fingerprint", delta(1, 3, fingerprint="0123456789abcdef")),
    ],
)
def test_a_corrupted_delta_is_refused_and_the_next_one_works(swapped: Swap, reason: str, offer: Offer) -> None:
    swapped.offer(*keyframe(1))
    assert swapped.acts() == 1
    swapped.offer(*offer)
    assert swapped.acts() is None
    assert swapped.refused == {reason: 1}
    assert swapped.phase is swap.Phase.REFUSED
    swapped.offer(*delta(1, 5))
    assert swapped.acts() == 5


def test_after_a_reconnect_the_older_keyframe_and_delta_are_no_replays(swapped: Swap) -> None:
    swapped.offer(*keyframe(10))
    swapped.offer(*delta(10, 12))
    for version in (13, 14):
        swapped.offer(*delta(version - 1, version))
    assert swapped.acts() == 14
    swapped.offer(*keyframe(10))  # what the broker retained
    swapped.offer(*delta(10, 12))
    assert swapped.refused == {}
    assert swapped.acts() is None
    assert swapped.phase is swap.Phase.ACTIVE
    swapped.offer(*delta(10, 15))
    assert swapped.acts() == 15


def test_an_older_keyframe_that_is_new_here_becomes_a_base(swapped: Swap) -> None:
    swapped.offer(*keyframe(10))
    swapped.offer(*delta(10, 17))
    assert swapped.acts() == 17
    swapped.offer(*keyframe(15))
    assert swapped.refused == {}
    assert swapped.acts() is None, "17 acts on"
    swapped.offer(*delta(15, 18))
    assert swapped.acts() == 18


def test_replays_of_genuine_old_messages_are_refused(swapped: Swap) -> None:
    old = [keyframe(1), delta(1, 2), delta(2, 3), delta(1, 4)]
    for offer in old:
        swapped.offer(*offer)
    swapped.offer(*keyframe(10))
    swapped.offer(*delta(10, 11))
    assert swapped.acts() == 11
    for offer in old:
        swapped.offer(*offer)
    assert swapped.refused == {"older": 4}
    assert swapped.acts() is None
    swapped.offer(*delta(11, 12))
    assert swapped.acts() == 12


# -- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offers", "stored"),
    [
        ([keyframe(1), keyframe(3)], 3),
        ([keyframe(1), delta(1, 2), delta(1, 3)], 3),
        ([keyframe(1), delta(1, 2), delta(2, 3)], 2),  # 3 cannot be made from what is sealed, 2 can
        ([keyframe(1), delta(1, 2), delta(2, 3), delta(1, 3)], 3),  # now it can
        ([keyframe(1), delta(1, 2), keyframe(4)], 4),
        ([keyframe(1), delta(1, 2), delta(2, 4), keyframe(4)], 4),
    ],
)
def test_the_last_good_policy_acts_after_a_restart_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offers: list[Offer], stored: int
) -> None:
    monkeypatch.setattr(swap, "STORE_PERIOD_S", 0.0)
    first = Swap(tmp_path)
    first.start(VERIFIER, NAMES)
    for offer in offers:
        first.offer(*offer)
        first.acts()
    first.close()

    second = Swap(tmp_path)
    second.start(VERIFIER, NAMES)
    assert second.acts() == stored
    assert second.refused == {}
    second.offer(*keyframe(0))
    assert second.refused == {"older": 1}
    second.close()


def test_between_two_stores_only_closing_writes(tmp_path: Path) -> None:
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    made.offer(*keyframe(1))
    assert made.acts() == 1
    conftest.wait_until((tmp_path / "keyframe.sealed").exists, "the first one is stored at once")
    made.offer(*delta(1, 2))
    assert made.acts() == 2
    assert not (tmp_path / "delta.sealed").exists()
    made.close()
    assert (tmp_path / "delta.sealed").read_bytes() == delta_bytes(made)


def delta_bytes(made: Swap) -> bytes:
    newest = made._held.newest
    assert newest is not None
    return newest.sources[1]


@pytest.mark.parametrize("lost", ["keyframe.sealed", "delta.sealed"])
def test_a_rollback_is_refused_though_the_stored_policy_is_gone(tmp_path: Path, lost: str) -> None:
    first = Swap(tmp_path)
    first.start(VERIFIER, NAMES)
    for offer in (keyframe(5), delta(5, 9)):
        first.offer(*offer)
        first.acts()
    first.close()
    (tmp_path / lost).unlink()

    second = Swap(tmp_path)
    second.start(VERIFIER, NAMES)
    kept = second.acts()
    assert kept == (None if lost.startswith("keyframe") else 5), "what is on this disk may act, lest it stands still"
    for replay in (keyframe(6), delta(5, 8), keyframe(5), keyframe(99, epoch=0)):
        second.offer(*replay)
        assert second.acts() is None, "older than what acted in the life before"
    assert second.refused["older"] >= 2
    second.offer(*delta(5, 9))
    if lost.startswith("keyframe"):
        second.offer(*keyframe(9))
    assert second.acts() == 9, "as new as that one is new enough"
    second.close()


def test_orders_under_another_key_mean_nothing(tmp_path: Path) -> None:
    """A fleet that began anew begins with epoch 1, and nobody can replay what the new key did not sign."""
    policy_store.PolicyStore(tmp_path, b"o" * 32).write((b"sealed by an old key",), (7, 100))
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    assert made.refused == {"stored": 1}
    made.offer(*keyframe(1))
    assert made.acts() == 1
    made.close()


@pytest.mark.parametrize("junk", [b"{", b"[]", b'{"epoch": "x"}', b"\xff"])
def test_a_damaged_order_is_said_and_stops_nothing(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "newest.json").write_bytes(junk)
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    assert made.refused == ({} if junk == b"[]" else {"stored": 1})
    made.offer(*keyframe(1))
    assert made.acts() == 1
    made.close()


def test_what_nobody_has_time_to_open_is_bounded(swapped: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless data: a broker sends junk of 40 MB faster than a Pi computes digests."""
    monkeypatch.setattr(swap, "QUEUE_LIMIT_BYTES", 3_000_000)
    may_go_on, opened = threading.Event(), list[bytes]()

    def handle(topic: str, payload: bytes, retained: bool) -> None:
        assert may_go_on.wait(5.0)
        opened.append(payload[:2])

    put = swapped.queued(handle)
    for index in range(20):
        put("topic", f"{index:02}".encode() + bytes(1_000_000), False)
        assert swapped._queued_bytes <= 3_000_000
    may_go_on.set()
    conftest.wait_until(lambda: opened[-1:] == [b"19"], "the newest one is opened")
    assert swapped.refused == {"flood": 20 - len(opened)}
    assert len(opened) <= 4
    assert swapped._queued_bytes == 0


@pytest.mark.parametrize("damage", [lambda b: b[:-1] + b"x", lambda b: b[:50], lambda b: b"x"])
def test_a_damaged_store_is_refused(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "keyframe.sealed").write_bytes(damage(keyframe()[1]))
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    assert not made.has_work
    assert made.refused == {"stored": 1}
    assert "stored policy cannot be used" in made.lines[0]
    made.close()


def test_a_store_of_another_learner_is_refused(tmp_path: Path) -> None:
    stranger = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
    (tmp_path / "keyframe.sealed").write_bytes(stranger.seal(NAMES.keyframe("main"), codec.encode(keyframe()[0])))
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    assert made.refused == {"stored": 1}
    made.close()


def test_a_stored_delta_of_another_keyframe_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "keyframe.sealed").write_bytes(keyframe(7)[1])
    (tmp_path / "delta.sealed").write_bytes(delta(1, 6)[1])
    made = Swap(tmp_path)
    made.start(VERIFIER, NAMES)
    assert made.acts() == 7
    made.close()


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    made = Swap(blocked)
    made.start(VERIFIER, NAMES)
    made.offer(*keyframe())
    acting = made.build()
    assert acting is not None
    assert np.isin(acting.act(np.zeros((1, 4), np.float32)), [0, 1])
    conftest.wait_until(lambda: "store" in made.refused or "stored" in made.refused, "counted")
    made.close()
