"""All brokers of the fleet as one: a link to each. What is retained goes to all, what comes from any is taken in.

An actor is connected to one of them, whichever that is. None is waited for: a link whose broker is away goes on trying
by itself, and what is retained is sent to that broker once it is back.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from broker.contract import address
from broker.mqtt import connect_errors, link, network_thread

_OTHERS_S = 1.0
"""Seconds that the start waits for the other brokers once one has answered."""
_TURN_S = 0.05
"""Seconds that a message waits for the network thread, which may be writing megabytes: a policy of which something does
not go out costs more, since it is then sent larger."""

_ECHOES = 256
"""What was said and has not come back: minutes of heartbeats. Of policies, whose number is said as well, it is less."""


class Brokers:
    """A connection to each broker of a list.

    Args:
        addresses: Where they are.
        client_id: As for link.Link, like all further options.
    """

    def __init__(self, addresses: Sequence[str], client_id: str, **options: Any) -> None:
        self._answered = threading.Event()
        self._links = {
            where: link.Link([where], client_id, on_connect=self._answered.set, **options)
            for where in dict.fromkeys(addresses)
        }
        self._all = list(self._links.values())

    @property
    def address(self) -> str:
        """The addresses of those that are connected; of all, if none is. For people."""
        return ", ".join([where for where, one in self._links.items() if one.connected] or self._links)

    @property
    def connected(self) -> bool:
        """Returns whether any of them is."""
        return any(one.connected for one in self._all)

    @property
    def connected_to(self) -> list[str]:
        """The addresses of those that are."""
        return [where for where, one in self._links.items() if one.connected]

    @property
    def is_local(self) -> bool:
        """Returns whether they serve this machine only: they are spoken to without TLS."""
        return not any(address.Address.parse(where).tls for where in self._links)

    @property
    def changes(self) -> int:
        """A number that grows whenever a connection is made or lost: what was under way then may not have arrived."""
        return sum(2 * one.connections - one.connected for one in self._all)

    @property
    def bytes_sent(self) -> int:
        return sum(one.bytes_sent for one in self._all)

    @property
    def bytes_received(self) -> int:
        return sum(one.bytes_received for one in self._all)

    @property
    def handler_errors(self) -> int:
        return sum(one.handler_errors for one in self._all)

    def subscribe(self, topic_filter: str, handler: link.Handler) -> None:
        """Subscribes at every broker (see Link.subscribe); the handler is called on several threads."""
        for one in self._all:
            one.subscribe(topic_filter, handler)

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribes at every broker (see Link.unsubscribe)."""
        for one in self._all:
            one.unsubscribe(topic_filter)

    def subscribe_each(self, topic_filter: str, made: Callable[[str], link.Handler]) -> None:
        """Subscribes at every broker, with a handler for each that is made of its address."""
        for where, one in self._links.items():
            one.subscribe(topic_filter, made(where))

    def route(self, topic_filter: str, handler: link.Handler) -> None:
        """Routes a filter at every broker (see Link.route); the handler is called on several threads."""
        for one in self._all:
            one.route(topic_filter, handler)

    def follow(self, wanted: Collection[str]) -> None:
        """Follows these topics, and no others, at every broker (see Link.follow)."""
        for one in self._all:
            one.follow(wanted)

    def start(self) -> None:
        """Connects, and waits until one broker has answered; briefly for the others.

        Raises:
            BrokerUnreachable: None did in time, or those that did let us not in.
        """
        for one in self._all:
            one.start()
        timeout_s = 2 * network_thread.CONNECT_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        while not all(one.connected for one in self._all) and (left := deadline - time.monotonic()) > 0:
            if self._answered.wait(left):
                self._answered.clear()
                deadline = min(deadline, time.monotonic() + _OTHERS_S)
        if not any(one.connected for one in self._all):
            raise connect_errors.as_error(
                {at: found for one in self._all for at, found in one.refusals.items()}, timeout_s
            )

    def retain_all(self, outgoing: Sequence[tuple[str, bytes]]) -> None:
        """Retains messages at every broker (see Link.retain_all)."""
        for one in self._all:
            one.retain_all(outgoing)

    def publish(self, topic: str, payload: bytes) -> bool:
        """Sends once, by every broker that is there; returns false if none took it."""
        taken = [one.publish(topic, payload, wait_s=_TURN_S) for one in self._all]
        return any(taken)

    def poll(self) -> None:
        """Reads what has come from every broker, in the caller's thread (see Link.poll)."""
        for one in self._all:
            one.poll()

    def rest(self) -> None:
        """Leaves every socket to its network thread (see Link.rest)."""
        for one in self._all:
            one.rest()

    def repeat(self) -> None:
        """Sends all that is retained again, at every broker."""
        for one in self._all:
            one.repeat()

    def gather(self, seconds: float) -> None:
        """Sets how long messages may stay in the sockets (see Link.gather_s)."""
        for one in self._all:
            one.gather_s = seconds

    def mute(self) -> None:
        """Says nothing more that a broker would retain (see Link.mute)."""
        for one in self._all:
            one.mute()

    def close(self, farewell: tuple[str, bytes] | None = None) -> None:
        """Closes all links at the same time (see Link.close)."""
        threads = [threading.Thread(target=one.close, args=(farewell,)) for one in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Echoes:
    """The time that what we say takes through each broker and back to us: what waits there, in either direction.

    It is said on one thread, and heard on others.
    """

    def __init__(self) -> None:
        self._said: collections.deque[tuple[int, float]] = collections.deque(maxlen=_ECHOES)
        self._heard: dict[str, tuple[int, float]] = {}

    def say(self, number: int, now_s: float) -> None:
        """Takes note that a number, larger than all before, is said now, at a monotonic time."""
        self._said.append((number, now_s))

    def hear(self, where: str, number: int, now_s: float) -> None:
        """Takes note that a number has come back from a broker; what came before it says nothing any more."""
        said_s = dict(tuple(self._said)).get(number)
        if said_s is not None and number > self._heard.get(where, (0, 0.0))[0]:
            self._heard[where] = number, now_s - said_s

    def delays_s(self, wheres: Iterable[str], now_s: float) -> dict[str, float]:
        """Returns the newest delay of each of these brokers; longer, if what was said since is away for longer."""
        return {where: self._delay_s(where, now_s) for where in wheres}

    def _delay_s(self, where: str, now_s: float) -> float:
        number, delay_s = self._heard.get(where, (0, 0.0))
        away = next((said_s for one, said_s in tuple(self._said) if one > number), now_s)
        return max(delay_s, now_s - away) if number else 0.0
