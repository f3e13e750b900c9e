"""Broker addresses: what is one, and what is not."""

from __future__ import annotations

import pytest

from broker.contract import address, errors


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("desk", "desk:8883"),
        ("mqtts://desk", "desk:8883"),
        ("127.0.0.1", "127.0.0.1:1883"),
        ("mqtt://127.0.0.1", "127.0.0.1:1883"),
        ("mqtts://127.0.0.1", "mqtts://127.0.0.1:8883"),
        ("mqtts://[::1]:99", "mqtts://[::1]:99"),
        ("desk.local:1884", "desk.local:1884"),
        ("10.0.0.1", "10.0.0.1:8883"),
        ("[::1]:1885", "[::1]:1885"),
        ("[fe80::1]", "[fe80::1]:8883"),
        ("::1", "[::1]:1883"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    found = address.Address.parse(text)
    assert str(found) == shown and address.Address.parse(shown) == found


@pytest.mark.parametrize(
    ("text", "tls"), [("desk", True), ("10.0.0.1:1883", True), ("localhost", False), ("mqtts://localhost", True)]
)
def test_tls_is_spoken_everywhere_but_on_this_machine(text: str, tls: bool) -> None:
    assert address.Address.parse(text).tls is tls


@pytest.mark.parametrize("text", ["mqtt://desk", "mqtt://10.0.0.1:1883"])
def test_a_plain_connection_over_a_network_cannot_be_asked_for(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="without TLS over a network"):
        address.Address.parse(text)


@pytest.mark.parametrize(
    "text", ["", ":1883", "desk:", "desk:x", "desk:0", "desk:65536", "desk:-1", "http://desk:1883", "[::1]x", "a:b:c"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not a broker address"):
        address.Address.parse(text)
