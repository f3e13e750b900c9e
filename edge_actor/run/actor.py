"""The life of one actor process: it finds a broker and a task, acts, and says goodbye.

One thread acts, others talk to the network, check policies and beat.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from broker.contract import errors
from broker.mqtt import connect_errors
from edge_actor.run import acting_loop, fleet_connection, sender, stopping

_log = logging.getLogger(__name__)


class Actor:
    """One actor process, made by `build.build`.

    Args:
        connection: To the fleet; started here.
        told_to_stop: Whether the actor is to end.
        loop: Acts in the environment that was named; None to take the learner's task.
        make_loop: Makes the loop for the task of that name.
        timeout_s: How long to look for a broker, and for a task.
        patient: Look for them for ever: nobody is there who would start it again, or read why it ended.

    Attributes:
        connection: As given.
        loop: Acts; None as long as nobody named an environment.
    """

    def __init__(
        self,
        connection: fleet_connection.FleetConnection,
        told_to_stop: stopping.Stopping,
        loop: acting_loop.ActingLoop | None,
        make_loop: Callable[[str], acting_loop.ActingLoop],
        *,
        timeout_s: float,
        patient: bool,
    ) -> None:
        self.connection = connection
        self._told_to_stop = told_to_stop
        self.loop = loop
        self._make_loop = make_loop
        self._timeout_s = timeout_s
        self._patient = patient

    def run(self) -> None:
        """Acts until `stop`.

        Raises:
            ActorRefused: The learner does not want this actor.
            BrokerUnreachable: No broker let it in, there is nothing to do without one, and it is not `patient`.
            EnvironmentFailure: The learner's task cannot be made here, or none was named.
        """
        try:
            loop = self.start()
            if loop is not None:
                self._act(loop)
        finally:
            self.close()

    @property
    def follows(self) -> str:
        """What was ordered to follow its end: `restart`, `reboot` or nothing."""
        return self._told_to_stop.then

    def stop(self) -> None:
        """Ends `run` soon; from any thread."""
        self._told_to_stop.request()

    def start(self) -> acting_loop.ActingLoop | None:
        """Connects, takes the learner's task if there is no other, and gives birth.

        Returns:
            The loop, ready to run; None if it was told to stop while it waited for a task.
        """
        if self.loop is not None:
            self.loop.policies.start()
        self.connection.link.start()
        self._find_a_broker()
        if self.loop is None:
            name = self._find_a_task()
            if not name:
                return None
            self.loop = self._make_loop(name)
            self.loop.policies.start()
        environment = self.loop.environment.environment
        _log.info(
            "actor %s boot %d: %s, %s, %d at once, %s",
            self.connection.actor_id,
            self.connection.boot,
            environment.name,
            environment.spec.describe(),
            environment.n_envs,
            self.loop.status.runtime,
        )
        self.loop.status.start()
        return self.loop

    def close(self) -> None:
        """Sends what is there, says goodbye, and frees everything."""
        try:
            if self.loop is not None:
                self.loop.close()
        finally:
            self.connection.close()

    def _act(self, loop: acting_loop.ActingLoop) -> None:
        try:
            loop.run()
        except errors.ActorRefused:
            loop.hand_over(self._told_to_stop)
            raise
        if self.follows == "reboot":  # what is held in memory ends with it
            loop.hand_over(lambda: not self.follows)

    def _find_a_broker(self) -> None:
        """Waits until one lets it in. Whatever else answers is no reason to end: the link says so, and tries again."""
        link, wake = self.connection.link, self.connection.inbox.wake
        until = time.monotonic() + self._timeout_s
        while not link.connected and not self._told_to_stop():
            if time.monotonic() > until:
                if self.loop is not None and self.loop.acts_alone:
                    _log.warning("no broker: acting with the stored policy until there is one")
                    return
                if not self._patient:
                    raise connect_errors.as_error(link.refusals, self._timeout_s)
            wake.wait(sender.IDLE_S)
            wake.clear()

    def _find_a_task(self) -> str:
        """Waits until a learner names one; empty if it was told to stop first."""
        if self._patient:
            _log.info("no environment is named here: waiting until a learner names one")
        limit_s = math.inf if self._patient else self._timeout_s
        return self.connection.task.wait(limit_s, self.connection.inbox.wake, self._told_to_stop)
