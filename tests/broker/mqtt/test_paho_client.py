"""Our client makes of a packet what paho would make of it, of an odd one too."""

from __future__ import annotations

import importlib.metadata
import itertools
import random
import socket
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from broker.mqtt import paho_client as paho
from tests.fakes.connections import mqtt_packet

PAYLOAD = bytes(range(256)) * 300
PUBLISH = 0x30
OVERRIDDEN = ("_packet_read", "_packet_write")
USED = (
    *("_handle_on_message", "_in_packet", "_last_bytes_received", "_msgtime_mutex"),
    *("_out_packet", "_packet_handle", "_send_puback"),
)


def heard(client: mqtt.Client, *pieces: bytes) -> tuple[Any, ...]:
    """Returns what callbacks get of what comes piece by piece, after the last code, or how it is refused."""
    messages: list[Any] = []
    client.on_message = lambda _, __, message: messages.append(
        (message.topic, message.payload, message.qos, message.retain, message.dup, message.mid)
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        client._sock = ours
        code: Any = MQTTErrorCode.MQTT_ERR_SUCCESS
        try:
            for piece in pieces:
                theirs.sendall(piece)
                while code is MQTTErrorCode.MQTT_ERR_SUCCESS:
                    code = client._packet_read()
                if code is MQTTErrorCode.MQTT_ERR_AGAIN:
                    code = MQTTErrorCode.MQTT_ERR_SUCCESS
        except Exception as error:  # whichever paho raises
            code = type(error)
        client._sock = None
    return code, *messages


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[mqtt.Client, mqtt.Client]]:
    """Makes ours and paho's own, with no socket for an acknowledgement."""
    for cls in (mqtt.Client, paho.Client):
        monkeypatch.setattr(cls, "_send_puback", lambda self, mid: MQTTErrorCode.MQTT_ERR_SUCCESS)
    return lambda: (paho.Client("x", 1.0), mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv311))


ODD = [
    (PUBLISH, b"\x00\x03a/b" + PAYLOAD),
    (PUBLISH, b"\x00\x03a/b"),
    (PUBLISH | 1, b"\x00\x03a/b" + PAYLOAD),
    (PUBLISH | 2, b"\x00\x03a/b\x12\x34" + PAYLOAD),
    (PUBLISH | 8 | 2, b"\x00\x03a/b\x12\x34"),
    (PUBLISH | 2, b"\x00\x03a/b\x12"),
    (PUBLISH | 2, "\x00\x03ä/".encode() + b"\x12\x34x"),
    (PUBLISH, b"\x00\x00" + PAYLOAD),
    (PUBLISH, b"\x00\x09a/b"),
    (PUBLISH, b"\x00"),
    (PUBLISH, b""),
    (PUBLISH | 6, b"\x00\x03a/b\x12\x34" + PAYLOAD),
    (0xD0, b""),
    (0xD0, b"x"),
    (0x40, b"\x12\x34"),
    (0x40, b"\x12"),
    (0x90, b"\x12\x34\x01"),
    (0xF0, b""),
]


@pytest.mark.parametrize(("command", "packet"), ODD)
def test_a_packet_is_to_us_what_it_is_to_paho(clients: Any, command: int, packet: bytes) -> None:
    ours, plain = clients()
    assert heard(ours, mqtt_packet.packet(command, packet)) == heard(plain, mqtt_packet.packet(command, packet))


@pytest.mark.parametrize("seed", range(20))
def test_packets_that_come_in_any_pieces_are_the_same_messages(clients: Any, seed: int) -> None:
    rng = random.Random(seed)
    sent = b"".join(
        mqtt_packet.packet(
            PUBLISH | qos << 1,
            b"\x00\x03a/b" + bytes([0, number] * qos) + rng.randbytes(rng.choice((0, 1, 120, 30_000, 300_000))),
        )
        for number in range(1, 12)
        for qos in (rng.choice((0, 1)),)
    )
    cuts = sorted(rng.sample(range(len(sent)), 7) + [1, 2, 3])
    pieces = [sent[first:last] for first, last in itertools.pairwise([0, *cuts, len(sent)])]
    ours, plain = clients()
    assert heard(ours, *pieces) == heard(plain, *pieces)
    assert not ours.is_amid_packet
    assert not ours.has_read


def test_a_packet_that_has_come_in_part_is_waited_for() -> None:
    client, packet = paho.Client("x", 1.0), mqtt_packet.packet(PUBLISH, b"\x00\x03a/b" + PAYLOAD)
    assert heard(client, packet + packet[:100]) == (
        MQTTErrorCode.MQTT_ERR_SUCCESS,
        ("a/b", PAYLOAD, 0, False, False, 0),
    )
    assert client.is_amid_packet
    assert not client.has_read, "it would be asked again and again"


def test_what_is_no_packet_or_too_large_ends_the_connection() -> None:
    said: list[str] = []
    for start in (b"\x30\xff\xff\xff\xff\x01", b"\x30\xff\xff\xff\x7f"):
        assert heard(paho.Client("x", 1.0, on_failure=said.append), start) == (MQTTErrorCode.MQTT_ERR_CONN_LOST,)
    assert "no MQTT" in said[0]
    assert paho.TOO_LARGE in said[1]


def test_only_whole_messages_are_heard() -> None:
    expected = ("a/b", PAYLOAD, 1, True, False, 0x1234)
    client = paho.Client("x", 1.0)
    packet = mqtt_packet.packet(PUBLISH | 3, b"\x00\x03a/b\x12\x34" + PAYLOAD)
    assert heard(client, packet) == (MQTTErrorCode.MQTT_ERR_SUCCESS, expected)
    assert [bytes(one["packet"]) for one in client._out_packet] == [b"\x40\x02\x12\x34"], "and acknowledged"


def test_paho_is_one_whose_private_methods_are_known() -> None:
    """Overridden methods are not part of its interface: a new release may call them otherwise, or not at all."""
    installed = importlib.metadata.version("paho-mqtt")
    assert installed.startswith(paho.KNOWN_PAHO), (
        f"paho-mqtt {installed} is not known: read its {', '.join(OVERRIDDEN)}, compare with {paho.__file__}, "
        "then name it there in KNOWN_PAHO, and raise the bound in setup.cfg"
    )


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_is_overridden_is_there(name: str) -> None:
    assert callable(getattr(mqtt.Client, name)), f"look at {paho.__file__}"


@pytest.mark.parametrize("name", USED)
def test_what_is_used_of_paho_is_there(name: str) -> None:
    assert hasattr(mqtt.Client(CallbackAPIVersion.VERSION2), name), f"look at {paho.__file__}"


def test_nothing_else_of_paho_is_overridden() -> None:
    private = {name for name in vars(paho.Client) if name.startswith("_") and not name.startswith("__")}
    assert private & set(dir(mqtt.Client)) == set(OVERRIDDEN), f"look at {paho.__file__}"
