"""Conducts a study: computes the cells that are left, in one process or several, and keeps each as it comes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from broker.contract import errors
from learner.study.sweep import cells, opening, policies, worker

_log = logging.getLogger(__name__)
_POLL_S = 0.5
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
Record = dict[str, Any]
Job = tuple[policies.Entry, str]
"""A policy and a column."""
Outcome = tuple[Job, Record | opening.Unusable]


class Study:
    """The work that is left of a study.

    Args:
        held: Its directory.
        stop: Ends it after the cells that are at work; `--resume` goes on.
        jobs: Processes.

    Attributes:
        unusable: Why a policy has no cells, by its name.
    """

    def __init__(self, held: cells.Cells, stop: threading.Event, jobs: int = 1) -> None:
        self._held, self._stop, self._jobs = held, stop, jobs
        self.unusable: dict[str, str] = {}

    def run(self, *, retry_failed: bool = False) -> None:
        """Computes what is left.

        Args:
            retry_failed: Whether that includes cells that failed.

        Raises:
            RunError: A policy has changed, or a process died.
        """
        left = self._left(retry_failed)
        total = len(self._held.entries) * len(self._held.request.columns)
        _log.info("%d of %d cells are left, of %d policies", len(left), total, len(self._held.entries))
        self._held.check_policies({entry.name for entry, _ in left})
        for (entry, column), found in self._outcomes(left):
            if isinstance(found, opening.Unusable):
                if entry.name not in self.unusable and not self._interrupts():
                    self.unusable[entry.name] = str(found)
                    _log.warning("%s has no cells: %s", entry.name, found)
                continue
            if found["failed"] and self._interrupts():
                continue  # Ctrl-C reaches the actors, too
            self._held.add(found)
            left.remove((entry, column))
            remaining = [job for job in left if job[0].name not in self.unusable]
            what = f"failed: {found['failed']}" if found["failed"] else f"return {_mean(found):.4g}"
            told = (total - len(left), total, entry.name, column, what, self._left_s(remaining))
            _log.info("%d of %d: %s %s, %s; %s", *told)
        if self.is_complete:
            self._held.tidy()

    @property
    def is_complete(self) -> bool:
        """Returns whether every cell is there of every policy that can have some."""
        return not any(entry.name not in self.unusable for entry, _ in self._left(retry_failed=False))

    def _left(self, retry_failed: bool) -> list[Job]:
        done = {key for key, record in self._held.done.items() if not (retry_failed and record["failed"])}
        columns = self._held.request.columns
        return [(entry, name) for entry in self._held.entries for name in columns if (entry.name, name) not in done]

    def _interrupts(self) -> bool:
        """Returns whether what just failed did so because all of it shall end: that is known a moment later."""
        return self._stop.wait(_POLL_S)

    def _left_s(self, left: Sequence[Job]) -> str:
        """Estimates by what the same column took of other policies, and the same policy in other columns."""
        took = [one for one in self._held.done.values() if "wall_s" in one]
        if not left:
            return "none left"
        mean = statistics.fmean(one["wall_s"] for one in took) or 1.0

        def ratio(key: str, value: str) -> float:
            alike = [one["wall_s"] for one in took if one[key] == value]
            return statistics.fmean(alike) / mean if alike else 1.0

        by_policy = {entry.name: ratio("policy", entry.name) for entry, _ in left}
        by_column = {column: ratio("column", column) for _, column in left}
        seconds = sum(mean * by_policy[entry.name] * by_column[column] for entry, column in left) / self._jobs
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"

    def _outcomes(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        waiting = list(jobs)
        if self._jobs == 1:
            for entry, column in waiting:
                if self._stop.is_set():
                    return
                if entry.name not in self.unusable:
                    yield (entry, column), worker.attempt(entry, column, self._held.request, self._held.path)
            return
        for name in _ONE_THREAD:  # of each process
            os.environ.setdefault(name, "1")
        context = multiprocessing.get_context("spawn")  # TensorFlow does not survive a fork
        pool = concurrent.futures.ProcessPoolExecutor(self._jobs, context, worker.begin, (os.getpid(),))
        at_work: dict[concurrent.futures.Future[Record | opening.Unusable], Job] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(pool.shutdown, cancel_futures=True)
            try:
                while waiting or at_work:
                    while waiting and len(at_work) < self._jobs and not self._stop.is_set():
                        entry, column = waiting.pop(0)
                        if entry.name not in self.unusable:
                            job = pool.submit(worker.attempt, entry, column, self._held.request, self._held.path)
                            at_work[job] = (entry, column)
                    if self._stop.is_set() and not at_work:
                        return
                    ended, _ = concurrent.futures.wait(
                        at_work, timeout=_POLL_S, return_when=concurrent.futures.FIRST_COMPLETED
                    )
                    for one in ended:
                        found = one.result()
                        yield at_work.pop(one), found
            except BrokenProcessPool as error:
                names = ", ".join(f"{e.name} {c}" for e, c in at_work.values())
                raise errors.RunError(
                    f"a process died at one of these cells: {names}",
                    where=str(self._held.path),
                    todo=f"--resume {self._held.path} goes on; with --jobs 1 a crash says where it was",
                ) from error


def _mean(record: Record) -> float:
    return statistics.fmean(record["returns"])
