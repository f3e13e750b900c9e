"""An MQTT packet as it lies on the wire, for whoever speaks below any client library."""

from __future__ import annotations


def packet(first: int, body: bytes) -> bytes:
    """Returns a packet by its first byte, kind and flags, with its header."""
    return bytes((first,)) + length(len(body)) + body


def length(value: int) -> bytes:
    """Returns the length of a packet's body, as its header has it."""
    digits = bytearray()
    while True:
        value, digit = divmod(value, 128)
        digits.append(digit | (0x80 if value else 0))
        if not value:
            return bytes(digits)
