"""actorq-learner: trains on the fleet's experience, and publishes int8 policies to it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.fleet import identity
from broker.program import cli, logs, settings
from learner import config
from learner.config import tasks
from learner.operate.orders import command as fleet_orders
from learner.operate.watch import command as watching
from learner.study.compare import arguments
from learner.study.sweep import arguments as study_arguments

_PAGE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    runs = {
        "bench": _bench,
        "compare": _compare,
        "demo": _demo,
        "deploy": _deploy,
        "export": _export,
        "fidelity": _fidelity,
        "fleet": _fleet,
        "held": _held,
        "quantize": _quantize,
        "report": _report,
        "study": _study,
        "train": _train,
        "watch": watching.run,
    }
    return runs[args.command](args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorq-learner", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train", allow_abbrev=False, help="train on the actors of a fleet", description=_train.__doc__
    )
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on from the newest checkpoint of a run, if any")
    train.add_argument(
        "--take-over",
        action="store_true",
        help="take the actors of a learner that is live on the fleet; that one saves and ends",
    )
    train.add_argument(
        "--standby",
        action="store_true",
        help="wait as long as the fleet's learner lives; once that one is gone, go on with its run (--resume RUN, on "
        "storage that both reach), or else begin a new one with its newest policy",
    )
    train.add_argument(
        "--watch",
        type=int,
        nargs="?",
        const=watching.PORT,
        metavar="PORT",
        help=f"serve the page of `actorq-learner watch` beside it, in a process of its own; 0 takes any port "
        f"(default: {watching.PORT})",
    )
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="start broker, learner and actors on this machine, train, show what happened",
        description=_demo.__doc__,
    )
    demo.add_argument("--envs", type=int, default=1, metavar="N", help="environments in each actor (default: 1)")
    demo.add_argument("--env-kwargs", default="{}", metavar="JSON", help="arguments for the environment")
    demo.add_argument(
        "--frame-stack", type=int, default=1, metavar="N", help="observations that the policy sees at once (default: 1)"
    )
    demo.add_argument(
        "--broker-kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="as in `actorq-broker up --kind`",
    )
    demo.add_argument(
        "--actor-cpu-share",
        type=float,
        default=0.0,
        metavar="X",
        help="hold each actor to so much of a core by a cgroup, where this user may (default: no limit)",
    )
    demo.add_argument("--actor-python", default="", help=argparse.SUPPRESS)  # of peers, for `compare`
    demo.add_argument("--actor-runtime", default="", help=argparse.SUPPRESS)
    _add_quantize(commands)
    _add_deploy(commands)
    _add_fidelity(commands)
    _add_export(commands)
    _add_held(commands)
    _add_report(commands)
    _add_bench(commands)
    fleet_orders.add(commands)
    watching.add(commands)
    compare = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="run fleets in turn, one precision after the other, and print what each gains",
        description=_compare.__doc__,
    )
    arguments.add(compare)
    compare.add_argument("--json", action="store_true", help="print the rows as JSON lines on stdout")
    compare.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    study = commands.add_parser(
        "study",
        allow_abbrev=False,
        help="play many policies, each in many precisions and with weights of few bits, and compare them with fp32",
        description=_study.__doc__,
    )
    study_arguments.add(study)
    study.add_argument("--json", action="store_true", help="print the study as one JSON object on stdout")
    study.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    for command in (train, demo):
        config.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
        command.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return parser


def _add_quantize(commands: Any) -> None:
    quantize = commands.add_parser(
        "quantize",
        allow_abbrev=False,
        help="turn any policy (Stable-Baselines3, ONNX, Keras, SavedModel) into a full-integer .tflite that actors run",
        description=_quantize.__doc__,
    )
    quantize.add_argument(
        "model",
        type=Path,
        metavar="FILE",
        help="Stable-Baselines3 .zip, .onnx, .keras or the directory of a SavedModel: one input, one output [N, n]",
    )
    quantize.add_argument(
        "--env",
        default="",
        metavar="ID",
        help="environment to calibrate in and to compare returns in, as `actorq-actor evaluate` takes it",
    )
    quantize.add_argument("--env-kwargs", default="{}", metavar="JSON", help="arguments for the environment")
    quantize.add_argument(
        "--frame-stack", type=int, default=1, metavar="N", help="observations that the policy sees at once (default: 1)"
    )
    quantize.add_argument(
        "--episodes",
        type=int,
        default=50,
        metavar="N",
        help="fresh ones that fp32 and int8 both play; up to eight times as many where those do not decide it "
        "(default: %(default)s)",
    )
    quantize.add_argument(
        "--calibration-episodes", type=int, default=20, metavar="N", help="that fp32 plays first (default: %(default)s)"
    )
    quantize.add_argument(
        "--calibration",
        type=Path,
        metavar="OBS.npz",
        help="instead of --env: observations [N, ...] as the model is fed them, in an array `observations` or the only "
        "one, at most 1 GB in memory (4 bytes a number or more), and in `episode` the number of the episode of each; "
        "three quarters set the ranges, a quarter judges the result",
    )
    quantize.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.tflite", help="OUT.json goes beside")
    quantize.add_argument(
        "--precision", choices=config.PRECISIONS, default="int8", help="of the result (default: %(default)s)"
    )
    quantize.add_argument(
        "--outputs",
        choices=("values", "actions"),
        help="what the outputs of ONNX and Keras models are: values of actions (or logits), of which the largest is "
        "taken; or continuous actions (default: what --env takes, else values)",
    )
    for end in ("low", "high"):
        quantize.add_argument(
            f"--action-{end}",
            type=_numbers,
            default=(),
            metavar="X[,X...]",
            help="bound to which continuous actions are clipped, one or one each (default: the file's, or --env's)",
        )
    quantize.add_argument(
        "--normaliser",
        type=Path,
        metavar="FILE.pkl",
        help="what VecNormalize saved (default: vecnormalize.pkl beside the .zip, if there is one)",
    )
    quantize.add_argument(
        "--aware",
        action="store_true",
        help="train the weights against the fp32 outputs through simulated int8; takes seconds, and mends most of what "
        "plain int8 breaks",
    )
    quantize.add_argument("--steps", type=int, default=400, metavar="N", help="of --aware (default: %(default)s)")
    quantize.add_argument(
        "--distil",
        action="store_true",
        help="where int8 loses too much: train a student in simulated int8 to do what the policy does, from states of "
        "its own episodes (--env), until it is non-inferior or the time ends",
    )
    quantize.add_argument(
        "--hidden",
        type=_widths,
        default=(),
        metavar="N[,N...]",
        help="units of the student's hidden layers (default: the policy's own shape)",
    )
    quantize.add_argument(
        "--distil-minutes",
        type=float,
        metavar="X",
        help="of training and playing, episodes of the comparison not counted (default: 2)",
    )
    quantize.add_argument(
        "--weight-bits",
        type=int,
        default=8,
        metavar="N",
        help="2 to 8: bits that weights are rounded to, kept in eight all the same (default: %(default)s)",
    )
    quantize.add_argument(
        "--prune",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="make that share of each output's weights 0, the smallest (default: none)",
    )
    quantize.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)"
    )
    quantize.add_argument("--force", action="store_true", help="overwrite OUT.tflite and OUT.json")
    quantize.add_argument("--force-publish", action="store_true", help="write it although it acts otherwise than fp32")
    quantize.add_argument("--json", action="store_true", help="print the report as one JSON object on stdout")
    quantize.add_argument("-v", "--verbose", action="store_true", help="show tracebacks and what the converter says")


def _add_deploy(commands: Any) -> None:
    deploy = commands.add_parser(
        "deploy",
        allow_abbrev=False,
        help="publish a policy to a fleet without training; the older one goes back out if actors score it worse",
        description=_deploy.__doc__,
    )
    deploy.add_argument(
        "policy",
        type=Path,
        metavar="FILE",
        help="what `quantize` wrote, OUT.tflite with its OUT.json beside it; or what it takes, which is quantized, "
        "by its default settings, first, and needs --env or --calibration",
    )
    defaults = config.TrainConfig()
    deploy.add_argument("--fleet", default=defaults.fleet, metavar="NAME", help="(default: %(default)s)")
    deploy.add_argument(
        "--broker", default="", metavar="HOST[:PORT],...", help="(default: as told to `actorq-broker init`)"
    )
    deploy.add_argument(
        "--actors", type=int, default=1, metavar="N", help="to wait for; all that come act on it (default: 1)"
    )
    deploy.add_argument("--wait-s", type=float, default=30.0, metavar="X", help="for them (default: %(default)s)")
    deploy.add_argument(
        "--episodes", type=int, default=20, metavar="N", help="by which an actor scores each (default: %(default)s)"
    )
    deploy.add_argument(
        "--canary",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the actors, at least one, try it first; the returns of their episodes beside the others' decide, in "
        "the place of a score",
    )
    deploy.add_argument(
        "--trial-s", type=float, default=600.0, metavar="X", help="for --canary to decide (default: %(default)s)"
    )
    deploy.add_argument("--env", default="", metavar="ID", help="to quantize FILE with, as in `quantize`")
    deploy.add_argument("--calibration", type=Path, metavar="OBS.npz", help="the same, as in `quantize`")
    deploy.add_argument(
        "--force-publish", action="store_true", help="although the gate refused it; actors score it all the same"
    )
    deploy.add_argument("--json", action="store_true", help="print what became of it as one JSON object on stdout")
    deploy.add_argument("-v", "--verbose", action="store_true", help="show tracebacks and what the converter says")


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 64,64") from error


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def _add_fidelity(commands: Any) -> None:
    fidelity = commands.add_parser(
        "fidelity",
        allow_abbrev=False,
        help="show how far int8 policies of a run act like their fp32 originals",
        description=_fidelity.__doc__,
    )
    fidelity.add_argument("run", type=Path, metavar="RUN", help="run directory with a checkpoint and a ledger")
    fidelity.add_argument(
        "--episodes", type=int, default=100, metavar="N", help="of each policy; 0 plays none (default: %(default)s)"
    )
    fidelity.add_argument(
        "--seed", type=int, default=0, metavar="N", help="episode k resets with N + k (default: %(default)s)"
    )
    fidelity.add_argument("--env", default="", metavar="ID", help="environment to play, instead of the run's")
    fidelity.add_argument("--rows", default="", metavar="NAME,...", help="some rows of the table (default: all)")
    fidelity.add_argument("--json", action="store_true", help="print the study as one JSON object on stdout")
    fidelity.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a run's experience as a Minari dataset",
        description=_export.__doc__,
    )
    export.add_argument("run", type=Path, metavar="RUN", help="run directory; it may be training")
    export.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="MINARI_DATASETS_PATH of the dataset (default: RUN/minari)"
    )
    export.add_argument(
        "--dataset-id", default="", metavar="ID", help="[namespace/]name-vN (default: actorq/NAME-OF-RUN-v0)"
    )
    export.add_argument("--json", action="store_true", help="print what was written as one JSON object on stdout")
    export.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def _add_held(commands: Any) -> None:
    held = commands.add_parser(
        "held",
        allow_abbrev=False,
        help="show whose experience a run holds back, and why; let it in, or leave it out",
        description=_held.__doc__,
    )
    held.add_argument("run", type=Path, metavar="RUN", help="run directory; it may be training")
    decision = held.add_mutually_exclusive_group()
    decision.add_argument("--release", metavar="ACTOR", help="what is held of it enters replay; what it sends counts")
    decision.add_argument("--discard", metavar="ACTOR", help="replay never sees what is held; what it sends now counts")
    held.add_argument("--json", action="store_true", help="print who is held as one JSON object on stdout")
    held.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="draw runs and comparisons on one HTML page that needs no network",
        description=_report.__doc__,
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run, or of a comparison")
    report.add_argument(
        "-o", "--output", type=Path, metavar="PAGE.html", help="(default: report.html in RUN; of several, here)"
    )
    report.add_argument("--json", action="store_true", help="print what was written as one JSON object on stdout")
    report.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="let every actor of a fleet measure its board, and compare them on one page",
        description=_bench.__doc__,
    )
    defaults = config.TrainConfig()
    bench.add_argument("--fleet", default=defaults.fleet, metavar="NAME", help="(default: %(default)s)")
    bench.add_argument(
        "--broker", default="", metavar="HOST[:PORT],...", help="(default: as told to `actorq-broker init`)"
    )
    bench.add_argument(
        "--actors", type=int, default=1, metavar="N", help="to wait for; all that are there are asked (default: 1)"
    )
    bench.add_argument("--wait-s", type=float, default=30.0, metavar="X", help="for them (default: %(default)s)")
    bench.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="actors that measure at the same time (default: 1)"
    )
    bench.add_argument("--quick", action="store_true", help="seconds instead of minutes, and rougher figures")
    bench.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of `actorq-actor bench`, such as parts=latency; may be repeated",
    )
    bench.add_argument("-o", "--output", type=Path, metavar="DIR", help="(default: runs/bench-FLEET-TIME)")
    bench.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def _train(args: argparse.Namespace) -> int:
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
    # Of OpenBLAS. More of its threads than the work needs spin between two calls, in the way of everybody else
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(initial.train.threads))
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
            held = None
            if args.standby:
                held = train.stand_by(initial.train, args.resume, stop)
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
                stop=stop,
                display=display,
            )
    except gathering.Stopped:
        print("interrupted before training began", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    _print_summary(summary, args.json)
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


def _held(args: argparse.Namespace) -> int:
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


def _demo(args: argparse.Namespace) -> int:
    """Runs a whole fleet on this machine: broker, learner and actors as processes of their own.

    It trains until the published int8 policy is good, stops them all, and shows what happened.
    """
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
        _print_summary(summary, args.json)
        if not args.json and code != errors.EXIT_INTERRUPTED:  # who asks for JSON, or to stop, waits for no picture
            _draw(path)
    return code


def _quantize(args: argparse.Namespace) -> int:
    """Turns a policy into a .tflite that takes raw observations and runs on actors, and judges it beside fp32.

    With --env by the returns of fresh episodes, else by what it answers to held-out observations. Nothing of a file is
    executed. int8 means full-integer: whatever cannot be is named, and nothing is written. Nor is it if the result acts
    otherwise than the original; --aware then helps.
    """
    if args.output.suffix != ".tflite":
        raise errors.ConfigError("the output is no .tflite file", where=str(args.output), todo="name it OUT.tflite")
    if args.steps < 1:
        raise errors.ConfigError(f"--steps must be positive, not {args.steps}")
    from learner.quantize.tflite import stderr_filter

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with stderr_filter.filtered(everything=not args.verbose):
        from learner.study.user_models import command, report, requests

    logs.configure()
    request = {field.name: getattr(args, field.name) for field in dataclasses.fields(requests.Request)}
    result = command.run(requests.Request(**request))
    print(json.dumps(result) if args.json else report.table(result))
    return errors.EXIT_OK


def _deploy(args: argparse.Namespace) -> int:
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
    command.run(requests.Request(**request | given | own, aware=False, steps=400, seed=0, force=True))
    return output


def _fidelity(args: argparse.Namespace) -> int:
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
    _draw(args.run)
    return errors.EXIT_OK


def _report(args: argparse.Namespace) -> int:
    """Draws learning curves, times, latency, bytes, energy, fidelity, fleet and settings of runs on one page.

    Runs that differ in nothing but their seed are drawn together. What cannot be used is said, and the rest goes on.
    """
    from learner.study import report

    logs.configure()
    output = args.output or (args.runs[0] if len(args.runs) == 1 else Path()) / _PAGE
    page, problems, runs = report.make(args.runs, output)
    if args.json:
        print(json.dumps({"page": str(page), "runs": [str(run) for run in runs], "left_out": problems}))
    else:
        print(page)
    return errors.EXIT_OK


def _draw(run: Path) -> None:
    """Draws the page of a run that has ended, and says where it is; that it cannot be drawn fails nothing."""
    from learner.study import report

    try:
        print(f"report: {report.write([run], run / _PAGE)}", file=sys.stderr)
    except Exception as error:  # of a library that draws, say
        print(f"no report is drawn: {error}", file=sys.stderr)


def _export(args: argparse.Namespace) -> int:
    """Writes a run's experience as a Minari dataset: what replay holds, or all of it after train --keep-experience."""
    from learner.study import export

    stem = re.sub(r"[^-\w]", "_", args.run.resolve().name)
    output, name = args.output or args.run / "minari", args.dataset_id or f"actorq/{stem}-v0"
    written = export.run(args.run, output, name)
    if args.json:
        print(json.dumps(written))
    else:
        print(
            f"{written['steps']:,} steps in {written['episodes']:,} episodes, {written['episodes_complete']:,} of them "
            f"whole, {written['size_mb']:.1f} MB\n"
            f"MINARI_DATASETS_PATH={output.resolve()}  minari.load_dataset({name!r})"
        )
    return errors.EXIT_OK


