"""Begins a run's workers: their ledgers, and what each of them is told."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from broker.contract import errors, topics
from learner import config
from learner.experience import ledger
from learner.files import run_directory
from learner.fleet import roster, session
from learner.run.workers import cluster, plan, shard, shards

_SHARD = "shard"


def prepare(
    directory: run_directory.RunDirectory,
    train: config.TrainConfig,
    about: Mapping[str, str],
    epochs: frozenset[int],
    *,
    is_new: bool,
) -> tuple[frozenset[int], set[str]]:
    """Makes or looks through the ledgers of all shards, and notes in each the sessions of the run.

    Args:
        directory: The run's.
        train: Its settings.
        about: What a ledger says of itself (see Ledger.open).
        epochs: Of the run's sessions as far as they are known, that of this one among them.
        is_new: Whether the run has no checkpoint: then ledgers that are not there are made.

    Returns:
        The epochs of all sessions of the run, and the actors that are held back.

    Raises:
        RunError: One is missing, broken, in use, or that of another shard.
        SpecError: The run was made for another environment.
    """
    run_directory.check_workers(directory.path, train.ingest_workers)
    held: set[str] = set()
    with contextlib.ExitStack() as opened:
        ledgers = []
        for number, path in enumerate(run_directory.ledgers(directory.path, train.ingest_workers)):
            own = {**about, _SHARD: f"{number} of {train.ingest_workers}"}
            if not path.exists() and not is_new:
                raise shard.lost(path, number)
            opened.enter_context(shard.locked(path))
            if not path.exists():
                _make(path, own)
            one = ledger.Ledger.open(path, keep=train.keep_experience, about=own)
            opened.callback(one.close)
            _compare(ledger.about(path), own, str(path))
            ledgers.append(one)
            epochs |= one.begin_session(epochs)
            held |= one.actors_held()
        for one in ledgers:  # each knows what any of them does, whatever was killed in between
            one.begin_session(epochs)
    return epochs, held


def _make(path: Path, about: Mapping[str, str]) -> None:
    """Makes a ledger that has its name only once it is whole, whenever this is killed."""
    new = path.with_name(f"{path.name}.new")
    for leftover in path.parent.glob(f"{new.name}*"):
        leftover.unlink()
    ledger.Ledger.open(new, about=about).close()
    new.replace(path)


def _compare(found: Mapping[str, str], own: Mapping[str, str], where: str) -> None:
    if found.get(_SHARD) != own[_SHARD]:
        raise errors.RunError(
            f"the ledger is that of shard {found.get(_SHARD)}, and stands in the place of {own[_SHARD]}",
            where=where,
            todo="give the ledgers their names back",
        )
    if json.loads(found["spec"]) != json.loads(own["spec"]):
        raise errors.SpecError(
            "the run was made for another environment",
            where=f"run: {found['env_id']}; actors: {own['env_id']}",
            todo="start the actors with the run's environment, or start a new run",
        )


def begin(
    settings: config.Settings,
    directory: run_directory.RunDirectory,
    fleet: session.Session,
    actors: roster.Roster,
    epochs: frozenset[int],
    earlier_steps: float,
    held: set[str],
    on_missed: Callable[[int, int], None],
    place: cluster.Cluster,
    stop: threading.Event | None = None,
) -> shards.Shards:
    """Starts the workers of a run whose ledgers are there; returns when all of them hear their actors.

    Args:
        settings: The run's.
        directory: The run's.
        fleet: The learner's session, which has joined.
        actors: Those who are there, and what they were granted.
        epochs: Of all sessions of the run.
        earlier_steps: Steps that each actor may hold of sessions before this one.
        held: Actors that are held back.
        on_missed: Called with steps and episodes that the ledgers have and no worker has told.
        place: Where they run.
        stop: Ends the wait for them when set.

    Raises:
        ActorqError: A worker cannot begin.
        Stopped: `stop` was set meanwhile.
    """
    train, algorithm, spec = settings.train, settings.algorithm, actors.the_spec
    assert isinstance(algorithm, config.OffPolicyConfig)

    def is_of(actor_id: str, number: int) -> bool:
        return topics.shard_of(actor_id, train.ingest_workers) == number

    def make_plan(number: int) -> plan.Plan:
        accounts = [one for one in actors.accounts() if is_of(one.actor_id, number)]
        return plan.Plan(
            shard=number,
            run=str(directory.path.resolve()),
            keys=str(fleet.fleet.directory.resolve()),
            train=train,
            algorithm=algorithm,
            spec=spec,
            epoch=fleet.epoch,
            epochs=epochs,
            head=algorithm.head(spec.action),
            granted={(one.actor_id, one.boot): one.granted for one in accounts},
            received={(one.actor_id, one.boot): one.recorded for one in accounts},
            earlier_steps=earlier_steps,
            earlier={name: left for name, left in actors.earlier_left.items() if is_of(name, number)},
            held=frozenset(name for name in made.held if is_of(name, number)),
        )

    def count(came: plan.Received) -> None:
        actors.count_received(came.actor_id, came.boot, came.assigned_epoch, came.steps)

    made = shards.Shards(place, train.ingest_workers, fleet.epoch, make_plan, count, on_missed, fleet.wake)
    made.held |= held
    made.receipt_s = lambda: actors.receipt_s
    try:
        made.begin(fleet.beat, stop)
    except BaseException:
        made.close()
        raise
    return made
