"""The command `report`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import logs

_PAGE = "report.html"


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="draw runs and comparisons on one HTML page that needs no network",
        description=run.__doc__,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run, or of a comparison")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE.html", help="(default: report.html in RUN; of several, here)"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Draws learning curves, times, latency, bytes, energy, fidelity, fleet and settings of runs on one page.

    Runs that differ in nothing but their seed are drawn together. What cannot be used is said, and the rest goes on.
    """
    from learner.study import report

    logs.configure()
    output = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / _PAGE
    page, problems, runs = report.make(args.runs, output)
    if args.json:
        print(json.dumps({"page": str(page), "runs": [str(run) for run in runs], "left_out": problems}))
    else:
        print(page)
    return errors.EXIT_OK


def draw(run: Path) -> None:
    """Draws the page of a run that has ended, and says where it is; that it cannot be drawn fails nothing."""
    from learner.study import report

    try:
        print(f"report: {report.write([run], run / _PAGE)}", file=sys.stderr)
    except Exception as error:  # of a library that draws, say
        print(f"no report is drawn: {error}", file=sys.stderr)
