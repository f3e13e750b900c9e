"""Errors of connecting: why a broker did not let us in, in words, and what to do about it.

Nothing of this is final: whoever answers on a broker's port may be a stranger, a broker whose files are just being
replaced, or the right one at the wrong date. So all of it is tried again; final is a bundle that cannot be used, which
lies on this machine (`IdentityError`).
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from broker.contract import errors

HUNG_UP = "it hung up after the TLS handshake"
"""The end of an attempt whose certificate was refused, by an alert that came too late to be read."""


class Refusal(NamedTuple):
    """The outcome of the last attempt at one address.

    Attributes:
        kind: Differs if there is something new to say; empty where nobody answered as a broker.
        what: In words; empty for silence.
        todo: What the reader can do about it.
    """

    kind: str
    what: str
    todo: str


SILENCE = Refusal("", "", "start one with `actorq-broker up`, or name yours with --broker HOST[:PORT]")


def explain(said: str, tls: ssl.SSLContext | None) -> Refusal:
    """Returns in words what an attempt ended with.

    Args:
        said: By the system, OpenSSL, paho or the broker; empty if nothing answered.
        tls: With which it was reached, if with any.
    """
    if "CERTIFICATE_VERIFY_FAILED" in said and ("not yet valid" in said or "has expired" in said):
        return _out_of_date(said, tls)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return Refusal(
            "foreign",
            f"the broker is not one of this fleet, or not under this name ({said})",
            "name it as in `actorq-broker init --address`, or add the name there",
        )
    if any(word in said.lower() for word in ("authori", "bad user name")) or "ALERT" in said or said == HUNG_UP:
        return Refusal(
            "shut out",
            f"the broker does not let this user in ({said})",
            "enrol anew with `actorq-broker enroll`, and start the broker with the same --fleet",
        )
    if tls is not None and "SSL" in said and "EOF" not in said:  # one that goes down hangs up too
        return Refusal(
            "no tls",
            f"what answers there does not speak TLS as a broker of this fleet ({said})",
            "look what listens on that port, or name the right one with --broker HOST[:PORT]",
        )
    return SILENCE._replace(what=said)


def as_error(found: Mapping[str, Refusal], timeout_s: float) -> errors.BrokerUnreachable:
    """Returns the error for a connection that was not made.

    Args:
        found: By address, what came of the last attempt there.
        timeout_s: How long they were tried.
    """
    todo = "; or ".join(dict.fromkeys(one.todo for one in found.values() if one.kind)) or SILENCE.todo
    if len(found) > 1:
        where = "; ".join(f"{address}: {one.what or 'no answer'}" for address, one in found.items())
        did = "let us in" if any(one.kind for one in found.values()) else "answered"
        what = f"no broker of {len(found)} {did} within {timeout_s:g} s"
        return errors.BrokerUnreachable(what, where=where, todo=todo)
    ((address, one),) = found.items()
    if one.kind:
        return errors.BrokerUnreachable(one.what, where=address, todo=todo)
    what = f"no broker answered within {timeout_s:g} s" + (f" ({one.what})" if one.what else "")
    return errors.BrokerUnreachable(what, where=address, todo=todo)


def _out_of_date(said: str, tls: ssl.SSLContext | None) -> Refusal:
    """Tells which of the two is wrong, clock or certificate, by the fleet's own authority, which lies here."""
    now = datetime.datetime.now(datetime.UTC)
    known = tls.get_ca_certs() if tls is not None else []
    since, until = (_date(str(known[0][name])) if known else now for name in ("notBefore", "notAfter"))
    if not since <= now <= until:
        return Refusal(
            "clock",
            f"the clock says {now:%Y-%m-%d}, the certificates of this fleet are valid from {since:%Y-%m-%d} to "
            f"{until:%Y-%m-%d}",
            "wait for the network's time, or set the clock (timedatectl)",
        )
    return Refusal(
        "date",
        f"the broker's certificate is out of date, or the clock, which says {now:%Y-%m-%d} ({said})",
        "set the clock (timedatectl), or make a new certificate with `actorq-broker init --renew`",
    )


def _date(text: str) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(text), datetime.UTC)
