"""Conclusions from the rows: per board and policy, which precision and kernels are fastest, and whether int8 pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edge_actor.bench.records import Row

Key = tuple[str, str]
"""Precision and kernels."""
KEYS: tuple[Key, ...] = (
    ("int8", "XNNPACK"),
    ("float32", "XNNPACK"),
    ("float16", "XNNPACK"),
    ("int8", "built-in"),
    ("float32", "built-in"),
    ("float16", "built-in"),
    ("float32", "numpy"),
)
_PAYS = 1.05
"""int8 pays if it is so many times as fast; less is the noise of two measurements."""


def boards(rows: Iterable[Row]) -> list[str]:
    """Returns the boards that measured, in order of appearance."""
    return list(dict.fromkeys(board_of(row) for row in rows))


def board_of(row: Row) -> str:
    """Returns the board that measured a row, by actor or host."""
    return f"{row.get('actor') or row['host']} ({row['board']})"


def latency(rows: Iterable[Row], *, batch: int = 1, threads: int = 1) -> dict[str, dict[Key, Row]]:
    """Returns rows of kind latency by policy, then by what ran it.

    Where the delegate left a policy to the built-in kernels, that row stands for them only if nothing better does.
    """
    table: dict[str, dict[Key, Row]] = {}
    for row in rows:
        if row["kind"] != "latency" or (row["batch"], row["threads"]) != (batch, threads):
            continue
        places, key = table.setdefault(row["policy"], {}), (row["precision"], row["kernels"])
        if key not in places or row["kernels_wanted"] == row["kernels"]:
            places[key] = row
    return table


def pays(measured: dict[Key, Row]) -> str:
    """Returns in words whether int8 beats the fastest float32 that is no numpy."""
    int8 = _fastest(row for (precision, _), row in measured.items() if precision == "int8")
    float32 = _fastest(
        row for (precision, kernels), row in measured.items() if precision == "float32" and kernels != "numpy"
    )
    if int8 is None or float32 is None:
        return ""
    ratio = float32["invoke_us_p50"] / int8["invoke_us_p50"]
    return f"int8 pays: {ratio:.2f}x" if ratio >= _PAYS else f"int8 does not pay: {ratio:.2f}x"


def above_idle(row: Row) -> str:
    """Returns in words the microjoules per inference beyond the idle board's, or that they are lost in these."""
    if row["net_uj"] is None:
        return "-"
    if row["net_uj_low"] <= 0:
        return "lost in the noise of idle"
    return f"{number(row['net_uj'])} ({number(row['net_uj_low'])} to {number(row['net_uj_high'])})"


def table(rows: Sequence[Row]) -> str:
    """The rows as text: medians in microseconds of invoke only at batch 1 on one thread, and what else was measured."""
    lines: list[str] = []
    for board in boards(rows):
        of_board = [row for row in rows if board_of(row) == board]
        lines.append(board)
        lines += [f"  {line}" for line in _latency_lines(of_board) + _energy_lines(of_board) + _control_lines(of_board)]
        lines += [
            f"  skipped: {row['policy']} {row.get('precision', '')} {row.get('kernels_wanted', '')}: {row['why']}"
            for row in of_board
            if row["kind"] == "skipped"
        ]
    return "\n".join(lines)


def number(value: Any, digits: int = 3) -> str:
    """Returns so many significant digits, without an exponent; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: float(row["invoke_us_p50"]), default=None)


def _latency_lines(rows: Sequence[Row]) -> list[str]:
    found = latency(rows)
    if not found:
        return []
    keys = [key for key in KEYS if any(key in measured for measured in found.values())]
    lines = ["median us of invoke only, one observation, one thread; then observation to action of the first column"]
    lines.append(f"{'':10}" + "".join(f"{precision + ' ' + kernels:>18}" for precision, kernels in keys))
    for policy, measured in found.items():
        cells = "".join(f"{number(measured[key]['invoke_us_p50']) if key in measured else '-':>18}" for key in keys)
        first = measured.get(keys[0])
        action = number(first["observation_to_action_us_p50"]) if first else "-"
        lines.append(f"{policy:10}{cells}{action:>10}   {pays(measured)}")
    return lines


def _energy_lines(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row["kind"] == "energy":
            rate = f"at {row['rate_hz']:g} Hz" if row["rate_hz"] else "flat out"
            lines.append(
                f"energy {row['policy']} {row['precision']} on {row['kernels']} {rate}: "
                f"{number(row['gross_uj'])} uJ per inference, above idle {above_idle(row)}; "
                f"{row['windows']} windows, {row['windows_dropped']} dropped; {row['power_source']}"
                + (" (MODELLED: this ratio is the ratio of times)" if row["power_modelled"] else "")
            )
    return lines


def _control_lines(rows: Sequence[Row]) -> list[str]:
    return [
        f"control {row['policy']} {row['precision']} at {row['rate_hz']:g} Hz for {row['window_s']:g} s beside "
        f"{row['busy']} busy: {row['missed']} of {row['inferences'] + row['missed']} deadlines missed, late "
        f"{number(row['late_us_p50'])} us (p99 {number(row['late_us_p99'])}, worst {number(row['late_us_max'])})"
        + (f", {number(row['power_w'])} W" if row["power_w"] is not None else "")
        for row in rows
        if row["kind"] == "control"
    ]
