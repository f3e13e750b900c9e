"""Wires the actor together and runs it: one thread acts, others talk to the network, build policies and beat.

Between two bursts of steps (about 2 ms, or one step at a control rate) the loop looks at everything else: what the
learner said, a policy that is ready, experience to send. Without a grant an actor that runs flat out sleeps; one with a
control rate acts on without recording, as it does when learner or network are gone.
"""

from __future__ import annotations

import collections
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import counters, identity
from broker.mqtt import connect_errors, link
from edge_actor import config
from edge_actor.acting import exploration, pace, rollout, supervised_env
from edge_actor.environment import env, task
from edge_actor.experience import recorder, spool, trajectory
from edge_actor.fleet import command, heartbeat, inbox, state_sequence, vitals
from edge_actor.policies import interpreter, policy, policy_store, swap

_IDLE_S = 0.2
_UNSENT_IDLE_S = 0.005  # the link refuses while its window is full, and does not say when it opens
_BUILD_MARGIN = 1.5  # slack that is wanted, by what the last swap took
_SLACK_WAIT_S = 1.0  # for so much slack at a control rate; then a missed deadline is the smaller evil
_EPISODE_WAIT_S = 0.01  # for an episode's end when running flat out; longer, and learning waits for tidiness
_MESSAGE_STEPS = 1024  # before the learner says how many
_HAND_OVER_S = 5.0  # for receipts of what a refused actor holds: under this name it may never start again


