"""The actor's states, numbered so that nothing late can contradict a newer one.

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
"""The count of numbers that one connection has."""


class StateSequence:
    """Makes and numbers the states of one process.

    Args:
        boot: The process's number.
        seal: Makes the bytes of a state, ready to publish.
    """

    def __init__(self, boot: int, seal: Callable[[messages.ActorState], bytes]) -> None:
        self._boot = boot
        self._seal = seal
        self._session = secrets.token_hex(8)
        self._heartbeat = 0

    def will(self) -> bytes:
        """Returns the will of a connection that is about to be made, to which later states belong."""
        self._heartbeat = (self._heartbeat // BEATS + 1) * BEATS
        return self._seal(messages.ActorState(False, self._session, self._boot, self._heartbeat + BEATS - 1))

    def online(self, birth: messages.Birth, vitals: messages.Vitals) -> bytes:
        """Returns a birth or heartbeat."""
        self._heartbeat += 1
        return self._seal(messages.ActorState(True, self._session, self._boot, self._heartbeat, birth, vitals))

    def farewell(self) -> bytes:
        """Returns the last state."""
        self._heartbeat += 1
        return self._seal(messages.ActorState(False, self._session, self._boot, self._heartbeat))
