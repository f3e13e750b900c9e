"""Attempts to connect: which broker comes next and when, what became of each, and what people are told of it.

The first broker of a list is home: who is connected to another one, because home was away, goes back after a while.
Lists differ from actor to actor (identity.spread), so that the brokers of a fleet share its actors.
"""

from __future__ import annotations

import logging
import math
import ssl
import time
from collections.abc import Sequence

from broker.contract import address
from broker.mqtt import backoff, connect_errors

_log = logging.getLogger(__name__)


class Attempts:
    """Attempts to connect to the brokers of a list, in turn; and the way back to the first.

    Args:
        addresses: The brokers.
        tls: With which those are reached that want it.

    Attributes:
        refusals: By address, what came of the last attempt there.
    """

    def __init__(self, addresses: Sequence[address.Address], tls: ssl.SSLContext | None) -> None:
        self._addresses, self._tls = addresses, tls
        self._at = -1  # the one that was tried last
        self._failures = self._failed_returns = 0
        self._home_due_s = math.inf
        self._goes_home = False
        self._logged: dict[str, str] = {}  # by address, the kind of refusal that was logged since the last connection
        self.refusals = {str(one): connect_errors.SILENCE for one in addresses}

    def next(self) -> address.Address:
        """Returns the broker to try now."""
        self._at = 0 if self._goes_home else (self._at + 1) % len(self._addresses)
        return self._addresses[self._at]

    @property
    def home(self) -> address.Address | None:
        """The broker to go back to, if it is time to look whether that is there."""
        return self._addresses[0] if time.monotonic() >= self._home_due_s else None

    def go_home(self, *, is_there: bool) -> bool:
        """Takes note of whether `home` answers; returns whether to leave the present broker for it."""
        self._goes_home = is_there
        if is_there:
            self._failed_returns += 1  # until that connection is made
            _log.info("%s is there again: going back to it", self._addresses[0])
        self._plan_return()
        return is_there

    def _plan_return(self) -> None:
        self._home_due_s = time.monotonic() + backoff.return_s(self._failed_returns)

    def made(self, where: address.Address) -> None:
        """Takes note of a connection; logs it where a loss or a refusal was logged before."""
        self._goes_home = False
        if self._at == 0:
            self._failed_returns, self._home_due_s = 0, math.inf
        elif self._home_due_s == math.inf:
            self._plan_return()
        if self._logged:
            self._logged = {}
            _log.info("connected to %s again", where)

    def ended(self, where: address.Address, failure: str, *, was_connected: bool, is_wanted: bool) -> None:
        """Takes note of a connection that was lost, or of an attempt that failed.

        What fails is logged once, until something else is wrong there.

        Args:
            where: The broker.
            failure: Said by the system, OpenSSL, paho or the broker; empty if nothing answered.
            was_connected: The broker had let us in.
            is_wanted: Nobody closed the link, so that people are told.
        """
        if was_connected:  # how its end looks to OpenSSL says nothing about who it is
            line, found = f"connection to {where} lost", connect_errors.SILENCE._replace(what=failure)
        else:
            said = failure or (connect_errors.HUNG_UP if where.tls else "")
            line, found = f"cannot reach {where}", connect_errors.explain(said, self._tls if where.tls else None)
        is_leaving = was_connected and self._goes_home
        self._goes_home = is_leaving  # one attempt; then the others have their turn again
        self._failures = 0 if was_connected else self._failures + 1
        self.refusals[str(where)] = found
        if is_wanted and not is_leaving and self._logged.get(str(where)) != found.kind:
            self._logged[str(where)] = found.kind
            _log.warning("%s%s; trying again", line, f": {found.what}" if found.what else "")

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next attempt."""
        return backoff.delay_s(self._failures // len(self._addresses))
