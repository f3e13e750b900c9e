"""Opens what takes in a run's experience, in this process or in workers, and its ledgers."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import NamedTuple

from broker.contract import errors
from broker.program import stopwatch
from learner import config
from learner.audit import holding
from learner.experience import age, dead_letters, ingest, ingestion, ledger, opening, validate
from learner.experience.buffers import replay, rollouts
from learner.files import records, run_directory
from learner.fleet import roster, session
from learner.run.loop import checkpoints, pace
from learner.run.reports import progress
from learner.run.workers import beginning, cluster, sampling


class Taken(NamedTuple):
    """What takes in experience, in this process or in workers, and where it is kept.

    Attributes:
        ingest: Takes it in; `counts` counts it.
        opener: Opens messages of frames on a thread; None where there are none, or where workers open them.
        memory: Keeps it.
        held: Actors that are held back.
        earlier_steps: Steps that each actor may hold of the run's sessions before.
        times: Stopwatches.
    """

    ingest: ingestion.Ingestion
    counts: ingestion.Counts
    opener: opening.Opener | None
    memory: replay.Replay | rollouts.Rollouts | sampling.ShardedReplay
    held: dict[str, holding.Hold]
    earlier_steps: float
    times: list[stopwatch.Stopwatch]


def begin(
    settings: config.Settings,
    directory: run_directory.RunDirectory,
    fleet: session.Session,
    actors: roster.Roster,
    buffer: replay.Replay | rollouts.Rollouts | None,
    saving: checkpoints.Checkpoints,
    steps: pace.Pace,
    counted: progress.Progress,
    kept: records.Records,
    *,
    is_new: bool,
    place: cluster.Cluster | None = None,
    stop: threading.Event | None = None,
) -> Taken:
    """Opens the run's ledger, and has what it holds in replay; or begins the workers, each of which has one.

    Without a `buffer` there are workers, and a `place` for them.

    Raises:
        SpecError: The run was made for another environment.
        RunError: A ledger cannot be used.
        Stopped: `stop` was set while workers began.
    """
    train, spec = settings.train, actors.the_spec
    if buffer is None:
        assert place is not None
        steps.limiter.set_inserted(0)  # the ledgers tell
        counted.set_episodes(0)

        def count_missed(missed: int, episodes: int) -> None:
            steps.limiter.insert(missed)
            counted.set_episodes(counted.episodes + episodes)

        # Before any assignment: all that is recorded finds its epoch there
        saving.epochs, left = beginning.prepare(directory, train, _about(actors), saving.epochs, is_new=is_new)
        held = _held(directory, left)
        earlier_steps = directory.owed_steps() if len(saving.epochs) > 1 else 0
        actors.set_earlier_steps(earlier_steps)
        made = beginning.begin(
            settings, directory, fleet, actors, saving.epochs, earlier_steps, {*held}, count_missed, place, stop
        )
        found = sampling.ShardedReplay(made, settings.algorithm.capacity)
        return Taken(made, made, None, found, held, earlier_steps, [made.times])
    committed = _open_ledger(directory, train, actors, steps, counted, is_new=is_new)
    saving.epochs = committed.begin_session(saving.epochs)  # before any assignment: all that is recorded finds it there
    inserted, episodes = committed.totals()
    steps.limiter.set_inserted(inserted)
    counted.set_episodes(episodes)
    validator = validate.Validator(
        fleet.macs,
        spec,
        saving.epochs,
        committed.marks(),
        dead_letters.DeadLetters(directory.path / dead_letters.NAME, kept=kept),
        buffer.fits,
        train.max_policy_lag,
        may_send=actors.may_send,
        on_outcome=fleet.note_outcome,
        head=settings.algorithm.head(spec.action),
    )
    earlier_steps = directory.owed_steps() if len(saving.epochs) > 1 else 0
    actors.set_earlier_steps(earlier_steps)
    ingesting = ingest.Ingest(validator, committed, buffer, age.Ages(train.max_experience_age_s))
    ingesting.rebuild_replay()
    committed.on_commit = fleet.wake
    held = _held(directory, committed.actors_held())
    ingesting.keep_holding(held)
    opener = opening.Opener(validator, fleet.wake) if validator.unpacks else None
    return Taken(ingesting, validator, opener, buffer, held, earlier_steps, [ingesting.times, committed.times])


def _held(directory: run_directory.RunDirectory, by_ledger: set[str]) -> dict[str, holding.Hold]:
    held = holding.read(directory.path)
    for actor_id in by_ledger - held.keys():  # the session before was killed in between
        held[actor_id] = holding.Hold("a session before found it wrong, and could not write down why", 0, 0, 0, 0, 0.0)
    return held


def _open_ledger(
    directory: run_directory.RunDirectory,
    settings: config.TrainConfig,
    actors: roster.Roster,
    steps: pace.Pace,
    counted: progress.Progress,
    *,
    is_new: bool,
) -> ledger.Ledger:
    """Opens the run's ledger, which knows what reached replay after the checkpoint, too, or before there was one.

    Raises:
        SpecError: The run was made for another environment.
        RunError: It cannot be opened.
    """
    path, keep, spec = directory.path / run_directory.LEDGER, settings.keep_experience, actors.the_spec
    about = _about(actors)
    if is_new and not path.exists():
        opened = ledger.Ledger.open(path, keep=keep, about=about)
    else:
        opened = ledger.resume(path, keep=keep, before=(steps.env_steps, counted.episodes), about=about)
    found = ledger.about(path)
    if json.loads(found["spec"]) != json.loads(about["spec"]):
        opened.close()
        raise errors.SpecError(
            "the run was made for another environment",
            where=f"run: {found['env_id']}; actors: {actors.env_id}, {spec.describe()}",
            todo="start the actors with the run's environment, or start a new run",
        )
    return opened


def _about(actors: roster.Roster) -> dict[str, str]:
    """Returns what a ledger says of itself: it can be read without its run."""
    return {"env_id": actors.env_id, "spec": json.dumps(dataclasses.asdict(actors.the_spec))}