class Actor:
    """One actor process.

    Args:
        settings: Checked settings.
        bundle: Who it is.
        on_log: Takes one line for people.

    Attributes:
        on_alive: Called from the loop, at least once per turn, as long as it is not stuck.
        patient: Looks for a broker and a task for ever: nobody is there who would start it again, or read why it ended.

    Raises:
        EnvironmentFailure: `settings.env` cannot be made.
        RuntimeMissing: There is no TFLite runtime.
    """

    def __init__(self, settings: config.ActorConfig, bundle: identity.Bundle, on_log: Callable[[str], None]) -> None:
        if settings.fleet and settings.fleet != bundle.fleet:
            raise errors.ConfigError(
                f"the bundle is for fleet {bundle.fleet!r}, not {settings.fleet!r}", where=settings.bundle
            )
        self._settings, self._on_log = settings, on_log
        self.on_alive: Callable[[], None] = lambda: None
        self.patient = False
        self._runtime = interpreter.find(settings.runtime)
        self._id, self._topics = bundle.actor_id, topics.Topics(bundle.fleet)
        self._state_dir = Path(settings.state_dir or identity.home() / "actors" / bundle.actor_id)
        made = self._planted(settings.env) if settings.env else None
        self._boot = counters.next_boot(self._state_dir / "boot")
        self._mac, self._verifier = signing.ActorMac(bundle.mac_key), signing.LearnerVerifier(bundle.learner_key)
        seal = functools.partial(self._seal, self._topics.actor_state(self._id))
        self._presence = state_sequence.Presence(self._boot, seal)
        self._inbox = inbox.Inbox(self._verifier, self._boot, on_log)
        self._link = self._connectable(bundle)
        self._stopping = self._reconnected = False
        self._task, self._commander = task.Task(), command.Commander(self._boot)
        self._assignment: messages.Assignment | None = None
        self._acting: policy.Policy | None = None
        self._grant, self._burst = pace.Grant(), pace.BurstLength()
        self._metronome = pace.Metronome(settings.rate_hz) if settings.rate_hz else None
        self._reports: collections.deque[messages.Report] = collections.deque()
        self._load, self._vitals = vitals.Load(settings.heartbeat_s), messages.Vitals()
        self._heartbeat = heartbeat.Heartbeat(self._beat, settings.heartbeat_s, on_log)
        self._plant: supervised_env.Plant | None = None
        if made is not None:
            self._prepare(made)

    # -- life -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Acts until `stop`.

        Raises:
            ActorRefused: The learner does not want this actor.
            BrokerUnreachable: No broker let it in, there is nothing to do without one, and it is not `patient`.
            EnvironmentFailure: The learner's task cannot be made here, or none was named.
        """
        try:
            self.start()
            while not self._told_to_stop():
                self.turn()
        except errors.ActorRefused:
            self._hand_over()
            raise
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` soon; from any thread."""
        self._stopping = True
        self._inbox.wake.set()

    def start(self) -> None:
        """Connects, takes the learner's task if there is no other, and gives birth."""
        self._link.start()
        self._find_a_broker()
        if self._plant is None:
            if self.patient:
                self._on_log("no environment is named here: waiting until a learner names one")
            limit_s = math.inf if self.patient else self._settings.connect_timeout_s
            name = self._task.wait(limit_s, self._inbox.wake, self._told_to_stop)
            if name:
                self._prepare(self._planted_for_the_learner(name))
        if self._plant is None:
            return  # told to stop while it waited
        environment = self._plant.environment
        self._on_log(
            f"actor {self._id} boot {self._boot}: {environment.name}, {environment.spec.describe()}, "
            f"{environment.n_envs} at once, {self._runtime}"
        )
        self._link.retain(self._topics.actor_state(self._id), self._state)
        self._heartbeat.start()

    def _find_a_broker(self) -> None:
        """Waits until one lets it in. Whatever else answers is no reason to end: the link says so, and tries again."""
        until = time.monotonic() + self._settings.connect_timeout_s
        while not self._link.connected and not self._told_to_stop():
            if time.monotonic() > until:
                if self._metronome is not None and self._plant is not None and self._acting is not None:
                    self._on_log("no broker: acting with the stored policy until there is one")
                    return
                if not self.patient:
                    raise connect_errors.as_error(self._link.refusals, self._settings.connect_timeout_s)
            self._inbox.wake.wait(_IDLE_S)
            self._inbox.wake.clear()

    def close(self) -> None:
        """Sends what is there, says goodbye, and frees everything."""
        if self._plant is not None:
            self._recorder.flush()
            self._send()
            for part in (self._plant, self._heartbeat, self._swap, self._spool, self._load):
                part.close()
        self._commander.close()
        self._link.close((self._topics.actor_state(self._id), self._presence.farewell), timeout_s=1.0)

    # -- one turn of the loop ---------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Looks at everything, then acts for one burst or waits."""
        self._listen()
        if self._swap.has_work and self._may_swap() and self._swap_in():
            self._heartbeat.beat()  # here: the thread would wait milliseconds for its turn
        self._send()
        if self._metronome is None:
            self._turn_flat_out()
        else:
            self._turn_at_rate(self._metronome)

    def _turn_flat_out(self) -> None:
        is_more_coming = self._link.turn()
        rows = self._allowed_rows()
        if not rows:
            self._recorder.flush()
            self._send()
            self._link.rest()
            self._inbox.wake.wait(_UNSENT_IDLE_S if self._spool.unsent or self._reports else _IDLE_S)
            self._inbox.wake.clear()
            return
        record = self._recorder.trajectory
        before, began = record.used, time.perf_counter()
        self._act(min(rows, self._burst.rows(pace.LOOK_S if is_more_coming else pace.BURST_S)))
        self._burst.learn(record.used - before, time.perf_counter() - began)
        self._recorder.flush_if_due()

    def _turn_at_rate(self, metronome: pace.Metronome) -> None:
        if not metronome.wait(self._inbox.wake):
            self._inbox.wake.clear()
            return
        if self._acting is None and self._assignment is None:
            return  # nobody said yet what to do here
        too_old = self._policy_is_too_old()
        self._recorder.record(not too_old and self._allowed_rows() > 0)
        self._act(1, safely=too_old)
        self._recorder.flush_if_due()

    def _allowed_rows(self) -> int:
        """Rows that the learner wants to be recorded now; the last one may exceed the grant by n_envs - 1 steps."""
        wanted = self._assignment
        if wanted is None or (self._metronome is None and (self._commander.measuring or self._spool.is_half_full)):
            return 0  # a simulator can wait; a robot acts on, and its spool drops the oldest
        if wanted.lockstep_version and self._recorder.order < (wanted.epoch, wanted.lockstep_version):
            return 0
        record = self._recorder
        return max(0, -(-self._grant.left(record.recorded) // record.trajectory.n_envs))

    def _act(self, rows: int, *, safely: bool = False) -> None:
        assert self._plant is not None
        record = self._recorder.trajectory
        try:
            if not self._plant.running:
                self._plant.begin(record, self._assignment)
            if safely:
                rollout.run(self._plant.environment, [self._plant.safe_action], record)
            else:
                until_end, acting = self._swap.has_work, self._acting
                rollout.burst(self._plant.environment, acting, self._explorer, record, rows, until_end=until_end)
            self._plant.look(record)
        except (Exception, SystemExit) as error:  # whatever an environment raises: counted, said, and tried again
            self._recorder.flush(cut=True)
            self._plant.rebuild(error, self._recorder.steps, self._told_to_stop, self._inbox.wake)
            if self._metronome is not None:
                self._metronome.restart()

    def _policy_is_too_old(self) -> bool:
        limit_s = self._settings.max_policy_age_s
        return limit_s > 0 and time.monotonic() - self._swap.heard_at > limit_s

    def _may_swap(self) -> bool:
        """This is a good moment: before the first step, at an episode's end, in slack, or when none of these came."""
        if self._acting is None or self._plant is None or not self._plant.running or self._swap.overdue:
            return True
        if self._metronome is not None:
            return self._metronome.has_room(_BUILD_MARGIN * 1e-3 * self._swap.build_ms)
        ended = self._recorder.trajectory.ended
        return len(ended) > 1 or bool(ended[0]) or not self._allowed_rows()

    def _swap_in(self) -> bool:
        """Builds what waits for it; whether another policy acts now."""
        acting = self._swap.build()
        if acting is None:
            return False
        self._recorder.flush()
        if self._acting is None:
            self._on_log(f"policy {acting.epoch}.{acting.version} acts on {acting.delegate}")
        self._acting, self._recorder.order = acting, (acting.epoch, acting.version)
        return True

    def _send(self) -> None:
        if self._reconnected:
            self._reconnected = False
            self._spool.rewind()
        self._spool.pump(functools.partial(self._link.publish, self._topics.experience(self._id)))
        while self._reports:
            topic = self._topics.report(self._id)
            if not self._link.publish(topic, self._seal(topic, self._reports[0])):
                return
            self._reports.popleft()

    def _hand_over(self) -> None:
        """Sends what is held, until all of it has its receipt or time is up; the rest stays in the spool's files."""
        self._recorder.flush()
        self._link.rest()
        deadline = time.monotonic() + _HAND_OVER_S
        while len(self._spool) and time.monotonic() < deadline and not self._told_to_stop():
            self._send()
            self._inbox.wake.wait(_UNSENT_IDLE_S if self._spool.unsent else _IDLE_S)
            self._inbox.wake.clear()
            while (word := self._inbox.get()) is not None:
                if isinstance(word, messages.Receipt):
                    self._spool.acknowledge(word)

    # -- what the learner says --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (word := self._inbox.get()) is not None:
            if isinstance(word, messages.Assignment):
                self._assign(word)
            elif isinstance(word, messages.Receipt):
                self._spool.acknowledge(word)
            elif isinstance(word, messages.Command):
                self._obey(word)
            elif word.online and word.fingerprint:
                self._spool.hear(word.session)

    def _assign(self, assignment: messages.Assignment) -> None:
        if assignment.boot != self._boot:
            return
        if assignment.refused:
            raise errors.ActorRefused(
                f"the learner refused this actor: {assignment.refused}",
                where=f"actor {self._id}",
                todo="do as it says; or start it with the other actors' environment, or on another fleet",
            )
        self._assignment, self._heartbeat.assigned_s = assignment, assignment.message_period_s
        self._recorder.assign(assignment)
        self._grant.assign(assignment, self._recorder.recorded)
        self._explorer.assign(assignment)
        if assignment.channel != self._swap.channel:
            self._swap.channel = assignment.channel
            self._subscribe_policies()

    def _obey(self, order: messages.Command) -> None:
        assert self._plant is not None
        if order.kind == "bench":
            self._commander.bench(order, self._respond)
        elif order.kind == "evaluate" and self._settings.one_env:
            self._recorder.flush(cut=True)
            self._plant.stop_episode()
            self._respond(self._commander.evaluate(order, self._builder(1), self._plant.environment, self._paced_stop))
        elif self._metronome is None:
            self._respond(self._commander.answer(order, self._builder(1), self._make_one, self._told_to_stop))
        else:
            self._commander.start(order, self._builder(1), self._make_one, lambda: self._stopping, self._respond)

    def _respond(self, report: messages.Report | None) -> None:
        self._reports.extend([report] if report else ())
        self._inbox.wake.set()

    def _paced_stop(self) -> bool:
        """For an evaluation on the only environment there is: it holds the control rate too."""
        while self._metronome is not None and not self._stopping and not self._metronome.wait(self._inbox.wake):
            self._inbox.wake.clear()
        return self._told_to_stop()

    def _told_to_stop(self) -> bool:
        """Asked in every turn, and by whatever a turn waits for."""
        self.on_alive()
        return self._stopping

    # -- making things ----------------------------------------------------------------------------------------------

    def _connectable(self, bundle: identity.Bundle) -> link.Link:
        made = link.Link(
            self._settings.broker or bundle.brokers,
            self._id,
            username=self._id,
            password=bundle.password,
            tls=bundle.tls(),
            will=(self._topics.actor_state(self._id), self._presence.will),
            on_connect=self._on_connect,
        )
        open_as, put = self._inbox.opener, self._inbox.put
        made.subscribe(self._topics.learner_state, open_as(messages.LearnerState, self._on_learner))
        made.subscribe(self._topics.assignment(self._id), open_as(messages.Assignment, put))
        made.subscribe(self._topics.receipt(self._id), open_as(messages.Receipt, put))
        made.subscribe(self._topics.command(self._id), open_as(messages.Command, put))
        return made

    def _planted(self, name: str) -> supervised_env.Plant:
        return supervised_env.Plant(self._make(name, self._settings.envs), self._settings, self._on_log)

    def _planted_for_the_learner(self, name: str) -> supervised_env.Plant:
        """As `_planted`; a task that does not fit here is not final, as the next one may."""
        try:
            return self._planted(name)
        except (errors.SpecError, errors.ConfigError) as error:
            raise errors.EnvironmentFailure(error.what, where=f"the learner's task {name}", todo=error.todo) from error

    def _prepare(self, made: supervised_env.Plant) -> None:
        """Makes all that depends on the environment."""
        settings, spec, n_envs = self._settings, made.environment.spec, made.environment.n_envs
        seal = functools.partial(self._mac.seal, self._topics.experience(self._id))
        self._spool = spool.opened(settings, self._state_dir, self._boot, spec.fingerprint, seal, self._on_log)
        self._plant = made  # behind the spool, which another process may hold: until here there is nothing to close
        self._recorder = recorder.Recorder(trajectory.Trajectory(spec, n_envs, _MESSAGE_STEPS), self._spool)
        self._explorer = exploration.Explorer(spec.action, n_envs, settings.seed, lambda: self._recorder.recorded)
        self._swap = swap.Swap(
            self._builder(n_envs),
            spec,
            policy_store.PolicyStore(self._state_dir, self._verifier.public_key),
            patience_s=_SLACK_WAIT_S if self._metronome else _EPISODE_WAIT_S,
            on_ready=self._inbox.wake.set,
            on_log=self._on_log,
        )
        self._swap.start(self._verifier, self._topics)
        self._swap_in()  # with the stored policy, if there is one
        self._subscribe_policies()

    def _subscribe_policies(self) -> None:
        names, channel, swapped = self._topics, self._swap.channel, self._swap
        opener, offer = self._inbox.opener, swapped.offer
        self._link.subscribe(names.keyframe(channel), swapped.queued(opener(messages.Policy, offer)))
        self._link.subscribe(names.part(channel), swapped.queued(opener(messages.PolicyPart, swapped.prepare)))
        self._link.subscribe(names.delta(channel), swapped.queued(opener(messages.PolicyDelta, offer)))

    def _builder(self, batch: int) -> Callable[[messages.Manifest, bytes], policy.Policy]:
        assert self._plant is not None
        return functools.partial(
            policy.from_manifest,
            spec=self._plant.environment.spec,
            batch=batch,
            runtime=self._settings.runtime,
            threads=self._settings.threads,
        )

    def _make(self, name: str, n_envs: int) -> env.Environment:
        return env.make(name, n_envs, self._settings.env_arguments)

    def _make_one(self) -> env.Environment:
        assert self._plant is not None
        return self._make(self._plant.environment.name, 1)

    # -- called on other threads too --------------------------------------------------------------------------------

    def _on_connect(self) -> None:
        self._reconnected = True
        self._inbox.wake.set()

    def _on_learner(self, state: messages.LearnerState, sealed: bytes) -> None:
        self._task.hear(state)
        self._inbox.put(state)
        if self._plant is not None and state.version:
            self._swap.announce(state.epoch, state.version)  # by a state that is new: the inbox passes on no other

    def _seal(self, topic: str, message: messages.Message) -> bytes:
        return self._mac.seal(topic, codec.encode(message))

    def _beat(self) -> None:
        self._link.retain(self._topics.actor_state(self._id), self._state)

    def _state(self) -> bytes:
        assert self._plant is not None
        self._inbox.listen()
        delegate = self._acting.delegate if self._acting else ""
        counters = (self._recorder, self._spool, self._swap, self._plant, self._metronome, self._inbox, self._load)
        born = vitals.birth(self._plant.environment, str(self._runtime), delegate, self._settings.rate_hz)
        self._vitals = self._heartbeat.attempt(lambda: vitals.take(*counters, delegate), self._vitals)
        return self._presence.online(born, self._vitals)