def _bench(args: argparse.Namespace) -> int:
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


def _fleet(args: argparse.Namespace) -> int:
    logs.configure()
    return fleet_orders.run(args)


def _compare(args: argparse.Namespace) -> int:
    """Runs whole fleets in turn, with policies of one precision and then of another, and prints ratios.

    Each ratio has a bootstrap interval over seeds, and what explains it. DIR gets rows.jsonl and report.html. Ctrl-C
    ends it after seconds; --resume DIR goes on, and does a half run again. docs/compare.md tells the method.
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


def _study(args: argparse.Namespace) -> int:
    """Plays many policies, each in many precisions and with weights of 2 to 8 bits, in the same episodes as fp32.

    DIR gets cells.jsonl, a line for each policy and column, and what is made of them: study.md, study.csv, study.json
    and report.html. Ctrl-C ends it after the cells that are at work; after that, kill -9 or a power cut, --resume DIR
    computes those that are missing. docs/study.md tells the method.
    """
    study_arguments.check(args)
    from learner.quantize.tflite import stderr_filter

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with stderr_filter.filtered(everything=not args.verbose):
        from learner.study.sweep import cells, conducting, output, plan, policies, results

    logs.configure()
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    given = study_arguments.given(args)
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


def _known(found: config.Settings) -> tuple[Any, ...]:
    """Without the settings of an algorithm, if none is chosen yet."""
    return (found.train, found.gate) if found.train.algorithm == config.AUTO else tuple(found)


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    """The table, where there is something to tell."""
    if not as_json and not summary["updates"]:
        return
    from learner.run.reports import summary as summaries

    print(json.dumps(summary) if as_json else summaries.table(summary), flush=True)


if __name__ == "__main__":
    sys.exit(main())
