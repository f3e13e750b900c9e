"""The environment as something that can break: begun, made safe, and made anew."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from broker.contract import errors, messages, specs
from broker.program import logs
from edge_actor import config
from edge_actor.environment import answers, env, failure
from edge_actor.experience import trajectory

_log = logging.getLogger(__name__)
_RETRY_FIRST_S, _RETRY_LIMIT_S = 0.02, 10.0
"""Pause before the environment is made anew, and what it grows to while it fails without a step in between."""
_LOG_PERIOD_S = 1.0
"""Between two log lines of failures in quick succession; all are counted."""


class SupervisedEnv:
    """The environment that the actor acts in.

    Args:
        environment: As made by `env.make`.
        settings: Of the actor.

    Attributes:
        environment: The present one; another after a failure.
        failures: Times that it failed.
        failure: How it did the last time, in a line.
        running: False until `begin`, and again after `stop_episode`.
    """

    def __init__(self, environment: env.Environment, settings: config.ActorConfig) -> None:
        self.environment = environment
        self.failures = 0
        self.failure = ""
        self.running = False
        self._pause_s = _RETRY_FIRST_S
        self._failed_after = 0  # steps
        self._settings = settings
        self._seeded = self._clips = False
        self._safe_action = self._parse(settings.safe_action) if settings.safe_action else None

    @property
    def safe_action(self) -> Any:
        """The safe action as a policy would choose it, or None."""
        return self._safe_action

    def begin(self, record: trajectory.Trajectory, assignment: messages.Assignment | None) -> None:
        """Resets; the first time seeded by settings, assignment and slot, so that actors with equal settings differ."""
        seed = None
        if not self._seeded:
            entropy = [self._settings.seed, *((assignment.seed, assignment.slot) if assignment else ())]
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
            self._seeded = True
        reset = answers.clipped(self.environment.reset) if record.clips else self.environment.reset
        record.start(reset(seed=seed)[0])
        self.running = True

    def report_clipping(self, record: trajectory.Trajectory) -> None:
        """Logs once that observations are clipped."""
        if record.clips and not self._clips:
            self._clips = True
            _log.warning("the environment observes more than %g: clipped from now on", specs.MAX_MAGNITUDE)

    def stop_episode(self) -> None:
        """Has the next step begin an episode: someone else used the environment."""
        self.running = False

    def act_safely(self) -> None:
        """Takes the safe action, if there is one, and does not care what comes of it."""
        if self._safe_action is None or not self.running:
            return
        try:
            self.environment.step(self.environment.to_env(self._safe_action))
        except (Exception, SystemExit) as error:  # it may be the environment that failed
            _log.warning("the safe action failed: %s", failure.text(error))

    def rebuild(self, error: BaseException, steps: int, stopping: Callable[[], bool], wake: threading.Event) -> None:
        """Makes the environment anew after a failure, as often as it takes, with growing pauses.

        Args:
            error: What it raised.
            steps: Taken by now in this boot. If it took some since the last failure, the pause is short again.
            stopping: Asked all the time.
            wake: Ends a wait.

        Raises:
            SpecError: It came back with other spaces.
        """
        name, spec, n_envs = self.environment.name, self.environment.spec, self._settings.envs
        self.act_safely()
        self.running = False
        if steps > self._failed_after:
            self._pause_s = _RETRY_FIRST_S
        self._failed_after = steps
        self._close()
        self._count(f"step {steps + 1}: {failure.text(error)}")
        while not stopping():
            until = time.monotonic() + self._pause_s
            while not stopping() and (left := until - time.monotonic()) > 0:
                wake.wait(left)
                wake.clear()
            self._pause_s = min(2 * self._pause_s, _RETRY_LIMIT_S)
            try:
                made = env.make(
                    name, n_envs, self._settings.env_arguments, frame_stack=self._settings.frame_stack, training=True
                )
            except (Exception, SystemExit) as again:
                self._count(failure.text(again))
                continue
            if made.spec != spec:
                raise errors.SpecError(
                    f"the environment came back as {made.spec.describe()}, it was {spec.describe()}",
                    where=name,
                    todo="restart this actor",
                )
            self.environment = made
            return

    def vitals(self) -> dict[str, Any]:
        """Returns how the environment fails, by fields of `messages.Vitals`."""
        return {"env_failures": self.failures, "env_failure": self.failure}

    def close(self) -> None:
        """Takes the safe action, and closes the environment."""
        self.act_safely()
        self._close()

    def _count(self, text: str) -> None:
        self.failures += 1
        self.failure = failure.line(text)
        _log.warning(
            "the environment failed, %d times by now: %s; making it anew",
            self.failures,
            self.failure,
            extra=logs.once("failed", again_s=_LOG_PERIOD_S),
        )

    def _close(self) -> None:
        try:
            self.environment.close()
        except (Exception, SystemExit) as error:
            _log.warning("the environment did not close: %s", failure.text(error))

    def _parse(self, text: str) -> Any:
        spec, n_envs = self.environment.spec.action, self.environment.n_envs
        try:
            value = np.asarray(json.loads(text), np.float32).reshape(spec.shape)
        except (TypeError, ValueError) as error:
            raise errors.ConfigError(
                f"safe_action {text} does not fit {self.environment.spec.describe()}: {error}", where="safe_action"
            ) from error
        if spec.kind != "continuous" and (value != np.floor(value)).any():
            raise errors.ConfigError(f"safe_action must be whole numbers, not {text}", where="safe_action")
        one = int(value) if spec.kind == "discrete" else value.astype(spec.dtype)
        if spec.kind == "discrete" and not 0 <= one < spec.n:
            raise errors.ConfigError(f"safe_action must be 0 to {spec.n - 1}, not {text}", where="safe_action")
        if spec.kind == "multi_discrete" and not ((one >= 0) & (one <= np.array(spec.high))).all():
            raise errors.ConfigError(
                f"safe_action must be 0 to {[n - 1 for n in spec.choices]}, not {text}", where="safe_action"
            )
        return np.stack([one] * n_envs) if self.environment.vectorized else one
