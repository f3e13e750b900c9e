"""The order `update`: a release is taken, tried by the next process, and kept once that one has proved itself."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable

from broker.contract import errors, messages
from broker.program import logs
from edge_actor.orders import order_log
from edge_actor.updates import release_directory, updater

_log = logging.getLogger(__name__)
KIND = "update"
_LIMIT_S = 120.0
_QUIET_S = 5.0
"""A learner that wants no experience has been heard, and the actor acts as it wants, for so long: that is proof."""


class ReleaseTrial:
    """Takes releases for the order runner, and proves the one that this process is.

    Args:
        log: Of orders.
        takes: Fetches, checks and unpacks.
        trial: The number of the order whose release this process tries; 0 if it tries none.

    Attributes:
        is_ready: A release is to be tried, so the process must start again.
    """

    def __init__(self, log: order_log.OrderLog, takes: updater.Updater, trial: int) -> None:
        self._log = log
        self._updater = takes
        self._trial = trial
        self._acted_since_s: float | None = None
        self._judge_again_s = 0.0
        self.is_ready = False

    @property
    def refused(self) -> dict[str, int]:
        """Refusals by reason, of what came as parts of a release."""
        return self._updater.refused

    @property
    def is_busy(self) -> bool:
        """Returns whether a release is being taken or tried."""
        return self._updater.is_busy or bool(self._trial)

    @property
    def has_work(self) -> bool:
        """Returns whether `turn` has something to do."""
        return bool(self._trial) or self._updater.result is not None

    def why_not(self, order: messages.Instruction) -> str:
        """Returns why an order cannot be taken; empty if it can."""
        try:
            limit_s = float(order.options.get("trial_s", _LIMIT_S))
        except ValueError:
            limit_s = 0.0
        lowest, highest = updater.TRIAL_S
        if not re.fullmatch("[0-9a-f]{64}", order.options.get("release", "")) or not lowest <= limit_s <= highest:
            return f"release is a SHA-256, and trial_s {lowest:g} to {highest:g}"
        return "another release is on trial" if self._trial else self._updater.why_not()

    def begin(self, order: messages.Instruction) -> None:
        """Takes the release of an order that is noted as taken."""
        limit_s = float(order.options.get("trial_s", _LIMIT_S))
        self._updater.begin(updater.Wanted(order.number, order.options["release"], limit_s))

    def poll(self, acts: Callable[[], bool | None], has_receipt: Callable[[], bool | None]) -> list[messages.Answer]:
        """Returns what there is to answer; see `OrderRunner.poll`."""
        result = self._updater.pop_result()
        answers = [self._record(result)] if result is not None else []
        if self._trial and self._is_proved(acts(), has_receipt()) and (answer := self._keep()) is not None:
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Ends what is under way."""
        self._updater.close()

    def _record(self, result: updater.Result) -> messages.Answer:
        """Writes down what came of taking a release, and so that it is to be tried."""
        wanted, directory = result.wanted, self._updater.directory
        is_good = result.outcome in ("ready", "done")
        _log.log(logging.INFO if is_good else logging.WARNING, "update: %s", result.text)
        try:
            if result.outcome != "ready" or directory is None:
                return _noted(self._log, wanted.number, result.outcome, result.text)
            answer = _noted(self._log, wanted.number, order_log.TAKEN, result.text)
            directory.begin_trial(result.name, result.serial, wanted.number, wanted.limit_s)
        except OSError as error:
            text = f"it cannot be written down: {error.strerror or error}"
            _log.warning("update: %s", text)
            with contextlib.suppress(OSError):
                return _noted(self._log, wanted.number, order_log.FAILED, text)
            return self._log.answer(wanted.number)
        self.is_ready = True
        return answer

    def _is_proved(self, acts: bool | None, has_receipt: bool | None) -> bool:
        now_s = time.monotonic()
        if not acts:
            self._acted_since_s = None
            return False
        if now_s < self._judge_again_s:
            return False
        self._acted_since_s = self._acted_since_s or now_s
        return bool(has_receipt) or (has_receipt is None and now_s - self._acted_since_s > _QUIET_S)

    def _keep(self) -> messages.Answer | None:
        """Keeps the release that this process is."""
        directory, number = self._updater.directory, self._trial
        assert directory is not None
        try:
            if not self._updater.leaves_room:
                raise OSError("it leaves less of the disk free than update_reserve_bytes asks for")
            if not directory.confirm():
                return None  # it was given up a moment ago, and the launcher ends this process
            answer = _noted(self._log, number, "done", f"acts as release {directory.running}")
            directory.forget_trial()
        except (OSError, ValueError, errors.ReleaseError) as error:
            self._judge_again_s = time.monotonic() + 1.0
            _log.warning("the release on trial cannot be kept: %s", error, extra=logs.once())
            return None
        self._trial = 0
        _log.info("release %s acts and reaches its learner: it is kept", directory.running)
        return answer


def resume(log: order_log.OrderLog, directory: release_directory.ReleaseDirectory | None) -> int:
    """Says of orders that were taken what this process's start means for them; of failed trials why they failed.

    Returns:
        The number of the order whose release this process is to prove; 0 if there is none.
    """
    trial = int(directory.trial.get("number", 0)) if directory is not None else 0
    failed = directory.failed if directory is not None else {}
    why = failed.get("why") or "the disk was too full to note why"
    try:
        for number in log.taken(KIND):
            if number == trial:
                continue
            if number == failed.get("number"):
                _noted(log, number, order_log.UNDONE, f"release {failed['name']} was given up: {why}")
                _log.warning("release %s was given up: %s", failed["name"], why)
            else:
                _noted(log, number, order_log.FAILED, "the actor ended while it took the release: order it again")
        if directory is not None and not trial:
            directory.forget_trial()
    except OSError as error:  # it stays unanswered until the next start
        _log.warning("what became of a release cannot be written down: %s", error)
    return trial


def _noted(log: order_log.OrderLog, number: int, outcome: str, text: str) -> messages.Answer:
    order = messages.Instruction(number, KIND, 0.0)
    log.note(order, outcome, text[: messages.MAX_NAME_CHARS])
    return log.answer(number)
