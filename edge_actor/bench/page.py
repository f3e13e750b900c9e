"""A benchmark as one HTML file that needs nothing else: charts, tables, and all rows as they were measured."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from edge_actor.bench import chart, verdict
from edge_actor.bench.records import Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1300px; margin: 2em auto; padding: 0 1em; color: #222 }
h1, h2, h3 { line-height: 1.2 }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
svg { display: block; margin: 1em 0; max-width: 100% }
svg text { font-family: system-ui, sans-serif; font-size: 12px }
.note { color: #555 }
.modelled { background: #fff3cd; padding: .4em .8em }
pre { overflow-x: auto; font-size: 11px }
"""
_FACTS = {
    "board": "Board",
    "processor": "Processor",
    "cores": "Cores",
    "bits": "Bits",
    "dot_product": "int8 dot product",
    "governor": "Governor",
    "kernel": "Kernel",
    "python": "Python",
    "numpy": "numpy",
}


def render(rows: Sequence[Row]) -> str:
    """Returns the page of rows from one board or several."""
    boards = verdict.boards(rows)
    parts = [f"<h1>What policies cost: {html.escape(', '.join(boards))}</h1>", _about(rows)]
    if len(boards) > 1:
        parts.append(_comparison(rows, boards))
    for board in boards:
        of_board = [row for row in rows if verdict.board_of(row) == board]
        parts += [f"<h2>{html.escape(board)}</h2>", _facts(of_board), _latency(of_board), _batches(of_board)]
        parts += [_memory(of_board), _energy(of_board), _control(of_board), _skipped(of_board)]
    data = "\n".join(json.dumps(row) for row in rows).replace("<", "\\u003c")
    parts.append(f"<details><summary>All rows, as JSON lines</summary><pre>{html.escape(data)}</pre></details>")
    title = html.escape(f"actorq-fleet benchmark: {', '.join(boards)}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _about(rows: Sequence[Row]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(max(row.get("at_s", 0.0) for row in rows)))
    return (
        f'<p class="note">{when}. Made by <code>actorq-actor bench</code>. Times are medians in microseconds, in '
        "brackets the 99th percentile. A row is called XNNPACK only where that delegate took the whole graph. Invoke "
        "is the network alone; action is all from an observation in memory to a chosen action.</p>"
    )


def _facts(rows: Sequence[Row]) -> str:
    one = rows[0]
    cells = [f"{label}: {html.escape(str(one[name]))}" for name, label in _FACTS.items() if str(one.get(name, ""))]
    runtimes = sorted({row["runtime"] for row in rows if row.get("runtime")})
    heat = [row["temperature_c"] for row in rows if row.get("temperature_c") is not None]
    cells += [f"Runtime: {html.escape(', '.join(runtimes))}"] if runtimes else []
    cells += [f"Temperature: {min(heat):.0f} to {max(heat):.0f} °C"] if heat else []
    bits = sorted({row["throttled"] for row in rows if row.get("throttled") is not None})
    cells += [f"Throttle bits seen: {', '.join(map(hex, bits))}"] if bits else []
    cells += [f"acting at {one['acting_hz']:g} Hz meanwhile"] if one.get("acting_hz") else []
    loads = [row["load_1m"] for row in rows if "load_1m" in row]
    cells += [f"Load average: {min(loads):.1f} to {max(loads):.1f}"] if loads else []
    return f'<p class="note">{" · ".join(cells)}</p>'


def _latency(rows: Sequence[Row]) -> str:
    found = verdict.latency(rows)
    if not found:
        return ""
    keys = [key for key in verdict.KEYS if any(key in measured for measured in found.values())]
    parts = ["<h3>Latency, one observation, one thread</h3>"]
    for layers in sorted({row["layers"] for measured in found.values() for row in measured.values() if not row["cnn"]}):
        series = {
            f"{precision} {kernels}": [
                (row["width"], row["invoke_us_p50"])
                for measured in found.values()
                for key, row in measured.items()
                if key == (precision, kernels) and row["layers"] == layers and not row["cnn"]
            ]
            for precision, kernels in keys
        }
        parts.append(chart.lines(f"{layers} layers, invoke only", "width", "us", series))
    head = ["policy", "", "action, int8 XNNPACK", "action / invoke", *(" ".join(key) for key in keys)]
    body = []
    for policy, measured in found.items():
        first = measured.get(("int8", "XNNPACK"))
        action = [_timed(first, "observation_to_action_us"), f"{_ratio(first):.2f}"] if first else ["-", "-"]
        times = [_timed(measured[key], "invoke_us") if key in measured else "-" for key in keys]
        body.append([policy, verdict.pays(measured), *action, *times])
    return "".join(parts) + _table(head, body)


def _batches(rows: Sequence[Row]) -> str:
    settings = sorted({(row["batch"], row["threads"]) for row in rows if row["kind"] == "latency"})
    settings = [one for one in settings if one != (1, 1)]
    if not settings:
        return ""
    body = []
    for batch, threads in settings:
        for policy, measured in verdict.latency(rows, batch=batch, threads=threads).items():
            for (precision, kernels), row in measured.items():
                who = f"{policy} {precision} {kernels}"
                per = row["invoke_us_p50"] / batch
                body.append([who, batch, threads or "all", _n(row["invoke_us_p50"]), _n(row["invoke_us_p99"]), _n(per)])
    head = ["policy", "batch", "threads", "invoke p50", "p99", "per observation"]
    return f"<details><summary>Batches and threads</summary>{_table(head, body)}</details>"


def _memory(rows: Sequence[Row]) -> str:
    body = []
    for policy, measured in verdict.latency(rows).items():
        for (precision, kernels), row in measured.items():
            size = f"{row['model_bytes'] / 1e6:.3g} MB" + ("" if row["publishable"] else ", more than actors take")
            body.append(
                [
                    f"{policy} {precision} {kernels}",
                    size if row["model_bytes"] else "-",
                    f"{row['memory_bytes'] / 1e6:.3g} MB",
                ]
                + [_n(row["load_ms"]), _n(row["first_invoke_us"])]
            )
    if not body:
        return ""
    head = ["policy", "file", "memory", "load, ms", "first invoke, us"]
    return f"<details><summary>File, memory, load and first invoke</summary>{_table(head, body)}</details>"


def _energy(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["kind"] == "energy"]
    if not found:
        return "<h3>Energy</h3><p>Not measured: this board has no source of power, or it was not asked for.</p>"
    warning = next((row["power_note"] for row in found if row["power_modelled"]), "")
    parts = [f"<h3>Energy by {html.escape(found[0]['power_source'])}</h3>"]
    parts.append(f'<p class="{"modelled" if warning else "note"}">{html.escape(warning or found[0]["power_note"])}</p>')
    flat = {
        f"{row['policy']} {row['precision']} {row['kernels']}": row["net_uj"] for row in found if not row["rate_hz"]
    }
    shown = {name: value for name, value in flat.items() if value is not None and value > 0}
    parts.append(chart.bars("Energy per inference above idle, flat out", "uJ", shown))
    body = [
        [
            f"{row['policy']} {row['precision']} {row['kernels']}",
            f"{row['rate_hz']:g} Hz" if row["rate_hz"] else "flat out",
            f"{_n(row['gross_uj'])} ({_n(row.get('gross_uj_low'))} to {_n(row.get('gross_uj_high'))})",
            verdict.above_idle(row),
            _n(row.get("power_w")),
            _n(row["idle_w"]),
            f"{row['windows']} of {row['windows'] + row['windows_dropped']} x {row['window_s']:g} s",
        ]
        for row in found
    ]
    head = ["policy", "rate", "uJ per inference", "above idle", "W", "idle W", "windows kept"]
    return "".join(parts) + _table(head, body)


def _control(rows: Sequence[Row]) -> str:
    body = [
        [
            f"{row['policy']} {row['precision']} {row['kernels']}",
            f"{row['rate_hz']:g} Hz",
            f"{row['window_s']:g} s",
            row["busy"],
            f"{row['missed']} of {row['inferences'] + row['missed']}",
            f"{_n(row['late_us_p50'])} / {_n(row['late_us_p99'])} / {_n(row['late_us_max'])}",
            _n(row["observation_to_action_us_p99"]),
            _n(row["power_w"]),
        ]
        for row in rows
        if row["kind"] == "control"
    ]
    if not body:
        return ""
    head = ["policy", "rate", "held for", "busy cores", "missed", "late us: p50 / p99 / worst", "action p99", "W"]
    return "<h3>Control at a rate, beside busy cores</h3>" + _table(head, body)


def _skipped(rows: Sequence[Row]) -> str:
    body = [
        [f"{row['policy']} {row.get('precision', '')} {row.get('kernels_wanted', '')}", row["why"]]
        for row in rows
        if row["kind"] == "skipped"
    ]
    return f"<h3>Left out</h3>{_table(['policy', 'why'], body)}" if body else ""


def _comparison(rows: Sequence[Row], boards: Sequence[str]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for board in boards:
        for measured in verdict.latency(row for row in rows if verdict.board_of(row) == board).values():
            for key in (("int8", "XNNPACK"), ("float32", "XNNPACK"), ("int8", "built-in")):
                row = measured.get(key)
                if row and row["layers"] == 2 and not row["cnn"]:
                    name = f"{' '.join(key)}, {row.get('actor') or row['host']}"
                    series.setdefault(name, []).append((row["width"], row["invoke_us_p50"]))
    return chart.lines("All boards: 2 layers, invoke only", "width", "us", series)


def _timed(row: Row, name: str) -> str:
    return f"{_n(row[f'{name}_p50'])} ({_n(row[f'{name}_p99'])})"


def _ratio(row: Row) -> float:
    ratio: float = row["observation_to_action_us_p50"] / row["invoke_us_p50"]
    return ratio


def _n(value: Any) -> str:
    return verdict.number(value)


def _table(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in line)}</tr>" for line in body)
    return f"<table><tr>{top}</tr>{lines}</table>"
