"""The command `bench`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import logs
from learner import config


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="let every actor of a fleet measure its board, and compare them on one page",
        description=run.__doc__,
    )
    defaults = config.TrainConfig()
    parser.add_argument("--fleet", default=defaults.fleet, metavar="NAME", help="(default: %(default)s)")
    parser.add_argument(
        "--broker", default="", metavar="HOST[:PORT],...", help="(default: as told to `actorq-broker init`)"
    )
    parser.add_argument(
        "--actors", type=int, default=1, metavar="N", help="to wait for; all that are there are asked (default: 1)"
    )
    parser.add_argument("--wait-s", type=float, default=30.0, metavar="X", help="for them (default: %(default)s)")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="actors that measure at the same time (default: 1)"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, and rougher figures")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of `actorq-actor bench`, such as parts=latency; may be repeated",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="(default: runs/bench-FLEET-TIME)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Asks every actor of a fleet to run `actorq-actor bench`, and draws one page that compares their boards.

    No training goes on meanwhile. DIR gets rows.jsonl and page.html.
    """
    options = dict(pair.partition("=")[::2] for pair in args.set) | ({"quick": "true"} if args.quick else {})
    if not all(name and value for name, value in options.items()) or min(args.actors, args.at_once) < 1:
        raise errors.ConfigError("--set takes NAME=VALUE, --actors and --at-once at least 1")
    from learner.study import fleet_bench

    chosen = config.TrainConfig(
        fleet=args.fleet, broker=tuple(filter(None, args.broker.split(","))), actors=args.actors, wait_s=args.wait_s
    )
    directory = args.output or Path("runs", time.strftime(f"bench-{args.fleet}-%Y%m%d-%H%M%S"))
    logs.configure()
    print(fleet_bench.run(chosen, options, directory, at_once=args.at_once))
    print(directory / "page.html", file=sys.stderr)
    return errors.EXIT_OK
