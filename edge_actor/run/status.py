"""The actor's state: published at birth, with every connection, and with every heartbeat."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import messages
from edge_actor.acting import supervised_env
from edge_actor.fleet import heartbeat, vitals
from edge_actor.run import fleet_connection, policy_switch


class StatusReporter:
    """Publishes who this actor is, and how it and its board are doing.

    Args:
        connection: To the fleet.
        environment: Acted in.
        policies: Know the kernels that the acting policy runs on.
        sources: Tell how the actor's stages are doing.
        runtime: Name and version of the TFLite runtime.
        rate_hz: Of control; 0 for none.
        ordered: Settings that orders changed, as KEY=VALUE.
        period_s: Between two heartbeats.

    Attributes:
        runtime: As given.
        heartbeat: The thread that publishes.
    """

    def __init__(
        self,
        connection: fleet_connection.FleetConnection,
        environment: supervised_env.SupervisedEnv,
        policies: policy_switch.PolicySwitch,
        sources: Sequence[vitals.Source],
        *,
        runtime: str,
        rate_hz: float,
        ordered: tuple[str, ...],
        period_s: float,
    ) -> None:
        self._connection = connection
        self._environment = environment
        self._policies = policies
        self._sources = sources
        self.runtime = runtime
        self._rate_hz = rate_hz
        self._ordered = ordered
        self._vitals = messages.Vitals()
        self.heartbeat = heartbeat.Heartbeat(self.publish, period_s)

    def start(self) -> None:
        """Gives birth, and beats from now on."""
        self.publish()
        self.heartbeat.start()

    def assign(self, assignment: messages.Assignment) -> None:
        """Follows an assignment: the learner of a large fleet asks for longer periods."""
        self.heartbeat.assigned_s = assignment.message_period_s

    def publish(self) -> None:
        """Publishes the state as it is, and as it will be with each connection to come."""
        self._connection.link.retain(self._connection.state_topic, self._state)

    def close(self) -> None:
        """Ends the heartbeats."""
        self.heartbeat.close()

    def _state(self) -> bytes:
        self._connection.inbox.check_silence()
        made, delegate = self._environment.environment, self._policies.delegate
        born = vitals.birth(made.name, made.spec, made.n_envs, self.runtime, delegate, self._rate_hz, self._ordered)
        self._vitals = self.heartbeat.attempt(lambda: vitals.merge(self._sources), self._vitals)
        return self._connection.states.online(born, self._vitals)
