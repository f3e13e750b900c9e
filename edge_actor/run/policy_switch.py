"""The policy that acts, and the moment at which the learner's newest replaces it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from broker.contract import messages
from edge_actor.acting import pace
from edge_actor.experience import recorder
from edge_actor.policies import policy, receiver
from edge_actor.run import fleet_connection

_log = logging.getLogger(__name__)
_NONE = messages.Order(0, 0)
_BUILD_MARGIN = 1.5  # slack that is wanted, by what the last swap took


class PolicySwitch:
    """Puts the newest policy in the place of the one that acts, when that suits the acting loop.

    Args:
        policies: Where policies come from.
        connection: Brings them.
        record: Told which policy chooses the steps that follow.
        metronome: Of the control rate; None for an actor that acts as fast as it can.

    Attributes:
        acting: The policy that acts; None before the first.
        receiver: Where policies come from.
    """

    def __init__(
        self,
        policies: receiver.PolicyReceiver,
        connection: fleet_connection.FleetConnection,
        record: recorder.Recorder,
        metronome: pace.Metronome | None,
    ) -> None:
        self.receiver = policies
        self._connection = connection
        self._recorder = record
        self._metronome = metronome
        self._known: set[str] = set()  # channels
        self.acting: policy.Policy | None = None

    def start(self) -> None:
        """Acts with the stored policy, if there is a good one, and listens for others."""
        self.receiver.start(self._connection.verifier, self._connection.topics)
        self._replace(lambda: None)
        self._subscribe()
        self._connection.on_announced = self.receiver.announce

    @property
    def is_waiting(self) -> bool:
        """Returns whether there is a policy to build, which an episode's end would suit."""
        return self.receiver.has_work

    def follow(self, channel: str) -> None:
        """Takes policies from another channel from now on, and no longer from the one before."""
        if channel != self.receiver.channel:
            self.receiver.channel = channel
            self._subscribe()

    def replace_if_suitable(
        self, is_running: bool, allowed_rows: Callable[[], int], on_replaced: Callable[[], None]
    ) -> None:
        """Builds what waits for it, if this is a good moment.

        Args:
            is_running: Whether an episode is in progress.
            allowed_rows: Returns how many rows may be recorded now.
            on_replaced: Called when another policy acts.
        """
        if self.receiver.has_work and self._is_suitable(is_running, allowed_rows):
            self._replace(on_replaced)

    def is_older_than(self, limit_s: float) -> bool:
        """Returns whether for so long no newer policy came, nor word that there is none; never for 0."""
        return limit_s > 0 and time.monotonic() - self.receiver.heard_at > limit_s

    def vitals(self) -> dict[str, Any]:
        """Returns what acts, and how far the newest policy has come, by fields of `messages.Vitals`."""
        epoch, version = self.acting.order if self.acting else _NONE
        acts = {"policy_epoch": epoch, "policy_version": version, "delegate": self.delegate}
        return acts | self.receiver.vitals()

    @property
    def delegate(self) -> str:
        """The kernels that the acting policy runs on; empty before the first."""
        return self.acting.delegate if self.acting else ""

    def close(self) -> None:
        """Stores what was not stored yet."""
        self.receiver.close()

    def _is_suitable(self, is_running: bool, allowed_rows: Callable[[], int]) -> bool:
        """Before the first step, at an episode's end, in slack, or when none of these came in time."""
        if self.acting is None or not is_running or self.receiver.overdue:
            return True
        if self._metronome is not None:
            return self._metronome.has_room(_BUILD_MARGIN * 1e-3 * self.receiver.build_ms)
        ended = self._recorder.trajectory.ended
        return len(ended) > 1 or bool(ended[0]) or not allowed_rows()

    def _replace(self, on_replaced: Callable[[], None]) -> None:
        built = self.receiver.newest()
        if built is None:
            return
        if self.acting is None:
            _log.info("policy %s acts on %s", built.order, built.delegate)
        self.acting = built
        on_replaced()  # first: to make a message of the steps before takes as long as building
        self._recorder.flush()
        self._recorder.order = built.order

    def _subscribe(self) -> None:
        connection, channel = self._connection, self.receiver.channel
        if channel not in self._known:
            self._known.add(channel)
            self.receiver.listen(connection.link.route, connection.topics, connection.inbox.opener)
        connection.link.follow(connection.topics.policies(channel))
