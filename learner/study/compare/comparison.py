"""Runs a comparison: decides what its runs share, runs them in their order, and makes rows and the page of them."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.study import report as page
from learner.study.compare import directory, figures, fleet_run, headroom, plan, ratios

_log = logging.getLogger(__name__)
_START_S = 12.0
"""Seconds, about, that a fleet takes until it trains and to end."""
_PILOT_S = 8.0
_PILOT_LIMIT_S = 120.0
_SLOWER = 2.5
"""The factor by which an arm may take longer than the fastest one, for the first estimate."""
_LIMIT = 8.0
"""Times `run_s`, after which a run for throughput is ended: its rate tells as much."""


class Comparison:
    """The runs of one comparison.

    Args:
        held: Its directory.
        tuned: Settings that are in force for the task (fleet_run.tuned).
        stop: Ends it; `--resume` goes on.
        absent: Peers that cannot act now; their runs are left undone.
    """

    def __init__(
        self,
        held: directory.Directory,
        tuned: dict[str, Any],
        stop: threading.Event,
        absent: frozenset[str] = frozenset(),
    ) -> None:
        self._absent = absent
        self._directory, self._request, self._tuned, self._stop = held, held.request, tuned, stop
        self._done = {one["run"]: one for one in held.runs()}
        self._paces: dict[tuple[str, tuple[int, ...]], headroom.Pace] = {}

    def run(self) -> list[dict[str, Any]]:
        """Does what is left to do; returns the rows of what is there.

        Runs that fail are named, kept, and left out.

        Raises:
            RunError: No two runs can be compared, though all ended.
        """
        runs = [run for run in plan.runs(self._request) if run.arm.peer not in self._absent]
        _log.info("%s", self._estimate(runs))
        for regime, hidden in plan.cells(self._request):
            if not self._stop.is_set():
                self._decide(regime, hidden)
        runs = [run for run in runs if (run.arm.regime, run.arm.hidden) in self._paces]
        for index, one in enumerate(runs):
            if self._stop.is_set():
                break
            if one.name not in self._done:
                _log.info("run %d of %d: %s; %s left", index + 1, len(runs), one.name, _duration(self._left_s(runs)))
                self._do(one)
        found = list(ratios.ratios(self._request, list(self._done.values()), self._paces))
        self._directory.write_rows(found)
        for line in ratios.unreached(self._request, list(self._done.values())):
            _log.warning("%s", line)
        failed = [record for record in self._done.values() if record["failed"]]
        if failed:
            names = ", ".join(record["run"] for record in failed)
            _log.warning("%d of %d runs failed, and are left out: %s", len(failed), len(self._done), names)
        if not found and not self._stop.is_set():
            raise errors.RunError(
                f"no two runs can be compared: {len(failed)} of {len(self._done)} failed",
                where=f"{self._directory.path}: {failed[0]['run']}: {failed[0]['failed']}" if failed else "",
                todo="look at logs/ there",
            )
        return found

    @property
    def is_complete(self) -> bool:
        """Returns whether all runs have ended."""
        runs = plan.runs(self._request)
        return not self._stop.is_set() or all(run.name in self._done for run in runs)

    def _do(self, run: plan.Run) -> None:
        request, pace = self._request, self._paces[run.arm.regime, run.arm.hidden]
        path, log = self._directory.clear(run.name), self._directory.log(run.name)
        words = fleet_run.command(request, run.arm, run.seed, path)
        if run.kind == plan.THROUGHPUT:
            limit_s = _LIMIT * request.run_s + 60.0
            words += fleet_run.until_steps(pace, self._tuned, limit_s)
        else:
            limit_s = request.max_s
            words += fleet_run.until_threshold(request, pace, self._tuned)
        ended = fleet_run.run(words, log, self._stop, max_s=2 * limit_s + 120.0)
        if ended.stopped and not ended.failed:
            return  # half a run counts for nothing, and is done again
        metrics = figures.read_rows(path / "metrics.jsonl")
        found = figures.of_run(metrics, ended.summary, reached=run.kind == plan.THRESHOLD)
        failed = ended.failed
        if not failed and run.kind == plan.THROUGHPUT and "env_steps_per_s" not in found:
            failed = "its steps were over before actors had acted by policies for a second or two; take more --steps"
        record = {
            "run": run.name,
            "kind": run.kind,
            "arm": run.arm.facts(),
            "seed": run.seed,
            "directory": str(path.relative_to(self._directory.path)),
            "failed": failed,
            "wall_s": round(ended.wall_s, 1),
            "figures": found,
            "breakdown": figures.breakdown(metrics, ended.summary),
            "summary": ended.summary,
        }
        self._directory.note_run(record)
        self._done[run.name] = record
        if failed:
            _log.warning("%s failed, and is left out: %s (%s)", run.name, failed, log)
        elif not request.keep:
            self._directory.slim(path)

    def _decide(self, regime: str, hidden: tuple[int, ...]) -> None:
        """Decides what the runs of a regime and size share, by a first short run where it takes one."""
        pace = self._directory.pace(regime, hidden) or self._new_pace(regime, hidden)
        if pace is not None:
            self._paces[regime, hidden] = pace

    def _new_pace(self, regime: str, hidden: tuple[int, ...]) -> headroom.Pace | None:
        request, tuned = self._request, self._tuned
        asked = request.samples_per_insert
        as_tuned = regime == plan.LEARNER_BOUND or not headroom.has_replay(tuned)
        pilot = headroom.Pace(0) if as_tuned else headroom.first(tuned, asked)
        needs_steps = plan.THROUGHPUT in request.kinds and not request.steps
        if needs_steps or not (as_tuned or asked):
            found = self._pilot(regime, hidden, pilot)
            while headroom.was_starved(found, pilot) and not (as_tuned or asked or self._stop.is_set()):
                pilot = headroom.lighter(pilot)
                found = self._pilot(regime, hidden, pilot)
            if not found or self._stop.is_set():
                return None
            if as_tuned:
                pace = headroom.learner_bound(found, tuned, request.run_s)
            else:
                pace = headroom.actor_bound(found, pilot, tuned, request.run_s, asked)
        else:
            pace = headroom.Pace(0, None if as_tuned else asked)
        if request.steps:
            pace = dataclasses.replace(pace, steps=max(request.steps, tuned["learning_starts"]))
        self._directory.note_pace(regime, hidden, pace)
        return pace

    def _pilot(self, regime: str, hidden: tuple[int, ...], pace: headroom.Pace) -> figures.Figures:
        request = self._request
        fastest = "int8" if "int8" in request.precisions else request.precisions[-1]
        arm = plan.Arm(regime, hidden, fastest)
        arm_of = regime, plan.widths(hidden)
        name = f"first-{regime}-{plan.widths(hidden)}-{fastest}"
        _log.info("a first short run sets the pace of %s, %s", *arm_of)
        path, log = self._directory.clear(name), self._directory.log(name)
        words = fleet_run.command(request, arm, request.seed, path)
        words += fleet_run.until_steps(pace, self._tuned, _PILOT_LIMIT_S)

        def window() -> list[figures.Row]:
            return figures.settled(figures.read_rows(path / "metrics.jsonl"))

        def enough() -> bool:
            return figures.rates(window()).get("window_s", 0.0) >= _PILOT_S

        ended = fleet_run.run(words, log, self._stop, enough, max_s=2 * _PILOT_LIMIT_S)
        found = figures.rates(window())
        if not self._stop.is_set() and not found:
            why = ended.failed or "no actor acted by a policy in time"
            _log.warning("%s, %s is left out: its first short run came to nothing: %s (%s)", *arm_of, why, log)
        if not request.keep:
            self._directory.slim(path)
        return found

    def _estimate(self, runs: Sequence[plan.Run]) -> str:
        left = [run for run in runs if run.name not in self._done]
        cells = sum(1 for cell in plan.cells(self._request) if self._directory.pace(*cell) is None)
        seconds = self._left_s(runs) + cells * (_START_S + _PILOT_S)
        first = f" and {cells} short ones before them" if cells else ""
        return f"{len(left)} of {len(runs)} runs are to be done{first}: {_duration(seconds)}, roughly"

    def _left_s(self, runs: Sequence[plan.Run]) -> float:
        """Returns the seconds that are left, by what runs of the same kind and arm took, else of the same kind."""
        total = 0.0
        for run in runs:
            if run.name not in self._done:
                alike = [one for one in self._done.values() if one["kind"] == run.kind]
                same = [one["wall_s"] for one in alike if one["arm"] == run.arm.facts()]
                usual_s = _SLOWER * self._request.run_s if run.kind == plan.THROUGHPUT else 0.25 * self._request.max_s
                known = same or [one["wall_s"] for one in alike if one["arm"]["hidden"] == list(run.arm.hidden)]
                total += statistics.fmean(known) if known else _START_S + usual_s
        return total


def report(path: Path) -> Path | None:
    """Draws the page of a comparison; returns it, or None where that is not possible, which is logged."""
    try:
        return page.write([path], path / directory.REPORT)
    except errors.ActorqError as error:
        _log.warning("no page is drawn: %s", error)
        return None


def default_path(env_id: str) -> Path:
    """Returns the directory of a new comparison."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in env_id)[:100]
    return Path("runs") / f"compare-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _duration(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
