"""Policies go out whole, as patches or in pieces; an actor makes the same bytes of them, whatever it misses."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable
from concurrent import futures

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import codec, errors, messages, specs, topics
from broker.contract.policies import policy_patch
from edge_actor.policies import assembly
from learner.policies import outgoing_policy, patch_loops, policy_channel

SPEC = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2))
NAMES = topics.Topics("f")
WHOLE, PATCH, PIECE_TOPIC = NAMES.policy("main"), NAMES.policy_patch("main"), NAMES.policy_piece("main")


PIECE = 1 << 20
FIRST = messages.PolicyPiece(1, 2, 1, 1, 0, 0, None, np.zeros(0, np.uint8))
LARGE = 5 * PIECE // 2


class Wire:
    """A broker, a clock, and whoever listens."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.up = True
        self.is_local = False
        self.sent: list[tuple[str, bool, messages.Message]] = []
        self.retained: dict[str, messages.Message] = {}
        self.listening: list[Callable[[messages.Message], None]] = []

    def retain(self, topic: str, message: messages.Message) -> int:
        self.retained[topic] = message
        return self._send(topic, True, message)

    def tell(self, topic: str, message: messages.Message) -> int:
        return self._send(topic, False, message) if self.up else 0

    def forget(self, topic: str) -> None:
        self.retained.pop(topic, None)

    def _send(self, topic: str, retained: bool, message: messages.Message) -> int:
        self.sent.append((topic, retained, message))
        for hear in self.listening:
            hear(message)
        return len(codec.encode(message))

    def kinds(self) -> str:
        """K for a whole policy, a for a patch, s for a last piece, p for one ahead of it; in the order of sending."""
        return "".join(self._kind(*sent) for sent in self.sent)

    def _kind(self, topic: str, retained: bool, message: messages.Message) -> str:
        assert retained == (topic != PIECE_TOPIC)
        if isinstance(message, messages.PolicyPiece):
            return "p" if message.changes is None else "s"
        return {WHOLE: "K", PATCH: "a"}[topic]


class Actor:
    """Hears messages and keeps the newest policy."""

    def __init__(self) -> None:
        self.held = assembly.Assembly(SPEC)
        self.missed = 0

    def hear(self, message: messages.Message) -> None:
        try:
            assert isinstance(message, assembly.Message)
            self.held.add(message, b"", 0.0)
        except errors.PolicyError as error:
            if error.reason not in ("base", "pieces"):
                raise
            self.missed += 1
        if (waiting := self.held.pop_waiting()) is not None:
            self.hear(waiting[0])

    @property
    def model(self) -> bytes:
        assert self.held.newest is not None
        return self.held.newest.model


class Learner:
    """Weights that walk at random, published as they are."""

    def __init__(self, wire: Wire, *, enabled: bool = True, size: int = 20_000, word: int = 1) -> None:
        self.wire = wire
        self.channel = policy_channel.PolicyChannel(
            wire, NAMES, "main", enabled=enabled, word=word, clock=lambda: wire.now_s
        )
        self.random = np.random.default_rng(0)
        self.weights: NDArray[np.float64] = self.random.normal(0, 30, size)
        self.version = 0
        self.model = b""

    def step(self, deviation: float = 1.0, after_s: float = 0.1) -> None:
        """Publishes after `after_s`, the weights having walked by so many levels."""
        self.wire.now_s += after_s
        self.weights += self.random.normal(0, deviation, len(self.weights))
        self.send(np.clip(np.rint(self.weights), -127, 127).astype(np.int8).tobytes())

    def send(self, model: bytes) -> None:
        self.version += 1
        self.model = model
        pieces = [model[a : a + PIECE] for a in range(0, len(model), PIECE)]
        outgoing = self.channel.begin(messages.Order(1, self.version))
        for piece in pieces:
            outgoing.add(piece)
        sha256 = outgoing.sha256()
        assert sha256 in ("", hashlib.sha256(model).hexdigest())
        manifest = messages.Manifest(
            1, self.version, "main", len(model), sha256, SPEC.fingerprint, "q_values", "int8", 0.0
        )
        self.channel.send(manifest, model, outgoing)


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_quick_policies_are_steps_from_one_to_the_next_and_sometimes_patches_on_the_whole_one(wire: Wire) -> None:
    learner = Learner(wire)
    for _ in range(45):
        learner.step()
    assert wire.kinds() == "K" + 20 * "s" + "a" + 20 * "s" + "a" + 2 * "s"
    bases = [m.base for _, _, m in wire.sent if isinstance(m, messages.PolicyPatch | messages.PolicyPiece)]
    assert bases == [*range(1, 21), 1, *range(22, 42), 1, *range(43, 45)]


