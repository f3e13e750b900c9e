"""Makes the parts of an actor from its settings, and wires them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from broker.contract import errors, messages
from broker.fleet import counters, identity
from broker.program import stopwatch
from edge_actor import config
from edge_actor.acting import exploration, pace, step_times, supervised_env
from edge_actor.environment import env
from edge_actor.experience import recorder, spool, trajectory
from edge_actor.fleet import command, vitals
from edge_actor.orders import log_lines, order_log, ordered_settings, release_trial, runner
from edge_actor.policies import policy, policy_store, receiver, runtimes
from edge_actor.run import (
    acting_loop,
    actor,
    command_runner,
    dispatcher,
    fleet_connection,
    policy_switch,
    sender,
    status,
    stopping,
)
from edge_actor.updates import release_directory, updater

_SLACK_WAIT_S = 1.0  # a policy waits for slack at a control rate; then a missed deadline is the smaller evil
_EPISODE_WAIT_S = 0.01  # for an episode's end when running flat out; longer, and learning waits for tidiness
_MESSAGE_STEPS = 1024  # before the learner says how many


def build(
    settings: config.ActorConfig,
    bundle: identity.Bundle,
    *,
    on_alive: Callable[[], None] = lambda: None,
    patient: bool = False,
    log: order_log.OrderLog | None = None,
    lines: log_lines.LogLines | None = None,
    releases: release_directory.ReleaseDirectory | None = None,
    trial: int = 0,
) -> actor.Actor:
    """Makes one actor process, which `Actor.run` then connects.

    Args:
        settings: Checked settings.
        bundle: Who it is.
        on_alive: Called from the acting loop, at least once per turn, as long as it is not stuck.
        patient: Look for a broker and a task for ever.
        log: What it was ordered; by default what its state directory has.
        lines: What this process logged.
        releases: Where the launcher keeps releases; None where it did not start this process.
        trial: The number of the order whose release this process is to prove; 0 if it is known to work.

    Raises:
        ConfigError: The bundle is for another fleet, or the spool cannot be used.
        EnvironmentFailure: `settings.env` cannot be made.
        RuntimeMissing: There is no such runtime.
    """
    if settings.fleet and settings.fleet != bundle.fleet:
        raise errors.ConfigError(
            f"the bundle is for fleet {bundle.fleet!r}, not {settings.fleet!r}", where=settings.bundle
        )
    state_dir = state_directory(settings, bundle)
    log, lines = log or order_log.OrderLog.open(state_dir, bundle.learner_key), lines or log_lines.LogLines()
    own, apply = settings, ordered_settings.applied if log.trial is not None else ordered_settings.still_fitting
    settings = apply(own, log.in_force)
    runtime = runtimes.describe(settings.runtime)
    environment = _environment(settings, settings.env) if settings.env else None
    boot = counters.next_boot(state_dir / "boot")
    brokers = settings.broker or bundle.brokers
    connection = fleet_connection.FleetConnection(bundle, brokers, boot, bundle.tls())
    told_to_stop = stopping.Stopping(connection.inbox.wake, on_alive)
    takes = updater.Updater(
        releases,
        bundle.release_key,
        connection.topics,
        functools.partial(connection.link.follow, group="release"),  # policies are followed on the same link
        version=vitals.release(),
        reserve_bytes=settings.update_reserve_bytes,
    )
    if releases is not None:
        connection.link.route(connection.topics.every_release, takes.receive)
    proving = release_trial.ReleaseTrial(log, takes, trial)

    def loop(made: supervised_env.SupervisedEnv) -> acting_loop.ActingLoop:
        return _loop(settings, own, log, lines, proving, state_dir, runtime, connection, told_to_stop, made)

    return actor.Actor(
        connection,
        told_to_stop,
        loop(environment) if environment else None,
        lambda name: loop(_environment_of_the_learner(settings, name)),
        timeout_s=settings.connect_timeout_s,
        patient=patient,
    )


def state_directory(settings: config.ActorConfig, bundle: identity.Bundle) -> Path:
    """Returns where an actor keeps its boot counter, its last good policy, and what it was ordered."""
    return Path(settings.state_dir or identity.home() / "actors" / bundle.actor_id)


def _environment(settings: config.ActorConfig, name: str) -> supervised_env.SupervisedEnv:
    made = env.make(name, settings.envs, settings.env_arguments, frame_stack=settings.frame_stack, training=True)
    return supervised_env.SupervisedEnv(made, settings)


def _environment_of_the_learner(settings: config.ActorConfig, name: str) -> supervised_env.SupervisedEnv:
    """Makes the learner's task. That it does not fit here is not final, as the next one may."""
    try:
        return _environment(settings, name)
    except (errors.SpecError, errors.ConfigError) as error:
        raise errors.EnvironmentFailure(error.what, where=f"the learner's task {name}", todo=error.todo) from error


