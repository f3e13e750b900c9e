"""Checks a sample of what actors say they did, on a thread of its own that takes a hundredth of a core at most."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import NamedTuple

import numpy as np

from broker.contract import messages, specs
from learner.audit import model_store, recompute
from learner.fleet import actors

_log = logging.getLogger(__name__)
PERIOD_S = 2.0
"""Seconds after which a message of an actor is checked, whatever the share."""
DUTY = 0.01
"""The largest share of a core that is spent on it. In a fleet for which that is too little, each actor's turn comes
later."""
_STEPS_MAX = 1024
_STEPS_MIN = 32
_ELEMENTS_MAX = 2_000_000
"""Elements of the observations of a check: in float32 they take four times as many bytes."""
_JOB_S = 0.005
"""Seconds of a check: where steps are dear, as of images, it takes fewer of them, that Python's lock is soon free."""


class Finding(NamedTuple):
    """What a check of a message found: nothing wrong, or how many of its steps cannot be true, and why."""

    actor_id: str
    boot: int
    seq: int
    verdict: recompute.Verdict


class Auditor:
    """Samples messages, and computes their steps again. Its methods are for one thread.

    Args:
        spec: Of the environment.
        head: What policies put out.
        precision: Of policies.
        live: The actors, by name.
        share: Share of the messages that are checked; 0: none.
        models: Has the policies, some of them in files, which the thread reads.
        clock: Monotonic seconds.

    Attributes:
        steps: Steps that were computed again.
        cpu_s: CPU time that took.
        checked: Messages.
        tolerant: Messages among them of actors whose kernels are not XNNPACK: those are held to a step of int8.
        passed_over: Messages whose turn it was, and which could not be checked, by reason.
    """

    def __init__(
        self,
        spec: specs.EnvSpec,
        head: specs.Head,
        precision: str,
        live: Mapping[str, actors.Actor],
        share: float,
        models: model_store.ModelStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._head, self._precision = spec, head, precision
        self._live, self._share, self._models, self._clock = live, share, models, clock
        self._random = random.Random()  # of the machine's entropy: an actor must not know when it is looked at
        self._rng = np.random.default_rng()
        self._worker = futures.ThreadPoolExecutor(1, "audit")
        self._job: futures.Future[Finding | None] | None = None
        self._resumes_at, self._step_s = 0.0, 5e-6
        self._checked_at: dict[str, float] = {}
        self.steps = self.checked = self.tolerant = 0
        self.cpu_s = 0.0
        self.passed_over: Counter[str] = Counter()

    def consider(self, actor_id: str, experience: messages.Experience) -> None:
        """Has an accepted message checked, if it is its actor's turn."""
        if not self._share or not experience.version:
            return
        now = self._clock()
        is_due = now - self._checked_at.get(actor_id, -PERIOD_S) >= PERIOD_S or self._random.random() < self._share
        if not is_due or self._job is not None or now < self._resumes_at:
            return
        self._checked_at[actor_id] = now
        acting = self._acting(actor_id, experience)
        if acting is not None:
            self._job = self._worker.submit(self._check, actor_id, experience, acting)

    def pop_finding(self) -> Finding | None:
        """Returns what the check that has ended since the last call found; None if none has, or it told nothing."""
        if self._job is None or not self._job.done():
            return None
        job, self._job = self._job, None
        return job.result()

    def wait(self) -> Finding | None:
        """Returns what the check under way finds; None as `pop_finding`."""
        if self._job is not None:
            futures.wait([self._job])
        return self.pop_finding()

    def close(self) -> None:
        """Waits for the check under way, and ends the thread."""
        self._worker.shutdown()

    def metrics(self) -> dict[str, float]:
        """Returns what was checked so far, for a row of metrics."""
        return {"audited_messages": self.checked, "audited_steps": self.steps}

    def summary(self) -> dict[str, object]:
        """Returns what was checked, for the summary."""
        return {
            "audited_messages": self.checked,
            "audited_steps": self.steps,
            "audited_with_tolerance": self.tolerant,
            "audit_cpu_s": round(self.cpu_s, 4),
            "audits_passed_over": dict(self.passed_over),
        }

    def _acting(self, actor_id: str, experience: messages.Experience) -> recompute.Acting | None:
        known = self._live.get(actor_id)
        process = known.process(experience.boot) if known else None
        if process is None or process.assignment is None or process.state is None or process.state.birth is None:
            self.passed_over["unknown boot"] += 1
            return None
        assigned, born = process.assignment, process.state.birth
        if assigned.boot != experience.boot or assigned.epoch != experience.assigned_epoch:
            self.passed_over["recorded for an earlier session"] += 1
            return None
        kernels = process.state.vitals.delegate or born.delegate
        if kernels not in ("XNNPACK", "built-in"):
            self.passed_over["its kernels are not known here"] += 1
            return None
        self.tolerant += kernels != "XNNPACK"
        return recompute.Acting(assigned, born.n_envs, kernels)

    # -- the thread's job -------------------------------------------------------------------------------------------

    def _check(self, actor_id: str, experience: messages.Experience, acting: recompute.Acting) -> Finding | None:
        began = time.thread_time()
        order = messages.Order(experience.epoch, experience.version)
        model = self._models.find(order)
        steps = 0
        try:
            if model is None:
                self.passed_over["policy no longer kept"] += 1
                return None
            n = len(experience.reward)
            most = min(_STEPS_MAX, _JOB_S / self._step_s, _ELEMENTS_MAX / self._spec.observation.size)
            wanted = max(_STEPS_MIN, int(most))
            chosen = np.sort(self._rng.choice(n, min(n, wanted), replace=False)).astype(np.int64)
            verdict = recompute.audit(
                *(experience, self._spec, self._head, self._precision, acting, chosen, model),
                lambda: self._others(order),
            )
            steps = verdict.steps
            self.checked += 1
            self.steps += steps
            return Finding(actor_id, experience.boot, experience.seq, verdict)
        except (RuntimeError, ValueError) as error:
            self.passed_over["not computed"] += 1
            _log.warning("steps of %s, by policy %s, cannot be computed again: %s", actor_id, order, error)
            return None
        finally:
            took_s = time.thread_time() - began
            self.cpu_s += took_s
            if steps:
                self._step_s += 0.2 * (took_s / steps - self._step_s)
            self._resumes_at = self._clock() + took_s / DUTY

    def _others(self, order: messages.Order) -> list[tuple[str, bytes]]:
        newest = self._models.newest_first()
        return [(f"version {one.version}, and says {order.version}", model) for one, model in newest if one != order]