def test_slow_policies_are_patches_on_the_whole_one_until_a_new_one_pays(wire: Wire) -> None:
    learner = Learner(wire)
    for _ in range(40):
        learner.step(deviation=3.0, after_s=10.0)
    assert set(wire.kinds()) == {"K", "a"}
    assert 3 <= wire.kinds().count("K") <= 10
    assert wire.kinds().startswith("Kaa")


def test_no_period_of_whole_policies_would_have_been_cheaper(wire: Wire) -> None:
    """The rule against every fixed period, on the same walk: within a few per cent of the best."""
    learner = Learner(wire)
    for _ in range(120):
        learner.step(deviation=2.0, after_s=10.0)
    mean = learner.channel.traffic.mean_bytes
    assert mean is not None

    models = list(itertools.islice(_walk(2.0), 120))
    fixed = []
    for period in (1, 2, 3, 5, 8, 12, 20, 40, 120):
        sizes = []
        for index, model in enumerate(models):
            base = models[index - index % period]
            sizes.append(len(model) if base is model else len(policy_patch.difference(base, model)))
        fixed.append(np.mean(sizes) + 410)  # manifest and header
    assert mean < 1.03 * min(fixed) < 0.9 * fixed[0]


def _walk(deviation: float) -> itertools.chain[bytes]:
    wire = Wire()
    learner = Learner(wire, enabled=False)

    def one() -> bytes:
        learner.step(deviation)
        return learner.model

    return itertools.chain(one() for _ in itertools.count())


def test_everyone_who_listens_has_every_policy(wire: Wire) -> None:
    learner, actor = Learner(wire), Actor()
    wire.listening.append(actor.hear)
    for _ in range(100):
        learner.step(deviation=3.0)
        assert actor.model == learner.model
    assert actor.missed == 0


@pytest.mark.parametrize("after", [1, 2, 21, 25, 60])
def test_a_late_joiner_is_two_seconds_behind_at_most(wire: Wire, after: int) -> None:
    learner, late = Learner(wire), Actor()
    for _ in range(after):
        learner.step()
    for topic in (PATCH, WHOLE):
        if topic in wire.retained:
            late.hear(wire.retained[topic])
    wire.listening.append(late.hear)
    behind = learner.version - late.held.best[1]
    assert 0 <= behind <= 20
    for _ in range(21):
        learner.step()
    assert late.model == learner.model


def test_when_nothing_follows_the_newest_policy_is_retained(wire: Wire) -> None:
    learner, late = Learner(wire), Actor()
    for _ in range(5):
        learner.step()
    learner.channel.retain_newest()
    assert wire.kinds() == "Kssss", "another may follow yet"
    wire.now_s += policy_channel.RETAIN_PERIOD_S
    learner.channel.retain_newest()
    learner.channel.retain_newest()
    assert wire.kinds() == "Kssssa"
    learner.step(after_s=0.1)
    learner.channel.retain_newest(at_once=True)
    assert wire.kinds() == "Kssssasa"
    for message in wire.retained.values():
        late.hear(message)
    assert late.model == learner.model


def test_what_cannot_go_out_now_is_retained_instead(wire: Wire) -> None:
    learner = Learner(wire)
    learner.step()
    wire.up = False
    learner.step()
    assert wire.kinds() == "Ka"
    assert learner.channel.traffic.patches == 1


def test_another_layout_goes_out_whole_and_takes_the_old_patch_back(wire: Wire) -> None:
    learner, actor = Learner(wire), Actor()
    wire.listening.append(actor.hear)
    learner.step()
    learner.step(after_s=10.0)
    assert PATCH in wire.retained
    learner.send(b"another layout")
    assert wire.kinds() == "KaK"
    assert PATCH not in wire.retained
    assert actor.model == b"another layout"


