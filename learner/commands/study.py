"""The command `study`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import cli, logs
from learner.study.sweep import arguments


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "study",
        allow_abbrev=False,
        help="play many policies, each in many precisions and with weights of few bits, and compare them with fp32",
        description=run.__doc__,
    )
    arguments.add(parser)
    parser.add_argument("--json", action="store_true", help="print the study as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Plays many policies, each in many precisions and with weights of 2 to 8 bits, in the same episodes as fp32.

    DIR gets cells.jsonl, a line for each policy and column, and what is made of them: study.md, study.csv, study.json
    and report.html. Ctrl-C ends it after the cells that are at work; after that, kill -9 or a power cut, --resume DIR
    computes those that are missing. docs/learning/study.md tells the method.
    """
    arguments.check(args)
    from learner.quantize.tflite import stderr_filter

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with stderr_filter.filtered(everything=not args.verbose):
        from learner.study.sweep import cells, conducting, output, plan, policies, results

    logs.configure()
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    given = arguments.given(args)
    if args.resume:
        held = cells.Cells.resume(args.resume, given)
    else:
        request = plan.Request(**given)
        plan.check(request)
        path = args.output or Path("runs", time.strftime("study-%Y%m%d-%H%M%S"))
        held = cells.Cells.new(path, request, policies.find(request.policies, request.env))
    print(f"study: {held.path}", file=sys.stderr, flush=True)
    study = conducting.Study(held, stop, args.jobs)
    with contextlib.closing(held):
        try:
            study.run(retry_failed=args.retry_failed)
        finally:  # what is there is shown, whatever ended it
            found = results.build(held, study.unusable)
            output.write(held.path, found)
            _draw_study(held.path, found)
    if args.json:
        print(json.dumps(found))
    else:
        print(output.markdown(found), end="")
    if not study.is_complete:
        print(f"interrupted; go on with: actorq-learner study --resume {held.path}", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    if not held.done:
        name, why = next(iter(study.unusable.items()))
        raise errors.RunError(
            f"none of the {len(held.entries)} policies can be studied",
            where=f"{name}: {why}",
            todo="mend that, --resume",
        )
    return errors.EXIT_OK


def _draw_study(directory: Path, found: dict[str, Any]) -> None:
    """Draws the page of a study, and says where it is; that it cannot be drawn fails nothing."""
    try:
        from learner.study.sweep import page  # here: matplotlib takes half a second to load

        print(f"report: {page.write(directory, found)}", file=sys.stderr)
    except Exception as error:  # of a library that draws, say
        print(f"no report is drawn: {error}", file=sys.stderr)
