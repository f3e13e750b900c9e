"""What this actor was ordered, on disk: the newest order's number, what became of the last ones, what they changed.

An order is written down before it is carried out, so that no broker and no power cut has it done twice. Where the file
is damaged, all that was ordered until now counts as done: numbers of orders never fall behind the time of day.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.contract import errors, messages
from broker.program import storage

_log = logging.getLogger(__name__)
_FILE = "orders.json"
_FILE_BYTES = 1 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TAKEN, DONE, FAILED, UNDONE = "taken", "done", "failed", "undone"
_LATE = ("set", "restart", "reboot", "update")
"""Kinds that the next process answers: newer orders may be answered, and no longer asked for, before they are."""


class OrderLog:
    """Orders of one actor.

    Args:
        directory: Where `orders.json` lies.
        learner_key: That orders are signed with. Numbers under another key mean nothing.

    Attributes:
        number: Of the newest order that was taken.
        paused: Whether it was ordered to pause.
        settings: What orders changed of the actor's settings, and that proved good; as text, by key.
        trial: Changed settings that have not proved good yet; None if there are none.
        damaged: The file could not be read.
    """

    def __init__(self, directory: Path, learner_key: bytes) -> None:
        self._path = directory / _FILE
        self._key = learner_key.hex()
        self._lock = threading.RLock()
        self._answers: dict[int, messages.Answer] = {}
        self._machine = ""
        self._trial_number = 0
        self._begun = False
        self.number = 0
        self.paused = self.damaged = False
        self.settings: dict[str, str] = {}
        self.trial: dict[str, str] | None = None

    @classmethod
    def open(cls, directory: Path, learner_key: bytes) -> OrderLog:
        """Reads what is there. An order that the last process began is settled: this process is its outcome."""
        made = cls(directory, learner_key)
        try:
            made._restore(json.loads(storage.read_regular(made._path, _FILE_BYTES)))
        except FileNotFoundError:
            return made
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning("%s is passed over: %s; all orders until now count as done", made._path, error)
            made.damaged, made.number = True, int(time.time() * 1000)
            return made
        made._resolve_taken()
        return made

    @property
    def in_force(self) -> Mapping[str, str]:
        """The changed settings that this process is to run with."""
        return self.settings if self.trial is None else self.trial

    @property
    def is_on_trial(self) -> bool:
        """Returns whether this process tries settings."""
        return self.trial is not None and self._begun

    def fresh(self, orders: messages.Orders) -> list[messages.Instruction]:
        """Returns those that are new, by number.

        Raises:
            MessageError: Newer ones were here before, and none of these is answered late. `reason` is `older_order`.
        """
        is_late = any(one.kind in _LATE for one in self.earlier(orders))
        if orders.orders[-1].number < self.number and not is_late:
            raise errors.MessageError("orders that newer ones have replaced", reason="older_order")
        return [one for one in orders.orders if one.number > self.number]

    def earlier(self, orders: messages.Orders) -> list[messages.Answer]:
        """Returns what became of those that are not new; who asks again did not hear it."""
        return [self._answers[one.number] for one in orders.orders if one.number in self._answers]

    def note(self, order: messages.Instruction, outcome: str, text: str = "", *, paused: bool | None = None) -> None:
        """Writes down what becomes of an order, and so that it is taken.

        Raises:
            OSError: It cannot be written; the order must not be carried out.
        """
        with self._lock:
            before = self.paused
            self.number = max(self.number, order.number)
            self._answers[order.number] = messages.Answer(order.number, order.kind, outcome, text)
            while len(self._answers) > messages.MAX_ORDERS:
                del self._answers[next(iter(self._answers))]
            self.paused = before if paused is None else paused
            self._machine = _boot_id()
            try:
                self._write()
            except OSError as error:
                self.paused = before
                self._end(order.number, FAILED, f"it cannot be written down: {error.strerror}")
                raise

    def answer(self, number: int) -> messages.Answer:
        """Returns what became of an order that was noted."""
        return self._answers[number]

    def give_up(self, text: str) -> None:
        """Notes that an order which was taken failed: a reboot that did not come.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            for answer in [one for one in self._answers.values() if one.outcome == TAKEN]:
                self._end(answer.number, FAILED, text)
            self._write()

    def taken(self, kind: str) -> list[int]:
        """Returns the numbers of orders of a kind that were taken, and have no outcome yet."""
        return [one.number for one in self._answers.values() if (one.kind, one.outcome) == (kind, TAKEN)]

    # -- settings on trial ------------------------------------------------------------------------------------------

    def try_out(self, order: messages.Instruction, settings: Mapping[str, str]) -> None:
        """Notes settings that the next process is to try.

        Raises:
            OSError: They cannot be written.
        """
        with self._lock:
            self.trial, self._trial_number, self._begun = dict(settings), order.number, False
            try:
                self.note(order, TAKEN, "starts again with the new settings")
            except OSError:
                self.trial = None
                raise

    def begin(self) -> bool:
        """Tells whether this process is to try settings, which is noted: the next one will not."""
        with self._lock:
            if self.trial is None:
                return False
            self._begun = True
            self._write()
            return True

    def keep(self) -> messages.Answer | None:
        """Keeps the settings on trial for good; returns what became of the order.

        Raises:
            OSError: It cannot be written; they stay on trial.
        """
        with self._lock:
            if self.trial is None or not self._begun:
                return None
            before, tried = self.settings, self.trial
            self.settings, self.trial = tried, None
            self._end(self._trial_number, DONE, "in force")
            try:
                self._write()
            except OSError:
                self.settings, self.trial = before, tried
                raise
            return self._answers.get(self._trial_number)

    def undo(self, why: str) -> None:
        """Goes back to the settings before those on trial."""
        with self._lock:
            if not self.is_on_trial:
                return
            self.trial = None
            self._end(self._trial_number, UNDONE, why)
            self._write()
        _log.warning("the ordered settings are undone: %s", why)

    def _resolve_taken(self) -> None:
        """Says of orders that were taken what this process's start means for them."""
        if self.trial is not None and self._begun:
            self.undo("the actor ended before it had proved them good")
        open_ones = [one for one in self._answers.values() if one.outcome == TAKEN]
        for answer in open_ones:
            if answer.kind == "restart":
                self._end(answer.number, DONE, "started again")
            elif answer.kind == "reboot" and self._machine != _boot_id():
                self._end(answer.number, DONE, "the board has booted")

    def _end(self, number: int, outcome: str, text: str) -> None:
        if (before := self._answers.get(number)) is not None:
            self._answers[number] = messages.Answer(number, before.kind, outcome, text[: messages.MAX_NAME_CHARS])

    # -- the file -----------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        state = {
            "learner_key": self._key,
            "number": self.number,
            "paused": self.paused,
            "settings": self.settings,
            "trial": self.trial,
            "trial_number": self._trial_number,
            "begun": self._begun,
            "machine": self._machine,
            "answers": [[one.number, one.kind, one.outcome, one.text] for one in self._answers.values()],
        }
        storage.write_atomic(self._path, json.dumps({"state": state, "check": _check(state)}).encode())

    def _restore(self, raw: Any) -> None:
        state = raw["state"]
        if raw["check"] != _check(state):
            raise ValueError("it is damaged")
        self.paused, self.settings = state["paused"], state["settings"]
        self.trial, self._trial_number, self._begun = state["trial"], state["trial_number"], state["begun"]
        self._machine = state["machine"]
        if state["learner_key"] == self._key:
            self.number = state["number"]
            self._answers = {one[0]: messages.Answer(*one) for one in state["answers"]}


def _check(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _boot_id() -> str:
    """Returns what tells this boot of the board from all others; empty where the kernel does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
