"""A learner that trains leaves orders that wait at a broker that has forgotten them."""

from __future__ import annotations

import contextlib
import time

import pytest

from broker.contract import codec, messages, signing
from broker.fleet import identity
from learner import config
from learner.fleet import session
from learner.operate.orders import order_book, standing
from tests import conftest
from tests.fakes import log_reader
from tests.fakes.connections import plain_client

pytestmark = pytest.mark.mosquitto


def test_they_are_left_again_and_taken_back(mosquitto: conftest.BrokerProcess) -> None:
    fleet = identity.Fleet.open("lab")
    fleet.enroll("pi", [mosquitto.address])
    held = session.Session.open(config.TrainConfig(fleet="lab", broker=(mosquitto.address,)))
    with contextlib.ExitStack() as looking:
        book = looking.enter_context(contextlib.closing(order_book.OrderBook.open(fleet.directory)))
        looking.enter_context(contextlib.closing(held))
        held.join()
        left = standing.StandingOrders.of(held)
        number = book.add(["pi"], "pause", {}, time.time(), 60.0)["pi"]
        book.add(["pi"], "resume", {}, time.time() - 60.0, 1.0)
        left.leave(0.0)
        mosquitto.restart()
        client = looking.enter_context(plain_client.PlainClient(mosquitto.port, "looks"))
        topic = held.topics.orders("pi")
        client.subscribe(topic)
        _, payload, _ = client.received.get(timeout=20.0)
        body = signing.LearnerVerifier(fleet.sealer.public_key).open(topic, payload)
        orders = codec.decode(messages.Orders, body).orders
        assert [(one.number, one.kind) for one in orders] == [(number, "pause")], "and what has expired is not"

        book.note([("pi", messages.Answer(number, "pause", "done"))])
        left.leave(1.0)
        assert client.received.empty(), "looks are seconds apart"
        left.leave(10.0)
        _, payload, _ = client.received.get(timeout=20.0)
        assert payload == b""
        left.close()


def test_a_book_that_cannot_be_used_ends_no_training(
    mosquitto: conftest.BrokerProcess, log: log_reader.LogReader
) -> None:
    fleet = identity.Fleet.open("lab")
    (fleet.directory / "orders.sqlite").mkdir(parents=True)
    left = standing.StandingOrders.of(
        session.Session.open(config.TrainConfig(fleet="lab", broker=(mosquitto.address,)))
    )
    left.leave(0.0)
    left.close()
    assert any("the book of orders cannot be used" in line for line in log.lines)
