"""A real spool and a real ledger over a network that loses, doubles and reorders, with kills on both sides."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from broker.contract import codec, messages, signing
from edge_actor.experience import journal, spool, trajectory, window
from learner.experience import dead_letters, ingest, ledger, validate
from learner.experience.buffers import replay
from learner.files import run_directory
from tests.fakes import fleet_examples

MAC = signing.ActorMac(b"k" * 32)
TOPIC = "actorq/lab/actor/pi/experience"
STEPS = 3  # in each message


class Actor:
    """One boot after the other on one directory. Each step carries its own number."""

    def __init__(self, directory: Path, spool_bytes: int) -> None:
        self._directory, self._spool_bytes = directory, spool_bytes
        self._numbers = itertools.count(1)
        self._boot = 0
        self.now = 0.0
        self.accepted: set[int] = set()
        self._dropped_before = 0
        self.start()

    def start(self) -> None:
        self._boot += 1
        self._files = journal.Journal.open(self._directory, self._spool_bytes)
        self.spool = spool.Spool.open(
            self._boot,
            fleet_examples.SPEC.fingerprint,
            lambda body: MAC.seal(TOPIC, body),
            self._files,
            lambda: self.now,
        )

    def kill(self) -> None:
        """Does what a kernel does for a process that is gone: its lock is released."""
        self._dropped_before += self.spool.steps_dropped
        os.close(self._files._lock)

    def act(self) -> None:
        numbers = [next(self._numbers) for _ in range(STEPS)]
        flags, ints = np.zeros(1, np.uint8), np.zeros(1, np.int32)
        observation = np.zeros((STEPS + 1, 4), np.float32)
        self.spool.add(
            trajectory.Segments(
                length=np.array([STEPS], np.int32),
                env_index=ints,
                row=ints,
                terminated=flags,
                truncated=flags,
                episode_return=np.zeros(1, np.float32),
                episode_length=ints,
                observation=observation,
                action=np.zeros(STEPS, np.int32),
                reward=np.array(numbers, np.float32),
                log_prob=np.zeros(0, np.float32),
                draw=0,
                finished=np.zeros(0, np.float32),
            ),
            assigned_epoch=1,
            epoch=0,
            version=0,
        )
        self.accepted.update(numbers)

    @property
    def dropped(self) -> int:
        """Steps, over all boots."""
        return self._dropped_before + self.spool.steps_dropped


class Learner:
    """One life after the other on one ledger, each a session of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lives = 0
        self.start()

    def start(self) -> None:
        self._lives += 1
        self.session = f"life-{self._lives}"
        self._book = ledger.Ledger.open(self._directory / run_directory.LEDGER, keep=True)
        self.replay = replay.Replay(fleet_examples.SPEC, 100_000, n_step=1, gamma=0.9)
        letters = dead_letters.DeadLetters(self._directory / dead_letters.NAME)
        self.checks = validate.Validator(
            {"pi": MAC}, fleet_examples.SPEC, (1, 1), self._book.marks(), letters, self.replay.fits
        )
        self.ingest = ingest.Ingest(self.checks, self._book, self.replay)
        self.ingest.rebuild_replay()

    def kill(self) -> None:
        """A commit under way is durable or is not, as it happens; nothing else remains."""
        self._book.close()

    def numbers(self) -> Counter[int]:
        """Returns how often each step is in the ledger."""
        found: Counter[int] = Counter()
        for _, body in ledger.bodies(self._directory / run_directory.LEDGER):
            found.update(int(number) for number in codec.decode(messages.Experience, body).reward)
        return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spool_bytes", [10_000_000, 40_000], ids=["roomy", "drops its oldest"])
def test_each_accepted_step_once_but_for_counted_drops(tmp_path: Path, seed: int, spool_bytes: int) -> None:
    rng = random.Random(seed)
    actor, learner = Actor(tmp_path / "spool", spool_bytes), Learner(tmp_path)
    on_the_way: list[bytes] = []  # to the learner, by any number of brokers
    receipts: list[messages.Receipt] = []  # back

    def carry(payload: bytes) -> bool:
        on_the_way.append(payload)
        return rng.random() < 0.95

    def deliver(order: random.Random | None) -> None:
        """One message; at random, and perhaps once more later; or the oldest, for the last time."""
        if on_the_way:
            index = order.randrange(len(on_the_way)) if order else 0
            payload = on_the_way[index] if order and order.random() < 0.2 else on_the_way.pop(index)
            learner.ingest.receive("pi", TOPIC, payload, 0)

    def settle(*, wait: bool) -> None:
        learner.ingest.commit(wait=wait)
        receipts.extend(receipt for _, receipt in learner.ingest.receipts())

    kills: Counter[str] = Counter()
    for _ in range(1000):
        actor.now += 0.1
        draw = rng.random()
        if draw < 0.45:
            actor.act()
        elif draw < 0.80:
            deliver(rng)
        elif draw < 0.86:
            settle(wait=rng.random() < 0.5)
        elif draw < 0.92 and receipts:
            actor.spool.acknowledge(receipts.pop(rng.randrange(len(receipts))))  # old ones too
        elif draw < 0.93 and on_the_way:
            del on_the_way[rng.randrange(len(on_the_way))]
        elif draw < 0.94:
            actor.spool.follow_learner(learner.session)
        elif draw < 0.945:
            on_the_way.clear()  # a broker is killed
            actor.spool.rewind()
        elif draw < 0.95:
            actor.kill()
            actor.start()
            kills["actor"] += 1
        elif draw < 0.955:
            learner.kill()
            learner.start()
            kills["learner"] += 1
        actor.spool.pump(carry)

    while len(actor.spool):  # the network is well again
        actor.now += window.RESEND_S
        actor.spool.follow_learner(learner.session)
        actor.spool.pump(lambda payload: not on_the_way.append(payload))  # type: ignore[func-returns-value]
        while on_the_way:
            deliver(None)
        settle(wait=True)
        for receipt in receipts:
            actor.spool.acknowledge(receipt)
        receipts.clear()

    found = learner.numbers()
    lost = actor.accepted - found.keys()
    assert kills["actor"] and kills["learner"]
    assert found and max(found.values()) == 1
    assert found.keys() <= actor.accepted
    assert len(learner.replay) == len(found), "replay has what the ledger has"
    assert learner.checks.refused.keys() <= {"duplicate", "gap"}
    assert len(lost) <= actor.dropped
    assert (actor.dropped > 0) == (spool_bytes < 100_000)
