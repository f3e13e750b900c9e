"""Limits what Mosquitto has no limit for: sessions and subscriptions of one user, counted from the lines it logs.

It does not ask the ACL at SUBSCRIBE, and one packet of 41 MB can hold five million filters, at which it works for
minutes: so whoever exceeds is told while it still does.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from broker.fleet import identity

MAX_SUBSCRIPTIONS = 256
"""The most topics of one user in all its connections; an actor has about six in each."""
MAX_CONNECTIONS = 32
"""The most connections of one user at once; an actor has one, and for 15 s those that it lost unnoticed."""

_CONNECTED = re.compile(r"New client connected from \S+ as (.*) \(p(\d+), c(\d), k\d+, u'([a-z0-9_-]+)'\)\.")
_GONE = re.compile(r"(?:Client|Bad socket read/write on client) ([\w.-]+):? ")
_SUBSCRIBED = re.compile(r"([\w.-]+) [0-2] (.*)")
_OURS = re.compile(r"[\w.-]{1,128}")
_NAMELESS = re.compile(r"New client connected from (\S+) as ")
_LOG_LINE_BYTES = 999
"""The length at which Mosquitto cuts a line off; what is as long may end in anything, and lack the user's name."""
_CLEAN_OF_3_1_1 = ("2", "1")
_NOTICES = re.compile(
    r"New |Client |Bad (socket|client)|mosquitto version|Expiring client|Dropping too large|Outgoing messages"
    r"|Warning: ACL pattern '[^']+' does not contain"  # what all may read (access.py)
)


class Watch:
    """Counts sessions and subscriptions by the lines that Mosquitto logs, in order.

    Args:
        on_excess: Called with a user's name and what it did, once for each; without a name for each client whose id is
            so long that the log does not say whose it is.
    """

    def __init__(self, on_excess: Callable[[str, str], None]) -> None:
        self._on_excess = on_excess
        self._filters: dict[str, dict[str, set[int]]] = {}  # of user and client id
        self._users: dict[str, str] = {}  # of client id
        self._out: set[str] = set()

    def count(self, line: str) -> bool:
        """Counts what a line tells; returns true if it is here to be counted, and not to be read by people."""
        whole = len(line.encode()) < _LOG_LINE_BYTES
        if whole and (connected := _CONNECTED.fullmatch(line)):
            self._connected(*connected.groups())
        elif not whole and (nameless := _NAMELESS.match(line)):
            self._on_excess("", f"came from {nameless[1]} under a client id of a thousand characters")
        elif gone := _GONE.match(line):
            self._forget(gone[1])
        elif (subscribed := _SUBSCRIBED.fullmatch(line)) and subscribed[1] in self._users:
            self._subscribed(subscribed[1], subscribed[2] if whole else None)
            return True
        return bool(_NOTICES.match(line))

    def _connected(self, client: str, protocol: str, clean: str, user: str) -> None:
        if user == identity.LEARNER_USER:  # who has its password is the fleet
            return
        self._forget(client)
        if not _OURS.fullmatch(client):
            self._exceeds(user, "has a client id that is none of ours")
        elif (protocol, clean) != _CLEAN_OF_3_1_1:
            self._exceeds(user, "asks for a session that outlives its connection")
        else:
            self._users[client] = user
            connections = self._filters.setdefault(user, {})
            connections[client] = set()
            if len(connections) > MAX_CONNECTIONS:
                self._exceeds(user, f"has more than {MAX_CONNECTIONS} connections")

    def _subscribed(self, client: str, topic_filter: str | None) -> None:
        user = self._users[client]
        if user in self._out:
            return
        if topic_filter is None:
            self._exceeds(user, "subscribed to a topic of a thousand characters")
        connections = self._filters[user]
        connections[client].add(hash(topic_filter))
        if sum(map(len, connections.values())) > MAX_SUBSCRIPTIONS:
            self._exceeds(user, f"subscribed to more than {MAX_SUBSCRIPTIONS} topics")

    def _forget(self, client: str) -> None:
        if user := self._users.pop(client, None):
            del self._filters[user][client]

    def _exceeds(self, user: str, what: str) -> None:
        if user not in self._out:
            self._out.add(user)
            self._on_excess(user, what)
