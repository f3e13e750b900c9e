"""What a deployment hears of a trial is receipted, and never together with what a training run shall have."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from broker.contract import codec, messages, signing, topics
from learner import config
from learner.fleet import roster
from learner.run.deploy import listening
from tests.fakes import fleet_examples

MAC = signing.ActorMac(bytes(range(32)))
NAMES = topics.Topics("f")
TOPIC = NAMES.experience("pi")


class Fleet:
    """A session that keeps its receipts."""

    epoch, id, topics, macs = 4, "session", NAMES, {"pi": MAC}

    def __init__(self) -> None:
        self.receipts: list[messages.Receipt] = []
        self.outcomes: list[int | None] = []

    def note_outcome(self, topic: str, size_bytes: int, steps: int | None) -> None:
        self.outcomes.append(steps)

    def retain_all(self, outgoing: Any) -> None:
        self.receipts += [message for _, message in outgoing]


class Site:
    """A listener, and one actor that was granted some steps."""

    def __init__(self, rate_hz: float = 0.0) -> None:
        self.fleet, self.roster = Fleet(), roster.Roster("session", 4, "")
        birth = dataclasses.replace(fleet_examples.birth(), rate_hz=rate_hz)
        state = fleet_examples.state(birth=birth)
        self.actor = self.roster.observe("pi", state, retained=False, now_s=0.0)
        self.listener = listening.Listener(self.fleet, self.roster, fleet_examples.SPEC, {1: "q_values"})  # type: ignore[arg-type]
        given = self.roster.assign(
            *(self.actor,),
            steps_left=15,
            env_steps=0,
            lockstep_version=0,
            settings=config.TrainConfig(),
            exploration=config.DqnConfig(),
            now_s=0.0,
        )
        assert given is not None

    def hear(self, seq: int, oldest: int, **changes: Any) -> bool:
        fields: dict[str, Any] = {"seq": seq, "oldest": oldest, "epoch": 4, "assigned_epoch": 4} | changes
        sealed = MAC.seal(TOPIC, codec.encode(fleet_examples.experience(**fields)))
        return self.listener.receive("pi", TOPIC, sealed, 1) is not None

    def receipts(self) -> list[tuple[int, int]]:
        self.listener.send_receipts()
        sent, self.fleet.receipts = self.fleet.receipts, []
        return [(one.boot, one.seq) for one in sent]


def test_what_was_granted_here_is_heard_once_and_receipted() -> None:
    site = Site()
    assert site.hear(7, 7) and site.hear(8, 7)
    assert site.receipts() == [(1, 8)]
    assert not site.hear(8, 8)
    assert site.receipts() == [(1, 8)], "the first one may not have come"
    assert site.hear(9, 9)
    assert site.receipts() == [(1, 9)]
    assert site.listener.refused == {"duplicate": 1}
    assert site.actor.recorded == 9


def test_what_a_training_run_shall_have_is_never_receipted() -> None:
    site = Site()
    assert not site.hear(5, 5, assigned_epoch=3)
    assert site.hear(6, 5) and site.hear(7, 5)
    assert site.receipts() == []
    assert site.hear(8, 6), "that learner has given its receipt"
    assert site.receipts() == [(1, 8)]
    assert site.listener.refused == {"held": 1}


def test_what_does_not_count_is_counted() -> None:
    site = Site()
    assert not site.hear(1, 1, version=2), "of a policy that does not go to this actor"
    assert not site.hear(1, 1, fingerprint="another")
    assert not site.hear(1, 1, lengths=(99,))
    forged = signing.ActorMac(bytes(32)).seal(TOPIC, codec.encode(fleet_examples.experience(epoch=4)))
    assert site.listener.receive("pi", TOPIC, forged, 1) is None
    assert site.listener.receive("nobody", NAMES.experience("nobody"), forged, 1) is None
    reasons = Counter({"version": 1, "fingerprint": 1, "grant": 1, "signature": 1, "unknown_actor": 1})
    assert site.listener.refused == reasons
    assert site.fleet.outcomes == [None] * 5
    assert site.receipts() == []


def test_an_actor_that_holds_a_rate_is_granted_seconds() -> None:
    assert Site().listener.ahead(Site().actor) == listening.AHEAD_STEPS
    assert Site(50.0).listener.ahead(Site(50.0).actor) == 100
