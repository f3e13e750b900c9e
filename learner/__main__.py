"""actorq-learner: trains on the fleet's experience, and publishes int8 policies to it."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker import cli, errors, settings
from learner import config, tasks

ENV_PREFIX = "ACTORQ_LEARNER_"
_CONFIGS = (config.TrainConfig, config.DqnConfig, config.GateConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    return _demo(args) if args.command == "demo" else _train(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorq-learner", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", allow_abbrev=False, help="train on the actors of a fleet", description=_train.__doc__
    )
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on from the newest checkpoint of a run directory")
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="start broker, learner and actors on this machine, train, show what happened",
        description=_demo.__doc__,
    )
    demo.add_argument("--envs", type=int, default=1, metavar="N", help="environments in each actor (default: 1)")
    demo.add_argument(
        "--broker-kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="as in `actorq-broker up --kind`",
    )
    for command in (train, demo):
        settings.add_arguments(command, *_CONFIGS)
        command.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
        command.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return parser


def _settings(args: argparse.Namespace, env_id: str, *weakest: settings.Table) -> config.Settings:
    """Effective settings for an environment: tuned ones where tasks.toml has some, under whatever the user gave."""
    tables = [*weakest, (f"tasks.toml [{env_id}]", tasks.settings(env_id))]
    values = settings.resolve(_CONFIGS, args, tables=tables, env_prefix=ENV_PREFIX)
    train, algorithm, gate = _CONFIGS
    return config.check(
        config.Settings(settings.build(train, values), settings.build(algorithm, values), settings.build(gate, values))
    )


def _train(args: argparse.Namespace) -> int:
    """Trains on what the actors of a fleet send, and publishes int8 policies to them.

    It waits for actors, and stops when the published policy is good or the budget is spent. Ctrl-C saves a checkpoint;
    --resume goes on from there.
    """
    saved = [_saved_settings(args.resume)] if args.resume else []
    initial = _settings(args, "", *saved)
    if settings.dump_if_asked(args, *_settings(args, initial.train.env, *saved)):
        return errors.EXIT_OK
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    from learner import console, session, train  # here: --help must not load what training needs

    def configure(env_id: str) -> config.Settings:
        return initial if args.resume else _settings(args, env_id)

    try:
        summary, path = train.run(initial, configure, resume=args.resume, stop=stop, screen=console.Console())
    except session.Stopped:
        print("interrupted before training began", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    _print_summary(summary, args.json)
    print(f"run directory: {path}", file=sys.stderr)
    if stop.is_set():
        print(f"interrupted; go on with: actorq-learner train --resume {path}", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    if summary["solved_return"] is not None and not summary["solved"]:
        raise errors.NotSolved(
            f"the published int8 policy did not reach {summary['solved_return']:g}",
            where=str(path),
            todo=f"go on with --resume {path} and a larger --max-env-steps, or try another --seed",
        )
    return errors.EXIT_OK


def _saved_settings(run: Path) -> settings.Table:
    file = run / "config.toml"
    try:
        return str(file), tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise errors.RunError(
            f"there is no run to resume: {error}", where=str(run), todo="name a run directory, as in runs/"
        ) from error


def _demo(args: argparse.Namespace) -> int:
    """Runs a whole fleet on this machine: broker, learner and actors as processes of their own.

    It trains until the published int8 policy is good, stops them all, and shows what happened.
    """
    defaults = ("demo", {"env": "CartPole-v1", "actors": 2})
    effective = _settings(args, _settings(args, "", defaults).train.env, defaults)
    if settings.dump_if_asked(args, *effective):
        return errors.EXIT_OK
    from learner import local_fleet

    summary, code = local_fleet.demo(effective, envs=args.envs, broker_kind=args.broker_kind)
    if summary is not None:
        _print_summary(summary, args.json)
    return code


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    from learner import summary as summaries

    print(json.dumps(summary) if as_json else summaries.table(summary))


if __name__ == "__main__":
    sys.exit(main())
