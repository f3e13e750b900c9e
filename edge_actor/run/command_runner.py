"""Carries out the learner's commands, in the environment and on the thread that suit this actor."""

from __future__ import annotations

from collections.abc import Callable

from broker.contract import messages
from edge_actor.acting import pace, supervised_env
from edge_actor.environment import env
from edge_actor.experience import recorder
from edge_actor.fleet import command
from edge_actor.run import sender, stopping


class CommandRunner:
    """Evaluates and measures when the learner says so.

    An actor without a control rate evaluates in its loop; one with a control rate acts on meanwhile, except where its
    environment is the only one there is.

    Args:
        commander: Carries them out.
        environment: The one that the actor acts in.
        record: Cut where an evaluation takes the only environment.
        metronome: Of the control rate; None for an actor that acts as fast as it can.
        outgoing: Takes the reports.
        told_to_stop: Whether the actor is to end.
        build: Makes a policy of batch 1.
        make: Makes a single environment.
        one_env: Whether evaluations must use the only environment.
    """

    def __init__(
        self,
        commander: command.Commander,
        environment: supervised_env.SupervisedEnv,
        record: recorder.Recorder,
        metronome: pace.Metronome | None,
        outgoing: sender.Sender,
        told_to_stop: stopping.Stopping,
        *,
        build: command.Build,
        make: Callable[[], env.Environment],
        one_env: bool,
    ) -> None:
        self._commander = commander
        self._environment = environment
        self._recorder = record
        self._metronome = metronome
        self._sender = outgoing
        self._told_to_stop = told_to_stop
        self._build = build
        self._make = make
        self._one_env = one_env

    @property
    def is_measuring(self) -> bool:
        """Returns whether a benchmark runs, which acting would disturb."""
        return self._commander.measuring

    def run(self, order: messages.Command, *, paused: bool = False) -> None:
        """Carries out one command; its reports go to the sender. An actor that is paused evaluates nothing."""
        respond = self._sender.respond
        if paused and order.kind == "evaluate":
            respond(self._commander.refuse(order, "this actor is paused"))
        elif order.kind == "bench":
            self._commander.bench(order, respond)
        elif order.kind == "evaluate" and self._one_env:
            self._recorder.flush(cut=True)
            self._environment.stop_episode()
            environment = self._environment.environment
            respond(self._commander.evaluate(order, self._build, environment, self._paced_stop))
        elif self._metronome is None:
            respond(self._commander.answer(order, self._build, self._make, self._told_to_stop))
        else:
            stop = self._told_to_stop
            self._commander.start(order, self._build, self._make, lambda: stop.requested, respond)

    def close(self) -> None:
        """Ends a benchmark, and closes the environment of evaluations."""
        self._commander.close()

    def _paced_stop(self) -> bool:
        """Returns whether to stop an evaluation on the only environment there is, which holds the control rate too."""
        metronome, stop = self._metronome, self._told_to_stop
        while metronome is not None and not stop.requested and not metronome.wait(stop.wake):
            stop.wake.clear()
        return stop()
