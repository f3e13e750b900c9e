"""Specs of what an environment takes and gives, the kinds of output a policy has, and the fingerprint of both.

The learner builds its networks from these alone; it never imports an environment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from broker.contract import errors

Head = Literal["q_values", "deterministic", "categorical", "gaussian", "squashed_gaussian"]
HEADS: tuple[Head, ...] = ("q_values", "deterministic", "categorical", "gaussian", "squashed_gaussian")
SQUASHED_MEAN_MAX = 3.0
"""The largest size of a squashed Gaussian's mean before the tanh, where that has reached 0.995; beyond it counts as it.
Eight bits then hold the middle well, and the distribution of fp32 is the one that int8 can say."""
SQUASHED_LOG_STD = -5.0, 2.0
"""The range of the log of a squashed Gaussian's standard deviation. A tanh of its own brings the model's outputs to it,
so that they, too, are needed from about -3 to 3: both halves share the one scale of an int8 tensor."""
SAMPLED_HEADS: tuple[Head, ...] = ("categorical", "gaussian", "squashed_gaussian")
"""Heads whose actions are sampled, and come with their log-probability."""
OBSERVATION_DTYPES = ("float32", "uint8")
_MAX_ELEMENTS = 1 << 24
MAX_STACK = 16
"""The most frames in an observation."""
MAX_ACTION_ELEMENTS = 1024
"""The most elements of an action: its bounds travel as text in an actor's birth, whose header has 64 KB."""
MAX_CHOICES = 4096
"""The most choices of all elements of a `multi_discrete` action together, each of which is an output of the policy and
a random number per step."""
MAX_EXPERIENCE_BYTES = 8_000_000
"""The largest message of experience, without its seal: a fifth of what a broker carries, and of what the learner holds
back at once. An environment of which one step does not fit (two observations and an action) cannot be carried."""
EXPERIENCE_HEADER_BYTES = 4096
"""More than a message of experience has beside its arrays."""
MAX_MAGNITUDE = 1e9
"""The largest reward, element of an observation, and bound of an action. Far above what is measured in any sensible
unit, and so far below float32's 3e38 that squares, products and sums over a batch stay finite. Observations are clipped
to it, as there are sensors that answer the largest float where nothing is; a reward beyond it is a fault."""


