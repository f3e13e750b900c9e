"""An hour of a fleet in virtual time: what its size makes of messages, receipts, assignments and the age of experience.

The learner's own roster and rate limiter run, with the commits and the rhythm of receipts of its loop; actors do what
tests/fakes/simulated_actor.py does, without bytes. Everything that counts is compared with the real thing where that
fits on this machine: broker, learner and actors over TLS, as `ONLY=load` has them.

    python -m tests.benchmarks simulate       ACTORQ_SIMULATE_ACTORS=500,2000,100000 names other sizes
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import random
import statistics
import time
import timeit
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import codec, messages, signing
from learner import config
from learner.experience import ingest, rate_limiter
from learner.fleet import budget, roster
from tests.benchmarks import _load
from tests.fakes import simulated_actor

SIZES = tuple(map(int, os.environ.get("ACTORQ_SIMULATE_ACTORS", "500,2000,10000,100000").split(",")))
MEASURED = 500, 2000
"""Sizes that are run for real as well."""
RATE, HOUR_S, JOIN_S, WARM_S = 50.0, 3600.0, 60.0, 12.0
BATCH = 256
TURN_S = 0.02
"""Seconds of a turn of the learner's loop, whose looks and receipts are less frequent."""
HEARTBEAT_S = 1.0
MESSAGE_S, STEP_S = 1.1e-3, 0.12e-6
"""The loop's time for a message, and for each of its steps, where each message wakes it: what the real ones of 500 and
2000 actors come to. Flat out, many at once, one of 256 steps takes 0.24 ms (`ONLY=ingest`)."""
_BIRTH = messages.Birth("Simulated-v0", simulated_actor.SPEC, 1, "simulated", "", "none", "", 0.0)


@dataclass
class Told:
    """Counts of an hour; ages in seconds from recording a step until replay has it."""

    messages: int = 0
    steps: int = 0
    receipts: int = 0
    states: int = 0
    assignments: int = 0
    age_s: float = 0.0
    oldest_s: float = 0.0
    silent: int = 0
    budget_per_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class _Actor:
    number: int
    rate: float
    beats: int = 0
    recorded: int = 0
    since_s: float = 0.0  # of the first step of the next message
    assignment: messages.Assignment | None = None
    is_starved: bool = False

    @property
    def full_steps(self) -> int:
        assert self.assignment is not None
        return max(1, min(self.assignment.message_steps, round(self.rate * self.assignment.message_period_s)))

    @property
    def steps(self) -> int:
        assert self.assignment is not None
        return min(self.full_steps, self.assignment.steps_granted - self.recorded)