def test_a_rollback_is_one_more_policy(wire: Wire) -> None:
    learner, actor = Learner(wire), Actor()
    wire.listening.append(actor.hear)
    learner.step()
    good = learner.model
    for _ in range(3):
        learner.step()
    learner.send(good)
    assert actor.model == good
    assert actor.held.best == (1, 5)


def test_without_deltas_every_policy_goes_out_whole(wire: Wire) -> None:
    learner = Learner(wire, enabled=False)
    for _ in range(5):
        learner.step()
    assert wire.kinds() == "KKKKK"


def test_every_byte_is_counted(wire: Wire) -> None:
    learner = Learner(wire)
    for _ in range(30):
        learner.step()
    learner.channel.retain_newest(at_once=True)
    traffic = learner.channel.traffic
    sizes = {"K": 0, "s": 0, "a": 0}
    for kind, (_, _, message) in zip(wire.kinds(), wire.sent, strict=True):
        sizes[kind] += len(codec.encode(message))
    assert (traffic.policies, traffic.whole, traffic.patches) == (30, 1, 30)
    assert (traffic.whole_bytes, traffic.patch_bytes) == (sizes["K"], sizes["s"] + sizes["a"])
    assert traffic.mean_bytes == (sizes["K"] + sizes["s"] + sizes["a"]) / 30


def test_a_large_policy_goes_ahead_in_pieces(wire: Wire) -> None:
    learner, actor = Learner(wire, size=LARGE), Actor()
    wire.listening.append(actor.hear)
    for _ in range(3):
        learner.step()
        assert actor.model == learner.model
    learner.step(after_s=10.0)
    learner.step()
    assert actor.model == learner.model
    assert wire.kinds() == "Kppps" + "ppps" + "a" + "ppps"
    assert actor.missed == 0
    streamed = [message for _, _, message in wire.sent if isinstance(message, messages.PolicyPiece)]
    assert [piece.attempt for piece in streamed] == [*[2] * 4, *[3] * 4, *[5] * 4], "one to an attempt"
    traffic = learner.channel.traffic
    assert (traffic.policies, traffic.patches) == (5, 4)
    sizes = [len(codec.encode(message)) for topic, _, message in wire.sent if topic != WHOLE]
    assert traffic.patch_bytes == sum(sizes)


def test_a_large_policy_is_retained_when_there_is_time(wire: Wire) -> None:
    learner, actor, joins = Learner(wire, size=LARGE), Actor(), Actor()
    wire.listening.append(actor.hear)
    learner.step()
    learner.step(after_s=policy_channel.RETAIN_PERIOD_S + 0.1)
    assert wire.kinds() == "Kppps", "not while it is urgent"
    assert learner.channel.is_due
    learner.channel.retain_newest()
    learner.channel.retain_newest()
    assert wire.kinds() == "Kppps" + "a"
    for message in wire.retained.values():
        joins.hear(message)
    assert joins.model == actor.model == learner.model
    assert actor.held.newest is not None
    assert len(actor.held.newest.sources) == 2
    learner.step()
    assert actor.model == learner.model
    assert actor.missed == 0


def test_pieces_that_stay_on_this_machine_are_not_coded(wire: Wire) -> None:
    sizes = {}
    for wire.is_local in (False, True):
        learner, actor = Learner(wire, size=LARGE), Actor()
        wire.listening.append(actor.hear)
        learner.step()
        learner.step(deviation=2.0)
        assert actor.model == learner.model
        wire.listening.clear()
        sizes[wire.is_local] = len(codec.encode(wire.sent[-2][2]))
    assert 1.2 * sizes[False] < sizes[True] < 0.52 * PIECE


def test_a_large_policy_of_which_a_piece_cannot_go_out_is_retained_instead(wire: Wire) -> None:
    learner, actor = Learner(wire, size=LARGE), Actor()
    wire.listening.append(actor.hear)
    learner.step()

    def down(message: messages.Message) -> None:
        wire.up = not isinstance(message, messages.PolicyPiece)

    wire.listening.append(down)
    learner.step()
    assert wire.kinds() == "Kpa"
    assert actor.model == learner.model


