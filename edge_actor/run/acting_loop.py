"""The loop that acts: burst by burst as fast as it can, or one step at a time at a control rate.

Between two bursts of steps (about 2 ms) or two steps it has everything else looked at: what the learner said, a policy
that is ready, experience to send. Without a grant an actor that runs flat out sleeps; one with a control rate acts on
without recording, as it does when learner or network are gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from broker.contract import messages
from broker.program import stopwatch
from edge_actor.acting import exploration, pace, rollout, step_times, supervised_env
from edge_actor.experience import recorder, spool
from edge_actor.fleet import vitals
from edge_actor.orders import runner
from edge_actor.run import command_runner, dispatcher, fleet_connection, policy_switch, sender, status, stopping

POLICY_BYTES = 4096
"""Payloads that come in one turn of the socket, from which on it counts as receiving a policy: all else is small."""


class ActingLoop:
    """Acts in one environment, from birth to the last message.

    Args:
        connection: To the fleet; its socket is served from here between two bursts.
        told_to_stop: Whether the actor is to end.
        environment: Acted in.
        record: Records the steps.
        outbox: Keeps them until the learner has them.
        explorer: Draws what is random in them.
        metronome: Of the control rate; None to act as fast as it can.
        grant: How many steps the learner wants.
        policies: Choose the other actions.
        incoming: Hands on what the learner said.
        outgoing: Sends experience and reports.
        reporter: Publishes the actor's state.
        commands: Carried out by this loop or beside it.
        orders: May keep it from acting.
        load: Of the board.
        times: Told where the time of steps goes.
        idle: Told what waiting and serving the socket take: `wait`, `send`, `policy_receive`.
        max_policy_age_s: With an older policy the safe action is taken; 0: never.

    Attributes:
        environment, recorder, policies, status: As given, by their stage's name.
    """

    def __init__(
        self,
        *,
        connection: fleet_connection.FleetConnection,
        told_to_stop: stopping.Stopping,
        environment: supervised_env.SupervisedEnv,
        record: recorder.Recorder,
        outbox: spool.Spool,
        explorer: exploration.Explorer,
        metronome: pace.Metronome | None,
        grant: pace.Grant,
        policies: policy_switch.PolicySwitch,
        incoming: dispatcher.Dispatcher,
        outgoing: sender.Sender,
        reporter: status.StatusReporter,
        commands: command_runner.CommandRunner,
        orders: runner.OrderRunner,
        load: vitals.Load,
        times: step_times.StepTimes,
        idle: stopwatch.Stopwatch,
        max_policy_age_s: float,
    ) -> None:
        self._link = connection.link
        self._wake = connection.inbox.wake
        self._told_to_stop = told_to_stop
        self.environment = environment
        self.recorder = record
        self._spool = outbox
        self._explorer = explorer
        self._metronome = metronome
        self._grant = grant
        self.policies = policies
        self._dispatcher = incoming
        self._sender = outgoing
        self.status = reporter
        self._commands = commands
        self._orders = orders
        self._paused = False
        self._load = load
        self._max_policy_age_s = max_policy_age_s
        self._burst = pace.BurstLength()
        self._times, self._idle = times, idle

    @property
    def acts_alone(self) -> bool:
        """Returns whether it can act without a learner: it has a control rate to hold, and a policy."""
        return self._metronome is not None and self.policies.acting is not None

    def run(self) -> None:
        """Acts until it is told to stop.

        Raises:
            ActorRefused: The learner does not want this actor.
        """
        if self._metronome is not None:
            self._metronome.restart()  # to look for a broker and a task is no missed deadline
        while not self._told_to_stop():
            self.run_once()

    def run_once(self) -> None:
        """Looks at everything, then acts for one burst or waits."""
        self._dispatcher.dispatch()
        if self._paused != self._orders.paused:
            self._follow_pause()
        beat = self.status.heartbeat.beat  # here: the thread would wait milliseconds for its turn
        self.policies.replace_if_suitable(self.environment.running, self._allowed_rows, beat)
        self._sender.send()
        if self._metronome is None:
            self._act_for_a_burst()
        else:
            self._act_on_time(self._metronome)
        self._orders.poll(self._acts_as_wanted, self._has_receipt)

    def hand_over(self, told_to_stop: Callable[[], bool]) -> None:
        """Gives the learner what is held, before what is in memory is gone, or this name is another's."""
        self.recorder.flush()
        self._sender.hand_over(told_to_stop)

    def close(self) -> None:
        """Sends what is there, makes the environment safe, and frees everything, each whatever became of the others."""
        with contextlib.ExitStack() as ending:  # the last one first
            for part in (
                self._commands,
                self._orders,
                self._load,
                self._spool,
                self.policies,
                self.status,
                self.environment,
            ):
                ending.callback(part.close)
            self.recorder.flush()
            self._sender.send()

    def _follow_pause(self) -> None:
        """Hands on what is recorded; at a control rate, makes the environment safe, and has an episode begin later."""
        self._paused = self._orders.paused
        if self._paused:
            self.recorder.flush(cut=self._metronome is not None)
        if self._metronome is None:
            return
        if self._paused:
            self.environment.act_safely()
            self.environment.stop_episode()
        else:
            self._metronome.restart()  # no deadline was missed meanwhile

    def _act_for_a_burst(self) -> None:
        is_more_coming = self._serve()
        rows = self._allowed_rows()
        if not rows:
            self.recorder.flush()
            self._sender.send()
            self._link.rest()
            with self._idle.time("wait"):
                self._sender.wait()
            return
        record = self.recorder.trajectory
        before, began = record.used, time.perf_counter()
        self._act(min(rows, self._burst.rows(pace.LOOK_S if is_more_coming else pace.BURST_S)))
        self._burst.learn(record.used - before, time.perf_counter() - began)
        self.recorder.flush_if_due()

    def _act_on_time(self, metronome: pace.Metronome) -> None:
        with self._idle.time("wait"):
            is_due = metronome.wait(self._wake)
        if not is_due:
            self._wake.clear()
            return
        if self._orders.paused:
            return
        if self.policies.acting is None and self._dispatcher.assignment is None:
            return  # nobody said yet what to do here
        is_too_old = self.policies.is_older_than(self._max_policy_age_s)
        self.recorder.record(not is_too_old and self._allowed_rows() > 0)
        self._act(1, safely=is_too_old)
        self.recorder.flush_if_due()

    def _acts_as_wanted(self) -> bool | None:
        """Returns whether it acts, if the learner wants it to; None as long as no learner has said."""
        if self.environment.failures:
            return False
        if self._dispatcher.assignment is None:
            return None
        return self.recorder.recorded > 0 or not self._allowed_rows()

    def _has_receipt(self) -> bool | None:
        """Returns whether the learner has what this process recorded, or its beginning; None if it wants nothing.

        That nothing may be recorded for now (a full spool, a measurement, lockstep) is not that.
        """
        recorded = self.recorder.recorded
        wants_none = not recorded and (self._orders.paused or self._grant.left(0) <= 0)
        return None if wants_none else self._dispatcher.has_receipt

    def _serve(self) -> bool:
        """Serves the socket; returns whether a message has come in part, which nearly always is a policy's."""
        policies, link, began = self.policies.receiver, self._link, time.perf_counter()
        opened_s, received = policies.opened_s, link.bytes_received
        is_more_coming = link.poll()
        took_s = time.perf_counter() - began - (policies.opened_s - opened_s)  # what was opened in it has its own stage
        is_policy = is_more_coming or link.bytes_received - received > POLICY_BYTES
        self._idle.add("policy_receive" if is_policy else "send", max(0.0, took_s))
        return is_more_coming

    def _allowed_rows(self) -> int:
        """Rows that the learner wants to be recorded now; the last one may exceed the grant by n_envs - 1 steps."""
        wanted = self._dispatcher.assignment
        if wanted is None or self._orders.paused:
            return 0
        if self._metronome is None and (self._commands.is_measuring or self._spool.is_half_full):
            return 0  # a simulator can wait; a robot acts on, and its spool drops the oldest
        if wanted.lockstep_version and self.recorder.order < messages.Order(wanted.epoch, wanted.lockstep_version):
            return 0
        record = self.recorder
        return max(0, -(-self._grant.left(record.recorded) // record.trajectory.n_envs))

    def _act(self, rows: int, *, safely: bool = False) -> None:
        record, supervised = self.recorder.trajectory, self.environment
        try:
            if not supervised.running:
                with self._times.times.time("environment"):
                    supervised.begin(record, self._dispatcher.assignment)
            made, times = supervised.environment, self._times
            if safely:
                rollout.run(made, [supervised.safe_action], record, times=times)
            else:
                until_end, acting = self.policies.is_waiting, self.policies.acting
                rollout.burst(made, acting, self._explorer, record, rows, until_end=until_end, times=times)
            supervised.report_clipping(record)
        except (Exception, SystemExit) as error:  # whatever an environment raises: counted, said, and tried again
            self.recorder.flush(cut=True)
            supervised.rebuild(error, self.recorder.steps, self._told_to_stop, self._wake)
            if self._metronome is not None:
                self._metronome.restart()
