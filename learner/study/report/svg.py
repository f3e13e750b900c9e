"""Pictures as SVG within a page: text stays text, and colours are the page's, in the light and in the dark.

matplotlib draws with stand-in colours; in what it writes, each becomes a variable of the page's style.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib import axes, figure

from learner.study.report import tables

TEXT, MUTED, GRID = "#0000e0", "#0000e1", "#0000e2"
SERIES = tuple(f"#0000f{k}" for k in range(6))
"""Stand-ins for the colours of series."""
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 2)))
"""Strokes of series, for who does not see colours."""
_LIGHT = ("#0b62a4", "#c2410c", "#117a4b", "#7a3fd0", "#a3195b", "#56616b")
_DARK = ("#6cb4ff", "#ff9d5c", "#4fd1a0", "#c7a4ff", "#ff8ac2", "#b4bec8")
_VARIABLES = {TEXT: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    stand_in: f"var(--s{k})" for k, stand_in in enumerate(SERIES)
}
_WIDTH_IN = 5.1
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "actorq",
    "text.parse_math": False,  # a name may have a dollar in it
    "axes.unicode_minus": True,
    "font.family": "DejaVu Sans",
    "font.size": 11.0,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "legend.handlelength": 1.8,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.color": TEXT,
    "hatch.linewidth": 0.6,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
}
_numbers = itertools.count(1)

# A machine without our font, or a name with letters that it lacks: the page's own font has them
logging.getLogger("matplotlib").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and its words.

    Attributes:
        title: Names it.
        text: Says in a sentence or two, with figures, what it shows.
        svg: To be put into a page.
        table: Its figures, as HTML.
        alone: The same picture as a file by itself.
    """

    title: str
    text: str
    svg: str
    table: str
    alone: str


def colour(index: int) -> str:
    """Returns the stand-in of a series' colour."""
    return SERIES[index % len(SERIES)]


def variables() -> str:
    """Returns the style in which the page, or a picture by itself, says what the colours are."""

    def named(colours: Sequence[str], muted: str, grid: str) -> str:
        return "".join(f"--s{k}:{value};" for k, value in enumerate(colours)) + f"--muted:{muted};--grid:{grid};"

    light, dark = named(_LIGHT, "#68727c", "#dfe3e8"), named(_DARK, "#9aa5b1", "#333c46")
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def style() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which pictures are drawn in this style."""
    return mpl.rc_context(_STYLE)  # type: ignore[arg-type]  # as it wants the names of its settings one by one


def new(height_in: float = 3.3, **grid: str) -> tuple[figure.Figure, axes.Axes]:
    """Returns an empty picture, as wide as a column of the page.

    Args:
        height_in: Of the picture, 5.1 in wide; it is scaled to its column.
        grid: `axis`: x, y or both, along which lines help to read it.
    """
    made = figure.Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    drawn = made.add_subplot()
    drawn.grid(True, axis=grid.get("axis", "y"))  # type: ignore[arg-type]  # a literal, for all that mypy knows
    drawn.tick_params(length=3)
    return made, drawn


def thousands(value: float, _: object = None) -> str:
    """Returns a tick's number, short: 200k, 1.5M."""
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def legend(drawn: axes.Axes, count: int) -> None:
    """Puts the names of `count` series above the picture, where there are several."""
    if count > 1:
        columns = 1 if count > 3 else 2
        drawn.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2)


def name(drawn: axes.Axes, y: float, text: str) -> None:
    """Writes a name above what is drawn at `y`, just beside the axis."""
    drawn.annotate(
        text,
        (0.0, y),
        xytext=(3, 0),
        xycoords=drawn.get_yaxis_transform(),
        textcoords="offset points",
        va="bottom",
        fontsize=10,
    )


def finish(made: figure.Figure, title: str, text: str, table: str = "") -> Picture:
    """Writes a picture."""
    written = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that its font lacks; it may not be able to lay out what is huge
        made.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    number = next(_numbers)
    return Picture(
        title, text, _inline(written.getvalue(), f"p{number}", title), table, _alone(written.getvalue(), title)
    )


def _inline(written: str, prefix: str, title: str) -> str:
    """Returns the drawing with names of its own, the page's colours and its title."""
    box, body = _parts(written)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(url\(|xlink:href=")#', rf"\1#{prefix}-", body)
    name = f"{prefix}-title"
    return (
        f'<svg role=img viewBox="{box}" aria-labelledby={name} aria-describedby={prefix}-text id={prefix}>'
        f"<title id={name}>{tables.escape(title)}</title>{body}</svg>"
    )


def _alone(written: str, title: str) -> str:
    box, body = _parts(written)
    width, height = (float(part) for part in box.split()[2:])
    style = f"svg{{color:#1b2733}}{variables()}@media (prefers-color-scheme:dark){{svg{{color:#e3e8ee}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}" '
        f'width="{1.4 * width:.0f}" height="{1.4 * height:.0f}" role="img" aria-label="{tables.escape(title)}">'
        f"<style>{style}</style>{body}</svg>\n"
    )


def _parts(written: str) -> tuple[str, str]:
    """Returns the view box and the drawing itself, in the page's colours and font."""
    match = re.search(r'<svg [^>]*viewBox="([^"]+)"[^>]*>(.*)</svg>', written, re.DOTALL)
    assert match is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", match[2], flags=re.DOTALL)
    for stand_in, variable in _VARIABLES.items():
        body = body.replace(stand_in, variable)
    body = re.sub(r"(font(?:-family)?:[^;\"]*?)'DejaVu Sans'(?:, [^;\"]*)?", rf"\1{_FONT}", body)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    return match[1], re.sub(r"\n\s*", "\n", body)
