"""Charts as SVG, without a library: lines over two logarithmic axes, and horizontal bars."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

_COLOURS = (
    "#0b6e99",
    "#d1495b",
    "#edae49",
    "#30638e",
    "#8f2d56",
    "#66a182",
    "#6c6c6c",
    "#7d4e9f",
    "#2e4057",
    "#b56576",
)
_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 34, 46
_BAR = 22
Points = Sequence[tuple[float, float]]


def lines(title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Draws one line per series; all values above 0. Names stand at the lines' ends."""
    shown = {name: sorted(points) for name, points in series.items() if points}
    if not shown:
        return ""
    xs = sorted({x for points in shown.values() for x, _ in points})
    ys = [y for points in shown.values() for _, y in points]
    x_of = _scale(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT)
    low, high = 10.0 ** math.floor(math.log10(min(ys))), 10.0 ** math.ceil(math.log10(max(ys)))
    y_of = _scale(low, high if high > low else 10 * low, _HEIGHT - _BOTTOM, _TOP)
    parts = [_text(_LEFT, 18, f"{title}, {y_label}", weight="bold"), _text(_LEFT, _HEIGHT - 8, x_label)]
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = y_of(10.0**exponent)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{10.0**exponent:,g}", anchor="end"))
    parts += [_text(x_of(x), _HEIGHT - _BOTTOM + 16, f"{x:g}", anchor="middle") for x in xs]
    taken: list[float] = []
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(series)}
    for name, points in sorted(shown.items(), key=lambda item: -item[1][-1][1]):
        colour = colours[name]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points:
            tip = html.escape(f"{name}, {x:g}: {y:,.4g}")
            parts.append(
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"><title>{tip}</title></circle>'
            )
        label_y = max(y_of(points[-1][1]), taken[-1] + 15 if taken else 0.0)
        taken.append(label_y)
        parts.append(_text(_WIDTH - _RIGHT + 10, label_y + 4, name, fill=colour))
    return _svg(_WIDTH, max(_HEIGHT, round(taken[-1]) + 12), parts)


def bars(title: str, unit: str, values: Mapping[str, float]) -> str:
    """Draws one bar per name."""
    if not values:
        return ""
    left, most = 300, max(values.values()) or 1.0
    parts = [_text(0, 18, f"{title} ({unit})", weight="bold")]
    for index, (name, value) in enumerate(values.items()):
        y = 32 + index * _BAR
        width = (_WIDTH - left - 110) * max(value, 0.0) / most
        parts.append(_text(left - 8, y + 13, name, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{_BAR - 6}" fill="{_COLOURS[0]}"/>')
        parts.append(_text(left + width + 6, y + 13, f"{value:,.4g}"))
    return _svg(_WIDTH, 40 + len(values) * _BAR, parts)


def _scale(low: float, high: float, at_low: float, at_high: float) -> _Scale:
    return _Scale(math.log(low), math.log(high), at_low, at_high)


class _Scale:
    """Places values on a logarithmic axis."""

    def __init__(self, low: float, high: float, at_low: float, at_high: float) -> None:
        self._low, self._span = low, (high - low) or 1.0
        self._at_low, self._at_high = at_low, at_high

    def __call__(self, value: float) -> float:
        return self._at_low + (self._at_high - self._at_low) * (math.log(value) - self._low) / self._span


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#222", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
    return f'<svg {size} role="img">{"".join(parts)}</svg>'
