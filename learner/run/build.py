"""Makes the parts of a run, and wires them."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import Any

import numpy as np

from broker.contract import messages, specs
from learner import algorithms, config
from learner.audit import auditor, drift, holding, model_store
from learner.experience import rate_limiter
from learner.experience.buffers import replay, rollouts
from learner.files import checkpoint, run_directory
from learner.fleet import receipts, roster, session
from learner.operate.orders import standing
from learner.policies import adopting, canary, publisher, trial_record
from learner.run import before_learning, devices
from learner.run.loop import (
    first_steps,
    policy_scores,
    publishing,
    receiving,
    recovery,
    scoring,
    training_loop,
    updating,
    waiting,
)
from learner.run.reports import actor_hours, breakdown, console, energy, metrics, notices
from learner.run.workers import sampling, shards

_log = logging.getLogger(__name__)


def build(
    settings: config.Settings,
    directory: run_directory.RunDirectory,
    fleet: session.Session,
    actors: roster.Roster,
    saved: checkpoint.Checkpoint | None,
    begun: before_learning.Begun,
    display: console.Console,
    started_s: float,
    stop: threading.Event,
    tracker: energy.Tracker | None = None,
    adopted: algorithms.Algorithm | None = None,
) -> training_loop.TrainingLoop:
    """Makes a training loop that is ready to train, while actors gather their first steps.

    Args:
        settings: The run's.
        directory: The run's.
        fleet: The learner's session, which has joined.
        actors: Those who are there.
        saved: Checkpoint to go on from, if there is one.
        begun: What the session has begun with.
        display: Shows progress.
        started_s: Monotonic time at which the process began.
        stop: Ends training when set.
        tracker: Of the learner's energy; None where nobody asks for it.
        adopted: One that begins with a policy that the fleet has (see `adopt`); None makes one.

    Raises:
        RunError: The checkpoint cannot be used.
    """
    train, algorithm_settings, spec = settings.train, settings.algorithm, actors.the_spec
    asking, failures = scoring.Scoring(fleet.command, train, fleet.id), notices.Notices()
    taken, limiter, steps, saving, assigner, counted, kept, rng, version = begun
    ingesting = taken.ingest
    with contextlib.ExitStack() as failing:
        if isinstance(ingesting, shards.Shards):
            failing.callback(ingesting.close)  # else workers would stay until this process ends
        _log.info("compiling the networks; the actors gather their first steps meanwhile")
        algorithm = adopted or devices.make(settings, spec)
        if saved:
            algorithm.restore(saved.parts["algorithm"])
        policies = publisher.Publisher(
            fleet,
            fleet.topics,
            spec,
            algorithm.head,
            fleet.epoch,
            version,
            settings.gate,
            directory,
            kept,
            send_differences=train.delta and not train.canary,  # between channels nothing has a base
            precision=train.precision,
            weight_bits=train.weight_bits,
            expire_after_s=train.policy_expire_s,
        )
        models = model_store.ModelStore(directory.stored_policy)
        checks = auditor.Auditor(spec, algorithm.head, train.precision, actors.actors, train.audit_share, models)
        drifting = drift.Drift(spec, directory.path, kept, models, is_ours=directory.is_ours)
        policies.on_published = models.note
        policies.prepare(algorithm.policy_layers())
        written = metrics.Metrics.open(directory.path, display, started_s, kept)
        good = algorithm.state()
        scores = policy_scores.PolicyScores(train, asking, policies, steps, good)
        trials = canary.Canary(train.canary, policies, actors, held=ingesting.held) if train.canary else None
        record = trial_record.TrialRecord(directory, kept) if trials else None
        if record is None:  # what goes out from now on is not tried: what was proven before is the past
            with kept.attempt("records of trials"):
                (directory.path / run_directory.CANARY).unlink(missing_ok=True)
        sending = publishing.Publishing(
            *(settings, algorithm, taken.memory, rng, policies, fleet, actors, scores), trials, record
        )
        if record and (proven := record.incumbent(spec)) is not None:  # it goes out again, and trials begin anew
            manifest, model = proven
            policies.publish_file(model, specs.check_head(manifest.head, spec.action), manifest.precision).result()
            sending.announce()
        gathering = first_steps.FirstSteps(train, algorithm_settings.batch_size, limiter)
        counted.restart_rates(algorithm.updates, steps.env_steps)
        owed = receipts.Receipts(fleet, actors, ingesting.receipts)
        receiver = receiving.Receiver(
            *(fleet, actors, ingesting, owed, limiter, counted, policies, scores, failures, checks, drifting),
            *(taken.opener, trials),
        )
        commit = functools.partial(receiver.commit, wait=True)
        if isinstance(ingesting, shards.Shards):
            ingesting.on_sample, ingesting.version = checks.consider, lambda: policies.version
        updater = _updater(settings, spec, algorithm, taken.memory, limiter, rng, policies)
        measured = [fleet.times, receiver.times, *taken.times, updater.times, policies.timings.times]
        parts = training_loop.Parts(
            session=fleet,
            roster=actors,
            validator=taken.counts,
            ingest=ingesting,
            algorithm=algorithm,
            publisher=policies,
            publishing=sending,
            receiver=receiver,
            pace=steps,
            first_steps=gathering,
            assigner=assigner,
            updater=updater,
            recovery=recovery.Recovery(algorithm, good, ingesting),
            auditor=checks,
            drift=drifting,
            holding=holding.Holding(checks, ingesting, directory.path, commit, receiver.count, taken.held, kept),
            scores=scores,
            checkpoints=saving,
            records=kept,
            progress=counted,
            metrics=written,
            actor_hours=actor_hours.ActorHours(directory.path, kept),
            breakdown=breakdown.Breakdown(measured, actors.work, counted),
            notices=failures,
            orders=standing.StandingOrders.of(fleet),
            tracker=tracker,
            waiting=waiting.Waiting(train, actors, taken.counts, steps, gathering, scores, failures),
        )
        failing.pop_all()
        return training_loop.TrainingLoop(settings, parts, started_s, stop)


def adopt(
    settings: config.Settings, spec: specs.EnvSpec, found: messages.Policy | None
) -> tuple[config.Settings, algorithms.Algorithm | None]:
    """Makes an algorithm that begins with the policy that a fleet has, where that can be.

    Args:
        settings: Of a new run.
        spec: Of the fleet.
        found: The policy; None if the fleet has none.

    Returns:
        The settings, with exploration at its end, and the algorithm; the same settings and None, if it cannot be.
    """
    if found is None:
        _log.warning("the fleet has no policy to go on from: this run begins anew")
        return settings, None
    algorithm = devices.make(settings, spec)
    why = adopting.adopt(algorithm, found, spec, settings.algorithm)
    if why:
        _log.warning("the fleet's policy %s cannot be gone on from: %s; this run begins anew", found.order, why)
        return settings, None
    _log.warning(
        "this run begins with the fleet's policy %s. Lost are replay and ledger, the optimizer's moments, values and "
        "critics, and the counts of steps and updates, which were in the run directory of the learner before",
        found.order,
    )
    return settings._replace(algorithm=adopting.explored(settings.algorithm)), algorithm


def _updater(
    settings: config.Settings,
    spec: specs.EnvSpec,
    algorithm: algorithms.Algorithm,
    buffer: replay.Replay | rollouts.Rollouts | sampling.ShardedReplay,
    limiter: rate_limiter.RateLimiter,
    rng: np.random.Generator,
    policies: publisher.Publisher,
) -> updating.Updater[Any]:
    chosen = settings.algorithm
    if isinstance(chosen, config.OnPolicyConfig):
        assert isinstance(buffer, rollouts.Rollouts)
        return updating.PhaseUpdater(chosen, algorithm, buffer, limiter, rng, lambda: policies.newest_order)
    assert isinstance(chosen, config.OffPolicyConfig)
    assert not isinstance(buffer, rollouts.Rollouts)
    per_call = settings.train.replicas * updating.updates_per_call(chosen, spec.observation.size)
    return updating.ReplayUpdater(chosen, per_call, algorithm, buffer, limiter, rng)