def test_a_large_policy_of_another_layout_goes_out_whole(wire: Wire) -> None:
    learner, actor = Learner(wire, size=LARGE), Actor()
    wire.listening.append(actor.hear)
    learner.step()
    for model in (learner.model + b"longer", learner.model[:-9]):
        learner.send(model)
        assert actor.model == model
        assert wire.kinds()[-1] == "K"


def test_pieces_of_a_policy_that_does_not_go_out_do_no_harm(wire: Wire) -> None:
    learner, actor = Learner(wire, size=LARGE), Actor()
    wire.listening.append(actor.hear)
    learner.step()
    refused = bytes(reversed(learner.model))
    outgoing = learner.channel.begin(messages.Order(1, 2))
    outgoing.add(refused[:PIECE])
    outgoing.add(refused[PIECE:])
    assert actor.held.best == (1, 1)
    learner.step()
    assert actor.model == learner.model
    assert actor.missed == 0


@pytest.mark.parametrize("far", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("size", [0, 2, 10, 254, 256, 258, 4098, 100_000])
def test_the_compiled_packing_writes_the_same_bytes(size: int, far: float) -> None:
    rng = np.random.default_rng(size)
    old = rng.integers(0, 256, size).astype(np.uint8)
    new = (old + np.where(rng.random(size) < far, 100, rng.integers(-8, 8, size))).astype(np.uint8)
    expected, packed = np.zeros((2, size // 2), np.uint8)
    where, found = np.zeros((2, size // 256), np.uint32)
    count = policy_patch.pack(old, new, expected, where)
    assert (patch_loops.pack(old, new, packed, found) > len(found)) == (count > len(where))
    if count <= len(where):
        assert (packed == expected).all()
        assert sorted(found[:count]) == where[:count].tolist()
        assert count or not far or size < 10_000


@pytest.mark.parametrize("word", [2, 4])
@pytest.mark.parametrize("size", [0, 4, 12, 256, 4100, 100_000])
def test_the_compiled_sorting_writes_the_same_bytes(size: int, word: int) -> None:
    rng = np.random.default_rng(size)
    old, new = rng.integers(0, 256, (2, size)).astype(np.uint8)
    expected, found = np.zeros((2, word, size // word), np.uint8)
    policy_patch.sort(old, new, expected)
    patch_loops.sort(old, new, found)
    assert (found == expected).all()


@pytest.mark.parametrize("is_local", [False, True])
def test_large_policies_of_floats_are_coded_only_where_they_leave_this_machine(wire: Wire, is_local: bool) -> None:
    wire.is_local = is_local
    learner, actor, joins = Learner(wire, size=1, word=4), Actor(), Actor()
    wire.listening.append(actor.hear)
    weights = learner.random.standard_normal(LARGE // 4).astype(np.float32)
    for after_s in (0.1, 0.1, 10.0):
        wire.now_s += after_s
        weights *= 1 + 0.003 * learner.random.standard_normal(weights.size, np.float32)
        learner.send(weights.tobytes())
        assert actor.model == learner.model
    assert wire.kinds() == "Kppps" + ("K" if is_local else "a")
    pieces = [len(m.patch) for _, _, m in wire.sent if isinstance(m, messages.PolicyPiece)]
    assert sum(pieces) == LARGE + 3 if is_local else sum(pieces) < 0.62 * LARGE
    wire.now_s += 0.1
    learner.send((weights * np.float32(1.001)).tobytes())
    learner.channel.retain_newest(at_once=True)
    for message in wire.retained.values():
        joins.hear(message)
    assert joins.model == learner.model


def test_a_policy_that_is_cancelled_leaves_the_bytes_alone_and_sends_nothing_more() -> None:
    began, goes_on, sent = threading.Event(), threading.Event(), []

    def send_piece(piece: messages.PolicyPiece) -> bool:
        sent.append((piece.start, piece.end))
        began.set()
        return goes_on.wait(10.0)

    with futures.ThreadPoolExecutor(1) as beside:
        outgoing = outgoing_policy.OutgoingPolicy(
            bytes(60), FIRST, is_retained=False, send_piece=send_piece, beside=beside
        )
        for _ in range(3):
            outgoing.add(bytes(20))
        assert began.wait(10.0)
        threading.Timer(0.05, goes_on.set).start()
        outgoing.cancel()
        assert goes_on.is_set()
    assert sent == [(0, 20)]
