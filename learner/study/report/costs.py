"""Draws what runs cost: bytes of policies and experience, joules and CO2, each with its source."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from learner.study import energies
from learner.study.report import grouping, reading, svg, tables

_SIDES = {"learner": "learner", "actors": "actors"}


def sizes(panel: grouping.Panel) -> svg.Picture | None:
    """Returns the bytes of a policy: as fp32, as its file, and on the wire."""
    wanted: dict[str, Callable[[reading.Run], Any]] = {
        "fp32 file": lambda run: run.summary.get("policy_fp32_bytes"),
        "file as published": lambda run: run.summary.get(f"policy_{run.precision}_bytes"),
        "on the wire, mean": lambda run: run.summary.get("bytes_per_policy"),
    }
    arms = {
        arm.label: {name: _median(arm.runs, of) for name, of in wanted.items()}
        for arm in panel.arms
        if any(_median(arm.runs, of) for of in wanted.values())
    }
    if not arms:
        return None
    made, drawn = svg.new(0.9 + 0.3 * len(wanted) * (0.6 + 0.5 * len(arms)), axis="x")
    height = 0.8 / len(arms)
    for index, (label, found) in enumerate(arms.items()):
        for row, name in enumerate(wanted):
            value = (found[name] or 0.0) / 1e3
            y = row + (index - (len(arms) - 1) / 2) * height
            drawn.barh(y, value, 0.9 * height, color=svg.colour(index), label=tables.label(label) if not row else None)
            drawn.text(value, y, f" {tables.size(found[name])}", va="center", fontsize=9.5)
    drawn.margins(x=0.16)
    drawn.set_yticks(range(len(wanted)), list(wanted))
    drawn.invert_yaxis()
    drawn.set_xlabel("kB")
    svg.legend(drawn, len(arms))
    text = "; ".join(
        f"{label}: {', '.join(f'{name} {tables.size(value)}' for name, value in found.items() if value)}"
        for label, found in arms.items()
    )
    return svg.finish(made, f"Bytes of a policy: {panel.title}", f"{text}.", _traffic(panel))


def energy(panel: grouping.Panel) -> svg.Picture | None:
    """Returns joules per million environment steps, learner and actors apart; modelled ones hatched."""
    arms = {arm.label: found for arm in panel.arms if (found := _per_million(arm.runs))}
    if not arms:
        return None
    made, drawn = svg.new(0.85 + 0.55 * len(arms), axis="x")
    for row, (label, found) in enumerate(arms.items()):
        start = 0.0
        for index, (side, (joules, modelled)) in enumerate(found.items()):
            drawn.barh(
                row,
                joules / 1e3,
                left=start,
                height=0.45,
                color=svg.colour(index),
                alpha=0.55 if modelled else 0.95,
                hatch="//" if modelled else "",
                edgecolor="none",
                label=f"{side}, {_how(modelled)}",
            )
            start += joules / 1e3
        svg.name(drawn, row - 0.28, tables.label(label))
    drawn.set_yticks([])
    drawn.set_ylim(len(arms) - 0.5, -0.75)
    drawn.set_xlabel("kJ per million environment steps")
    handles, names = drawn.get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    drawn.legend(
        list(unique.values()), list(unique), loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2
    )
    text = "; ".join(f"{label}: {_sides(found)}" for label, found in arms.items())
    caption = f"Per million steps, medians over runs. {text}. {_can_tell(panel)}"
    return svg.finish(made, f"Energy: {panel.title}", caption.strip(), "")


def energy_table(runs: Sequence[reading.Run]) -> str:
    """Returns the energy of each run with its sources."""
    body = [
        (
            run.name,
            *(cell for side in _SIDES for cell in _told(_of(run), side)),
            _percent(_side(_of(run), "actors").get("coverage")),
            _watt_hours(_of(run).get("kwh")),
            _grams(_of(run).get("kgco2e")),
            tables.shown(_of(run).get("joules_per_million_steps")),
            tables.shown(_of(run).get("carbon_g_per_kwh")),
            str(_of(run).get("carbon_source") or "-"),
            str(_of(run).get("note") or "-"),
        )
        for run in runs
        if _of(run)
    ]
    head = (
        *(
            "run",
            "learner, J",
            "how",
            "actors, J",
            "how",
            "covered",
            "fleet, Wh",
            "fleet, g CO2e",
            "J per million steps",
        ),
        *("g CO2e per kWh", "whose", "what the fleet's figures hold"),
    )
    return tables.table(head, body, words=(0, 2, 4, 10, 11))


def _traffic(panel: grouping.Panel) -> str:
    head = ("runs", "policies", "keyframes", "differences", "bytes a policy", "sent", "received", "received per step")
    body = []
    for arm in panel.arms:
        medians = {
            key: _median(arm.runs, lambda run, key=key: run.summary.get(key))  # type: ignore[misc]  # bound at once
            for key in ("policies_published", "keyframes", "deltas", "bytes_per_policy", "bytes_sent", "bytes_received")
        }
        counts = [tables.shown(medians[key]) for key in ("policies_published", "keyframes", "deltas")]
        each = [tables.size(medians[key]) for key in ("bytes_per_policy", "bytes_sent", "bytes_received")]
        per_step = _median(arm.runs, _received_per_step)
        body.append((arm.label, *counts, *each, tables.size(per_step)))
    return tables.table(head, body)


def _received_per_step(run: reading.Run) -> float | None:
    received, steps = tables.number(run.summary.get("bytes_received")), run.session_steps
    return received / steps if received is not None and steps else None


def _median(runs: Sequence[reading.Run], of: Callable[[reading.Run], Any]) -> float | None:
    found = [value for run in runs if (value := tables.number(of(run))) is not None]
    return statistics.median(found) if found else None


def _per_million(runs: Sequence[reading.Run]) -> dict[str, tuple[float, bool]]:
    """Returns, of each side that tells its energy, the median of joules per million steps, and whether modelled."""
    told: dict[str, tuple[float, bool]] = {}
    for side in _SIDES:
        found = []
        modelled = False
        for run in runs:
            one = _side(_of(run), side)
            joules, steps = tables.number(one.get("joules")), run.session_steps
            if joules is not None and steps:
                found.append(1e6 * joules / steps)
                modelled |= bool(one.get("modelled", True))
        if found:
            told[side] = statistics.median(found), modelled
    return told


def _sides(found: Mapping[str, tuple[float, bool]]) -> str:
    return ", ".join(f"{side} {tables.shown(joules / 1e3)} kJ ({_how(how)})" for side, (joules, how) in found.items())


def _can_tell(panel: grouping.Panel) -> str:
    """Returns what the ratio of the arms' energies is worth; empty where there is no ratio."""
    if len(panel.arms) < 2:
        return ""
    _, why = energies.distinguishable(*(_of(run) for arm in panel.arms for run in arm.runs if _of(run)))
    return f"What their ratios are worth: {why}."


def _of(run: reading.Run) -> Mapping[str, Any]:
    found = run.summary.get("energy")
    return found if isinstance(found, dict) else {}


def _side(found: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    one = found.get(side)
    return one if isinstance(one, dict) else {}


def _told(found: Mapping[str, Any], side: str) -> tuple[str, str]:
    one = _side(found, side)
    if tables.number(one.get("joules")) is None:
        return "-", str(one.get("source") or "-")
    return tables.shown(one.get("joules")), f"{_how(bool(one.get('modelled', True)))}: {one.get('source')}"


def _how(modelled: bool) -> str:
    return "modelled" if modelled else "measured"


def _percent(value: Any) -> str:
    found = tables.number(value)
    return "-" if found is None else f"{100 * found:.0f} %"


def _watt_hours(kwh: Any) -> str:
    found = tables.number(kwh)
    return tables.shown(None if found is None else 1e3 * found)


def _grams(kg: Any) -> str:
    found = tables.number(kg)
    return tables.shown(None if found is None else 1e3 * found)
