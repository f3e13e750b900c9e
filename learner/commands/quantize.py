"""The command `quantize`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import logs
from learner import config


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "quantize",
        allow_abbrev=False,
        help="turn any policy (Stable-Baselines3, ONNX, Keras, SavedModel) into a full-integer .tflite that actors run",
        description=run.__doc__,
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="FILE",
        help="Stable-Baselines3 .zip, .onnx, .keras or the directory of a SavedModel: one input, one output [N, n]",
    )
    parser.add_argument(
        "--env",
        default="",
        metavar="ID",
        help="environment to calibrate in and to compare returns in, as `actorq-actor evaluate` takes it",
    )
    parser.add_argument("--env-kwargs", default="{}", metavar="JSON", help="arguments for the environment")
    parser.add_argument(
        "--frame-stack", type=int, default=1, metavar="N", help="observations that the policy sees at once (default: 1)"
    )
    parser.add_argument(
        "--episodes",
        type=int,
        default=50,
        metavar="N",
        help="fresh ones that fp32 and int8 both play; up to eight times as many where those do not decide it "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--calibration-episodes", type=int, default=20, metavar="N", help="that fp32 plays first (default: %(default)s)"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="OBS.npz",
        help="instead of --env: observations [N, ...] as the model is fed them, in an array `observations` or the only "
        "one, at most 1 GB in memory (4 bytes a number or more), and in `episode` the number of the episode of each; "
        "three quarters set the ranges, a quarter judges the result",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.tflite", help="OUT.json goes beside")
    parser.add_argument(
        "--precision", choices=config.PRECISIONS, default="int8", help="of the result (default: %(default)s)"
    )
    parser.add_argument(
        "--outputs",
        choices=("values", "actions"),
        help="what the outputs of ONNX and Keras models are: values of actions (or logits), of which the largest is "
        "taken; or continuous actions (default: what --env takes, else values)",
    )
    for end in ("low", "high"):
        parser.add_argument(
            f"--action-{end}",
            type=_numbers,
            default=(),
            metavar="X[,X...]",
            help="bound to which continuous actions are clipped, one or one each (default: the file's, or --env's)",
        )
    parser.add_argument(
        "--normaliser",
        type=Path,
        metavar="FILE.pkl",
        help="what VecNormalize saved (default: vecnormalize.pkl beside the .zip, if there is one)",
    )
    parser.add_argument(
        "--aware",
        action="store_true",
        help="train the weights against the fp32 outputs through simulated int8; takes seconds, and mends most of what "
        "plain int8 breaks",
    )
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="of --aware (default: %(default)s)")
    parser.add_argument(
        "--distil",
        action="store_true",
        help="where int8 loses too much: train a student in simulated int8 to do what the policy does, from states of "
        "its own episodes (--env), until it is non-inferior or the time ends",
    )
    parser.add_argument(
        "--hidden",
        type=_widths,
        default=(),
        metavar="N[,N...]",
        help="units of the student's hidden layers (default: the policy's own shape)",
    )
    parser.add_argument(
        "--distil-minutes",
        type=float,
        metavar="X",
        help="of training and playing, episodes of the comparison not counted (default: 2)",
    )
    parser.add_argument(
        "--weight-bits",
        type=int,
        default=8,
        metavar="N",
        help="2 to 8: bits that weights are rounded to, kept in eight all the same (default: %(default)s)",
    )
    parser.add_argument(
        "--prune",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="make that share of each output's weights 0, the smallest (default: none)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.tflite and OUT.json")
    parser.add_argument("--force-publish", action="store_true", help="write it although it acts otherwise than fp32")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks and what the converter says")


def run(args: argparse.Namespace) -> int:
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
    from learner.study.user_models import requests

    asked = {field.name: getattr(args, field.name) for field in dataclasses.fields(requests.Request)}
    request = requests.Request(**asked)
    requests.check(request)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with stderr_filter.filtered(everything=not args.verbose):
        from learner.study.user_models import command, report

    logs.configure()
    result = command.run(request)
    print(json.dumps(result) if args.json else report.table(result))
    return errors.EXIT_OK


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(width) for width in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 64,64") from error


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))
