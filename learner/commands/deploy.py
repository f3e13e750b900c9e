"""The command `deploy`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.fleet import identity
from broker.program import cli, logs
from learner import config


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "deploy",
        allow_abbrev=False,
        help="publish a policy to a fleet without training; the older one goes back out if actors score it worse",
        description=run.__doc__,
    )
    parser.add_argument(
        "policy",
        type=Path,
        metavar="FILE",
        help="what `quantize` wrote, OUT.tflite with its OUT.json beside it; or what it takes, which is quantized, "
        "by its default settings, first, and needs --env or --calibration",
    )
    defaults = config.TrainConfig()
    parser.add_argument("--fleet", default=defaults.fleet, metavar="NAME", help="(default: %(default)s)")
    parser.add_argument(
        "--broker", default="", metavar="HOST[:PORT],...", help="(default: as told to `actorq-broker init`)"
    )
    parser.add_argument(
        "--actors", type=int, default=1, metavar="N", help="to wait for; all that come act on it (default: 1)"
    )
    parser.add_argument("--wait-s", type=float, default=30.0, metavar="X", help="for them (default: %(default)s)")
    parser.add_argument(
        "--episodes", type=int, default=20, metavar="N", help="by which an actor scores each (default: %(default)s)"
    )
    parser.add_argument(
        "--canary",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the actors, at least one, try it first; the returns of their episodes beside the others' decide, in "
        "the place of a score",
    )
    parser.add_argument(
        "--trial-s", type=float, default=600.0, metavar="X", help="for --canary to decide (default: %(default)s)"
    )
    parser.add_argument("--env", default="", metavar="ID", help="to quantize FILE with, as in `quantize`")
    parser.add_argument("--calibration", type=Path, metavar="OBS.npz", help="the same, as in `quantize`")
    parser.add_argument(
        "--force-publish", action="store_true", help="although the gate refused it; actors score it all the same"
    )
    parser.add_argument("--json", action="store_true", help="print what became of it as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks and what the converter says")


def run(args: argparse.Namespace) -> int:
    """Publishes a policy to a fleet, signed, and no training goes on: actors go on acting on it when this has ended.

    The gate must have let it pass. An actor plays it, and what the fleet had before, for the same episodes: if it is
    worse, the older one goes back out as the newest version, and the exit code is 16. Actors are asked for no
    experience; what they hold from before stays with them until a learner trains. With --canary some of the actors act
    on it first, and it goes to the others only if their episodes are not worse.
    """
    if args.actors < 1 or args.episodes < 2 or not args.wait_s > 0:
        raise errors.ConfigError("--actors must be at least 1, --episodes at least 2, --wait-s positive")
    if not 0.0 <= args.canary < 1.0 or not args.trial_s > 0:
        raise errors.ConfigError("--canary must be from 0 to below 1, --trial-s positive")
    identity.Fleet.open(args.fleet, create=False)  # before what takes seconds or minutes
    from learner.fleet import gathering
    from learner.quantize.tflite import stderr_filter

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with stderr_filter.filtered(everything=not args.verbose):
        from learner.run.deploy import deployment, policy_file, table

    logs.configure()
    chosen = config.TrainConfig(
        fleet=args.fleet,
        broker=tuple(filter(None, args.broker.split(","))),
        actors=max(args.actors, 2 if args.canary else 1),
        wait_s=args.wait_s,
        canary=args.canary,
        evaluate_episodes=args.episodes,
    )
    with tempfile.TemporaryDirectory(prefix="actorq-") as scratch:
        path = args.policy
        if path.suffix != ".tflite":
            path = _quantized(args, Path(scratch))
        elif args.env or args.calibration:
            raise errors.ConfigError("--env and --calibration are for files that are still to be quantized")
        file = policy_file.PolicyFile.read(path, forced=args.force_publish)
    stop = threading.Event()  # not before: quantizing does not look at it
    cli.on_stop_signal(stop.set)
    try:
        result = deployment.run(dataclasses.replace(file, path=args.policy), chosen, stop, args.trial_s)
    except gathering.Stopped:
        print("interrupted before the policy was scored", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    print(json.dumps(result) if args.json else table.made(result))
    if not result["deployed"]:
        raise errors.PolicyError(
            "the actors score it worse than the policy that the fleet had, which goes out again"
            f" (acting on that: {', '.join(result['acting']) or 'nobody yet'})",
            reason="worse",
            where=str(args.policy),
            todo="train or quantize it anew; more --episodes tell smaller differences",
        )
    return errors.EXIT_OK


def _quantized(args: argparse.Namespace, directory: Path) -> Path:
    """Quantizes a policy as `quantize` does by default; returns the path of the .tflite."""
    from learner.study.user_models import command, requests

    request = {
        field.name: field.default
        for field in dataclasses.fields(requests.Request)
        if field.default is not dataclasses.MISSING
    }
    given = {name: getattr(args, name) for name in ("env", "calibration", "force_publish", "verbose")}
    output = directory / "policy.tflite"
    own: dict[str, Any] = {"model": args.policy, "output": output, "precision": "int8", "outputs": None}
    asked = requests.Request(**request | given | own, aware=False, steps=400, seed=0, force=True)
    requests.check(asked)
    command.run(asked)
    return output
