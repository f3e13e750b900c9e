"""Gives a release to the actors of a fleet in stages, and stops at the first one that does not come through."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from broker.contract import errors, topics
from broker.fleet import release_files
from learner.operate.orders import courier, giving, order_book

_log = logging.getLogger(__name__)
_ROLL_CALL_S = 10.0


def stages(actors: Sequence[str], first: Sequence[str], shares: Sequence[float]) -> list[list[str]]:
    """Returns who gets a release when.

    Args:
        actors: All that are to have it.
        first: Those of them that begin.
        shares: Of the others, in percent, that have it after each further stage; they rise, and end with 100.

    Raises:
        ConfigError: The shares do not.
    """
    if list(shares) != sorted(set(shares)) or not shares or shares[0] <= 0 or shares[-1] != 100:
        raise errors.ConfigError(f"shares {list(shares)} do not rise to 100", todo="give them like 10,50,100")
    others = [name for name in actors if name not in first]
    ends = [-(-len(others) * share // 100) for share in shares]
    batches = [others[int(start) : int(end)] for start, end in zip([0, *ends], ends, strict=False)]
    return [batch for batch in ([name for name in actors if name in first], *batches) if batch]


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lets one rollout at a time go on in a fleet, because brokers hold one release.

    Raises:
        FleetBusy: There is one.
    """
    descriptor = os.open(directory / ".update.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.FleetBusy(
                "another update of this fleet is under way", where=str(directory), todo="wait until it has ended"
            ) from None
        yield
    finally:
        os.close(descriptor)


def connected_actors(actors: Sequence[str], book: order_book.OrderBook, carrier: courier.Courier) -> list[str]:
    """Returns those that are connected, as brokers know it; they are asked for some seconds at most."""
    until = time.monotonic() + _ROLL_CALL_S
    while time.monotonic() < until and not all(name in carrier.heard for name in actors):
        book.note(list(carrier.drain(0.1)))
    return [name for name in actors if name in carrier.heard and carrier.heard[name].state.online]


def roll_out(
    made: release_files.SignedRelease,
    batches: Sequence[Sequence[str]],
    names: topics.Topics,
    book: order_book.OrderBook,
    carrier: courier.Courier,
    *,
    trial_s: float,
    wait_s: float,
) -> list[order_book.Entry]:
    """Leaves a release at the brokers, orders one batch after the other to take it, and takes it back at the end.

    Returns:
        What became of each order. Nobody of a later batch was ordered anything once an actor did not take it.
    """
    entries: list[order_book.Entry] = []
    options = {"release": made.digest, "trial_s": f"{trial_s:g}"}
    left = made.retained(names)
    try:
        carrier.leave(left)
        for number, batch in enumerate(batches, 1):
            _log.info("stage %d of %d: %s to %s", number, len(batches), made.name, _some(batch))
            given = giving.give("update", options, batch, book, carrier, wait_s=wait_s, valid_s=wait_s)
            entries += given
            good = sum(one.outcome == "done" for one in given)
            _log.info("stage %d of %d: %d of %d act as %s", number, len(batches), good, len(batch), made.name)
            if good < len(batch):
                break
    finally:
        late = [one.number for name in {name for batch in batches for name in batch} for one in book.open_orders(name)]
        book.withdraw(number for number in late if book.entry(number).kind == "update")
        carrier.deliver(sorted({name for batch in batches for name in batch}))
        carrier.leave([(topic, b"") for topic, payload in left if payload])
    return [book.entry(one.number) for one in entries]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
