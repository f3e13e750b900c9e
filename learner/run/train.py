"""One session of a learner, from joining the fleet to the summary.

Nothing here imports TensorFlow before actors are sought: its three seconds pass while they arrive. Nor does it wait for
it before they are assigned, and workers take in what they send.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.contract import errors, messages, signing
from broker.program import amx
from learner import algorithms, config
from learner.experience.buffers import replay
from learner.files import checkpoint, run_directory
from learner.fleet import budget, gathering, roster, session
from learner.policies import retained_policy
from learner.quantize.tflite import stderr_filter
from learner.run import before_learning, standby
from learner.run.reports import console, energy, summary
from learner.run.workers import cluster

_log = logging.getLogger(__name__)
_KERAS = "keras.src.optimizers"
SWITCH_S = 0.001
"""Seconds for which a thread may keep Python's lock from another. With the default, 5 ms, an update that has been
computed waits so long for the loop to hear of it, and so does what arrives: 146 updates/s instead of 176 beside
500 actors."""


@amx.refused()
def run(
    initial: config.Settings,
    configure: Callable[[str, str], config.Settings],
    *,
    resume: Path | None,
    held: run_directory.RunDirectory | None = None,
    take_over: bool,
    adopt: bool = False,
    place: cluster.RayCluster | None = None,
    stop: threading.Event,
    display: console.Console,
) -> tuple[dict[str, Any], Path]:
    """Runs one session of a learner on a fleet; returns its summary (see summary.py) and the run directory.

    Args:
        initial: Settings for finding the fleet and its actors.
        configure: Effective settings once the environment and the kind of its actions are known.
        resume: Run directory to go on with.
        held: The same, where it is open already.
        take_over: Claim the fleet though another learner is live; that one ends.
        adopt: Begin a new run with the policy that the fleet has, if it has one that fits.
        place: For workers, where that is open already.
        stop: Set from outside to end the session early.
        display: Shows progress; closed at the end.

    Raises:
        gathering.Stopped: `stop` was set before training began.
        NothingLearned: The time ended before any actor came.
    """
    started_s = time.monotonic()
    workers = initial.train.ingest_workers
    directory = held or (run_directory.RunDirectory.open(resume, resume=True) if resume else None)
    if directory:
        run_directory.check_workers(directory.path, workers)
    saved = checkpoint.load_newest(directory.checkpoints) if directory else None
    if directory and saved is None:
        _log.warning("the run has no checkpoint yet: it begins again, with its settings and what its ledger holds")
    if workers and place is None:
        place = _open(initial.train)
    loading = threading.Thread(target=_load_tensorflow, name="load-tensorflow", daemon=True)
    loading.start()
    try:
        _look_for_devices(initial.train)
        tracker = energy.Tracker(initial.train.country) if initial.train.energy else None
        if tracker:
            tracker.start()
        fleet = session.Session.open(initial.train, take_over=take_over)
        try:
            retained = _hear_retained(fleet) if adopt else None
            actors = roster.Roster(
                fleet.id,
                fleet.epoch,
                initial.train.env,
                quorum=initial.train.actors,
                fingerprint=saved.meta["fingerprint"] if saved else "",
                unfit=lambda birth: _unfit(configure(initial.train.env or birth.env_id, birth.spec.action.kind), birth),
                allowed=budget.Budget(initial.train.message_budget_per_s),
                shards=workers,
            )
            until_s = started_s + initial.train.max_wall_s if initial.train.max_wall_s else math.inf
            gathering.gather(initial.train, fleet, actors, stop, until_s)
            settings = configure(actors.env_id, actors.the_spec.action.kind)
            directory = directory or run_directory.RunDirectory.open(
                run_directory.new_path(settings.train, actors.env_id), resume=False
            )
            adopted = None
            if retained is not None:
                settings, adopted = _adopt(settings, fleet, retained, actors)
            directory.describe(settings)
            begun = before_learning.begin(settings, directory, fleet, actors, saved, started_s, stop, place)
            while loading.is_alive():
                loading.join(session.HEARTBEAT_S / 2)
                fleet.beat()
            from learner.run import build

            _set_up_threads(settings.train)
            sys.setswitchinterval(SWITCH_S)
            loop = build.build(
                *(settings, directory, fleet, actors, saved, begun, display, started_s, stop, tracker, adopted)
            )
            loop.train()
            used = tracker.stop() if tracker else None
            error = tracker.error if tracker else "switched off"
            spent = energy.summary(used, error, actors.energy, loop.parts.progress.steps)
            result = summary.make(loop.summaries(), spent)
            with loop.parts.records.attempt("details for the report"):
                directory.save_details(loop.details())
            with loop.parts.records.attempt("the summary"):
                directory.save_summary(result)
            return result, directory.path
        finally:
            fleet.close()
            display.close()
    except errors.ActorqError as error:
        if loading.is_alive():  # it takes seconds more, and until then stderr is held back
            for line in f"error: {error}".splitlines():
                _log.error("%s", line)
            error.said = True
        raise
    finally:
        loading.join()  # until then stderr is held back, and an error message would be lost with it
        if place is not None:
            place.close()


def stand_by(
    settings: config.TrainConfig, path: Path | None, stop: threading.Event
) -> tuple[run_directory.RunDirectory | None, cluster.RayCluster | None]:
    """Waits as `standby.wait` does, or as `wait_apart` where there is no path; returns its directory, and Ray.

    TensorFlow is loaded meanwhile, and Ray started on this machine. One on others is left alone until a run needs it:
    it may be started anew meanwhile.
    """
    place = None
    if settings.ray:
        cluster.check(settings.ray)
    elif settings.ingest_workers:
        place = _open(settings)
    loading = threading.Thread(target=_load_tensorflow, name="load-tensorflow", daemon=True)
    loading.start()
    try:
        _look_for_devices(settings)
        if path is not None:
            return standby.wait(settings, path, stop), place
        standby.wait_apart(settings, stop)
        return None, place
    finally:
        loading.join()  # until then stderr is held back


def _open(settings: config.TrainConfig) -> cluster.RayCluster:
    cluster.check(settings.ray)
    return cluster.RayCluster.open(settings.ray, settings.ingest_workers)


def _hear_retained(fleet: session.Session) -> retained_policy.RetainedPolicy:
    """Subscribes to what brokers retain of policies; it is here once the session has joined."""
    heard = retained_policy.RetainedPolicy(fleet.topics, signing.LearnerVerifier(fleet.fleet.sealer.public_key))
    for topic in heard.topics:
        fleet.brokers.subscribe(topic, heard.hear)
    return heard


def _adopt(
    settings: config.Settings,
    fleet: session.Session,
    retained: retained_policy.RetainedPolicy,
    actors: roster.Roster,
) -> tuple[config.Settings, algorithms.Algorithm | None]:
    from learner.run import build  # with TensorFlow

    for topic in retained.topics:
        fleet.brokers.unsubscribe(topic)
    _set_up_threads(settings.train)
    return build.adopt(settings, actors.the_spec, retained.newest())


def _unfit(settings: config.Settings, birth: messages.Birth) -> str:
    """Returns why an actor's environment cannot be trained on here; empty if it can. A lie about it ends nothing."""
    spec, hidden = birth.spec, settings.algorithm.hidden
    is_image = spec.observation.dtype == "uint8" and len(spec.observation.shape) == 3  # as in convolutions.py
    weights = hidden[-1] * spec.action.size + (
        0 if is_image and settings.algorithm.network != "mlp" else hidden[0] * spec.observation.size
    )
    size = weights * config.WEIGHT_BYTES[settings.train.precision] + config.hidden_bytes(settings)
    if size > messages.MAX_POLICY_BYTES:
        return (
            f"a policy for {spec.describe()} has {size:,} bytes in {settings.train.precision}; actors take "
            f"{messages.MAX_POLICY_BYTES:,}"
        )
    try:
        replay.check_memory(spec, settings.algorithm.capacity, settings.train.max_env_steps)
    except errors.ConfigError as error:
        return f"{error.what}; {error.todo}"
    return ""


