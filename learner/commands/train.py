"""The command `train`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import cli, logs, settings
from learner import config
from learner.operate.watch import command as watching


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "train", allow_abbrev=False, help="train on the actors of a fleet", description=run.__doc__
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on from the newest checkpoint of a run, if any")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the actors of a learner that is live on the fleet; that one saves and ends",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="wait as long as the fleet's learner lives; once that one is gone, go on with its run (--resume RUN, on "
        "storage that both reach), or else begin a new one with its newest policy",
    )
    parser.add_argument(
        "--watch",
        type=int,
        nargs="?",
        const=watching.PORT,
        metavar="PORT",
        help=f"serve the page of `actorq-learner watch` beside it, in a process of its own; 0 takes any port "
        f"(default: {watching.PORT})",
    )
    config.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Trains on what the actors of a fleet send, and publishes int8 policies to them.

    It waits for actors, and stops when the published policy is good or the budget is spent. Ctrl-C saves a checkpoint;
    --resume goes on from there. --standby goes on by itself when the learner before is gone.
    """
    saved = [_saved_settings(args.resume)] if args.resume else []
    initial = config.effective(args, "", *saved)
    if args.standby:
        _check_standby(args, initial.train.fleet, *saved)
    # What is tuned for the task is in a run's settings already, and weaker than they are
    in_force = initial if saved else config.effective(args, initial.train.env)
    if settings.dump_if_asked(args, *_known(in_force)):
        return errors.EXIT_OK
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    from learner.fleet import gathering  # here: --help must not load what training needs
    from learner.run import train
    from learner.run.reports import console

    def configure(env_id: str, actions: str) -> config.Settings:
        return initial if args.resume else config.effective(args, env_id, actions=actions)

    display = console.Console.on_stderr()
    logs.configure(display)
    beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if args.watch is not None:
        curve = str(args.resume or initial.train.run_dir)
        beside = watching.beside(initial.train.fleet, initial.train.broker, args.watch, curve)
    printing: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if initial.train.ingest_workers:
        printing = contextlib.redirect_stdout(sys.stderr)  # Ray prints to what is for the summary alone
    try:
        with beside, printing:
            held = place = None
            if args.standby:
                held, place = train.stand_by(initial.train, args.resume, stop)
                if args.resume and held is None:
                    print(f"the run has ended by itself: {args.resume}", file=sys.stderr)
                    return errors.EXIT_OK
                if args.resume:
                    initial = config.effective(args, "", _saved_settings(args.resume))  # as the live one had them
            summary, path = train.run(
                initial,
                configure,
                resume=args.resume,
                held=held,
                take_over=args.take_over,
                adopt=args.standby and not args.resume,
                place=place,
                stop=stop,
                display=display,
            )
    except gathering.Stopped:
        print("interrupted before training began", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    print_summary(summary, args.json)
    print(f"run directory: {path}", file=sys.stderr)
    if not summary["updates"] and not stop.is_set():
        raise errors.NothingLearned(
            f"nothing was learned: {summary['nothing_learned']}",
            where=str(path),
            todo="mend that, or give it more time (--max-wall-s, --max-env-steps)",
        )
    if stop.is_set():
        print(f"interrupted; go on with: actorq-learner train --resume {path}", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    if summary["solved_return"] is not None and not summary["solved"]:
        raise errors.NotSolved(
            f"the published {summary['precision']} policy did not reach {summary['solved_return']:g}",
            where=str(path),
            todo=f"go on with --resume {path} and a larger --max-env-steps, or try another --seed",
        )
    return errors.EXIT_OK


def _check_standby(args: argparse.Namespace, fleet: str, *saved: settings.Table) -> None:
    """Checks that a standby's run, if it knows it, is of the fleet on which it stands by.

    Raises:
        ConfigError: It shall not wait.
        RunError: The run is of another fleet.
    """
    if args.take_over:
        raise errors.ConfigError(
            "--standby waits for the live learner, and --take-over does not", todo="leave one of them out"
        )
    run_dir = args.run_dir and Path(args.run_dir)
    if not saved and run_dir and (run_dir / "config.toml").exists():  # before it has waited for days
        raise errors.RunError(
            "the run directory holds a run already, and this standby would begin a new one",
            where=str(run_dir),
            todo=f"--resume {run_dir}, if the live learner has it, or another --run-dir",
        )
    if saved and (known := saved[0][1].get("fleet", fleet)) != fleet:
        raise errors.RunError(
            f"the run is of fleet {known!r}, and this standby would be on {fleet!r}",
            where=str(args.resume),
            todo=f"leave --fleet out, or name the run directory of the learner that is live on {fleet!r}",
        )


def _saved_settings(run: Path) -> settings.Table:
    file = run / "config.toml"
    if not file.exists():
        from learner.files import run_directory

        raise run_directory.no_run(run)
    try:
        return str(file), tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise errors.RunError(
            f"there is no run to resume: {error}", where=str(run), todo="name a run directory, as in runs/"
        ) from error


def _known(found: config.Settings) -> tuple[Any, ...]:
    """Without the settings of an algorithm, if none is chosen yet."""
    return (found.train, found.gate) if found.train.algorithm == config.AUTO else tuple(found)


def print_summary(summary: dict[str, Any], as_json: bool) -> None:
    """The table, where there is something to tell."""
    if not as_json and not summary["updates"]:
        return
    from learner.run.reports import summary as summaries

    print(json.dumps(summary) if as_json else summaries.table(summary), flush=True)
