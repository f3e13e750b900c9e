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


def find(read: bytearray, at: int) -> tuple[int, int, int] | None:
    """Returns the first byte of the packet at `at`, where its content starts and ends; None if it is not all there."""
    size = shift = 0
    for place in range(at + 1, min(at + 5, len(read))):
        size |= (read[place] & 0x7F) << shift
        shift += 7
        if read[place] < 0x80:
            end = place + 1 + size
            return (read[at], place + 1, end) if end <= len(read) else None
    return None


def text(value: str) -> bytes:
    """Returns a string with its length before it."""
    return data(value.encode())


def data(value: bytes) -> bytes:
    """Returns bytes with their length before them."""
    return len(value).to_bytes(2, "big") + value
