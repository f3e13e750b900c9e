"""A broker that sends what is no MQTT: a link leaves it, and nothing reaches the thread that takes turns."""

from __future__ import annotations

import tracemalloc

import pytest

from broker.mqtt import link
from tests import conftest
from tests.fakes import log_reader
from tests.fakes.connections import raw_broker


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("what", raw_broker.GARBAGE)
def test_garbage(what: str, by_turns: bool, log: log_reader.LogReader) -> None:
    with raw_broker.RawBroker(raw_broker.GARBAGE[what]) as raw:
        made = link.Link([raw.address], "pi")
        made.subscribe("actorq/#", lambda *_: None)
        made.start()
        try:

            def gone() -> bool:
                if by_turns:
                    made.poll()
                return raw.clients.qsize() >= 2

            conftest.wait_until(gone, "it left, came back, and left again", 30.0)
            assert "lost" in log.get(0.0)
        finally:
            made.close()


def test_endless_data_is_not_kept(log: log_reader.LogReader) -> None:
    with raw_broker.RawBroker(raw_broker.GARBAGE["endless data"]) as raw:
        tracemalloc.start()
        made = link.Link([raw.address], "pi")
        made.subscribe("actorq/#", lambda *_: None)
        made.start()
        try:
            conftest.wait_until(lambda: raw.clients.qsize() >= 2, "it left twice", 30.0)
            assert "more than any policy has" in log.get(0.0)
        finally:
            made.close()
            kept, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert kept < 10e6, f"{kept / 1e6:.0f} MB are still held"
        assert peak < 30e6, f"{peak / 1e6:.0f} MB were held"
