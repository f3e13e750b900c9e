"""Orders go beside a learner that has the fleet, and an answer counts only from whom the order went to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from learner import config
from learner.fleet import session
from learner.operate.orders import courier, giving, order_book
from tests import conftest
from tests.fakes import fleet_examples
from tests.fakes.connections import plain_client

pytestmark = pytest.mark.mosquitto
NAMES = topics.Topics("lab")


class Actor:
    """Says that it is here, and answers what it is ordered, sealed with the key of `signer`."""

    def __init__(self, fleet: identity.Fleet, client: plain_client.PlainClient, signer: str) -> None:
        self._fleet, self._client = fleet, client
        self._mac = signing.ActorMac(fleet.bundle("pi").mac_key)
        self._signer = signing.ActorMac(fleet.bundle(signer).mac_key)
        self.orders: list[messages.Instruction] = []
        client.subscribe(NAMES.orders("pi"))
        topic = NAMES.actor_state("pi")
        client.publish(topic, self._mac.seal(topic, codec.encode(fleet_examples.state())), retain=True)

    def answer(self) -> None:
        """Answers one message of orders."""
        topic, payload, _ = self._client.received.get(timeout=20.0)
        body = signing.LearnerVerifier(self._fleet.sealer.public_key).open(topic, payload)
        self.orders += codec.decode(messages.Orders, body).orders
        for order in self.orders:
            said = messages.Answer(order.number, order.kind, "done")
            self._client.publish(NAMES.answer("pi"), self._signer.seal(NAMES.answer("pi"), codec.encode(said)))


Give = Callable[[str, float], tuple[order_book.Entry, courier.Courier]]


@pytest.fixture
def fleet() -> identity.Fleet:
    made = identity.Fleet.open("lab")
    for name in ("pi", "other"):
        made.enroll(name)
    return made


@pytest.fixture
def give(mosquitto: conftest.BrokerProcess, fleet: identity.Fleet) -> Iterator[Give]:
    """Pauses `pi`, which answers with the key of the actor named."""
    with contextlib.ExitStack() as ending:
        client = ending.enter_context(plain_client.PlainClient(mosquitto.port, "pi"))
        book = ending.enter_context(contextlib.closing(order_book.OrderBook.open(fleet.directory)))
        carrier = courier.Courier(fleet, book, [mosquitto.address], ["pi"], fleet.tls())
        ending.enter_context(contextlib.closing(carrier))
        carrier.start()

        def run(signer: str, wait_s: float) -> tuple[order_book.Entry, courier.Courier]:
            answering = threading.Thread(target=Actor(fleet, client, signer).answer)
            answering.start()
            (entry,) = giving.give("pause", {}, ["pi"], book, carrier, wait_s=wait_s, valid_s=60.0)
            answering.join()
            return entry, carrier

        yield run


def test_a_learner_that_has_the_fleet_keeps_it(give: Give, mosquitto: conftest.BrokerProcess) -> None:
    with contextlib.closing(session.Session.open(config.TrainConfig(fleet="lab", broker=(mosquitto.address,)))) as held:
        held.join()
        entry, _ = give("pi", 20.0)
        assert entry.outcome == "done"
        held.beat()
        heard = list(held.drain(0.5))  # raises FleetBusy, had somebody else claimed the fleet
        assert {arrival.actor_id for arrival in heard} <= {"pi"} and not held.refused


def test_nobody_answers_for_another(give: Give) -> None:
    entry, carrier = give("other", 2.0)
    assert entry.outcome == "waiting"
    conftest.wait_until(lambda: not list(carrier.drain(0.1)) and carrier.refused, "the forged answer came", 20.0)
    assert carrier.refused == {"signature": 1}
