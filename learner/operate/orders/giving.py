"""Gives one order to many actors, and waits for their answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from learner.operate.orders import courier, order_book

_log = logging.getLogger(__name__)
_ROLL_CALL_S = 1.0
"""Brokers say at once who is there; who is not is not waited for."""
_PROGRESS_S = 2.0
_NAMED = 5
"""Actors up to which each is told of; of more, how many."""
LONGER_S = {"set": 100.0, "restart": 60.0, "reboot": 300.0}
"""Seconds that an actor which has taken such an order is waited for; `set` may have to be undone."""


def give(
    kind: str,
    options: Mapping[str, str],
    actors: Sequence[str],
    book: order_book.OrderBook,
    carrier: courier.Courier,
    *,
    wait_s: float,
    valid_s: float,
    on_lines: Callable[[str, tuple[str, ...]], None] = lambda name, lines: None,
) -> list[order_book.Entry]:
    """Gives an order to each actor, by a connected courier.

    Args:
        kind: One of messages.ORDER_KINDS.
        options: Of that kind.
        actors: To whom.
        book: Where it is written down.
        carrier: Sends it.
        wait_s: How long actors that are there are waited for.
        valid_s: How long actors that are away may stay so, and still get it.
        on_lines: Told lines of logs, by actor.

    Returns:
        What became of it, by actor, in the order given. `waiting` are those that did not answer yet.
    """
    numbers = book.add(actors, kind, options, time.time(), valid_s)
    began = said_s = time.monotonic()
    carrier.deliver(actors)
    until = dict.fromkeys(actors, began + wait_s)  # of those who are waited for
    taken: dict[str, str] = {}  # and what they said then
    while until and (left := max(until.values()) - time.monotonic()) > 0:
        answers = list(carrier.drain(min(0.1, left)))
        book.note(answers)
        now = time.monotonic()
        for name, answer in answers:
            if answer.lines:
                on_lines(name, answer.lines)
            if answer.number != numbers.get(name) or name not in until:
                continue
            if answer.outcome == order_book.TAKEN:
                if len(actors) <= _NAMED and taken.get(name) != answer.text:
                    _log.info("%s %s", name, answer.text)
                taken[name] = answer.text
                until[name] = now + LONGER_S.get(kind, wait_s)
            else:
                del until[name]
        if now - began > _ROLL_CALL_S:
            connected = taken.keys() | {name for name, heard in carrier.heard.items() if heard.state.online}
            until = {name: end for name, end in until.items() if end > now and name in connected}
        if until and len(actors) > _NAMED and now - said_s > _PROGRESS_S:
            said_s = now
            _log.info("%s: %d of %d have answered", kind, len(actors) - len(until), len(actors))
    carrier.deliver(actors)
    return [book.entry(numbers[name]) for name in actors]
