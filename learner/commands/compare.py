"""The command `compare`."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from typing import Any

from broker.contract import errors
from broker.program import cli, logs
from learner.study.compare import arguments


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="run fleets in turn, one precision after the other, and print what each gains",
        description=run.__doc__,
    )
    arguments.add(parser)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON lines on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Runs whole fleets in turn, with policies of one precision and then of another, and prints ratios.

    Each ratio has a bootstrap interval over seeds, and what explains it. DIR gets rows.jsonl and report.html. Ctrl-C
    ends it after seconds; --resume DIR goes on, and does a half run again. docs/learning/compare.md tells the method.
    """
    from learner.study.compare import comparison, directory, fleet_run, table

    logs.configure()
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    given, absent = arguments.given(args), frozenset[str]()
    if args.resume:
        held = directory.Directory.resume(args.resume, given)
        absent = arguments.absent_peers(held.request)  # they were there when it began
        tuned = fleet_run.tuned(held.request)
    else:
        request = arguments.request(given)
        tuned = fleet_run.tuned(request)
        request = arguments.complete(request, tuned)
        held = directory.Directory.new(args.output or comparison.default_path(request.env), request)
    print(f"comparison: {held.path}", file=sys.stderr, flush=True)
    compared = comparison.Comparison(held, tuned, stop, absent)
    rows = compared.run()
    if args.json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        print(table.table(rows))
    page = comparison.report(held.path) if rows else None
    if page:
        print(f"report: {page}", file=sys.stderr)
    if not compared.is_complete:
        print(f"interrupted; go on with: actorq-learner compare --resume {held.path}", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_OK
