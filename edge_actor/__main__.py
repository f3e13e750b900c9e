"""actorq-actor: acts in an environment for a learner, scores a policy file, checks and measures this machine."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from broker.contract import errors, specs
from broker.program import cli, logs, settings
from edge_actor import config
from edge_actor.bench import config as bench_config

if TYPE_CHECKING:
    from edge_actor.acting import evaluate

RANDOM = "random"
"""The word that stands for a policy whose actions are drawn uniformly."""
_KEPT_BYTES = 1 << 26


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    logs.configure()
    runs = {"run": _act, "evaluate": _evaluate, "check": _check, "bench": _bench, "spec": _spec}
    return runs[args.command](args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorq-actor", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False, help="act and send experience until Ctrl-C or SIGTERM")
    settings.add_arguments(run, config.ActorConfig)
    run.add_argument("-v", dest="verbose", action="store_true", default=None, help="short for --verbose")

    check = commands.add_parser(
        "check", allow_abbrev=False, help="say what is right and wrong with this machine", description=_check.__doc__
    )
    settings.add_arguments(check, config.ActorConfig)
    check.add_argument("--offline", action="store_true", help="connect to no broker: it lets in one actor of a name")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument("-v", dest="verbose", action="store_true", default=None, help="short for --verbose")

    bench = commands.add_parser(
        "bench", allow_abbrev=False, help="measure what policies cost on this board", description=_bench.__doc__
    )
    settings.add_arguments(bench, bench_config.BenchConfig)
    bench.add_argument("--quick", action="store_true", help="seconds instead of minutes, and rougher figures")
    bench.add_argument("-o", "--output", type=Path, metavar="DIR", help="(default: bench-HOST-TIME)")
    bench.add_argument(
        "--draw", type=Path, nargs="+", metavar="ROWS.jsonl", help="measure nothing; one page of earlier rows, in DIR"
    )
    bench.add_argument("--json", action="store_true", help="print the rows as JSON lines, each as soon as it is known")
    bench.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")

    spec = commands.add_parser(
        "spec", allow_abbrev=False, help="print what an environment observes and takes, as one JSON object"
    )
    spec.add_argument("--env", required=True, help="Gymnasium id, module:EnvId, or FILE.py:ClassOrEnvId")
    spec.add_argument("--env-kwargs", default="{}", metavar="JSON", help="arguments for the environment")
    spec.add_argument("--frame-stack", type=int, default=1, metavar="N", help="as for `run` (default: %(default)s)")
    spec.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")

    score = commands.add_parser("evaluate", allow_abbrev=False, help="play a .tflite policy greedily, and time it")
    score.add_argument("policy", metavar="POLICY.tflite", help=f"its path; or the word {RANDOM}, to score chance")
    score.add_argument("--env", required=True, help="Gymnasium id, module:EnvId, or FILE.py:ClassOrEnvId")
    score.add_argument("--env-kwargs", default="{}", metavar="JSON", help="arguments for the environment")
    score.add_argument("--frame-stack", type=int, default=1, metavar="N", help="as for `run` (default: %(default)s)")
    score.add_argument("--episodes", type=int, default=20, metavar="N", help="(default: %(default)s)")
    score.add_argument(
        "--seed", type=int, default=0, metavar="N", help="episode k resets with N + k (default: %(default)s)"
    )
    score.add_argument(
        "--max-steps",
        type=int,
        default=0,
        metavar="N",
        help="give up after so many steps of all episodes; 0: no limit (default: %(default)s)",
    )
    score.add_argument(
        "--max-s",
        type=float,
        default=600.0,
        metavar="X",
        help="give up after so many seconds: episodes may never end; 0: no limit (default: %(default)s)",
    )
    score.add_argument(
        "--head", choices=specs.HEADS, help="what the model puts out (default: q_values, or deterministic)"
    )
    score.add_argument(
        "--observations",
        type=Path,
        metavar="OBS.npz",
        help=f"keep what it saw, with the number of the episode, to calibrate with; at most {_KEPT_BYTES / 1e6:.0f} MB",
    )
    score.add_argument("--runtime", default="auto", help=f"{config.RUNTIME_HELP} (default: %(default)s)")
    score.add_argument("--threads", type=int, default=1, metavar="N", help="(default: %(default)s)")
    score.add_argument("--json", action="store_true", help="print one JSON object")
    score.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    return parser


def _act(args: argparse.Namespace) -> int:
    chosen = settings.load(config.ActorConfig, args, env_prefix=config.ENV_PREFIX)
    if settings.dump_if_asked(args, chosen):
        return errors.EXIT_OK
    from broker.fleet import identity
    from edge_actor.run import service  # here: NumPy, Gymnasium and the runtime would slow --help down

    bundle = identity.Bundle.read(Path(chosen.bundle) if chosen.bundle else identity.home() / "bundle.json")
    return service.run(chosen, bundle)


def _check(args: argparse.Namespace) -> int:
    """Looks at all that `run` would need, with the settings of `run`; each line is ok, warn or fail, with what to do.

    Ends with the code that `run` would end with, or 0 if nothing fails. Works without a bundle too.
    """
    chosen = settings.load(config.ActorConfig, args, env_prefix=config.ENV_PREFIX)
    if settings.dump_if_asked(args, chosen):
        return errors.EXIT_OK
    from edge_actor.run import check

    logs.configure(logging.NullHandler())  # what it finds says it all

    findings = []
    for found in check.run(chosen, offline=args.offline):
        findings.append(found)
        if not args.json:
            print(f"{found.state:5} {found.name:14} {found.what}", flush=True)
            if found.todo:
                print(f"{'':5} {'':14} to do: {found.todo}", flush=True)
    if args.json:
        print(json.dumps({"ok": not check.exit_code(findings), "findings": [dataclasses.asdict(f) for f in findings]}))
    return check.exit_code(findings)


def _bench(args: argparse.Namespace) -> int:
    """Measures latency, memory and energy of policies by width, precision, kernels, batch and threads; control rates.

    Needs nothing but this program: no policy, no broker, no learner. DIR gets rows.jsonl and page.html.
    """
    tables = [("--quick", bench_config.QUICK)] if args.quick else []
    chosen = settings.load(bench_config.BenchConfig, args, tables=tables, env_prefix=bench_config.ENV_PREFIX)
    if settings.dump_if_asked(args, chosen):
        return errors.EXIT_OK
    from edge_actor.bench import command, verdict

    directory = args.output or Path(time.strftime(f"bench-{socket.gethostname()}-%Y%m%d-%H%M%S"))
    if args.draw:
        found, interrupted = command.read(args.draw), False
        command.write_page(found, directory / command.PAGE)
    else:
        found, interrupted = command.to_directory(chosen, directory, sys.stdout if args.json else None)
    if not args.json:
        print(verdict.table(found))
    print(f"{directory / command.PAGE}", file=sys.stderr)
    return errors.EXIT_INTERRUPTED if interrupted else errors.EXIT_OK


def _spec(args: argparse.Namespace) -> int:
    chosen = config.ActorConfig(env=args.env, env_kwargs=args.env_kwargs, frame_stack=args.frame_stack)
    from edge_actor.environment import env

    environment = env.make(chosen.env, 1, chosen.env_arguments, frame_stack=chosen.frame_stack)
    print(json.dumps({"env": args.env, **dataclasses.asdict(environment.spec)}))
    return errors.EXIT_OK


def _evaluate(args: argparse.Namespace) -> int:
    if args.episodes < 1 or args.threads < 1:
        raise errors.ConfigError("--episodes and --threads must be at least 1")
    if args.max_steps < 0 or not args.max_s >= 0:
        raise errors.ConfigError("--max-steps and --max-s must not be negative")
    chosen = config.ActorConfig(
        env=args.env, env_kwargs=args.env_kwargs, frame_stack=args.frame_stack, runtime=args.runtime
    )
    from edge_actor.acting import evaluate
    from edge_actor.environment import env

    logs.configure()  # how far it is; stdout has the result alone
    if args.policy == RANDOM:
        environment = env.make(chosen.env, 1, chosen.env_arguments, frame_stack=chosen.frame_stack)
        limits = evaluate.Limits(args.max_steps, args.max_s)
        score = evaluate.run_at_random(environment, args.episodes, args.seed, limits)
        environment.close()
        labels: dict[str, str] = {}
    else:
        score, labels = _score(args, chosen)
    result = {
        "policy": args.policy,
        "env": args.env,
        "seed": args.seed,
        **labels,
        **score.values,
        "episode_return": score.episode_return.tolist(),
    }
    if args.json:
        print(json.dumps(result))
        return errors.EXIT_OK
    for name, value in result.items():
        print(f"{name:32} {value}")
    return errors.EXIT_OK


def _score(args: argparse.Namespace, chosen: config.ActorConfig) -> tuple[evaluate.Score, dict[str, str]]:
    """Returns the score of a policy file, and what it ran on."""
    try:
        model = Path(args.policy).read_bytes()
    except OSError as error:
        raise errors.PolicyError(
            f"the policy cannot be read: {error.strerror}",
            where=args.policy,
            todo="give the path of a .tflite file",
        ) from error
    from edge_actor.acting import evaluate
    from edge_actor.environment import env
    from edge_actor.policies import policy

    environment = env.make(chosen.env, 1, chosen.env_arguments, frame_stack=chosen.frame_stack)
    head = args.head or environment.spec.action.heads[0]
    try:
        acting = policy.Policy(model, head, environment.spec, 1, runtime=chosen.runtime, threads=args.threads)
    except errors.PolicyError as error:
        error.where = error.where or args.policy
        raise
    limits = evaluate.Limits(args.max_steps, args.max_s)
    kept = evaluate.Kept(_KEPT_BYTES) if args.observations else None
    score = evaluate.run(acting, environment, args.episodes, args.seed, limits=limits, kept=kept)
    environment.close()
    assert score is not None
    if kept is not None:
        kept.write(args.observations)
    return score, {
        "sha256": hashlib.sha256(model).hexdigest(),
        "runtime": str(acting.interpreter.runtime),
        "delegate": acting.delegate,
    }


if __name__ == "__main__":
    sys.exit(main())
