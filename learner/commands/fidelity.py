"""The command `fidelity`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import logs
from learner.commands import report


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "fidelity",
        allow_abbrev=False,
        help="show how far int8 policies of a run act like their fp32 originals",
        description=run.__doc__,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with a checkpoint and a ledger")
    parser.add_argument(
        "--episodes", type=int, default=100, metavar="N", help="of each policy; 0 plays none (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="episode k resets with N + k (default: %(default)s)"
    )
    parser.add_argument("--env", default="", metavar="ID", help="environment to play, instead of the run's")
    parser.add_argument("--rows", default="", metavar="NAME,...", help="some rows of the table (default: all)")
    parser.add_argument("--json", action="store_true", help="print the study as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Compares policies made from the newest checkpoint of a run with their fp32 original.

    On states of replay that took no part in calibration, and by their returns in the same episodes, which actors on
    this machine play. The study is kept as RUN/fidelity.json.
    """
    if args.episodes < 0:
        raise errors.ConfigError("--episodes must be at least 0")
    from learner.quantize.tflite import stderr_filter

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with stderr_filter.filtered(everything=not args.verbose):
        from learner.study import fidelity

    logs.configure()
    study = fidelity.study(
        args.run,
        env_id=args.env,
        episodes=args.episodes,
        seed=args.seed,
        rows=[name.strip() for name in args.rows.split(",") if name.strip()],
    )
    print(json.dumps(study) if args.json else fidelity.table(study), flush=True)
    report.draw(args.run)
    return errors.EXIT_OK
