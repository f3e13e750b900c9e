"""The learner's task, for an actor that has no environment of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from broker.contract import errors, messages
from edge_actor.environment import env

_IDLE_S = 0.2


class Task:
    """Remembers the task: told on the network thread, waited for on another."""

    def __init__(self) -> None:
        self._env_id = ""

    def observe(self, state: messages.LearnerState) -> None:
        """Takes note of the task that a live learner names."""
        if state.online and state.env_id:
            self._env_id = state.env_id

    def wait(self, timeout_s: float, wake: threading.Event, stopping: Callable[[], bool]) -> str:
        """Returns the environment's name once there is one; empty if `stopping` came first.

        Raises:
            EnvironmentFailure: No learner named one in time, or one that would make this actor import code.
        """
        until = time.monotonic() + timeout_s
        while not self._env_id and not stopping():
            if time.monotonic() > until:
                raise errors.EnvironmentFailure(
                    "this actor has no environment, and no learner has said which one to take",
                    where="env",
                    todo="name one (--env CartPole-v1), or start the learner first",
                )
            wake.wait(_IDLE_S)
            wake.clear()
        if self._env_id:
            env.check_from_network(self._env_id)
        return self._env_id
