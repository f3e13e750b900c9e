"""Refuses genuine messages that no longer count: a broker may repeat the learner's old ones, and hold back new ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from broker.contract import errors, messages

_log = logging.getLogger(__name__)
SILENCE_S = 10.0
"""The learner speaks every two seconds."""


class ReplayGuard:
    """Remembers what the learner said last, and refuses what is older.

    Policies have an order of their own (`assembly`); receipts only ever take away what they cover; commands are for one
    boot and carried out once (`command`); orders are numbered over all boots (`orders/order_log`).

    Args:
        clock: Monotonic seconds.

    Attributes:
        silences: How often the learner was not heard of for SILENCE_S.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard_at = clock()
        self._silent = False
        self._beat = (0, 0)
        self._assigned: messages.Assignment | None = None
        self.silences = 0

    def check(self, message: object, boot: int) -> bool:
        """Takes note of a genuine message.

        Args:
            message: What came.
            boot: Of this actor.

        Returns:
            False for a state of the learner that says nothing new: brokers repeat it with every connection, and one
            that repeats it for ever must not pass for a learner that lives.

        Raises:
            MessageError: One that is newer was here before. `reason` is `older_state` or `older_assignment`.
        """
        if isinstance(message, messages.LearnerState):
            return self._check_state(message)
        if isinstance(message, messages.Assignment) and message.boot == boot:
            self._check_assignment(message)
        return True

    def check_silence(self) -> None:
        """Notices that nothing new comes, and that it does again. To be called now and then."""
        silent = self._clock() - self._heard_at > SILENCE_S
        if silent and not self._silent:
            self.silences += 1
            _log.warning("nothing new from the learner for %g s: it is away, or someone holds it back", SILENCE_S)
        elif self._silent and not silent:
            _log.info("the learner is heard again")
        self._silent = silent

    def _check_state(self, state: messages.LearnerState) -> bool:
        if not state.online:  # a will was made before the first heartbeat, and says nothing of when
            beat = (state.epoch, self._beat[1] if state.epoch == self._beat[0] else 0)
        else:
            beat = (state.epoch, state.heartbeat)
        if beat < self._beat:
            raise errors.MessageError(f"a state of the learner, {beat} after {self._beat}", reason="older_state")
        is_new = beat > self._beat
        if is_new:
            self._beat, self._heard_at = beat, self._clock()
        return is_new

    def _check_assignment(self, new: messages.Assignment) -> None:
        """Epochs grow with learners; within one, grants and versions grow too."""
        old = self._assigned
        if old is None or new.epoch > old.epoch:
            self._assigned = new
            return
        goes_back = new.steps_granted < old.steps_granted or new.lockstep_version < old.lockstep_version
        if new.epoch < old.epoch or goes_back:
            raise errors.MessageError("an assignment that a newer one has replaced", reason="older_assignment")
        self._assigned = new
