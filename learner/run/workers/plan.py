"""What a worker is told when it begins, and what passes between it and the learner; no keys, which it reads itself."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from broker.contract import errors, messages, specs
from learner import config


def release() -> str:
    """Returns what learner and workers must have alike."""
    try:
        version = importlib.metadata.version("actorq-fleet")
    except importlib.metadata.PackageNotFoundError:
        version = "from source"
    return f"actorq-fleet {version}, schema {messages.SCHEMA_VERSION}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The task of one worker.

    Attributes:
        shard: Which one, from 0.
        run: Path of the run directory, on this machine or on storage that the worker's reaches.
        keys: Path of the fleet's directory, likewise.
        train: Settings of the run; `algorithm` likewise.
        spec: Of the actors' environment.
        epoch: Of the learner's session.
        epochs: Of all sessions of the run.
        head: What policies put out.
        granted: Steps granted in this session, by actor and boot; `received`: what came of them.
        earlier_steps: Steps that each actor may hold of sessions before; `earlier`: what is left of some.
        held: Actors whose experience is held back.
    """

    shard: int
    run: str
    keys: str
    train: config.TrainConfig
    algorithm: config.OffPolicyConfig
    spec: specs.EnvSpec
    epoch: int
    epochs: frozenset[int]
    head: specs.Head
    granted: Mapping[tuple[str, int], int]
    received: Mapping[tuple[str, int], int]
    earlier_steps: float
    earlier: Mapping[str, float]
    held: frozenset[str]


class Told(NamedTuple):
    """What the learner tells each time it asks: its newest policy version, and how long receipts may wait."""

    version: int = 0
    receipt_s: float = 0.0


class Begun(NamedTuple):
    """What a worker begins with.

    Attributes:
        steps: That its ledger counts over the run; `episodes` likewise.
        marks: How many steps of each boot it has, by actor and boot.
        transitions: In its replay.
        pid: Of its process.
    """

    steps: int
    episodes: int
    marks: dict[tuple[str, int], int]
    transitions: int
    pid: int


class Received(NamedTuple):
    """Steps that the ledger has, whatever became of them; `mark` counts those of their boot up to and with them."""

    actor_id: str
    boot: int
    assigned_epoch: int
    steps: int
    mark: int


class Inserted(NamedTuple):
    """Messages of a boot by one policy that entered replay, as far as the learner counts them.

    Together, because each that is told of by itself would take a tenth of what taking it in does.

    Attributes:
        steps: Of all of them.
        returns: Of the episodes that ended in them.
        created_ms: When each of them was finished.
    """

    actor_id: str
    boot: int
    epoch: int
    version: int
    steps: int
    returns: list[float]
    created_ms: list[int]


class Report(NamedTuple):
    """What a worker did since its last report.

    Attributes:
        received: What was committed, by boot and assignment.
        inserted: What entered replay.
        samples: Some of them as a whole, for the audit.
        transitions: In replay now.
        pending_steps: Received, and not in replay yet.
        steps_held: Held back, and still in the ledger.
        steps_too_old: As `age.Ages` counts them, over the worker's life.
        counts: As `Validator.summary` has them, over the worker's life.
        seconds: Runs and seconds of each stage, over the worker's life.
        said: What it logged, with levels.
    """

    received: list[Received]
    inserted: list[Inserted]
    samples: list[tuple[str, messages.Experience]]
    transitions: int
    pending_steps: int
    steps_held: int
    steps_too_old: int
    counts: dict[str, Any]
    seconds: dict[str, tuple[int, float]]
    said: Sequence[tuple[int, str]] = ()


class Alone(errors.RunError):
    """No learner has asked a worker for anything for so long that it has ended."""


class Failed(NamedTuple):
    """An error of ours that ended a worker: exceptions lose what they know on their way between processes."""

    kind: str
    what: str
    where: str
    todo: str

    @classmethod
    def of(cls, error: errors.ActorqError) -> Failed:
        """Returns what is to be told of an error."""
        return cls(type(error).__name__, error.what, error.where, error.todo)

    def error(self) -> errors.ActorqError:
        """Returns the error, for the learner to raise."""
        kind = getattr(errors, self.kind, errors.RunError)
        if issubclass(kind, errors.MessageError | errors.PolicyError):
            kind = errors.RunError
        made: errors.ActorqError = kind(self.what, where=self.where, todo=self.todo)
        return made
