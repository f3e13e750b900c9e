"""The embedded broker's own: where it listens, what it says, and amqtt's manners that are changed."""

from __future__ import annotations

import sys

import pytest

from broker.contract import errors
from tests import conftest


@pytest.fixture(autouse=True)
def _amqtt() -> None:
    conftest.require("embedded")


def ready(port: int) -> None:
    raise AssertionError("it must not start")


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.168.1.10", "broker.example.com", ""])
def test_other_machines_are_never_served(bind: str) -> None:
    from broker.serve import embedded

    with pytest.raises(errors.ConfigError, match="serves one machine.*\n.*\n.*install mosquitto"):
        embedded.run(bind, 0, ready)


def test_a_taken_port(real_broker: conftest.BrokerProcess) -> None:
    from broker.serve import embedded

    with pytest.raises(errors.ConfigError, match="in use, perhaps by another broker"):
        embedded.run("127.0.0.1", real_broker.port, ready)


def test_missing_amqtt_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt.broker", None)
    monkeypatch.delitem(sys.modules, "broker.serve.embedded", raising=False)
    with pytest.raises(errors.RuntimeMissing, match=r"pip install 'actorq-fleet\[local\]'"):
        __import__("broker.serve.embedded")


def test_a_payload_is_not_formatted_into_log_lines() -> None:
    from broker.serve import embedded

    assert repr(embedded._Payload(bytes(40_000_000))) == "<40000000 bytes>"
