"""What people see of a fleet and of orders: tables, and objects for machines."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from learner.operate.orders import courier, order_book

_SHOWN_S = 60.0


def actor_row(
    name: str, heard: courier.Heard | None, labels: Mapping[str, str], waiting: Sequence[order_book.Entry]
) -> dict[str, Any]:
    """Returns one actor as an object. `state` is here, paused, silent (it should be here and is not heard) or away."""
    row: dict[str, Any] = {"actor": name, "state": "away", "labels": dict(labels), "orders_waiting": len(waiting)}
    if heard is None:
        return row
    state, birth, vitals = heard.state, heard.state.birth, heard.state.vitals
    if state.online:
        row["state"] = "silent" if not heard.is_live else "paused" if vitals.paused else "here"
    if birth is not None:
        about = {"env": birth.env_id, "envs": birth.n_envs, "rate_hz": birth.rate_hz, "board": birth.board}
        about |= {"release": birth.release, "schema": state.schema}
        row |= about | {"runtime": birth.runtime, "set": dict(pair.partition("=")[::2] for pair in birth.ordered)}
        row |= {"policy": f"{vitals.policy_epoch}.{vitals.policy_version}", "steps": vitals.steps}
    return row


def fleet(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line an actor."""
    head = ["ACTOR", "STATE", "ENVIRONMENT", "RATE", "POLICY", "STEPS", "LABELS", "WAITING"]
    lines = [head]
    for row in rows:
        rate = f"{row['rate_hz']:g} Hz" if row.get("rate_hz") else f"x{row['envs']}" if "envs" in row else ""
        labels = " ".join(f"{key}={value}" for key, value in row["labels"].items())
        waiting = str(row["orders_waiting"] or "")
        steps = f"{row['steps']:,}" if "steps" in row else ""
        lines.append(
            [row["actor"], row["state"], row.get("env", ""), rate, row.get("policy", ""), steps, labels, waiting]
        )
    return _aligned(lines)


def actor(row: Mapping[str, Any], vitals: Mapping[str, Any], orders: Sequence[order_book.Entry]) -> str:
    """Returns all that is known of one actor, a line each; then the orders that it was given."""
    about = {key: value for key, value in {**row, **vitals}.items() if value not in (None, "", {}) and key != "stages"}
    width = max(map(len, about))
    lines = [f"{key:{width}}  {_text(value)}".rstrip() for key, value in about.items()]
    if orders:
        lines += ["", _aligned([["ORDER", "GIVEN", "OUTCOME", ""], *(_order(one) for one in orders)])]
    return "\n".join(lines)


def outcomes(entries: Sequence[order_book.Entry]) -> str:
    """Returns a line an actor: what became of the order."""
    return _aligned([[one.actor, one.outcome, explained(one)] for one in entries])


def explained(entry: order_book.Entry) -> str:
    """Returns more of an outcome."""
    if entry.outcome == order_book.WAITING:
        return f"no answer: it gets the order when it is back, until {_time(entry.expires_s)}"
    if entry.outcome == order_book.TAKEN:
        return f"{entry.text}; not back yet"
    return entry.text


def as_object(entry: order_book.Entry) -> dict[str, Any]:
    """Returns an order for machines."""
    return dataclasses.asdict(entry)


def _order(one: order_book.Entry) -> list[str]:
    what = " ".join([one.kind, *(f"{key}={value}" for key, value in one.options.items())])
    return [what, _time(one.issued_s), one.outcome, explained(one)]


def _time(at_s: float) -> str:
    form = "%H:%M:%S" if abs(at_s - time.time()) < _SHOWN_S * 60 else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(at_s))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={one}" for key, one in value.items())
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
