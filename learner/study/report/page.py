"""The page: one HTML file that needs nothing else, in the light and in the dark, on a desk and on a phone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from learner.study.report import (
    breakdown,
    compared,
    costs,
    curves,
    facts,
    grouping,
    latency,
    reading,
    svg,
    tables,
)

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The list of what a browser may load for the page, whatever a fleet wrote into it: nothing."""
_CAPTION_CHARS = 4000
_STYLE = """
*{box-sizing:border-box}
:root{color-scheme:light dark;--text:#1b2733;--back:#fff;--card:#f7f8fa}
@media (prefers-color-scheme:dark){:root{--text:#e3e8ee;--back:#14191f;--card:#1b222a}}
body{font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;margin:0 auto;max-width:1240px;
padding:1.2rem clamp(.9rem,3vw,2rem);color:var(--text);background:var(--back);overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.2;margin:.4em 0}
h2{font-size:1.2rem;margin:2em 0 .5em;border-bottom:1px solid var(--grid)}
p{max-width:75ch}nav{display:flex;flex-wrap:wrap;gap:.2rem 1rem}a{color:var(--s0)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:1rem;align-items:start}
figure{margin:0;padding:.7rem;background:var(--card);border-radius:8px;min-width:0}
figure h3{font-size:.98rem;margin:0 0 .4rem;line-height:1.3}
figure svg{display:block;width:100%;height:auto;max-width:40rem;color:var(--text)}
figure svg text{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
figcaption{font-size:.84rem;color:var(--muted);margin-top:.4rem}
details{margin:.5rem 0;font-size:.9rem;min-width:0}summary{cursor:pointer}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top;max-width:26rem}
th.w,td.w{text-align:left}td{white-space:nowrap}td.w,td.r{white-space:normal}td.w{min-width:7rem}td.r{min-width:6.2rem}th{font-weight:600}
pre{font-size:.84rem;margin:0;padding:.7rem;background:var(--card)}
.problems{border-left:4px solid var(--s1);padding-left:.8rem}
@media (max-width:30rem){body{padding:.8rem .6rem}figure{padding:.5rem .4rem}}
@media print{details:not([open])>*{display:block}}
"""


def render(found: reading.Found) -> str:
    """Returns the page of all that was read."""
    with svg.style():
        return _page(found)


def _page(found: reading.Found) -> str:
    panels = grouping.panels(found)
    runs = found.all_runs
    tasks = list(dict.fromkeys(run.task for run in runs))
    title = f"{tables.listed(tasks) or 'No run'}: {len(runs)} run{'' if len(runs) == 1 else 's'}"
    sections = [
        ("At a glance", facts.glance(panels)),
        ("Ratios", _ratios(found.comparisons)),
        ("Learning", grid(made for panel in panels for made in curves.pictures(panel))),
        ("Where the time goes", _times(panels)),
        ("Latency and lag", grid(made for panel in panels for made in latency.pictures(panel))),
        ("Bytes", grid(costs.sizes(panel) for panel in panels)),
        ("Energy and CO2", _energy(panels, runs)),
        ("Fidelity of int8 to fp32", _fidelity(runs)),
        ("Fleet", facts.fleet(runs) or "<p>None of these runs kept a table of its actors.</p>"),
        ("Configuration", facts.configuration(runs)),
        ("Commands", facts.commands(found)),
    ]
    words = "Where there are several runs, a figure is their median, and in brackets the smallest and the largest."
    return document(title, "report", words, sections, found.problems)


def document(
    title: str, command: str, words: str, sections: Sequence[tuple[str, str]], problems: Sequence[str] = ()
) -> str:
    """Returns a page.

    Args:
        title: Names it.
        command: Of `actorq-learner`, that writes it.
        words: What a reader must know before all else.
        sections: Their names and contents, as HTML; empty ones are left out.
        problems: What could not be used.
    """
    shown = [(name, content) for name, content in sections if content]
    links = "".join(f"<a href='#{_anchor(name)}'>{name}</a>" for name, _ in shown)
    body = "".join(f"<section id={_anchor(name)}><h2>{name}</h2>{content}</section>" for name, content in shown)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{tables.escape(title)}</title><style>{svg.variables()}{_STYLE}</style></head><body>"
        f"<h1>{tables.escape(title)}</h1><p>Written by <code>actorq-learner {command}</code>, {when}. "
        f"{tables.escape(words, _CAPTION_CHARS)}</p>"
        f"<nav aria-label=Sections>{links}</nav>{_problems(problems)}{body}</body></html>\n"
    )


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    lines = "".join(f"<li>{tables.escape(line)}</li>" for line in problems)
    return f"<div class=problems><p>What could not be used:</p><ul>{lines}</ul></div>"


def _ratios(comparisons: Sequence[reading.Comparison]) -> str:
    parts = [
        (f"<h3>{tables.escape(one.path.resolve().name)}</h3>" if len(comparisons) > 1 else "")
        + grid(compared.ratios(one))
        + tables.folded("All rows of the comparison", compared.ratio_table(one))
        for one in comparisons
    ]
    return "".join(parts)


def _times(panels: Sequence[grouping.Panel]) -> str:
    beside = breakdown.published(panels)
    every = [breakdown.stages(panel, who) for panel in panels for who in ("actors", "learner")]
    if beside is None and not any(every):
        return "<p>None of these runs kept a breakdown of its time.</p>"
    return grid([beside, *every]) + (f"<p>{tables.escape(breakdown.DIFFERS, _CAPTION_CHARS)}</p>" if beside else "")


def _energy(panels: Sequence[grouping.Panel], runs: Sequence[reading.Run]) -> str:
    table = costs.energy_table(runs)
    if not table:
        return "<p>None of these runs tells its energy.</p>"
    return grid(costs.energy(panel) for panel in panels) + tables.folded("Energy of each run, and its sources", table)


def _fidelity(runs: Sequence[reading.Run]) -> str:
    hint = "<p>None of these runs was studied; <code>actorq-learner fidelity RUN</code> does it.</p>"
    return grid(compared.fidelity(run) for run in runs) or hint


def grid(pictures: Iterable[svg.Picture | None]) -> str:
    """Returns pictures in columns, as many as fit; empty without any."""
    shown = "".join(_figure(picture) for picture in pictures if picture is not None)
    return f"<div class=grid>{shown}</div>" if shown else ""


def _figure(picture: svg.Picture) -> str:
    name = re.search(r"\bid=(p\d+)>", picture.svg)
    assert name is not None
    return (
        f"<figure><h3>{tables.escape(picture.title)}</h3>{picture.svg}"
        f"<figcaption id={name[1]}-text>{tables.escape(picture.text, _CAPTION_CHARS)}</figcaption>"
        f"{tables.folded('Figures', picture.table)}</figure>"
    )


def _anchor(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")
