"""The loop itself, over a real broker and ledger; only the update takes as long as the test wants."""

from __future__ import annotations

import io
import queue
import threading
import time
from pathlib import Path

import pytest

from broker import codec, identity, messages, signing, topics
from learner import config, console, replay, roster, run_directory, session, training_loop
from learner.algorithms import Update
from tests.broker import plain_client
from tests.conftest import BrokerProcess
from tests.learner import fleet_examples

TOPICS = topics.Topics("lab")
WAIT_S = 60.0


class Actor:
    """Says that it lives, and sends a message of experience until it has the receipt; then the next one."""

    def __init__(self, fleet: identity.Fleet, client: plain_client.PlainClient) -> None:
        self._mac = signing.ActorMac(fleet.bundle("pi").mac_key)
        self._verifier = signing.LearnerVerifier(fleet.sealer.public_key)
        self._client = client
        self.stop = threading.Event()
        self.receipts = threading.Semaphore(0)

    def run(self) -> None:
        self._client.subscribe(TOPICS.receipt("pi"))
        seq, beats = 1, 0
        while not self.stop.is_set():
            beats += 1
            sent = fleet_examples.experience((8, 4), seq=seq, step=12 * (seq - 1), epoch=0, version=0)
            self._say(TOPICS.actor_state("pi"), fleet_examples.state(heartbeat=beats))
            self._say(TOPICS.experience("pi"), sent)
            if self._has_receipt(seq):
                seq += 1
                self.receipts.release()

    def _say(self, topic: str, message: messages.Message) -> None:
        self._client.publish(topic, self._mac.seal(topic, codec.encode(message)))

    def _has_receipt(self, seq: int) -> bool:
        """Whether it comes soon; a learner that is not there yet gives none."""
        try:
            topic, payload, _ = self._client.received.get(timeout=0.5)
        except queue.Empty:
            return False
        return codec.decode(messages.Receipt, self._verifier.open(topic, payload)).seq >= seq


def test_a_receipt_does_not_wait_for_an_update(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = identity.Fleet.open("lab")
    fleet.enroll("pi")
    train = config.TrainConfig(fleet="lab", broker=(mosquitto.address,), learning_starts=24, evaluate_episodes=0)
    settings = config.Settings(train, config.DqnConfig(hidden=(8,), batch_size=4), config.GateConfig())
    stop = threading.Event()
    here = session.Session(train, print)
    with plain_client.PlainClient(mosquitto.port, "pi") as client:
        actor = Actor(fleet, client)
        acting = threading.Thread(target=actor.run)
        acting.start()
        actors = here.gather(roster.Roster(here.id, here.epoch, "", print), stop)
        directory = run_directory.RunDirectory(tmp_path / "run", resume=False)
        screen, now_s = console.Console(io.StringIO()), time.monotonic()
        loop = training_loop.TrainingLoop(settings, directory, here, actors, None, screen, now_s, stop)
        update = loop.algorithm.update

        def slow(batch: replay.Batch) -> Update:
            while actor.receipts.acquire(blocking=False):  # those of before
                pass
            arrived = [actor.receipts.acquire(timeout=WAIT_S) for _ in range(3)]
            stop.set()
            assert all(arrived), "receipts wait for the update"
            return update(batch)

        monkeypatch.setattr(loop.algorithm, "update", slow)
        try:
            loop.train()
        finally:
            actor.stop.set()
            acting.join()
            here.close()
    assert loop.algorithm.updates == settings.algorithm.updates_per_call
    assert loop.env_steps >= 24 + 3 * 12
