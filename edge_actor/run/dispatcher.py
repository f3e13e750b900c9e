"""Tells each part of the actor what the learner said that concerns it."""

from __future__ import annotations

from broker.contract import errors, messages
from edge_actor.acting import exploration, pace
from edge_actor.experience import recorder, spool
from edge_actor.orders import runner
from edge_actor.run import command_runner, fleet_connection, policy_switch, status


class Dispatcher:
    """Hands on assignments, receipts, commands, orders, and the learner's states.

    Args:
        connection: Where messages wait.
        outbox: Lets go of what has its receipt.
        record: Follows assignments; so do `grant`, `explorer`, `policies` and `reporter`.
        commands: Carries out commands.
        orders: Carries out orders.

    Attributes:
        assignment: The last one for this boot; None before the first.
        has_receipt: The learner has experience of this boot.
    """

    def __init__(
        self,
        connection: fleet_connection.FleetConnection,
        outbox: spool.Spool,
        record: recorder.Recorder,
        grant: pace.Grant,
        explorer: exploration.Explorer,
        policies: policy_switch.PolicySwitch,
        reporter: status.StatusReporter,
        commands: command_runner.CommandRunner,
        orders: runner.OrderRunner,
    ) -> None:
        self._connection = connection
        self._spool = outbox
        self._recorder = record
        self._grant = grant
        self._explorer = explorer
        self._policies = policies
        self._status = reporter
        self._commands = commands
        self._orders = orders
        self.assignment: messages.Assignment | None = None
        self.has_receipt = False

    def dispatch(self) -> None:
        """Hands on every message that waits.

        Raises:
            ActorRefused: The learner does not want this actor.
        """
        while (message := self._connection.inbox.get()) is not None:
            if isinstance(message, messages.Assignment):
                self._assign(message)
            elif isinstance(message, messages.Receipt):
                self._spool.acknowledge(message)
                self.has_receipt = self.has_receipt or message.boot == self._connection.boot
            elif isinstance(message, messages.Command):
                self._commands.run(message, paused=self._orders.paused)
            elif isinstance(message, messages.Orders):
                self._orders.run(message)
            elif message.online and message.fingerprint:
                self._spool.follow_learner(message.session)

    def _assign(self, assignment: messages.Assignment) -> None:
        if assignment.boot != self._connection.boot:
            return
        if self._connection.follow_shard(assignment.shard):
            self._spool.rewind()  # whoever listens there may not have had what is on its way; else it is a duplicate
        if assignment.refused:
            raise errors.ActorRefused(
                f"the learner refused this actor: {assignment.refused}",
                where=f"actor {self._connection.actor_id}",
                todo="do as it says; or start it with the other actors' environment, or on another fleet",
            )
        self.assignment = assignment
        self._status.assign(assignment)
        self._recorder.assign(assignment)
        self._grant.assign(assignment, self._recorder.recorded)
        self._explorer.assign(assignment)
        self._policies.follow(assignment.channel)
