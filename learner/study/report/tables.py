"""Tables and text as HTML. Whatever a fleet said is text here, and can be nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

_TEXT_CHARS, _LABEL_CHARS = 600, 44
_MINUS = "\u2212"


def plain(value: object, most: int = _TEXT_CHARS) -> str:
    """Returns a value as one line of printable text, cut where it is longer than `most`.

    What is not printable (line ends, control and direction marks) is shown as U+FFFD: actors name themselves.
    """
    text = str(value)
    text = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def label(value: object) -> str:
    """Returns a name that is short enough for a picture."""
    return plain(value, _LABEL_CHARS)


def escape(value: object, most: int = _TEXT_CHARS) -> str:
    """Returns text that HTML shows as it is; see `plain`."""
    return html.escape(plain(value, most))


def number(value: Any) -> float | None:
    """Returns a finite number; None for all else, as files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def shown(value: Any, digits: int = 3) -> str:
    """Returns a number for people; `-` where there is none."""
    found = number(value)
    if found is None:
        return "-"
    if found == int(found) or abs(found) >= 10**digits:
        return f"{found:,.0f}".replace("-", _MINUS)
    return f"{found:,.{digits}g}".replace("-", _MINUS)


def size(value: Any) -> str:
    """Returns a number of bytes for people."""
    found = number(value)
    if found is None:
        return "-"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if found >= unit:
            return f"{found / unit:.3g} {name}"
    return f"{found:.0f} B"


def table(
    head: Sequence[str], body: Iterable[Sequence[object]], *, words: Iterable[int] = (0,), ranges: Iterable[int] = ()
) -> str:
    """Returns a table that scrolls by itself where it is wider than the page; empty without rows.

    Args:
        head: Names of columns.
        body: Rows, of the same length.
        words: Columns that hold words, which stand to the left.
        ranges: Columns whose figures have a range behind them, and may stand in two lines.
    """
    kinds = dict.fromkeys(ranges, " class=r") | dict.fromkeys(words, " class=w")
    lines = list(body)
    if not lines:
        return ""

    def row(cells: Sequence[object], tag: str) -> str:
        marked = (f"<{tag}{kinds.get(k, '')}>{escape('-' if c is None else c)}</{tag}>" for k, c in enumerate(cells))
        return f"<tr>{''.join(marked)}</tr>"

    top = row(head, "th")
    rest = "".join(row(line, "td") for line in lines)
    return f"<div class=scroll tabindex=0><table><thead>{top}</thead><tbody>{rest}</tbody></table></div>"


def folded(summary: str, content: str) -> str:
    """Returns content that is shown when asked for; empty where there is none."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>" if content else ""


def listed(items: Iterable[object]) -> str:
    """Returns names as part of a sentence, joined by `, `."""
    return ", ".join(plain(item) for item in items)
