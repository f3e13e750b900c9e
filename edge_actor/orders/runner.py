"""Carries out orders: pause and resume at once, log lines as long as they are wanted, the rest by starting again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from broker.contract import errors, messages
from broker.program import logs
from edge_actor import config
from edge_actor.board import clock
from edge_actor.orders import log_lines, order_log, ordered_settings, release_trial

_log = logging.getLogger(__name__)
PAUSE, RESUME, LOGS, SET, RESTART, REBOOT = "pause", "resume", "logs", "set", "restart", "reboot"
UPDATE = "update"
_FOLLOW_PERIOD_S = 0.25
_FOLLOW_LIMIT_S = 120.0
"""The longest that lines are sent without being asked again: whoever asked may be gone."""
_QUIET_S = 5.0
"""Settings on trial are good after so long without a learner that says what to do."""


class OrderRunner:
    """Carries out orders, between two turns of the acting loop.

    Args:
        log: Where they are written down.
        own: The board's own settings: what is allowed, and what `set` changes.
        lines: What this process logged.
        respond: Sends an answer.
        start_again: Ends this process, which then starts anew (`restart`), or the board does (`reboot`).
        releases: Takes releases of the program, and proves the one that this process is; None takes none.
    """

    def __init__(
        self,
        log: order_log.OrderLog,
        own: config.ActorConfig,
        lines: log_lines.LogLines,
        respond: Callable[[messages.Answer], None],
        start_again: Callable[[str], None],
        releases: release_trial.ReleaseTrial | None = None,
    ) -> None:
        self._log = log
        self._own = own
        self._lines = lines
        self._respond = respond
        self._start_again = start_again
        self._releases = releases
        self._follower = 0  # the number of the order that asked for lines
        self._follows_until_s = self._followed_at_s = 0.0
        self._sent_lines = 0
        self._trial_since_s: float | None = None
        self._judge_again_s = 0.0
        self._is_ending = False
        self.refused: dict[str, int] = {}

    @property
    def paused(self) -> bool:
        """Returns whether an order keeps the actor from acting."""
        return self._log.paused

    def vitals(self) -> dict[str, Any]:
        """Returns its state and what it refused, by fields of `messages.Vitals`."""
        stored = {"stored": 1} if self._log.damaged else {}
        by_release = self._releases.refused if self._releases is not None else {}
        return {"paused": self._log.paused, "refused": self.refused | stored | by_release}

    def run(self, orders: messages.Orders) -> None:
        """Carries out what is new; of the others it says again what became of them."""
        try:
            fresh = self._log.fresh(orders)
        except errors.MessageError as error:
            self._count(error.reason)
            _log.warning("orders refused: %s", error.what)
            return
        for answer in self._log.earlier(orders):
            self._respond(answer)
        for order in fresh:
            try:
                self._carry_out(order)
            except OSError as error:
                self._count("order_unwritten")
                _log.warning("order %s is not carried out, since it cannot be written down: %s", order.kind, error)
                self._respond(self._log.answer(order.number))

    def poll(self, acts: Callable[[], bool | None], has_receipt: Callable[[], bool | None] = lambda: None) -> None:
        """Does what orders left to do.

        Args:
            acts: Returns whether the actor acts, if its learner wants it to; None if no learner has said yet.
            has_receipt: Returns whether the learner has what this process recorded; None if it wants nothing.
        """
        if self._log.is_on_trial:
            self._judge(acts())
        if self._releases is not None and self._releases.has_work:
            self._follow_release(self._releases, acts, has_receipt)
        if self._follower:
            self._follow()

    def close(self) -> None:
        """Ends what is under way."""
        if self._releases is not None:
            self._releases.close()

    def _carry_out(self, order: messages.Instruction) -> None:
        now_s = clock.now_s()
        if now_s is not None and now_s > order.expires_s:
            self._end(order, "expired", f"it came {now_s - order.expires_s:.0f} s too late")
        elif order.kind not in messages.ORDER_KINDS:
            self._end(order, "refused", f"this actor knows no order {order.kind[:60]!r}")
        elif order.kind not in self._own.allow:
            self._end(order, "refused", f"this board's settings do not allow it (allow = {', '.join(self._own.allow)})")
        else:
            level = (
                logging.DEBUG if order.kind == LOGS else logging.INFO
            )  # it would be a line of those that it asks for
            _log.log(
                level, "ordered: %s %s", order.kind, " ".join(f"{k}={v}" for k, v in sorted(order.options.items()))
            )
            self._do(order)

    def _do(self, order: messages.Instruction) -> None:
        if order.kind in (PAUSE, RESUME):
            wanted = order.kind == PAUSE
            if wanted == self._log.paused:
                self._end(order, "done", "paused already" if wanted else "not paused")
                return
            self._log.note(order, "done", paused=wanted)
            self._respond(self._log.answer(order.number))
        elif order.kind == LOGS:
            self._send_lines(order)
        elif order.kind == SET:
            self._set(order)
        elif order.kind == UPDATE:
            self._update(order)
        elif self._is_ending:
            self._end(order, "refused", "it is about to start again: order it again when it is back")
        elif order.kind == REBOOT and self._releases is not None and self._releases.is_busy:
            self._end(order, "refused", "a release is being taken or tried: order it again when that is answered")
        else:
            self._log.note(order, order_log.TAKEN, "starts again" if order.kind == RESTART else "boots")
            self._respond(self._log.answer(order.number))
            self._is_ending = True
            self._start_again(order.kind)

    def _end(self, order: messages.Instruction, outcome: str, text: str) -> None:
        """Notes and answers; what is refused is counted."""
        self._log.note(order, outcome, text)
        if outcome != "done":
            self._count(f"order_{outcome}")
            _log.warning("order %s %s: %s", order.kind[:60], outcome, text)
        self._respond(self._log.answer(order.number))

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    # -- releases -----------------------------------------------------------------------------------------------------

    def _update(self, order: messages.Instruction) -> None:
        why_not = "this actor takes no release"
        if self._is_ending or self._log.trial is not None:
            why_not = "it is about to start again, or tries settings: order it again when it is back"
        elif self._releases is not None:
            why_not = self._releases.why_not(order)
        if why_not or self._releases is None:
            self._end(order, "refused", why_not)
            return
        self._log.note(order, order_log.TAKEN, "takes the release")
        self._respond(self._log.answer(order.number))
        self._releases.begin(order)

    def _follow_release(
        self,
        releases: release_trial.ReleaseTrial,
        acts: Callable[[], bool | None],
        has_receipt: Callable[[], bool | None],
    ) -> None:
        """Says what became of a release, and starts again where it is to be tried."""
        for answer in releases.poll(acts, has_receipt):
            if answer.outcome not in ("done", order_log.TAKEN):
                self._count(f"order_{answer.outcome}")
            self._respond(answer)
        if releases.is_ready and not self._is_ending:
            self._is_ending = True
            self._start_again(UPDATE)

    # -- settings -----------------------------------------------------------------------------------------------------

    def _set(self, order: messages.Instruction) -> None:
        if self._log.trial is not None or (self._releases is not None and self._releases.is_busy):
            what = "a release is being taken" if self._log.trial is None else "other settings are on trial"
            self._end(order, "refused", f"{what}: order it again when that is answered")
            return
        merged = dict(self._log.settings)
        for key, text in order.options.items():
            if text:
                merged[key] = text
            else:
                merged.pop(key, None)
        try:
            ordered_settings.check_keys(self._own, order.options)
            ordered_settings.applied(self._own, merged)
        except errors.ConfigError as error:
            self._end(order, "refused", error.what[: messages.MAX_NAME_CHARS])
            return
        if merged == self._log.settings:
            self._end(order, "done", "in force already")
            return
        self._log.try_out(order, merged)
        self._respond(self._log.answer(order.number))
        self._start_again(RESTART)

    def _judge(self, acts: bool | None) -> None:
        """Keeps settings on trial once the actor is back with them, and acts if it is to."""
        now_s = time.monotonic()
        self._trial_since_s = self._trial_since_s or now_s
        if now_s < self._judge_again_s:
            return
        if acts or (acts is None and now_s - self._trial_since_s > _QUIET_S):
            try:
                answer = self._log.keep()
            except OSError as error:
                self._judge_again_s = now_s + 1.0
                _log.warning("the ordered settings cannot be kept: %s", error, extra=logs.once())
                return
            if answer is not None:
                _log.info("the ordered settings are kept")
                self._respond(answer)

    # -- lines of the log ---------------------------------------------------------------------------------------------

    def _send_lines(self, order: messages.Instruction) -> None:
        try:
            wanted, follow_s = int(order.options.get("lines", "100")), float(order.options.get("follow_s", "0"))
        except ValueError:
            self._end(order, "refused", "lines and follow_s are numbers")
            return
        self._log.note(order, "done")
        before = self._sent_lines if self._follower and wanted == 0 else self._lines.count
        self._tell_lines(order.number, self._lines.last(wanted) if wanted > 0 else [])
        if follow_s > 0:
            self._follower, self._sent_lines = order.number, before
            self._follows_until_s = time.monotonic() + min(follow_s, _FOLLOW_LIMIT_S)

    def _follow(self) -> None:
        now_s = time.monotonic()
        if now_s > self._follows_until_s:
            self._follower = 0
        elif self._lines.count > self._sent_lines and now_s - self._followed_at_s > _FOLLOW_PERIOD_S:
            self._followed_at_s = now_s
            new, self._sent_lines = self._lines.since(self._sent_lines), self._lines.count
            self._tell_lines(self._follower, new)

    def _tell_lines(self, number: int, lines: list[str]) -> None:
        """Sends lines, in as many answers as it takes: a header holds 64 KB."""
        for piece in _pieces(lines) or [()]:
            self._respond(messages.Answer(number, LOGS, "done", lines=piece))


def _pieces(lines: list[str]) -> list[tuple[str, ...]]:
    pieces: list[list[str]] = []
    room = 0
    for line in lines:
        cost = 8 + 6 * len(line)  # JSON within JSON, at its worst
        if cost > room or len(pieces[-1]) >= messages.MAX_LOG_LINES:
            pieces.append([])
            room = 50_000
        pieces[-1].append(line)
        room -= cost
    return [tuple(piece) for piece in pieces]