def _load_tensorflow() -> None:
    """Loads TensorFlow and what needs it, without Keras and without a look for garbage: that takes half the time.

    Keras is for whoever asks TensorFlow for models of Keras, and is loaded when they do.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    gc.disable()  # what is loaded stays, and each look takes longer than the one before
    sys.modules.setdefault(_KERAS, None)  # type: ignore[arg-type]
    try:
        with stderr_filter.filtered():
            import tensorflow  # noqa: F401
        from learner.run import build  # noqa: F401
    except Exception:
        _log.debug("loading failed", exc_info=True)  # whoever imports it next is told why
    finally:
        if sys.modules[_KERAS] is None:
            del sys.modules[_KERAS]
        gc.freeze()
        gc.enable()


def _look_for_devices(settings: config.TrainConfig) -> None:
    """Looks for the devices that are named, before anybody waits for actors."""
    if settings.learner_devices:
        from learner.run import devices  # with TensorFlow

        devices.prepare(settings.learner_devices)


def _set_up_threads(settings: config.TrainConfig) -> None:
    """Sets the threads of OpenBLAS, and TensorFlow's, before the first operation fixes those."""
    import tensorflow as tf
    import threadpoolctl

    if "OPENBLAS_NUM_THREADS" not in os.environ:  # its other threads spin between two calls, in the way of everybody
        threadpoolctl.threadpool_limits(settings.threads, "blas")
    # Those of the CPU have one pool: of one thread, several devices would compute one after the other
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads * settings.replicas)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
