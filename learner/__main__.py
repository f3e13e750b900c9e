"""actorq-learner: trains on the fleet's experience, and publishes int8 policies to it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from broker.program import cli
from learner.commands import bench, compare, demo, deploy, export, fidelity, held, quantize, report, study, train
from learner.operate.orders import command as fleet
from learner.operate.watch import command as watch

# As --help lists them; what a command needs is imported when it runs, so that --help is quick
_COMMANDS = {
    "train": train,
    "demo": demo,
    "quantize": quantize,
    "deploy": deploy,
    "fidelity": fidelity,
    "export": export,
    "held": held,
    "report": report,
    "bench": bench,
    "fleet": fleet,
    "watch": watch,
    "compare": compare,
    "study": study,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="actorq-learner", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS.values():
        command.add(commands)
    args = parser.parse_args(argv)
    code: int = _COMMANDS[args.command].run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