@dataclass
class Simulation:
    """A fleet of so many, from its start; `run` counts what happens after `warm_s`.

    Each takes `rate` steps a second; `message_s` is the loop's time for a message, without its steps.
    """

    size: int
    rate: float = RATE
    message_s: float = MESSAGE_S
    told: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self._random = random.Random(self.size)
        self._settings = config.TrainConfig(samples_per_insert=0.001)
        self._exploration = config.DqnConfig(replay_capacity=1_000_000)
        self._roster = roster.Roster("simulated", 1, "")
        self._limiter = rate_limiter.RateLimiter(0.001, 1000, 2.0 * BATCH)
        self._actors = [_Actor(number, self.rate) for number in range(self.size)]
        self._due: list[tuple[float, int, str]] = []
        self._arrived: list[tuple[_Actor, int, float]] = []  # actor, steps, and when the first of them was recorded
        self._owed: set[int] = set()
        self._receipts_at = self._measured_at = 0.0
        self._busy_s, self._opened = 0.0, 0
        self._states = 0

    def run(self, warm_s: float, seconds: float) -> Told:
        """Runs, and returns the counts of the seconds after `warm_s`."""
        began_s, now_s, counts_from = time.process_time(), 0.0, False
        for actor in self._actors:
            joins_s = self._random.random() * min(JOIN_S, self.size / 100)
            self._due.append((joins_s, actor.number, "beat"))
        heapq.heapify(self._due)
        while now_s < warm_s + seconds:
            if not counts_from and now_s >= warm_s:
                counts_from, self.told = True, Told()
            while self._due and self._due[0][0] <= now_s:
                self._do(*heapq.heappop(self._due))
            self._learn(now_s)
            now_s += TURN_S
        self.told.silent = self.size - len(self._roster.working())
        self.told.budget_per_s = self._roster.budget.messages_per_s
        self.told.cpu_s = time.process_time() - began_s
        return self.told

    def _do(self, at_s: float, number: int, what: str) -> None:
        actor = self._actors[number]
        if what == "beat":
            actor.beats += 1
            self.told.states += 1
            self._states += 1
            state = messages.ActorState(True, "one", 1, actor.beats, _BIRTH)
            self._roster.observe(f"actor-{number}", state, retained=False, now_s=at_s)
            period_s = actor.assignment.message_period_s if actor.assignment else 0.0
            heapq.heappush(self._due, (at_s + max(HEARTBEAT_S, period_s), number, "beat"))
            return
        steps = actor.steps
        if steps <= 0:
            actor.is_starved = True
            return
        actor.recorded += steps
        self._arrived.append((actor, steps, at_s - steps / self.rate))
        heapq.heappush(self._due, (at_s + actor.full_steps / self.rate, number, "send"))

    def _learn(self, now_s: float) -> None:
        """A turn of the learner's loop: commit, insert, sample, receipts, assignments."""
        self._measure(now_s)
        durable_s = now_s + ingest.GROUP_S
        for actor, steps, first_s in self._arrived:
            self.told.messages += 1
            self.told.steps += steps
            self._busy_s += self.message_s + STEP_S * steps
            self._opened += 1
            self.told.age_s += steps * (durable_s - first_s - steps / self.rate / 2)
            self.told.oldest_s = max(self.told.oldest_s, durable_s - first_s)
            self._limiter.insert(steps)
            self._roster.count_received(f"actor-{actor.number}", 1, 1, steps)
            self._owed.add(actor.number)
        self._arrived.clear()
        while self._limiter.may_sample(BATCH):
            self._limiter.sample(BATCH)
            self._limiter.took(BATCH, BATCH / 50_000)
        if now_s - self._receipts_at >= self._roster.receipt_s:
            self._receipts_at = now_s
            self.told.receipts += len(self._owed)
            self._owed.clear()
        self._roster.expire(now_s)
        if not self._roster.decided or not self._roster.may_assign(now_s):
            return
        self._limiter.widen(self._roster.grant_s, self.rate * self.size)
        due = self._roster.assign_due(
            steps_left=self._limiter.steps_granted() - self._limiter.inserted,
            env_steps=self._limiter.inserted,
            lockstep_version=0,
            settings=self._settings,
            exploration=self._exploration,
            now_s=now_s,
        )
        for actor_id, assignment in due:
            self._assigned(self._actors[int(actor_id.partition("-")[2])], assignment, now_s)

    def _measure(self, now_s: float) -> None:
        """Does as the receiver of the learner's loop, which nothing keeps waiting here."""
        if now_s - self._measured_at < budget.WINDOW_S:
            return
        seen = budget.Seen(
            actors=len(self._roster.working()),
            seconds=now_s - self._measured_at,
            messages=self._opened,
            taken=self._opened + self._states,
            busy_s=self._busy_s,
            waiting=0,
            delays_s={"broker": 0.0},
        )
        self._roster.budget.steer(seen)
        self._measured_at, self._busy_s, self._opened, self._states = now_s, 0.0, 0, 0

    def _assigned(self, actor: _Actor, assignment: messages.Assignment, now_s: float) -> None:
        self.told.assignments += 1
        is_first, actor.assignment = actor.assignment is None, assignment
        if is_first:
            wait_s = self._random.random() * assignment.message_period_s + 1.0 / self.rate
        elif actor.is_starved and actor.steps > 0:
            wait_s = actor.steps / self.rate
        else:
            return
        actor.is_starved = False
        heapq.heappush(self._due, (now_s + wait_s, actor.number, "send"))


def run() -> Iterator[dict[str, Any]]:
    """Yields the rows of each size; with the real figure as reference where that was run."""
    logging.getLogger("learner").setLevel(logging.ERROR)
    yield from _units()
    for size in SIZES:
        real = _real(size) if size in MEASURED else {}
        seconds = _real_s(size) if real else HOUR_S
        if real:
            short = Simulation(size).run(min(JOIN_S, size / 100) + _settle_s(size), seconds)
            explain = (
                "reference is broker, learner and actors as processes, whose loop took "
                f"{1e6 * real['message_s']:.0f} us for a message, the simulated one {1e6 * MESSAGE_S:.0f}; the budget "
                f"ended at {real['budget']:.0f}, simulated {short.budget_per_s:.0f} messages a second; "
                f"{real['delay_s']:.2f} s through the broker"
            )
            for what, value in (
                ("messages/s", short.messages),
                ("steps/s", short.steps),
                ("receipts/s", short.receipts),
            ):
                yield _row(size, f"{what}, as on this machine", value / seconds, "1/s", real[what], explain)
        hour = Simulation(size).run(2.0 * JOIN_S, HOUR_S)
        mean_s = hour.age_s / max(1, hour.steps)
        explain = (
            f"{hour.steps / HOUR_S:.0f} steps/s of {RATE * size:.0f} offered, {hour.receipts / HOUR_S:.1f} receipts, "
            f"{hour.states / HOUR_S:.1f} states and {hour.assignments / HOUR_S:.1f} assignments a second; experience "
            f"is {mean_s:.1f} s old when it is learned from, {hour.oldest_s:.0f} at most; {hour.silent} silent; "
            f"the budget ends at {hour.budget_per_s:.0f} messages a second; "
            f"roster and limiter took {hour.cpu_s:.0f} s of CPU, of {HOUR_S + 2 * JOIN_S:.0f} simulated"
        )
        yield _row(size, "messages/s of experience, over an hour", hour.messages / HOUR_S, "1/s", None, explain)


