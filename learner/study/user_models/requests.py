"""What is asked of `actorq-learner quantize`, and which of it goes together. TensorFlow is not loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from broker.contract import errors
from learner.quantize import bits
from learner.quantize.distil import compression

if TYPE_CHECKING:
    from learner.quantize.distil import distillation

_MINUTES_MAX = 1440.0


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command line."""

    model: Path
    calibration: Path | None
    output: Path
    precision: str
    outputs: distillation.Outputs | None
    aware: bool
    steps: int
    seed: int
    force: bool
    verbose: bool
    env: str = ""
    env_kwargs: str = "{}"
    frame_stack: int = 1
    episodes: int = 50
    calibration_episodes: int = 20
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    normaliser: Path | None = None
    force_publish: bool = False
    distil: bool = False
    hidden: tuple[int, ...] = ()
    prune: float = 0.0
    weight_bits: int = bits.BITS_MAX
    distil_minutes: float | None = None

    @property
    def report(self) -> Path:
        """The path of the report, beside the model."""
        return self.output.with_suffix(".json")

    @property
    def compressed(self) -> compression.Compression:
        """What weights are to be left."""
        return compression.Compression(self.weight_bits, self.prune)


def check(request: Request) -> None:
    """Raises ConfigError if arguments contradict each other, or a file would be overwritten."""
    for path in (request.output, request.report):
        if path.exists() and not request.force:
            raise errors.ConfigError("the file exists", where=str(path), todo="--force overwrites it")
    if request.aware and request.precision != "int8":
        raise errors.ConfigError(
            f"--aware is for int8, and {request.precision} was asked for", todo="leave out one of the two"
        )
    _check_distil(request)
    if bool(request.env) == bool(request.calibration):
        raise errors.ConfigError(
            "observations come from --calibration OBS.npz or from --env ID, of which one is needed",
            todo="name the environment, if this machine has it: then returns are compared, too",
        )
    if request.episodes < 10 or request.calibration_episodes < 1:
        raise errors.ConfigError("--episodes must be at least 10, --calibration-episodes at least 1")
    if bool(request.action_low) != bool(request.action_high):
        raise errors.ConfigError("--action-low and --action-high go together")


def _check_distil(request: Request) -> None:
    request.compressed.check()
    if request.hidden and not request.distil:
        raise errors.ConfigError("--hidden is the shape of a student, and none is trained", todo="add --distil")
    if request.distil_minutes is not None and not request.distil:
        raise errors.ConfigError("--distil-minutes is for a student, and none is trained", todo="add --distil")
    if request.distil_minutes is not None and not 0 < request.distil_minutes <= _MINUTES_MAX:
        raise errors.ConfigError(
            f"--distil-minutes must be above 0 and at most {_MINUTES_MAX:g}, not {request.distil_minutes:g}"
        )
    asked = [
        flag
        for flag, given in (
            ("--distil", request.distil),
            ("--weight-bits", request.weight_bits < bits.BITS_MAX),
            ("--prune", request.prune > 0),
        )
        if given
    ]
    if asked and request.precision != "int8":
        raise errors.ConfigError(
            f"{asked[0]} is for int8, and {request.precision} was asked for", todo="leave out one of the two"
        )
    if asked and request.aware:
        raise errors.ConfigError(
            f"--aware trains the policy as it is, and {asked[0]} makes another",
            todo="use --distil alone: it trains through simulated int8, too",
        )
