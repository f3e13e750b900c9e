"""Whom a trial reaches, what decides it, what goes out then, and who may come and leave meanwhile."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import messages, specs, topics
from learner import config
from learner.files import records, run_directory
from learner.fleet import roster
from learner.policies import canary, paired_trial, publisher, trial_record
from learner.quantize import gate
from tests.fakes import fleet_examples, log_reader

TRIALS = 200
PAIRS_MAX = 1000
Draw = Callable[[np.random.Generator], float]
RETURNS: dict[str, Draw] = {
    "a return that is no length": lambda rng: rng.normal(200.0, 60.0),
    "as long as its return": lambda rng: float(rng.geometric(0.02)),
    "the shorter the better": lambda rng: -float(rng.geometric(0.02)),
}


class Policies:
    """A publisher that sends nothing, and counts versions as the real one does."""

    def __init__(self) -> None:
        self.version = self.main_version = 0
        self.newest: publisher.Published | None = None
        self.main: publisher.Published | None = None
        self.cleared = 0

    def publish(self, channel: str, model: bytes = b"") -> publisher.Published:
        self.version += 1
        sent = messages.Manifest(4, self.version, channel, 0, "0", "f", "q_values", "int8", 0.0)
        self.newest = publisher.Published(sent, model, gate.Verdict(True, ""), (), np.zeros(0, np.float32))
        if channel == topics.MAIN_CHANNEL:
            self.main, self.main_version = self.newest, self.version
        return self.newest

    def publish_again(self, policy: publisher.Published) -> futures.Future[None]:
        self.publish(topics.MAIN_CHANNEL, policy.model)
        done = futures.Future[None]()
        done.set_result(None)
        return done

    def clear_canary(self) -> None:
        self.cleared += 1


class Site:
    """Actors that are there, and a candidate on trial among them."""

    def __init__(self, actors: int = 4, share: float = 0.25) -> None:
        self.now = 0.0
        self.roster, self.policies = roster.Roster("session", 4, ""), Policies()
        self._beats = 0
        for index in range(actors):
            self.hear(f"pi-{index}")
        self.policies.publish(topics.MAIN_CHANNEL, b"incumbent")
        self.held: set[str] = set()
        self.canary = canary.Canary(share, self.policies, self.roster, lambda: self.now, self.held)  # type: ignore[arg-type]
        self.policies.publish(topics.CANARY_CHANNEL, b"candidate")
        self.canary.begin()
        assert self.channels, "each knows the channel that it follows"

    def hear(self, name: str, *, online: bool = True) -> None:
        self._beats += 1
        state = fleet_examples.state(session=name, heartbeat=self._beats, online=online)
        self.roster.observe(name, state, retained=False, now_s=self.now)

    def look(self) -> canary.Outcome | None:
        self.now += canary.LOOK_S
        return self.canary.advance()

    @property
    def channels(self) -> dict[str, str]:
        """The channel that each actor's newest assignment names."""
        settings = config.TrainConfig()
        for _ in self.roster.assign_due(
            steps_left=10, env_steps=0, lockstep_version=0, settings=settings, exploration=config.DqnConfig(), now_s=0.0
        ):
            pass
        return {name: one.assignment.channel for name, one in self.roster.actors.items() if one.assignment}

    @property
    def canaries(self) -> set[str]:
        return {name for name, channel in self.channels.items() if channel == topics.CANARY_CHANNEL}


FIXED = {
    field.name: getattr(fleet_examples.experience([1]), field.name) for field in dataclasses.fields(messages.Experience)
}
NUMBERS = [np.array([number], np.int32) for number in range(100)]
FLAGS = [np.array([flag], np.uint8) for flag in (0, 1)]


