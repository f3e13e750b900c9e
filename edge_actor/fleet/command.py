"""Commands of the learner to one actor, and the reports that answer them."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable

import numpy as np

from broker.contract import errors, messages
from edge_actor.acting import evaluate
from edge_actor.board import clock
from edge_actor.environment import env, failure
from edge_actor.fleet import bench_order
from edge_actor.policies import manifest_check, policy

Build = Callable[[messages.Manifest, bytes], policy.Policy]
_REMEMBERED = 4096  # a broker may send any of them again
_EPISODES_LIMIT = 1000
_OWN_LIMITS = evaluate.Limits(max_steps=10_000_000, max_s=600.0)
"""The limits of an evaluation whose command has none: an actor that acts flat out does nothing else meanwhile."""


class Commander:
    """Carries out commands for one boot, each of them once.

    Keeps the environment that evaluations use.

    Attributes:
        measuring: A benchmark runs, which acting would disturb.
    """

    def __init__(self, boot: int) -> None:
        self._boot = boot
        self._done: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)
        self._environment: env.Environment | None = None
        self._lock = threading.Lock()
        self._benchmark = bench_order.Benchmark()
        self.measuring = False

    def answer(
        self, order: messages.Command, build: Build, make: Callable[[], env.Environment], stop: Callable[[], bool]
    ) -> messages.Report | None:
        """Carries out a command on an environment of its own.

        Args:
            order: From the network.
            build: Makes a policy of batch 1.
            make: Makes a single environment; called once.
            stop: Asked before each step.

        Returns:
            None if it is for another boot, was done before, or was stopped.
        """
        if order.kind != "evaluate":
            return self.refuse(order, f"this actor cannot {order.kind!r}")
        with self._lock:
            try:
                if self._environment is None:
                    self._environment = make()
                report = self.evaluate(order, build, self._environment, stop)
                if report is not None and report.error:
                    self._forget()  # whatever is wrong with it, the next evaluation begins with another one
                return report
            except errors.ActorqError as error:
                return self.refuse(order, error.what)

    def start(
        self,
        order: messages.Command,
        build: Build,
        make: Callable[[], env.Environment],
        stop: Callable[[], bool],
        respond: Callable[[messages.Report | None], None],
    ) -> None:
        """Does what `answer` does in a thread, for an actor that has a control rate to hold meanwhile."""
        threading.Thread(
            target=lambda: respond(self.answer(order, build, make, stop)), name="command", daemon=True
        ).start()

    def bench(self, order: messages.Command, respond: Callable[[messages.Report | None], None]) -> None:
        """Measures this board, in a thread; `respond` gets a report per row, and one at the end."""
        if self.measuring:
            respond(self.refuse(order, "this actor is measuring already"))
            return
        if not self._is_new(order):
            return
        self.measuring = True

        def measure() -> None:
            try:
                self._benchmark.run(order, respond)
            finally:
                self.measuring = False
                respond(None)

        threading.Thread(target=measure, name="bench", daemon=True).start()

    def evaluate(
        self, order: messages.Command, build: Build, environment: env.Environment, stop: Callable[[], bool]
    ) -> messages.Report | None:
        """Scores the enclosed policy in the environment given. Returns as `answer`."""
        if not self._is_new(order):
            return None
        try:
            if order.manifest is None or not 0 < order.episodes <= _EPISODES_LIMIT:
                raise errors.PolicyError(f"evaluate needs a policy and 1 to {_EPISODES_LIMIT} episodes")
            manifest_check.check_policy(order.manifest, order.model.data, environment.spec, clock.now_s())
            acting = build(order.manifest, order.model.tobytes())
            score = evaluate.run(acting, environment, order.episodes, order.seed, stop, _limits(order))
        except (Exception, SystemExit) as error:  # a broken environment's too: the learner hears of it, and we go on
            return messages.Report(order.command_id, order.kind, error=failure.text(error))
        if score is None:
            return None
        return messages.Report(
            order.command_id,
            order.kind,
            labels={
                "runtime": str(acting.interpreter.runtime),
                "delegate": acting.delegate,
                "sha256": order.manifest.sha256,
            },
            values=score.values,
            episode_return=score.episode_return.astype(np.float32),
        )

    def close(self) -> None:
        """Ends a benchmark, and closes the environment of evaluations."""
        self._benchmark.stop()
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            with contextlib.suppress(Exception, SystemExit):  # it may be the environment that is broken
                environment.close()

    def refuse(self, order: messages.Command, what: str) -> messages.Report | None:
        """Returns the report that says why it is not done. Returns as `answer`."""
        return messages.Report(order.command_id, order.kind, error=what) if self._is_new(order) else None

    def _is_new(self, order: messages.Command) -> bool:
        if order.boot != self._boot or order.command_id in self._done:
            return False
        self._done.append(order.command_id)
        return True


def _limits(order: messages.Command) -> evaluate.Limits:
    """Returns the limits of the command; our own in the place of one that is none."""
    return evaluate.Limits(
        max_steps=order.max_steps if order.max_steps > 0 else _OWN_LIMITS.max_steps,
        max_s=order.max_s if order.max_s > 0 else _OWN_LIMITS.max_s,
    )
