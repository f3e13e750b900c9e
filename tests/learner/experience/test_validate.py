"""Each genuine message once; everything else counted under its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from broker.contract import codec, errors, frames, messages, signing, specs
from learner.experience import dead_letters, ledger, validate
from tests.fakes import fleet_examples

MAC = signing.ActorMac(b"k" * 32)
TOPIC = "actorq/lab/actor/pi/experience"


class Desk:
    """Ingest with a ledger that takes everything at once."""

    def __init__(
        self, directory: Path, max_policy_lag: int = 0, epochs: tuple[int, ...] = (1, 2), **marks: Any
    ) -> None:
        self.letters = directory / "letters.jsonl"
        self.ingest = validate.Validator(
            {"pi": MAC},
            fleet_examples.SPEC,
            epochs,
            marks.get("marks", {}),
            dead_letters.DeadLetters(self.letters),
            lambda steps, segments: steps <= 10,
            max_policy_lag,
            **({"may_send": marks["may_send"]} if "may_send" in marks else {}),
        )

    def offer(self, experience: messages.Experience, version: int = 5) -> validate.Validated | None:
        return self.offer_body(codec.encode(experience), version)

    def offer_body(self, body: bytes, version: int = 5) -> validate.Validated | None:
        taken = self.ingest.validate("pi", TOPIC, MAC.seal(TOPIC, body), version)
        if taken is not None:
            self.ingest.note_committed([taken.entry])
        return taken

    def accepts(self, **changes: Any) -> bool:
        taken = self.offer(fleet_examples.experience(**changes))
        return taken is not None and taken.entry.verdict == ledger.OK

    @property
    def receipts(self) -> list[messages.Receipt]:
        return [receipt for _, receipt in self.ingest.receipts("ledger")]

    @property
    def reasons(self) -> list[str]:
        lines = self.letters.read_text().splitlines() if self.letters.exists() else []
        return [json.loads(line)["reason"] for line in lines]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_accepts_a_genuine_message_and_receipts_it(desk: Desk) -> None:
    taken = desk.offer(fleet_examples.experience(step=20))
    assert taken is not None
    assert taken.experience is not None
    np.testing.assert_array_equal(taken.experience.reward, np.ones(3, np.float32))
    entry = taken.entry
    assert (entry.actor_id, entry.boot, entry.seq, entry.step, entry.steps, entry.ended) == ("pi", 1, 1, 20, 3, 2)
    assert entry.verdict == ledger.OK
    assert entry.body is not None
    assert len(entry.body) == entry.size_bytes
    assert desk.receipts == [messages.Receipt("ledger", 1, 1)]
    assert desk.receipts == [], "each once"
    assert not desk.ingest.refused


def test_receipts_only_what_the_ledger_has(desk: Desk) -> None:
    payloads = [MAC.seal(TOPIC, codec.encode(fleet_examples.experience(seq=seq))) for seq in (1, 2)]
    taken = [desk.ingest.validate("pi", TOPIC, payload, 5) for payload in payloads]
    assert desk.ingest.validate("pi", TOPIC, payloads[1], 5) is None, "a duplicate of what is not durable yet"
    assert desk.receipts == []
    assert taken[0] is not None
    desk.ingest.note_committed([taken[0].entry])
    assert desk.receipts == [messages.Receipt("ledger", 1, 1)]


def test_accepts_each_message_once_and_receipts_it_again(desk: Desk) -> None:
    assert desk.accepts()
    assert desk.receipts
    assert not desk.accepts()
    assert desk.ingest.refused == {"duplicate": 1}
    assert desk.receipts == [messages.Receipt("ledger", 1, 1)], "the first one may have been lost"
    assert desk.reasons == []


def test_leaves_a_gap_to_be_filled(desk: Desk) -> None:
    assert desk.accepts(seq=1)
    assert desk.receipts
    assert not desk.accepts(seq=3)
    assert desk.ingest.refused == {"gap": 1}
    assert desk.receipts == []
    assert desk.accepts(seq=2)
    assert desk.accepts(seq=3)
    assert desk.receipts == [messages.Receipt("ledger", 1, 3)]


def test_passes_over_what_the_actor_dropped(desk: Desk) -> None:
    assert desk.accepts(seq=1)
    assert desk.accepts(seq=7, oldest=7, step=20)
    assert desk.receipts == [messages.Receipt("ledger", 1, 7)]
    assert desk.ingest.steps_missed == 17, "20 were recorded before, 3 arrived"
    assert desk.accepts(seq=8, oldest=8, step=23)
    assert desk.ingest.steps_missed == 17


def test_what_went_to_a_ledger_before_is_not_missed(desk: Desk) -> None:
    assert desk.accepts(seq=7, oldest=7, step=500)
    assert desk.ingest.steps_missed == 0


def test_goes_on_where_the_ledger_is(tmp_path: Path) -> None:
    desk = Desk(tmp_path, marks={("pi", 1): ledger.Mark(6, 18), ("pi", 2): ledger.Mark(1, 3)})
    assert not desk.accepts(seq=6)
    assert desk.receipts == [messages.Receipt("ledger", 1, 6)]
    assert desk.accepts(seq=8, oldest=8, step=28)
    assert desk.ingest.steps_missed == 10


def test_every_boot_counts_for_itself(desk: Desk) -> None:
    assert desk.accepts(seq=1)
    assert desk.accepts(boot=2, seq=1)
    assert desk.accepts(boot=1, seq=2), "of a spool that was elsewhere for a while"
    assert not desk.accepts(boot=2, seq=1)
    assert desk.ingest.refused == {"duplicate": 1}
    assert desk.receipts == [messages.Receipt("ledger", 1, 2), messages.Receipt("ledger", 2, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_with_losses_and_copies_ends_with_each_once(tmp_path: Path, seed: int) -> None:
    desk, rng = Desk(tmp_path), np.random.default_rng(seed)
    accepted: list[int] = []
    dropped: set[int] = set()
    held = list(range(1, 31))
    while held:
        window = [seq for seq in held[:8] for _ in range(rng.integers(0, 3))]  # lost, once, or twice
        for seq in rng.permutation(window):
            if desk.accepts(seq=int(seq), oldest=held[0] if seq == held[0] else 1):
                accepted.append(int(seq))
        for receipt in desk.receipts:
            held = [seq for seq in held if seq > receipt.seq]
        if rng.random() < 0.2 and len(held) > 3:
            dropped.update(held[:2])  # the actor's spool was full
            del held[:2]
    assert accepted == sorted(set(accepted))
    assert set(accepted) | dropped == set(range(1, 31))


def test_accepts_any_number_within_the_bound(desk: Desk) -> None:
    largest = np.float32(specs.MAX_MAGNITUDE)
    assert desk.accepts(observation=np.full((5, 4), largest), reward=np.full(3, -largest)), "the largest there may be"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("fingerprint", {"fingerprint": "0" * 16}),
        ("epoch", {"assigned_epoch": 3}),
        ("epoch", {"assigned_epoch": 0}),
        ("version", {"epoch": 3}),
        ("version", {"epoch": -1}),
        ("version", {"epoch": 2, "version": 6}),
        ("version", {"version": -1}),
        ("shape", {"length": np.array([2, 2], np.int32)}),
        ("shape", {"length": np.array([3, 0], np.int32)}),
        ("shape", {"length": np.array([4, -1], np.int32)}),
        ("shape", {"terminated": np.ones(1, np.uint8)}),
        ("shape", {"observation": np.zeros((5, 3), np.float32)}),
        ("shape", {"observation": np.zeros((4, 4), np.float32)}),
        ("shape", {"observation": np.zeros((5, 4), np.uint8)}),
        ("shape", {"action": np.zeros(3, np.float32)}),
        ("shape", {"action": np.zeros((3, 1), np.int32)}),
        ("shape", {"log_prob": np.zeros(2, np.float32)}),
        ("value", {"reward": np.array([1, np.nan, 1], np.float32)}),
        ("value", {"observation": np.full((5, 4), np.inf, np.float32)}),
        ("value", {"observation": np.full((5, 4), np.nan, np.float32)}),
        ("value", {"reward": np.array([np.inf, -np.inf, 1], np.float32)}),
        ("value", {"episode_return": np.array([1, -np.inf], np.float32)}),
        ("value", {"terminated": np.array([1, 2], np.uint8)}),
        ("value", {"env_index": np.array([0, -1], np.int32)}),
        ("value", {"row": np.array([-1, 4], np.int32)}),
        ("action", {"action": np.array([0, 1, 2], np.int32)}),
        ("action", {"action": np.array([0, -1, 0], np.int32)}),
        ("sequence", {"oldest": 2}),
        ("sequence", {"oldest": 0}),
    ],
)
def test_refuses_what_does_not_fit_but_receipts_it(desk: Desk, reason: str, changes: dict[str, Any]) -> None:
    taken = desk.offer(fleet_examples.experience(**changes))
    assert taken is not None
    assert taken.entry.verdict == reason
    assert taken.entry.body is None
    assert desk.ingest.refused == {reason: 1}
    assert desk.receipts == [messages.Receipt("ledger", 1, 1)], "else its actor would send it for ever"
    assert desk.ingest.steps_refused == 3
    assert desk.ingest.messages == 0
    assert desk.reasons == [reason]


def test_refuses_steps_of_policies_that_are_too_old(tmp_path: Path) -> None:
    desk = Desk(tmp_path, max_policy_lag=3)
    assert desk.accepts(seq=1, epoch=2, version=2)
    assert not desk.accepts(seq=2, epoch=2, version=1)
    assert desk.accepts(seq=3, epoch=2, version=0), "random steps have no age"
    assert not desk.accepts(seq=4, epoch=1, version=9), "of a session before this one"
    assert desk.ingest.refused == {"stale": 2}


def test_takes_what_an_older_policy_chose_for_this_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path, epochs=(7, 7))
    assert desk.accepts(seq=1, assigned_epoch=7, epoch=3, version=900)
    assert desk.accepts(seq=2, assigned_epoch=7, epoch=0, version=0)


@pytest.mark.fault(13)
def test_what_goes_beyond_a_grant_is_refused_but_receipted(tmp_path: Path) -> None:
    asked: list[tuple[str, int, int, int]] = []

    def may_send(*what: Any) -> bool:
        asked.append(what)
        return len(asked) < 2

    desk = Desk(tmp_path, may_send=may_send)
    assert desk.accepts(seq=1, boot=7, assigned_epoch=2)
    assert not desk.accepts(seq=2, boot=7, assigned_epoch=2)
    assert asked == [("pi", 7, 2, 3)] * 2
    assert desk.ingest.refused == {"grant": 1} and desk.reasons == ["grant"] and desk.ingest.steps_refused == 3
    assert desk.receipts == [messages.Receipt("ledger", 7, 2)]


@pytest.mark.fault(16)
def test_boots_that_were_invented_are_forgotten_and_no_others(desk: Desk) -> None:
    assert desk.accepts(boot=1)
    for boot in range(2, 3000):
        assert not desk.accepts(boot=boot, fingerprint="0" * 16)
        assert desk.receipts == [messages.Receipt("ledger", boot, 1)] or boot == 2
    assert len(desk.ingest._marks) == len(desk.ingest._durable) <= ledger.BOOTS_KEPT + 2
    assert desk.accepts(boot=2999, seq=2), "one of which something is taken after all stays"
    for boot in range(3000, 3001 + ledger.BOOTS_KEPT):
        assert not desk.accepts(boot=boot, fingerprint="0" * 16)
    assert not desk.accepts(boot=1, seq=1) and not desk.accepts(boot=2999, seq=2)
    assert desk.ingest.refused["duplicate"] == 2


def test_refuses_what_replay_cannot_hold(desk: Desk) -> None:
    taken = desk.offer(fleet_examples.experience(lengths=(11,)))
    assert taken is not None
    assert taken.entry.verdict == "too_long"


@pytest.mark.fault(6)
def test_refuses_a_message_of_more_bytes_than_any_actor_makes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.ingest, "_fits", lambda steps, segments: True)
    taken = desk.offer(fleet_examples.experience(lengths=(400_000,)))
    assert taken is not None
    assert taken.entry.verdict == "too_large"
    assert taken.entry.body is None
    assert desk.ingest.steps_refused == 400_000
    assert desk.receipts == [messages.Receipt("ledger", 1, 1)], "else its actor would send it for ever"


@pytest.mark.fault(6)
def test_no_birth_has_a_spec_of_which_one_step_is_too_large() -> None:
    spec = specs.EnvSpec(specs.ObservationSpec((12,)), fleet_examples.SPEC.action)
    birth = messages.Birth("x", spec, 1, "board", "3.11", "runtime", "XNNPACK", 0.0)
    object.__setattr__(spec.observation, "shape", (12_000_000,))  # as a rogue would write it
    with pytest.raises(errors.DecodeError, match="one step of obs") as caught:
        codec.decode(messages.ActorState, codec.encode(messages.ActorState(True, "s", 1, 1, birth)))
    assert caught.value.reason == "field"


def test_refuses_what_is_not_sealed_by_the_actor_without_reading_it(desk: Desk) -> None:
    body = codec.encode(fleet_examples.experience())
    forged = signing.ActorMac(b"x" * 32).seal(TOPIC, body)
    elsewhere = MAC.seal("actorq/lab/actor/other/experience", body)
    for payload in (forged, elsewhere, body, b""):
        assert desk.ingest.validate("pi", TOPIC, payload, 5) is None
    assert desk.ingest.validate("stranger", TOPIC, MAC.seal(TOPIC, body), 5) is None
    assert desk.ingest.refused == {"signature": 4, "unknown_actor": 1}
    assert desk.receipts == []
    assert desk.reasons == ["signature"] * 4 + ["unknown_actor"]


def test_another_release_is_refused_but_receipted(desk: Desk) -> None:
    body = codec.encode(fleet_examples.experience(seq=1))
    schema = f'"schema":"{messages.SCHEMA_VERSION}"'.encode()
    taken = desk.offer_body(body.replace(schema, schema[:-2] + b'9"'))
    assert taken is not None
    assert taken.experience is None
    assert (taken.entry.seq, taken.entry.verdict, taken.entry.body) == (1, "schema", None)
    assert desk.receipts == [messages.Receipt("ledger", 1, 1)]
    assert desk.accepts(seq=2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"junk", "size"),
        (b"\0" * 8 + b"{}", "header"),
        (len(b"[" * 5000).to_bytes(8, "little") + b"[" * 5000, "header"),
        (codec.encode(fleet_examples.experience(seq=0)), "sequence"),
        (codec.encode(fleet_examples.experience(seq=-5)), "sequence"),
    ],
)
def test_junk_under_a_genuine_mac_is_counted_and_kept(desk: Desk, body: bytes, reason: str) -> None:
    assert desk.offer_body(body) is None
    assert desk.ingest.refused == {reason: 1}
    assert desk.reasons == [reason]
    assert desk.receipts == []


FRAMES = specs.EnvSpec(specs.ObservationSpec((8, 8, 2), "uint8", 2), specs.ActionSpec("discrete", n=2))
SEEN = np.arange(7 * 64, dtype=np.uint8).reshape(7, 8, 8, 1)  # of segments of 2 and 1 steps, with 2 frames more each


def test_frames_are_unpacked() -> None:
    packed = fleet_examples.experience(observation=frames.pack(SEEN))
    np.testing.assert_array_equal(validate.unpacked(packed, FRAMES).observation, SEEN)


@pytest.mark.fault(6)
@pytest.mark.parametrize(
    "observation",
    [
        SEEN,  # not packed
        frames.pack(SEEN[:6]),
        frames.pack(np.concatenate([SEEN, SEEN])),
        frames.pack(np.zeros((1 << 27, 1), np.uint8)),  # a bomb
        frames.pack(SEEN)[:-1],
        np.concatenate([frames.pack(SEEN), np.zeros(1, np.uint8)]),
        np.frombuffer(zstandard.ZstdCompressor(write_content_size=False).compress(SEEN.tobytes()), np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(7 * 64, np.float32),
    ],
    ids=["plain", "too few", "too many", "bomb", "cut off", "more behind", "no size", "nothing", "floats"],
)
def test_refuses_frames_that_are_not_those_of_the_message(observation: Any) -> None:
    with pytest.raises(errors.DecodeError) as caught:
        validate.unpacked(fleet_examples.experience(observation=observation), FRAMES)
    assert caught.value.reason == "frames"


@pytest.mark.fault(6)
def test_a_frame_of_zstd_that_lies_about_its_length_is_refused() -> None:
    honest, longer = (bytearray(frames.pack(np.zeros((n, 1), np.uint8))) for n in (7 * 64, 40_000))
    assert (honest[4] >> 6, longer[4] >> 6) == (1, 1)  # both claim in two bytes
    longer[5:7] = honest[5:7]
    with pytest.raises(errors.DecodeError, match="unpacked"):
        frames.unpack(np.frombuffer(longer, np.uint8), (7, 8, 8, 1))


@pytest.mark.fault(6)
def test_refuses_more_frames_than_any_message_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "unpack", lambda packed, shape: pytest.fail("was to be unpacked"))
    many = fleet_examples.experience(lengths=(130_000,), observation=np.zeros(9, np.uint8))
    with pytest.raises(errors.DecodeError, match="frames of") as caught:
        validate.unpacked(many, FRAMES)
    assert caught.value.reason == "too_large"


def test_checks_continuous_actions_against_their_bounds() -> None:
    spec = specs.EnvSpec(
        fleet_examples.SPEC.observation, specs.ActionSpec("continuous", shape=(2,), low=(-1.0, -2.0), high=(1.0, 2.0))
    )
    inside = np.array([[1, 2], [-1, -2], [0, 0]], np.float32)
    validate.checked(fleet_examples.experience(action=inside), spec)
    with pytest.raises(errors.DecodeError, match="out of bounds"):
        validate.checked(fleet_examples.experience(action=inside * np.float32(1.01)), spec)


def test_a_sampled_action_may_lie_beyond_the_bounds_and_has_its_probability() -> None:
    spec = specs.EnvSpec(
        fleet_examples.SPEC.observation, specs.ActionSpec("continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    )
    beyond, said = np.full((3, 1), 7.0, np.float32), np.zeros(3, np.float32)
    validate.checked(fleet_examples.experience(action=beyond, log_prob=said), spec, "gaussian")
    with pytest.raises(errors.DecodeError, match="out of bounds"):
        validate.checked(fleet_examples.experience(action=beyond, log_prob=said), spec, "deterministic")
    with pytest.raises(errors.DecodeError, match="without its log-probability"):
        validate.checked(fleet_examples.experience(action=beyond), spec, "gaussian")
    validate.checked(fleet_examples.experience(action=beyond, version=0), spec, "gaussian")
    with pytest.raises(errors.DecodeError, match="NaN"):
        validate.checked(fleet_examples.experience(action=beyond * np.nan, log_prob=said), spec, "gaussian")
