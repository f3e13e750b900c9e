"""Saves a run's state as checkpoints, and restores it: beside the algorithm's all counters and random state."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from broker.contract import errors, specs
from learner import algorithms
from learner.files import checkpoint, records, run_directory
from learner.run.loop import pace
from learner.run.reports import progress

_COUNT_MAX = 1 << 53


class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: The run's.
        kept: Counts what the disk does not take.
        spec: What the actors have.
        env_id: Their environment.
        epoch: This session's.
        rng: Draws batches.
        steps: Counts steps and samples.
        counted: Counts episodes.

    Attributes:
        epochs: Of all sessions of the run, this one among them.
    """

    def __init__(
        self,
        directory: run_directory.RunDirectory,
        kept: records.Records,
        spec: specs.EnvSpec,
        env_id: str,
        epoch: int,
        rng: np.random.Generator,
        steps: pace.Pace,
        counted: progress.Progress,
    ) -> None:
        self._directory, self._kept, self._spec, self._env_id, self._epoch = directory, kept, spec, env_id, epoch
        self._rng, self._pace, self._progress = rng, steps, counted
        self.epochs = frozenset({epoch})

    def check_ours(self) -> None:
        """Checks that no other learner goes on with the run: a checkpoint of ours would replace those of that one.

        Raises:
            InUse: One does.
        """
        if not self._directory.is_ours():
            raise run_directory.InUse(
                "another learner goes on with this run, and this one ends",
                where=str(self._directory.path),
                todo="nothing, if this machine was cut off from its storage: a standby has taken its place",
            )

    def save(self, state: algorithms.State, updates: int, version: int, published: str, *, last: bool) -> None:
        """Writes a checkpoint.

        Args:
            state: The algorithm's, all of it finite.
            updates: Updates behind it.
            version: The newest policy version.
            published: The name of the policy's file, if that solved the task.
            last: Whether no other one will follow.

        Raises:
            OSError: It is the last one, and the disk does not take it. Of others that is logged and counted.
        """
        meta = {
            "env_id": self._env_id,
            "fingerprint": self._spec.fingerprint,
            "epochs": sorted(self.epochs),
            "version": version,
            "episodes": self._progress.episodes,
            "rng": self._rng.bit_generator.state,
            "limiter": self._pace.limiter.state(),
            "lockstep_goal": self._pace.lockstep_goal,
            "published": published,
        }
        with contextlib.nullcontext() if last else self._kept.attempt("checkpoints"):
            checkpoint.save(self._directory.checkpoints, updates, meta, {"algorithm": state})

    def restore(self, saved: checkpoint.Checkpoint) -> int:
        """Takes back all but the algorithm's state; returns the last policy version.

        Raises:
            SpecError: It was made for another environment.
            RunError: A counter is missing or absurd.
        """
        meta: dict[str, Any] = saved.meta
        limiter = self._pace.limiter
        try:
            saved.check(self._spec, self._env_id)
            self._rng.bit_generator.state = meta["rng"]
            limiter.restore(meta["limiter"])
            self._progress.set_episodes(int(meta["episodes"]))
            self._pace.restore(int(meta["lockstep_goal"]))
            # Of a checkpoint without them, all since the first
            self.epochs |= set(meta["epochs"] if "epochs" in meta else range(meta["first_epoch"], self._epoch))
            version = int(meta["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._unusable(f"{type(error).__name__}: {error}") from error
        counts = version, limiter.inserted, limiter.sampled, self._progress.episodes, self._pace.lockstep_goal
        if not all(0 <= count <= _COUNT_MAX for count in counts):
            raise self._unusable(f"it counts {', '.join(map(str, counts))}")
        return version

    def _unusable(self, why: str) -> errors.RunError:
        return errors.RunError(
            f"the checkpoint is whole, and cannot be gone on from: {why}",
            where=str(self._directory.checkpoints),
            todo="remove the newest one, and the one before is taken; or start a new run",
        )