def message(version: int, env: int, age: int, total: float, *, begins: bool, ends: bool) -> messages.Experience:
    """A segment of an episode: its first step, or the rest of it."""
    changes: dict[str, Any] = {
        "epoch": 4,
        "version": version,
        "env_index": NUMBERS[env],
        "length": NUMBERS[1 if begins else 2],
        "episode_length": NUMBERS[age],
        "episode_return": np.array([total], np.float32),
        "terminated": FLAGS[ends],
    }
    return messages.Experience(**(FIXED | changes))


def played(site: Site, rng: np.random.Generator, draws: dict[bool, Draw], envs: int = 1) -> Iterator[tuple[str, Any]]:
    """Plays for ever: each environment one episode after the other, which arrive when they begin and when they end."""
    streams = [(f"pi-{actor}", env) for actor in range(len(site.roster.actors)) for env in range(envs)]
    due = [(float(rng.random()), number, 0.0, True) for number in range(len(streams))]
    heapq.heapify(due)
    trial = site.canary
    on_trial = site.policies.version
    while True:
        at, number, total, begins = heapq.heappop(due)
        actor_id, env = streams[number]
        is_canary = trial.newest_version(actor_id) == on_trial
        version = on_trial if is_canary else site.policies.main_version
        if begins:
            yield actor_id, message(version, env, 1, 0.0, begins=True, ends=False)
            total = draws[is_canary](rng)
            heapq.heappush(due, (at + 1.0 + abs(total), number, total, False))
        else:
            yield actor_id, message(version, env, 99, total, begins=False, ends=True)
            heapq.heappush(due, (at + 0.01, number, 0.0, True))


def tried(seed: int, draws: dict[bool, Draw], **options: Any) -> tuple[Site, canary.Outcome]:
    """Returns what a seeded trial came to; one that is not decided is broken off."""
    site, rng = Site(**options), np.random.default_rng(seed)
    for actor_id, sent in played(site, rng, draws):
        site.canary.consider(actor_id, sent)
        trial = site.canary._trial
        assert trial is not None
        if trial.pairs.decision != "wait" or trial.pairs.pairs >= PAIRS_MAX:
            break
    outcome = site.canary.advance() or site.canary.end("long enough")
    assert outcome is not None
    return site, outcome


@pytest.mark.parametrize("name", ["as long as its return", "the shorter the better"])
def test_equal_policies_are_rarely_withdrawn_whatever_ends_first(name: str) -> None:
    equal = {True: RETURNS[name], False: RETURNS[name]}
    found = [tried(seed, equal, actors=3, share=0.34)[1] for seed in range(TRIALS)]
    withdrawn = sum(one.verdict == "withdrawn" for one in found)
    print(f"{name}: {withdrawn} of {TRIALS} withdrawn, median {np.median([one.pairs for one in found]):g} pairs")
    assert withdrawn <= 0.05 * TRIALS
    assert sum(one.verdict == "promoted" for one in found) >= 0.9 * TRIALS


def test_halved_returns_are_withdrawn_within_episodes_and_reach_the_share_alone() -> None:
    whole = RETURNS["a return that is no length"]
    found = [tried(seed, {True: lambda rng: 0.5 * whole(rng), False: whole}) for seed in range(TRIALS)]
    assert {one.verdict for _, one in found} == {"withdrawn"}
    assert all(len(one.actors) == 1 for _, one in found), "a quarter of four"
    pairs = [one.pairs for _, one in found]
    print(f"halved: median {np.median(pairs):g} episodes, 99th percentile {np.percentile(pairs, 99):g}")
    assert np.median(pairs) <= 15
    assert np.percentile(pairs, 99) <= 50
    site, outcome = found[0]
    assert site.canaries == set(), "all follow what was proven"
    assert site.policies.main is not None
    assert (site.policies.main.model, site.policies.main_version) == (b"incumbent", 3)
    assert (outcome.candidate, outcome.incumbent, outcome.newest) == ("4.2", "4.1", "4.3")
    assert outcome.return_mean is not None and outcome.incumbent_return_mean is not None
    assert outcome.return_mean < 0.7 * outcome.incumbent_return_mean
    assert site.policies.cleared == 1


