"""The time of a run, divided: the learner's stages, those of its actors, and ActorQ's four categories.

Stages of the learner that stand on different threads overlap, so their shares need not add up to the whole: the loop's
own (receive, decode, replay_insert, sample, wait) go on while another thread computes an update or makes a policy
(calibrate, quantize, gate), and a third waits for the disk (ledger); `sign` and `publish` are on several threads.
An actor's stages follow each other on the one thread that acts, but for large policies, which are received and verified
beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from broker.program import stopwatch
from learner.fleet import work
from learner.run.reports import progress

LEARNER_STAGES = (
    *("receive", "decode", "ledger", "replay_insert", "sample", "update", "calibrate", "quantize", "gate", "sign"),
    *("publish", "wait", "broker"),
)
_ON_THE_WAY = "broker"
"""No time that the learner spends: how long messages were on their way to it."""
_SHOWN = 5
"""Stages in a line of the table, the longest."""


class Breakdown:
    """Adds up what the stages of a run measure.

    Args:
        measured: The stopwatches of the learner's stages.
        actors: What the fleet's actors say.
        counted: Has the environment steps per second.
    """

    def __init__(self, measured: Sequence[stopwatch.Stopwatch], actors: work.Work, counted: progress.Progress) -> None:
        self._measured, self._actors, self._progress = measured, actors, counted
        self._shown: dict[str, float] = {}  # seconds by metric, as of the newest row
        self._began_s = self._began_cpu_s = 0.0
        self._summary: dict[str, Any] | None = None

    def begin(self) -> None:
        """Takes note that training begins."""
        self._began_s, self._began_cpu_s = time.monotonic(), time.process_time()

    def end(self) -> None:
        """Takes note that training has ended: the summary is of now."""
        self._summary = self._summarize()

    def metrics(self) -> dict[str, float]:
        """Returns what each stage took since the row before, in seconds, for a row of metrics."""
        learner, actors = self._totals()
        seconds = {f"stage_{name}_s": spent.seconds for name, spent in learner.items()}
        seconds |= {f"stage_actor_{name}_s": spent.seconds for name, spent in actors.items()}
        shown, self._shown = self._shown, seconds
        return {name: total - shown.get(name, 0.0) for name, total in seconds.items()}

    def summary(self) -> dict[str, Any]:
        """Returns counts and seconds of all stages of the training, for the summary."""
        return self._summary or self._summarize()

    def _summarize(self) -> dict[str, Any]:
        learner, actors = self._totals()
        wall_s = time.monotonic() - self._began_s
        return {
            "breakdown": {"learner": _plain(learner), "actors": _plain(actors), "actorq": actorq(actors)},
            "training_s": wall_s,
            "learner_cpu_s": time.process_time() - self._began_cpu_s,
            "actors_cpu_s": self._actors.cpu_s,
            "learner_idle_share": min(1.0, learner["wait"].seconds / wall_s) if wall_s > 0 else 0.0,
            "env_steps_per_s": self._progress.mean_steps_per_s,
        }

    def _totals(self) -> tuple[stopwatch.Totals, stopwatch.Totals]:
        found = stopwatch.added(one.totals() for one in self._measured)
        return {name: found[name] for name in LEARNER_STAGES}, self._actors.times.totals()


def actorq(actors: stopwatch.Totals) -> dict[str, float]:
    """Returns the seconds of all actors in the four categories of ActorQ (Krishnan et al., figure of actor time).

    `step` is acting: environment, observation to action, and recording. `pull` is what the thread that acts reads of
    policies from its socket, and checking signatures; ActorQ's actors wait there for a parameter server, ours act on.
    `deserialise` is unpacking a policy, putting it together and checking its digest. `load` is building interpreters
    and putting one in the place of another. Spooling, sealing and sending experience and waiting for a grant are in
    none of them: ActorQ's figure has no place for them.
    """
    parts = {
        "step": ("environment", "observation_to_action", "record"),
        "pull": ("policy_receive",),
        "deserialise": ("policy_verify",),
        "load": ("policy_build", "policy_swap"),
    }
    return {name: sum(actors[stage].seconds for stage in stages) for name, stages in parts.items()}


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns lines of the summary's table: where the time of learner and actors went, and what waits for what."""
    found = summary["breakdown"]
    if not found:
        return []
    own = {name: spent["total_s"] for name, spent in found["learner"].items() if name != _ON_THE_WAY}
    theirs = {name: spent["total_s"] for name, spent in found["actors"].items()}
    cpu_s = summary["actors_cpu_s"]
    told = "" if cpu_s is None else f", actors {cpu_s:.1f} s together"
    idle = f"idle for want of experience {100 * summary['learner_idle_share']:.0f} %"
    return [
        (
            "learner's time",
            f"{_shares(own)} on all threads; {idle}",
        ),
        ("actors' time", _shares(theirs)),
        ("environment steps/s", f"{summary['env_steps_per_s']:,.0f}, from the first experience to the last"),
        ("CPU while training", f"learner {summary['learner_cpu_s']:.1f} s{told}"),
    ]


def _shares(seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values())
    if not whole:
        return "-"
    longest = sorted(seconds, key=lambda name: -seconds[name])[:_SHOWN]
    shown = (f"{name} {100 * seconds[name] / whole:.0f} %" for name in longest if seconds[name] >= 0.005 * whole)
    return f"{', '.join(shown)} of {whole:.1f} s"


def _plain(totals: stopwatch.Totals) -> dict[str, dict[str, float]]:
    return {name: {"count": spent.runs, "total_s": spent.seconds} for name, spent in totals.items()}
