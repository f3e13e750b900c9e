"""Why no broker let us in, as an error that says what to do."""

from __future__ import annotations

from broker import errors

HUNG_UP = "it hung up after the TLS handshake"
"""A refused certificate whose alert came too late to be read."""


def as_error(said: str, tried: str, reached: str, timeout_s: float) -> errors.ActorqError:
    """The error for a connection that was not made.

    Args:
        said: What the last attempt ended with; empty if nothing answered.
        tried: Addresses, for people.
        reached: The address that answered, if one did.
        timeout_s: How long they were tried.
    """
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return errors.IdentityError(
            f"the broker is not one of this fleet, or not under this name ({said})",
            where=tried,
            todo="name it as in `actorq-broker init --address`, or add the name there",
        )
    if "authori" in said.lower() or "ALERT" in said or said == HUNG_UP:
        return errors.IdentityError(
            f"the broker does not let this user in ({said})",
            where=reached or tried,
            todo="enrol anew with `actorq-broker enroll`, and start the broker with the same --fleet",
        )
    return errors.BrokerUnreachable(
        f"no broker answered within {timeout_s:g} s" + (f" ({said})" if said else ""),
        where=tried,
        todo="start one with `actorq-broker up`, or name yours with --broker HOST[:PORT]",
    )
