"""What each actor of a shard may send: granted by the learner's assignments, as the worker hears them itself.

An actor hears of a grant by the broker that its experience then goes by, and so does the worker, before: on one
connection a broker keeps the order. A worker that begins hears what is retained, before it hears experience.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.contract import messages


class Grants:
    """Compares what comes with what was granted.

    Args:
        epoch: Of the learner's session.
        granted: What it has granted so far, by actor and boot; for what a broker no longer retains.
        received: What has come of that, by actor and boot.
        earlier_steps: Steps that each actor may send of the run's sessions before.
        earlier: What is left of those, of the actors that sent some.
    """

    def __init__(
        self,
        epoch: int,
        granted: Mapping[tuple[str, int], int],
        received: Mapping[tuple[str, int], int],
        earlier_steps: float,
        earlier: Mapping[str, float],
    ) -> None:
        self._epoch, self._granted, self._received = epoch, dict(granted), dict(received)
        self._earlier_steps, self._earlier = earlier_steps, dict(earlier)
        self._rows: dict[str, tuple[int, int]] = {}  # by actor: boot, and environments that it steps at once

    def hear_state(self, actor_id: str, state: messages.ActorState) -> None:
        """Takes note of how many environments an actor steps at once: a grant is rounded up to whole rows."""
        if state.birth is not None:
            self._rows[actor_id] = state.boot, state.birth.n_envs

    def hear_assignment(self, actor_id: str, assignment: messages.Assignment) -> None:
        """Takes note of a grant, if it is of this session."""
        if assignment.epoch == self._epoch:
            key = actor_id, assignment.boot
            self._granted[key] = max(self._granted.get(key, 0), assignment.steps_granted)

    def may_send(self, actor_id: str, boot: int, assigned_epoch: int, steps: int) -> bool:
        """Returns whether so many steps more were granted to a boot, by this session or an earlier one of the run."""
        return steps <= self._credit(actor_id, boot, assigned_epoch)

    def count_received(self, actor_id: str, boot: int, assigned_epoch: int, steps: int) -> int:
        """Counts what came of a grant, refused for its content or not; returns how many steps count: none beyond it."""
        left = self._credit(actor_id, boot, assigned_epoch) - steps
        if left < 0:
            return 0
        if assigned_epoch != self._epoch:
            self._earlier[actor_id] = left
        else:
            self._received[actor_id, boot] = self._received.get((actor_id, boot), 0) + steps
        return steps

    def _credit(self, actor_id: str, boot: int, assigned_epoch: int) -> float:
        if assigned_epoch != self._epoch:
            return self._earlier.get(actor_id, self._earlier_steps)
        key = actor_id, boot
        if key not in self._granted:
            return 0
        of_boot, n_envs = self._rows.get(actor_id, (boot, 1))
        rounding = n_envs - 1 if of_boot == boot else 0
        return self._granted[key] + rounding - self._received.get(key, 0)
