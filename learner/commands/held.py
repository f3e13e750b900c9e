"""The command `held`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from broker.contract import errors


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "held",
        allow_abbrev=False,
        help="show whose experience a run holds back, and why; let it in, or leave it out",
        description=run.__doc__,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory; it may be training")
    decision = parser.add_mutually_exclusive_group()
    decision.add_argument("--release", metavar="ACTOR", help="what is held of it enters replay; what it sends counts")
    decision.add_argument("--discard", metavar="ACTOR", help="replay never sees what is held; what it sends now counts")
    parser.add_argument("--json", action="store_true", help="print who is held as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Shows whose experience a run holds back: actors whose actions are not those of the policy that they name.

    Their boards, runtimes or files are broken, or they lie. Nothing of it enters replay until you decide; a learner
    that trains follows within a second, another one when its run is resumed. To put an actor out: actorq-broker revoke.
    """
    from learner.audit import holding
    from learner.files import run_directory

    if not (args.run / "config.toml").exists():
        raise run_directory.no_run(args.run)
    held = holding.read(args.run)
    for decision in (holding.RELEASE, holding.DISCARD):
        if (actor_id := getattr(args, decision)) is not None:
            holding.decide(args.run, actor_id, decision)
            print(f"{decision} {actor_id}: the run's learner follows, or does when it is resumed", file=sys.stderr)
    if args.json:
        print(json.dumps({name: dataclasses.asdict(hold) for name, hold in held.items()}))
    elif not held:
        print("nobody is held back", file=sys.stderr)
    else:
        for name, hold in held.items():
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(hold.since_s))
            wrong = f"{hold.wrong} of {hold.steps} steps of message {hold.seq}, boot {hold.boot}"
            print(f"{name}: since {when}, {wrong} are not its policy's; {hold.why}")
    return errors.EXIT_OK
