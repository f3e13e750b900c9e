"""Links for the tests of this folder."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker.mqtt import link
from tests.fakes import log_reader

Messages = queue.Queue[tuple[str, bytes, bool]]
MakeLink = Callable[..., link.Link]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> log_reader.LogReader:
    """Returns what links log."""
    return log_reader.LogReader(caplog, "broker.mqtt")


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    """Links that are closed behind the test."""
    made: list[link.Link] = []

    def make(*brokers: str, name: str = "pi", start: bool = True, **options: Any) -> link.Link:
        made.append(link.Link(brokers, name, **options))
        if start:
            made[-1].start()
            made[-1].wait_connected(10)
        return made[-1]

    yield make
    for one in made:
        one.close()


def listen(made: link.Link, topic_filter: str) -> Messages:
    """Returns what comes by a filter, as (topic, payload, retained)."""
    received: Messages = queue.Queue()
    made.subscribe(topic_filter, lambda *message: received.put(message))
    return received
