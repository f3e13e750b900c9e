"""What a study is asked for, and the columns that follow from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from broker.contract import errors

RANDOM, FP32 = "random", "fp32"
"""Columns that are always there: what chance returns, and what everything else is compared with."""
PRECISIONS = ("fp16", "int8-weights", "int8-plain", "int8-recipe", "int8-refined", "int8-aware", "int8-distilled")
"""Columns that may be chosen; `columns.MAKERS` says how each is made."""
_AWARE = "-aware"
_BITS = range(2, 9)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a study, all of which its cells depend on.

    Attributes:
        policies: Files and directories, absolute.
        env: Environment of all of them; empty takes each one's own.
        env_kwargs, frame_stack: As in `play.Task`.
        precisions: Some of PRECISIONS.
        bits, aware_bits: Bits of weights, rounded after training; and trained for that.
        episodes: That each column plays, with the same seeds.
        calibration_episodes: That fp32 plays first.
        seed: Of all that is drawn.
        steps: Gradient steps of quantization-aware training.
        distil_rounds: Rounds of distillation, between which the student plays.
    """

    policies: tuple[str, ...] = ()
    env: str = ""
    env_kwargs: str = "{}"
    frame_stack: int = 1
    precisions: tuple[str, ...] = PRECISIONS
    bits: tuple[int, ...] = tuple(_BITS)
    aware_bits: tuple[int, ...] = tuple(_BITS)
    episodes: int = 50
    calibration_episodes: int = 20
    seed: int = 0
    steps: int = 400
    distil_rounds: int = 2

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of each policy, in the order in which they are done."""
        rounded = (bits_column(bits, is_aware=False) for bits in self.bits)
        trained = (bits_column(bits, is_aware=True) for bits in self.aware_bits)
        return (RANDOM, FP32, *self.precisions, *rounded, *trained)


def bits_column(bits: int, *, is_aware: bool) -> str:
    """Returns the name of the column of weights of so many bits."""
    return f"w{bits}{_AWARE if is_aware else ''}"


def bits_of(column: str) -> tuple[int, bool] | None:
    """Returns the bits of such a column, and whether it is trained for them; None of others."""
    found = re.fullmatch(rf"w(\d)({_AWARE})?", column)
    return (int(found[1]), bool(found[2])) if found else None


def bits(text: str) -> tuple[int, ...]:
    """Parses `2..8`, `2,4,8` or `none`.

    Raises:
        ValueError: It is something else.
    """
    if text == "none":
        return ()
    first, dots, last = text.partition("..")
    found = range(int(first), int(last) + 1) if dots else map(int, text.split(","))
    return tuple(sorted(set(found)))


def words(text: str) -> tuple[str, ...]:
    """Parses names, separated by commas; `none` is none of them."""
    return () if text == "none" else tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def check(request: Request) -> None:
    """Checks a request.

    Raises:
        ConfigError: It makes no study; says all that is wrong.
    """
    problems = [
        f"precision {name!r} is unknown: there are {', '.join(PRECISIONS)}"
        for name in request.precisions
        if name not in PRECISIONS and name != FP32
    ]
    problems += [
        f"weights of {found} bits are not offered: there are 2 to 8"
        for found in (*request.bits, *request.aware_bits)
        if found not in _BITS
    ]
    least = {"episodes": 2, "calibration_episodes": 4, "frame_stack": 1, "steps": 1, "distil_rounds": 1, "seed": 0}
    problems += [
        f"--{name.replace('_', '-')} must be at least {low}, not {getattr(request, name)}"
        for name, low in least.items()
        if getattr(request, name) < low
    ]
    if not (request.precisions or request.bits or request.aware_bits):
        problems.append("there is nothing to compare with fp32: name --precisions, --bits or --aware-bits")
    try:
        if not isinstance(json.loads(request.env_kwargs), dict):
            problems.append("--env-kwargs is no JSON object")
    except ValueError as error:
        problems.append(f"--env-kwargs is no JSON: {error}")
    if problems:
        raise errors.ConfigError("; ".join(problems), todo="`actorq-learner study --help` lists what there is")


def fingerprint(table: Mapping[str, Any]) -> str:
    """Returns what tells one study's cells from another's: a digest of its settings and policies."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]
