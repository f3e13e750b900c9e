"""Broker addresses: what is one, and what is not."""

from __future__ import annotations

import pytest

from broker import address, errors


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("desk", "desk:1883"),
        ("desk.local:1884", "desk.local:1884"),
        ("10.0.0.1", "10.0.0.1:1883"),
        ("[::1]:1885", "[::1]:1885"),
        ("[fe80::1]", "[fe80::1]:1883"),
        ("::1", "[::1]:1883"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert str(address.Address.parse(text)) == shown


@pytest.mark.parametrize(
    "text", ["", ":1883", "desk:", "desk:x", "desk:0", "desk:65536", "desk:-1", "mqtt://desk:1883", "a:b:c"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not a broker address"):
        address.Address.parse(text)
