"""One enrolled client that does what it may as fast as it can, until SIGTERM; prints how much it sent.

python -m tests.benchmarks.fleet._hostile --bundle BUNDLE.json --kind junk
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from broker.contract import address, codec, messages, signing, specs, topics
from broker.fleet import identity
from tests.fakes.connections import light_connection, mqtt_packet

SPEC = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2))
"""The spec of the honest actors: nothing is wrong with what is sent but that it is so much."""
AT_ONCE = 20
_PUBLISH, _SUBSCRIBE = 0x30, 0x82


def junk(actor: Hostile) -> Iterator[bytes]:
    """Bytes that are nothing, at its own topic of experience."""
    yield from itertools.repeat(actor.publish("experience", bytes(1000)))


def refused(actor: Hostile) -> Iterator[bytes]:
    """Messages under its MAC, each the next of its boot, of another environment."""
    for seq in itertools.count(1):
        yield actor.say("experience", experience(seq, fingerprint="0" * 16))


def accepted(actor: Hostile) -> Iterator[bytes]:
    """Messages with nothing wrong but that there are so many; of ever new boots, to be granted something."""
    for boot in itertools.count(1):
        yield actor.say("state", state(boot, 1), retain=True)
        for seq in range(1, 200):
            yield actor.say("experience", experience(seq, boot=boot))


def states(actor: Hostile) -> Iterator[bytes]:
    """States and reports, all of them new."""
    for number in itertools.count(1):
        yield actor.say("state", state(1 + number // 100, number), retain=True)
        yield actor.say("report", messages.Report(f"{number}", "evaluate", episode_return=np.full(20, 1e9, "f4")))


def subscriptions(actor: Hostile) -> Iterator[bytes]:
    """Filters without end, which the broker has to keep."""
    for number in itertools.count(1):
        one = mqtt_packet.text(f"actorq/{actor.fleet}/{number}/+/#") + b"\1"
        yield mqtt_packet.packet(_SUBSCRIBE, struct.pack("!H", 1 + number % 60_000) + one)


KINDS: dict[str, Callable[[Hostile], Iterator[bytes]]] = {
    "junk": junk,
    "refused": refused,
    "accepted": accepted,
    "states": states,
    "subscriptions": subscriptions,
}


def state(boot: int, heartbeat: int) -> messages.ActorState:
    birth = messages.Birth("CartPole-v1", SPEC, 1, "hostile", "", "none", "", 0.0)
    return messages.ActorState(True, "hostile", boot, heartbeat, birth)


def experience(seq: int, **changes: object) -> messages.Experience:
    """Returns experience of one step."""
    ones = np.ones(1, np.float32)
    made = messages.Experience(
        boot=1,
        seq=seq,
        oldest=seq,
        step=seq,
        fingerprint=SPEC.fingerprint,
        assigned_epoch=1,
        epoch=0,
        version=0,
        draw=0,
        length=np.ones(1, np.int32),
        env_index=np.zeros(1, np.int32),
        row=np.zeros(1, np.int32),
        terminated=np.ones(1, np.uint8),
        truncated=np.zeros(1, np.uint8),
        episode_return=ones,
        episode_length=np.ones(1, np.int32),
        observation=np.zeros((2, *SPEC.observation.shape), np.float32),
        action=np.zeros(1, np.int32),
        reward=ones,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


class Hostile:
    """An actor that floods: it seals with its own key and sends at QoS 0, so that it waits for nobody's answer."""

    def __init__(self, bundle: identity.Bundle) -> None:
        self.fleet, self._id = bundle.fleet, bundle.actor_id
        self._topics, self._mac = topics.Topics(bundle.fleet), signing.ActorMac(bundle.mac_key)
        where = address.Address.parse(bundle.brokers[0])
        will = self._topics.actor_state(self._id), b"gone"
        credentials = self._id, bundle.password
        self._connection = light_connection.LightConnection(
            (where.host, where.port), bundle.tls() if where.tls else None, f"{self._id}-hostile", credentials, will
        )
        self._connection.socket.setblocking(True)
        threading.Thread(target=self._read, daemon=True).start()

    def publish(self, leaf: str, payload: bytes, *, retain: bool = False) -> bytes:
        """A packet."""
        topic = mqtt_packet.text(self._topics.actor(self._id, leaf))
        return mqtt_packet.packet(_PUBLISH | retain, topic + payload)

    def say(self, leaf: str, message: messages.Message, *, retain: bool = False) -> bytes:
        """A packet with a sealed message."""
        return self.publish(
            leaf, self._mac.seal(self._topics.actor(self._id, leaf), codec.encode(message)), retain=retain
        )

    def send(self, packets: Iterator[bytes], stop: threading.Event) -> int:
        """Until `stop`, or until the broker has had enough; how many went out."""
        sent = 0
        try:
            while not stop.is_set():
                self._connection.socket.sendall(b"".join(itertools.islice(packets, AT_ONCE)))
                sent += AT_ONCE
        except OSError:
            pass
        return sent

    def _read(self) -> None:
        """So that the broker is never held up by what it answers."""
        try:
            while self._connection.socket.recv(1 << 16):
                pass
        except OSError:
            pass


def main() -> None:
    """Floods until SIGTERM. One that is cut off comes back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    args = parser.parse_args()
    os.nice(int(os.environ.get("HOSTILE_NICE", "0")))
    stop, sent, connections = threading.Event(), 0, 0

    def end(*_: object) -> None:
        stop.set()
        signal.alarm(1)  # it may be writing to a broker that reads no more

    def finish(*_: object) -> None:
        print(json.dumps({"sent": sent, "connections": connections}), flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, finish)

    print(json.dumps({"ready": True}), flush=True)
    while not stop.is_set():
        try:
            actor = Hostile(identity.Bundle.read(args.bundle))
        except OSError:
            stop.wait(0.1)
            continue
        connections += 1
        sent += actor.send(KINDS[args.kind](actor), stop)
    signal.alarm(0)
    finish()


if __name__ == "__main__":
    main()
