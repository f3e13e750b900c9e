"""Decides how long runs shall be, and how often steps are sampled where actors shall be what is waited for.

Decided once for a regime and size, by a first short run of the fastest arm that counts for nothing: all arms then have
the same settings, and so the same work for the learner per step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from learner.study.compare import figures

IDLE_MIN = 0.3
"""The least share of the time for which the learner must wait where actors are what is waited for."""
_BUSY = 0.45
"""The share of time for which the fastest arm may keep the learner busy: others leave it more, and the first run may
have met a quiet moment."""
_STARVED = 0.15
_CALL_S, _PUBLISH_S = 0.2, 1.0
_SAMPLES_PER_INSERT_MIN = 0.02
_STEPS_MIN = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Settings that the runs of a regime and size share.

    Attributes:
        steps: Environment steps of a run for throughput.
        samples_per_insert, updates_per_call, publish_period_updates: As in config; None leaves what is tuned.
        remark: What could not be decided, and why.
    """

    steps: int
    samples_per_insert: float | None = None
    updates_per_call: int | None = None
    publish_period_updates: int | None = None
    remark: str = ""

    def flags(self) -> list[str]:
        """Returns the settings as flags."""
        names = ("samples_per_insert", "updates_per_call", "publish_period_updates")
        given = {name: getattr(self, name) for name in names}
        return [word for name, value in given.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]


def has_replay(tuned: Mapping[str, Any]) -> bool:
    """Returns whether how often a step is sampled can be chosen; else it is learned from in one phase, as tuned."""
    return "updates_per_call" in tuned


def first(tuned: Mapping[str, Any], samples_per_insert: float) -> Pace:
    """Returns what the first short run in the actor-bound regime is made with: little work, or what is asked for."""
    return Pace(
        0,
        samples_per_insert or min(tuned["samples_per_insert"], 0.25),
        min(tuned["updates_per_call"], 4),
        min(tuned["publish_period_updates"], 4),
    )


def was_starved(found: figures.Figures, pilot: Pace) -> bool:
    """Returns whether actors waited for the learner, and how fast they are is not known; and less work is possible."""
    return found.get("idle_share", 1.0) < _STARVED and (pilot.samples_per_insert or 0.0) > _SAMPLES_PER_INSERT_MIN


def lighter(pilot: Pace) -> Pace:
    """Returns a pace with a quarter of the work for the learner."""
    fewer = max(_SAMPLES_PER_INSERT_MIN, (pilot.samples_per_insert or 0.0) / 4)
    return dataclasses.replace(pilot, samples_per_insert=fewer, updates_per_call=1, publish_period_updates=1)


def learner_bound(found: figures.Figures, tuned: Mapping[str, Any], run_s: float) -> Pace:
    """Returns the pace of runs with tuned settings; `found` is of the first short run."""
    if not has_replay(tuned):
        return Pace(_from_second_policy(found, tuned, run_s, 2.0 * tuned["rollout_steps"]))  # who gathers is one ahead
    return Pace(_steps(found, tuned, run_s, tuned["samples_per_insert"], tuned["updates_per_call"]))


def actor_bound(
    found: figures.Figures, pilot: Pace, tuned: Mapping[str, Any], run_s: float, samples_per_insert: float = 0.0
) -> Pace:
    """Returns the pace at which the learner waits for half of the time.

    Args:
        found: Figures of the first short run.
        pilot: What that was made with.
        tuned: Settings of the task.
        run_s: What a run shall take.
        samples_per_insert: As asked for; 0 decides it here.
    """
    per_s = found.get("env_steps_per_s", 0.0)
    updates, idle, seconds = found.get("updates", 0.0), found.get("idle_share"), found.get("window_s", 0.0)
    assert pilot.samples_per_insert is not None
    chosen = samples_per_insert or pilot.samples_per_insert
    if not (updates and per_s and idle is not None and found.get("update_s")):
        why = "the first short run did not say how long the learner waited: samples per insert were not fitted to it"
        steps = _steps(found, tuned, run_s, chosen, pilot.updates_per_call or 1)
        return dataclasses.replace(pilot, steps=steps, samples_per_insert=chosen, remark=why)
    update_s = found["update_s"] / updates
    other = max(0.0, 1.0 - idle - found["update_s"] / seconds)
    batch = tuned["batch_size"]
    if not samples_per_insert:
        affordable = max(0.05, _BUSY - other) * batch / (per_s * update_s)
        chosen = float(f"{min(tuned['samples_per_insert'], max(_SAMPLES_PER_INSERT_MIN, affordable)):.2g}")
    updates_per_s = per_s * chosen / batch
    per_call = max(1, min(tuned["updates_per_call"], math.floor(_CALL_S / update_s)))
    return Pace(
        _steps(found, tuned, run_s, chosen, per_call),
        chosen,
        per_call,
        max(1, min(tuned["publish_period_updates"], round(_PUBLISH_S * updates_per_s))),
    )


def _steps(
    found: figures.Figures, tuned: Mapping[str, Any], run_s: float, samples_per_insert: float, updates_per_call: int
) -> int:
    """Returns the steps of a run: those of `run_s`, after the random ones before there is a policy.

    Until then the fleet may run ahead by as many as two calls of updates would sample, which are many where each is
    sampled seldom, or by a message (learner/run/build.py): while a large network is compiled it does.
    """
    return _from_second_policy(found, tuned, run_s, 2.0 * tuned["batch_size"] * updates_per_call / samples_per_insert)


def _from_second_policy(found: figures.Figures, tuned: Mapping[str, Any], run_s: float, ahead: float) -> int:
    """Returns the steps of `run_s`, after the random ones and those by which the fleet runs ahead."""
    ahead = max(ahead, tuned["message_steps"])
    wanted = tuned["learning_starts"] + ahead + max(_STEPS_MIN, found.get("env_steps_per_s", 0.0) * run_s)
    return int(float(f"{wanted:.2g}"))