@dataclass(frozen=True, slots=True)
class ObservationSpec:
    """The spec of one observation: `shape` without the batch dimension, as the policy sees it.

    That is the newest `stack` frames side by side in the last axis, the oldest first; in front of an episode's first
    frame that one is repeated. An environment gives one frame a step, and records, messages and replay hold each frame
    once: whoever feeds a network stacks. Most environments have no stack, and a frame is an observation.

    Dict, Tuple and Discrete spaces arrive here flattened (edge_actor/environment/env.py says in which order).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    stack: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in OBSERVATION_DTYPES:
            raise errors.SpecError(
                f"observations of dtype {self.dtype!r} are not carried",
                todo=f"wrap the environment so that it gives one of {', '.join(OBSERVATION_DTYPES)}",
            )
        _check_shape(self.shape, "observation", rank_min=1)
        if not 1 <= self.stack <= MAX_STACK or self.shape[-1] % self.stack:
            raise errors.SpecError(
                f"a stack of {self.stack} frames does not make observations of shape {self.shape}",
                todo=f"stack 1 to {MAX_STACK} frames",
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape of what an environment gives each step."""
        return (*self.shape[:-1], self.shape[-1] // self.stack)

    @property
    def frame_bytes(self) -> int:
        """The bytes of one frame."""
        return self.size // self.stack * (1 if self.dtype == "uint8" else 4)


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """The spec of one action.

    That is `discrete` with `n` choices 0..n-1, `continuous` with `shape` and bounds, or `multi_discrete`: a choice for
    each element of `shape` [D], from 0 (`low`) to its `high`.
    """

    kind: str
    n: int = 0
    shape: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "discrete":
            if not 2 <= self.n <= 1 << 16:
                raise errors.SpecError(f"a discrete action needs 2 to 65536 choices, not {self.n}")
        elif self.kind == "continuous":
            _check_shape(self.shape, "action", rank_min=1, limit=MAX_ACTION_ELEMENTS)
            size = math.prod(self.shape)
            if len(self.low) != size or len(self.high) != size:
                raise errors.SpecError("action bounds must have one value per element of the action")
            if not all(-MAX_MAGNITUDE <= lo < hi <= MAX_MAGNITUDE for lo, hi in zip(self.low, self.high, strict=True)):
                raise errors.SpecError(
                    f"action bounds must be finite, with low below high, and within ±{MAX_MAGNITUDE:g}",
                    todo="wrap the environment with gymnasium.wrappers.TransformAction and a Box of finite bounds",
                )
        elif self.kind == "multi_discrete":
            _check_shape(self.shape, "action", rank_min=1, limit=MAX_ACTION_ELEMENTS)
            size = math.prod(self.shape)
            if len(self.shape) != 1 or len(self.high) != size or any(self.low) or len(self.low) != size:
                raise errors.SpecError("several choices need one dimension, and for each element 0 and the last choice")
            if not all(0 <= last < MAX_CHOICES and last == int(last) for last in self.high):
                raise errors.SpecError(f"an element of several choices has 1 to {MAX_CHOICES} of them")
            if not size < sum(self.choices) <= MAX_CHOICES:
                raise errors.SpecError(
                    f"an action of {size} elements has {sum(self.choices)} choices, of {MAX_CHOICES} at most",
                    todo="wrap the environment so that it takes fewer",
                )
        else:
            raise errors.SpecError(
                f"unknown kind of action {self.kind!r}", todo="use 'discrete', 'continuous' or 'multi_discrete'"
            )

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of choices of each element of a `multi_discrete` action; empty for other kinds."""
        return tuple(int(last) + 1 for last in self.high) if self.kind == "multi_discrete" else ()

    @property
    def size(self) -> int:
        """Returns the number of outputs of a q_values, deterministic or categorical head for this action."""
        if self.kind == "discrete":
            return self.n
        return sum(self.choices) or math.prod(self.shape)

    @property
    def elements(self) -> int:
        """The number of numbers in one action."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> str:
        """What those are in experience."""
        return "float32" if self.kind == "continuous" else "int32"

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads that can choose such an action."""
        if self.kind == "discrete":
            return ("q_values", "categorical")
        if self.kind == "multi_discrete":
            return ("categorical",)
        return ("deterministic", "gaussian", "squashed_gaussian")


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The observation and action spec of one environment."""

    observation: ObservationSpec
    action: ActionSpec

    def __post_init__(self) -> None:
        bytes_ = self.experience_bytes(1)
        if bytes_ > MAX_EXPERIENCE_BYTES:
            raise errors.SpecError(
                f"one step of {self.describe()} makes a message of {bytes_} bytes, of {MAX_EXPERIENCE_BYTES} at most",
                todo="wrap the environment so that it observes less: smaller frames, uint8, fewer of them",
            )

    def experience_bytes(self, rows: int, n_envs: int = 1) -> int:
        """Returns the most bytes that `rows` steps of `n_envs` environments take, frames as they are and not packed."""
        step_bytes = 4 * self.action.elements + 8 + 22  # with reward and log-probability; what there is of each segment
        segments = -(-rows // 2)  # at most: an episode of one step takes two rows, as the next one resets
        frames = rows + 1 + segments * (self.observation.stack - 1)
        return EXPERIENCE_HEADER_BYTES + n_envs * (frames * self.observation.frame_bytes + rows * step_bytes)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits over the canonical JSON of the spec; equal exactly when policies are interchangeable."""
        return _fingerprint(self)

    def describe(self) -> str:
        """Returns one line for people: `obs float32[4] -> 2 actions`."""
        shape, stack = ",".join(map(str, self.observation.shape)), self.observation.stack
        observation = f"obs {self.observation.dtype}[{shape}]" + (f" of {stack} frames" if stack > 1 else "")
        if self.action.kind == "discrete":
            return f"{observation} -> {self.action.n} actions"
        if self.action.kind == "multi_discrete":
            choices = self.action.choices
            each = f"{min(choices)} to {max(choices)}" if len(set(choices)) > 1 else f"{choices[0]}"
            return f"{observation} -> {len(choices)} choices of {each}"
        return f"{observation} -> continuous[{','.join(map(str, self.action.shape))}]"


@functools.lru_cache(maxsize=64)
def _fingerprint(spec: EnvSpec) -> str:
    """Returns the fingerprint, which is cached: the learner asks for it with every message."""
    fields = asdict(spec)
    if spec.observation.stack == 1:
        del fields["observation"]["stack"]  # so that policies stay usable that were stored when there were no stacks
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def from_dict(fields: dict[str, Any]) -> EnvSpec:
    """Returns the spec that `dataclasses.asdict` made this of, by way of JSON."""
    action = fields["action"]
    bounds = {key: tuple(action[key]) for key in ("shape", "low", "high")}
    return EnvSpec(
        ObservationSpec(**{**fields["observation"], "shape": tuple(fields["observation"]["shape"])}),
        ActionSpec(**{**action, **bounds}),
    )


def check_head(head: str, action: ActionSpec) -> Head:
    """Returns `head` if it can choose actions of this spec.

    Raises:
        SpecError: It is unknown or does not fit.
    """
    if head not in action.heads:
        raise errors.SpecError(
            f"a policy head {head!r} cannot choose {action.kind} actions",
            todo=f"use one of {', '.join(action.heads)}",
        )
    return next(h for h in HEADS if h == head)


def _check_shape(shape: tuple[int, ...], what: str, rank_min: int, limit: int = _MAX_ELEMENTS) -> None:
    if len(shape) < rank_min or len(shape) > 4 or any(d < 1 for d in shape):
        raise errors.SpecError(f"{what} shape {shape} is not carried", todo="flatten it to 1 to 4 dimensions")
    if math.prod(shape) > limit:
        raise errors.SpecError(
            f"{what} shape {shape} is not carried: {math.prod(shape)} elements",
            todo=f"make it smaller, or flatten it to 1 to 4 dimensions of at most {limit} elements together",
        )