def _loop(
    settings: config.ActorConfig,
    own: config.ActorConfig,
    log: order_log.OrderLog,
    lines: log_lines.LogLines,
    proving: release_trial.ReleaseTrial,
    state_dir: Path,
    runtime: str,
    connection: fleet_connection.FleetConnection,
    told_to_stop: stopping.Stopping,
    environment: supervised_env.SupervisedEnv,
) -> acting_loop.ActingLoop:
    """Makes all that depends on the environment."""
    made = environment.environment
    spec, n_envs, wake = made.spec, made.n_envs, connection.inbox.wake

    def builder(batch: int) -> Callable[[messages.Manifest, bytes], policy.Policy]:
        return functools.partial(
            policy.from_manifest, spec=spec, batch=batch, runtime=settings.runtime, threads=settings.threads
        )

    outbox = spool.from_settings(
        settings, state_dir, connection.boot, spec.fingerprint, connection.seal_experience, connection.date
    )
    record = recorder.Recorder(trajectory.Trajectory(spec, n_envs, _MESSAGE_STEPS), outbox)
    explorer = exploration.Explorer(spec.action, n_envs, settings.seed, lambda: record.recorded)
    metronome = pace.Metronome(settings.rate_hz) if settings.rate_hz else None
    newest = receiver.PolicyReceiver(
        builder(n_envs),
        spec,
        policy_store.PolicyStore(state_dir, connection.verifier.public_key),
        patience_s=_SLACK_WAIT_S if metronome else _EPISODE_WAIT_S,
        on_ready=wake.set,
    )
    policies = policy_switch.PolicySwitch(newest, connection, record, metronome)
    outgoing, grant = sender.Sender(connection, outbox), pace.Grant()
    load = vitals.Load.of_board(settings.heartbeat_s, lambda: record.steps)
    orders = runner.OrderRunner(log, own, lines, outgoing.answer, told_to_stop.request, proving)
    times, idle = step_times.StepTimes(), stopwatch.Stopwatch("wait", "send", "policy_receive")
    sources: list[vitals.Source] = [record, outbox, policies, environment, connection.inbox, orders, load]
    sources.append(vitals.Stages([record.times, outbox.times, newest.times, times.times, idle]))
    sources += [times]
    sources += [metronome] if metronome else []
    reporter = status.StatusReporter(
        connection,
        environment,
        policies,
        sources,
        runtime=runtime,
        rate_hz=settings.rate_hz,
        ordered=tuple(f"{key}={text}" for key, text in sorted(log.in_force.items())),
        period_s=settings.heartbeat_s,
    )
    commands = command_runner.CommandRunner(
        command.Commander(connection.boot),
        environment,
        record,
        metronome,
        outgoing,
        told_to_stop,
        build=builder(1),
        make=lambda: env.make(made.name, 1, settings.env_arguments, frame_stack=settings.frame_stack),
        one_env=settings.one_env,
    )
    incoming = dispatcher.Dispatcher(connection, outbox, record, grant, explorer, policies, reporter, commands, orders)
    return acting_loop.ActingLoop(
        connection=connection,
        told_to_stop=told_to_stop,
        environment=environment,
        record=record,
        outbox=outbox,
        explorer=explorer,
        metronome=metronome,
        grant=grant,
        policies=policies,
        incoming=incoming,
        outgoing=outgoing,
        reporter=reporter,
        commands=commands,
        orders=orders,
        load=load,
        times=times,
        idle=idle,
        max_policy_age_s=settings.max_policy_age_s,
    )
