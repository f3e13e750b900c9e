"""The arguments of `actorq-learner study`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.study.sweep import plan

_DEFAULT = plan.Request()


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. None stands for what was not given, so that `--resume` can tell."""
    d = _DEFAULT
    parser.add_argument(
        "--policies",
        nargs="+",
        metavar="PATH",
        help="files (.zip of Stable-Baselines3, .keras, .onnx), SavedModels, run directories, or directories of such",
    )
    parser.add_argument(
        "--env", metavar="ID", help="environment of all (default: each one's, of files by their name, ALGO-ENV.zip)"
    )
    parser.add_argument("--env-kwargs", metavar="JSON", help="arguments for the environment")
    parser.add_argument("--frame-stack", type=int, metavar="N", help=f"(default: {d.frame_stack})")
    parser.add_argument(
        "--precisions",
        type=plan.words,
        metavar="NAME,...",
        help=f"beside fp32, or none (default: {','.join(d.precisions)})",
    )
    for flag, text in (("--bits", "rounded after training"), ("--aware-bits", "trained for so many bits")):
        parser.add_argument(
            flag, type=plan.bits, metavar="LIST", help=f"of weights, {text}: 2..8, 2,4,8 or none (default: 2..8)"
        )
    numbers = [
        ("--episodes", d.episodes, "that each column plays, with the same seeds"),
        ("--calibration-episodes", d.calibration_episodes, "that fp32 plays first"),
        ("--seed", d.seed, "of all that is drawn"),
        ("--steps", d.steps, "of quantization-aware training"),
        ("--distil-rounds", d.distil_rounds, "of distillation, of 2000 gradient steps and 10 episodes each"),
    ]
    for flag, default, text in numbers:
        parser.add_argument(flag, type=int, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="(default: runs/study-TIME)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with a study that was interrupted")
    parser.add_argument(
        "--retry-failed", action="store_true", help="with --resume: do cells again that could not be made or played"
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a request that were given, by name."""
    found = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(plan.Request)}
    if found["policies"]:
        found["policies"] = tuple(str(Path(path).resolve()) for path in found["policies"])
    if found["precisions"]:  # fp32 is always there
        found["precisions"] = tuple(name for name in found["precisions"] if name != plan.FP32)
    return {name: value for name, value in found.items() if value is not None}


def check(args: argparse.Namespace) -> None:
    """Checks what is no part of a request.

    Raises:
        ConfigError: It cannot be met.
    """
    if args.jobs < 1:
        raise errors.ConfigError(f"--jobs must be at least 1, not {args.jobs}")
    if args.resume and args.output:
        raise errors.ConfigError("--resume and -o are two places for one study", todo="leave one of them out")
    if not (args.resume or args.policies):
        raise errors.ConfigError(
            "there is nothing to study", where="--policies", todo="name policies, or --resume DIR of a study"
        )
    if args.retry_failed and not args.resume:
        raise errors.ConfigError("--retry-failed goes with --resume")
