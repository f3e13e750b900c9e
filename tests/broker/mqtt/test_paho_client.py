"""Our client makes of a packet what paho would make of it, of an odd one too."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode

from broker.mqtt import paho_client as paho

PAYLOAD = bytes(range(256)) * 300
PUBLISH = 0x30
OVERRIDDEN = ("_handle_publish", "_packet_write", "_sock_recv")


def heard(client: mqtt.Client, command: int, packet: bytes) -> tuple[Any, ...]:
    """Returns what a packet's callback gets, or how it is refused."""
    messages: list[Any] = []
    client.on_message = lambda _, __, message: messages.append(
        (message.topic, message.payload, message.qos, message.retain, message.dup, message.mid)
    )
    client._in_packet |= {"command": command, "packet": bytearray(packet), "remaining_length": len(packet)}
    try:
        code = client._packet_handle()
    except Exception as error:  # whichever paho raises
        return type(error), *messages
    return code is MQTTErrorCode.MQTT_ERR_SUCCESS, *messages


@pytest.mark.parametrize(
    ("command", "packet"),
    [
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
    ],
)
def test_a_message_reaches_its_callback_as_by_paho_itself(
    monkeypatch: pytest.MonkeyPatch, command: int, packet: bytes
) -> None:
    for cls in (mqtt.Client, paho.Client):  # there is no socket for an acknowledgement
        monkeypatch.setattr(cls, "_send_puback", lambda self, mid: MQTTErrorCode.MQTT_ERR_SUCCESS)
    plain = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv311)
    assert heard(paho.Client("x", 1.0), command, packet) == heard(plain, command, packet)


def test_only_whole_messages_are_heard() -> None:
    expected = ("a/b", PAYLOAD, 1, True, False, 0x1234)
    client = paho.Client("x", 1.0)
    assert heard(client, PUBLISH | 3, b"\x00\x03a/b\x12\x34" + PAYLOAD) == (True, expected)
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


@pytest.mark.parametrize("name", ["_handle_on_message", "_send_puback", "_in_packet", "_out_packet"])
def test_what_is_used_of_paho_is_there(name: str) -> None:
    assert hasattr(mqtt.Client(CallbackAPIVersion.VERSION2), name), f"look at {paho.__file__}"


def test_nothing_else_of_paho_is_overridden() -> None:
    private = {name for name in vars(paho.Client) if name.startswith("_") and not name.startswith("__")}
    assert private & set(dir(mqtt.Client)) == set(OVERRIDDEN), f"look at {paho.__file__}"
