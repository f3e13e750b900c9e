"""Begins a session, up to where actors act for it: none of that needs TensorFlow, whose import takes seconds."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from learner import config
from learner.experience import rate_limiter
from learner.experience.buffers import replay, rollouts
from learner.files import checkpoint, records, run_directory
from learner.fleet import roster, session
from learner.run import taking_in
from learner.run.loop import assigning, checkpoints, pace, updating
from learner.run.reports import progress
from learner.run.workers import cluster


class Begun(NamedTuple):
    """What a session has before it learns.

    Attributes:
        taken: Takes in experience, and keeps it.
        limiter: Keeps fleet and learner in step; `steps` paces both by it.
        saving: Checkpoints.
        assigner: Has assigned.
        counted: Counts.
        kept: Records that may fail to be written.
        rng: Of the run.
        version: Of the newest policy before this session.
    """

    taken: taking_in.Taken
    limiter: rate_limiter.RateLimiter
    steps: pace.Pace
    saving: checkpoints.Checkpoints
    assigner: assigning.Assigner
    counted: progress.Progress
    kept: records.Records
    rng: np.random.Generator
    version: int


def begin(
    settings: config.Settings,
    directory: run_directory.RunDirectory,
    fleet: session.Session,
    actors: roster.Roster,
    saved: checkpoint.Checkpoint | None,
    started_s: float,
    stop: threading.Event,
    place: cluster.Cluster | None = None,
) -> Begun:
    """Has what the ledger holds in replay, or in that of workers, and then assigns: actors gather their first steps.

    Args:
        settings: The run's.
        directory: The run's.
        fleet: The learner's session, which has joined.
        actors: Those who are there.
        saved: Checkpoint to go on from; None begins anew, with what the run's ledger holds, if it has one.
        started_s: Monotonic time at which the process began.
        stop: Ends the wait for workers when set.
        place: For workers, if there are any.

    Raises:
        SpecError: The run was made for another environment.
        RunError: The checkpoint or the ledger cannot be used.
        Stopped: `stop` was set.
    """
    train, spec = settings.train, actors.the_spec
    counted, kept, rng = progress.Progress(), records.Records(), np.random.default_rng(train.seed)
    buffer, limiter = _memory(settings, actors)
    steps = pace.Pace(train, settings.algorithm, limiter, started_s)
    saving = checkpoints.Checkpoints(directory, kept, spec, actors.env_id, fleet.epoch, rng, steps, counted)
    version = saving.restore(saved) if saved else 0
    taken = taking_in.begin(
        *(settings, directory, fleet, actors, buffer, saving, steps, counted, kept),
        is_new=saved is None,
        place=place,
        stop=stop,
    )
    fleet.announce(spec.fingerprint, version)
    assigner = assigning.Assigner(settings, fleet, actors, steps, taken.ingest, counted, directory, taken.earlier_steps)
    assigner.assign()
    return Begun(taken, limiter, steps, saving, assigner, counted, kept, rng, version)


def _memory(
    settings: config.Settings, actors: roster.Roster
) -> tuple[replay.Replay | rollouts.Rollouts | None, rate_limiter.RateLimiter]:
    """Makes what experience is kept in, if not in workers, and what keeps fleet and learner in step."""
    train, algorithm, spec = settings.train, settings.algorithm, actors.the_spec
    if isinstance(algorithm, config.OnPolicyConfig):
        waiting = rollouts.of(spec, algorithm)
        return waiting, rate_limiter.PhaseLimiter(train.learning_starts, algorithm.rollout_steps, waiting.__len__)
    assert isinstance(algorithm, config.OffPolicyConfig)
    per_call = train.replicas * updating.updates_per_call(algorithm, spec.observation.size)
    error_buffer = max(2.0 * algorithm.batch_size * per_call, train.samples_per_insert * train.message_steps)
    limiter = rate_limiter.RateLimiter(train.samples_per_insert, train.learning_starts, error_buffer)
    return None if train.ingest_workers else replay.of(spec, algorithm), limiter