def test_a_better_one_goes_to_all_as_the_newest_version(log: log_reader.LogReader) -> None:
    site, outcome = tried(0, {True: lambda rng: 2.0, False: lambda rng: 1.0})
    assert outcome.verdict == "promoted"
    assert site.policies.main is not None
    assert (site.policies.main.model, site.policies.main_version) == (b"candidate", 3)
    assert site.canaries == set()
    assert site.canary.metrics()["canary_promoted"] == 1
    assert site.canary.summary()["trials"][0]["verdict"] == "promoted"
    assert any("policy 4.2 is promoted" in line for line in log.lines)


@pytest.mark.parametrize(
    ("present", "share", "expected"),
    [(0, 0.5, 0), (1, 0.9, 0), (2, 0.01, 1), (2, 0.99, 1), (4, 0.25, 1), (4, 0.5, 2), (10, 0.3, 3), (200, 0.999, 199)],
)
def test_how_many_may_be_canaries(present: int, share: float, expected: int) -> None:
    assert canary.allowed(present, share) == expected


def test_canaries_are_the_same_each_time_and_the_others_keep_their_channel() -> None:
    chosen = {frozenset(Site().canaries) for _ in range(3)}
    assert len(chosen) == 1
    names = [f"pi-{index}" for index in range(4)]
    assert chosen == {frozenset(canary.ranked(names)[:1])}
    assert canary.ranked(reversed(names)) == canary.ranked(names)


def test_who_joins_may_become_one_and_one_that_starts_again_stays_one() -> None:
    site = Site()
    (first,) = site.canaries
    for index in range(4, 8):
        site.hear(f"pi-{index}")
    assert site.look() is None
    assert len(site.canaries) == 2
    site.hear(first, online=False)
    assert site.look() is None
    site._beats += 1
    born = fleet_examples.state(session="again", boot=2, heartbeat=site._beats)
    site.roster.observe(first, born, retained=False, now_s=site.now)
    assert site.look() is None
    assert first in site.canaries
    assert len(site.canaries) == 2, "nobody else got it meanwhile"


@pytest.mark.parametrize("left", ["canary", "others", "most"])
def test_a_trial_that_cannot_go_on_is_broken_off_after_a_while(left: str) -> None:
    site = Site(actors=4, share=0.5)
    canaries = sorted(site.canaries)
    others = sorted(site.roster.actors.keys() - canaries)
    gone = {"canary": canaries, "others": others, "most": others[:1]}[left]
    for name in gone:
        site.hear(name, online=False)
    assert site.look() is None
    began, outcome = site.now, None
    while outcome is None:
        outcome = site.look()
    assert canary.PATIENCE_S <= site.now - began <= canary.PATIENCE_S + 2 * canary.LOOK_S
    assert outcome.verdict == "broken off"
    assert site.policies.main is not None
    assert site.policies.main.model == b"incumbent"
    assert site.canaries == set()
    assert not site.canary.is_trying


def test_who_comes_back_in_time_breaks_nothing_off() -> None:
    site = Site(actors=2)
    (name,) = site.roster.actors.keys() - site.canaries
    for _ in range(10):
        site.hear(name, online=False)
        for _ in range(int(canary.PATIENCE_S / canary.LOOK_S) - 1):
            assert site.look() is None
        site.hear(name)
        assert site.look() is None
    assert site.canary.is_trying


def test_no_trial_begins_with_one_actor(log: log_reader.LogReader) -> None:
    site = Site(actors=2)
    found = [site.canary.may_begin]  # one goes on
    assert site.canary.end("enough") is not None
    found.append(site.canary.may_begin)
    site.hear("pi-0", online=False)
    found.append(site.canary.may_begin)
    assert found == [False, True, False]
    assert any("a trial needs two actors" in line for line in log.lines)


