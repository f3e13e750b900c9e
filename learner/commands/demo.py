"""The command `demo`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from broker.contract import errors
from broker.program import logs, settings
from learner import config
from learner.commands import report, train
from learner.config import tasks


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="start broker, learner and actors on this machine, train, show what happened",
        description=run.__doc__,
    )
    parser.add_argument("--envs", type=int, default=1, metavar="N", help="environments in each actor (default: 1)")
    parser.add_argument("--env-kwargs", default="{}", metavar="JSON", help="arguments for the environment")
    parser.add_argument(
        "--frame-stack", type=int, default=1, metavar="N", help="observations that the policy sees at once (default: 1)"
    )
    parser.add_argument(
        "--broker-kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="as in `actorq-broker up --kind`",
    )
    parser.add_argument(
        "--actor-cpu-share",
        type=float,
        default=0.0,
        metavar="X",
        help="hold each actor to so much of a core by a cgroup, where this user may (default: no limit)",
    )
    parser.add_argument("--actor-python", default="", help=argparse.SUPPRESS)  # of peers, for `compare`
    parser.add_argument("--actor-runtime", default="", help=argparse.SUPPRESS)
    config.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Runs a whole fleet on this machine: broker, learner and actors as processes of their own.

    It trains until the published int8 policy is good, stops them all, and shows what happened.
    """
    logs.configure()
    defaults = ("demo", {"env": "CartPole-v1", "actors": 2})
    from learner.files import run_directory
    from learner.run import local_fleet

    actors = local_fleet.ActorOptions(
        args.envs, args.actor_cpu_share, args.actor_python, args.actor_runtime, args.env_kwargs, args.frame_stack
    )
    effective = config.effective(args, config.effective(args, "", defaults).train.env, defaults)
    env_id = effective.train.env
    if effective.train.algorithm not in tasks.algorithms(env_id):  # then the actions are to decide, or to fit
        effective = config.effective(args, env_id, defaults, actions=local_fleet.actions_of(env_id, actors))
    if settings.dump_if_asked(args, *effective):
        return errors.EXIT_OK
    path = run_directory.new_path(effective.train, env_id)
    effective = effective._replace(train=dataclasses.replace(effective.train, run_dir=str(path)))
    summary, code = local_fleet.demo(effective, actors=actors, broker_kind=args.broker_kind)
    if summary is not None:
        train.print_summary(summary, args.json)
        if not args.json and code != errors.EXIT_INTERRUPTED:  # who asks for JSON, or to stop, waits for no picture
            report.draw(path)
    return code
