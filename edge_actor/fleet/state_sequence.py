"""What the actor says of itself, numbered so that nothing late can contradict it.

Heartbeats of one boot count up over all its connections. A connection's will has the last number of that connection:
above every heartbeat of it, and below all of the next. So whoever keeps the highest (boot, heartbeat) knows the truth,
through whichever brokers and in whatever order states come; and a will that a broker sends when its actor is long back
changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from broker.contract import messages

BEATS = 1 << 32
"""Numbers of one connection."""


class StateSequence:
    """Makes and numbers the states of one process.

    Args:
        boot: Its number.
        seal: Bytes of a state, ready to publish.
    """

    def __init__(self, boot: int, seal: Callable[[messages.ActorState], bytes]) -> None:
        self._boot = boot
        self._seal = seal
        self._session = secrets.token_hex(8)
        self._heartbeat = 0

    def will(self) -> bytes:
        """For a connection that is about to be made; later states belong to it."""
        self._heartbeat = (self._heartbeat // BEATS + 1) * BEATS
        return self._seal(messages.ActorState(False, self._session, self._boot, self._heartbeat + BEATS - 1))

    def online(self, birth: messages.Birth, vitals: messages.Vitals) -> bytes:
        """Birth and heartbeat."""
        self._heartbeat += 1
        return self._seal(messages.ActorState(True, self._session, self._boot, self._heartbeat, birth, vitals))

    def farewell(self) -> bytes:
        """The last word."""
        self._heartbeat += 1
        return self._seal(messages.ActorState(False, self._session, self._boot, self._heartbeat))