def test_the_newest_version_is_that_of_the_channel() -> None:
    site = Site()
    (name,) = site.canaries
    versions = {one: site.canary.newest_version(one) for one in site.roster.actors}
    assert versions == {one: 2 if one == name else 1 for one in site.roster.actors}
    site.canary.end("enough")
    assert {site.canary.newest_version(one) for one in site.roster.actors} == {3}


def test_only_whole_episodes_of_the_two_policies_count() -> None:
    pairing = paired_trial.PairedTrial(messages.Order(4, 2), messages.Order(4, 1))

    def begin(actor: str, version: int) -> None:
        pairing.add(actor, message(version, 0, 1, 0.0, begins=True, ends=False))

    def end(actor: str, version: int) -> None:
        pairing.add(actor, message(version, 0, 9, 1.0, begins=False, ends=True))

    end("a", 1)  # it had begun before
    begin("a", 1)
    begin("b", 2)  # partners from here on: what `a` plays now had begun before
    end("a", 1)
    end("b", 2)
    assert pairing.pairs == 0
    begin("a", 1)
    end("a", 1)
    assert pairing.pairs == 1
    begin("a", 1)
    begin("b", 2)
    end("b", 2)
    end("a", 2)  # `a` has become a canary within its episode
    assert pairing.pairs == 1
    begin("a", 2)
    end("a", 2)
    begin("c", 0)
    end("c", 0)
    assert pairing.pairs == 1, "random steps tell nothing"
    begin("c", 1)
    end("c", 1)
    begin("b", 2)
    end("b", 2)
    assert pairing.pairs == 2, "those who lost a partner have another"


@pytest.mark.parametrize("wrong", ["{", '{"incumbent": 3}', '{"incumbent": {"epoch": 1}}'])
def test_what_a_killed_learner_goes_on_from(tmp_path: Path, wrong: str, log: log_reader.LogReader) -> None:
    directory = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    record = trial_record.TrialRecord(directory, records.Records())
    spec = fleet_examples.SPEC
    assert record.incumbent(spec) is None
    assert log.lines == [], "a new run has proven nothing"
    for version, model in ((1, b"one"), (2, b"two")):
        sent = messages.Manifest(4, version, "main", 3, "", spec.fingerprint, "q_values", "int8", 0.0)
        policy = publisher.Published(sent, model, gate.Verdict(True, ""), (), np.zeros(0, np.float32))
        record.note(policy, [])
        found = record.incumbent(spec)
        assert found is not None
        assert (found[0].order, found[1]) == ((4, version), model)
    assert [file.name for file in directory.path.glob("proven-*")] == ["proven-4.2.tflite"]
    assert record.incumbent(specs.EnvSpec(specs.ObservationSpec((9,)), specs.ActionSpec("discrete", n=2))) is None
    (directory.path / run_directory.CANARY).write_text(wrong)
    assert record.incumbent(spec) is None
    assert any("goes to all without a trial" in line for line in log.lines)


def test_a_canary_that_is_held_back_ends_its_trial_and_none_begins_without_two_that_count() -> None:
    site = Site(actors=2, share=0.5)
    (first,) = site.canaries
    site.held.add(first)
    ended = [outcome for _ in range(100) if (outcome := site.look()) is not None]
    assert [(outcome.verdict, outcome.pairs) for outcome in ended] == [("broken off", 0)]
    assert not site.canary.may_begin, "one actor is left whose episodes count"
    site.held.clear()
    assert site.canary.may_begin


def test_who_was_told_no_channel_yet_may_act_on_what_is_on_trial() -> None:
    site = Site(actors=2, share=0.5)
    (told,) = {"pi-0", "pi-1"} - site.canaries
    assert site.canary.newest_version(told) == site.policies.main_version
    site.hear("pi-9")
    assert site.canary.newest_version("pi-9") == site.policies.version