def _units() -> Iterator[dict[str, Any]]:
    """Rows for what one message costs in signatures, on one core; the others of its costs are `ONLY=ingest`'s."""
    sealer = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())
    verifier, mac = signing.LearnerVerifier(sealer.public_key), signing.ActorMac(bytes(32))
    topic, body = "actorq/bench/actor/actor-0000/receipt", codec.encode(messages.Receipt("ledger", 1, 1))
    sealed, message = sealer.seal(topic, body), bytes(27_600)
    from_actor = mac.seal(topic, message)
    for what, one in (
        ("a receipt is signed", lambda: sealer.seal(topic, body)),
        ("a receipt is verified", lambda: verifier.open(topic, sealed)),
        ("the MAC of a message of 27.6 KB is checked", lambda: mac.open(topic, from_actor)),
    ):
        us = [1e6 * seconds / 500 for seconds in timeit.repeat(one, number=500, repeat=7)]
        yield {
            "benchmark": "simulate",
            "case": f"unit cost: {what}",
            "value": round(statistics.median(us), 1),
            "unit": "us",
            "reference": None,
            "ratio": None,
            "runs": len(us),
            "spread": round(max(us) - min(us), 1),
            "explain": f"least {min(us):.1f}; load average {os.getloadavg()[0]:.1f}",
        }


def _real(size: int) -> dict[str, float]:
    """The same figures of processes: a broker with TLS, a learner, and as many connections."""
    with _load.Site(size) as site:
        learner = site.learner(
            *("--actors", str(size), "--samples-per-insert", "0.001", "--learning-starts", "1000"),
            *("--replay-capacity", "1000000", "--max-env-steps", "1000000000"),
        )
        swarm = site.swarm("--rate", str(RATE))
        site.line(swarm)
        site.newest_metrics()
        time.sleep(_settle_s(size))
        first = site.newest_metrics()
        time.sleep(_real_s(size))
        last = site.newest_metrics()
        swarm.terminate()
        report = json.loads(site.line(swarm))
        site.stop_learner(learner)
    wall_s = last["wall_s"] - first["wall_s"]
    per_s = {
        "messages/s": (last["messages"] - first["messages"]) / wall_s,
        "steps/s": (last["env_steps"] - first["env_steps"]) / wall_s,
    }
    steps = per_s["steps/s"] / per_s["messages/s"]
    return per_s | {
        "receipts/s": per_s["messages/s"] * report["receipted"] / max(1, report["sent"]),
        "message_s": 1.0 / last["ingest_capacity_per_s"] - STEP_S * steps,
        "budget": last["message_budget_per_s"],
        "delay_s": last["broker_delay_s"],
    }


def _settle_s(size: int) -> float:
    """Seconds until each has sent, and been granted more, twice."""
    return WARM_S + 3.0 * size / budget.MESSAGES_PER_S


def _real_s(size: int) -> float:
    """Seconds in which each sends three times: many send together, for they were granted more together."""
    return max(25.0, 3.0 * size / budget.MESSAGES_PER_S)


def _row(size: int, what: str, value: float, unit: str, reference: float | None, explain: str) -> dict[str, Any]:
    return {
        "benchmark": "simulate",
        "case": f"{size} actors at {RATE:g} steps/s: {what}",
        "value": round(value, 2),
        "unit": unit,
        "reference": None if reference is None else round(reference, 2),
        "ratio": None if reference is None else round(value / reference, 3),
        "runs": 1,
        "spread": 0.0,
        "explain": f"{explain}; load average {os.getloadavg()[0]:.1f}",
    }
