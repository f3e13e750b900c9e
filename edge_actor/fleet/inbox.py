"""Messages of the learner to this actor: opened, decoded, queued for the acting loop; or refused and counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from broker.contract import codec, errors, messages, signing
from broker.program import bounded_queue
from edge_actor.fleet import replay_guard

_log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=messages.Message)
Message = messages.Assignment | messages.Receipt | messages.Command | messages.LearnerState | messages.Orders
LIMIT = bounded_queue.Limit(64, 2 * messages.MAX_POLICY_BYTES)
"""Messages that wait for a loop that is busy, and their bytes: a broker may repeat what is genuine while an evaluation
goes on. Beyond them the oldest goes, counted as `flood`; whatever was retained comes again."""


class Inbox:
    """Opens sealed payloads on the thread that they come on.

    Args:
        verifier: Knows the learner's signature.
        boot: Of this actor.

    Attributes:
        wake: Set whenever something came in.
        refused: Refusals by reason. `flood` counts genuine messages that came faster than the loop took them;
            `silence` how often the learner was not heard of for long.
    """

    def __init__(self, verifier: signing.LearnerVerifier, boot: int) -> None:
        self._verifier = verifier
        self._boot = boot
        self._guard = replay_guard.ReplayGuard()
        self._waiting = bounded_queue.BoundedQueue[Message](LIMIT)  # and the bytes that each came in
        self._lock = threading.Lock()
        self.wake = threading.Event()
        self.refused: dict[str, int] = {}

    def opener(self, kind: type[_M], use: Callable[[_M, bytes], None]) -> Callable[[str, bytes, bool], None]:
        """Returns a handler for `Link.subscribe` that gives sound messages of `kind` to `use`, with their sealed bytes.

        A state of the learner is passed on once: what was heard already is no sign of life.
        """

        def handle(topic: str, payload: bytes, retained: bool) -> None:
            if not payload:
                return  # a retained message was deleted
            try:
                message = codec.decode(kind, self._verifier.open(topic, payload))
                is_new = self._guard.check(message, self._boot)
            except errors.MessageError as error:
                self._refuse(error, topic)
                return
            if is_new:
                use(message, payload)

        return handle

    def put(self, message: Message, sealed: bytes = b"") -> None:
        """Keeps a message for the acting loop; of those that replace each other only the newest."""
        with self._lock:
            self._waiting.put(message, len(sealed), _subject(message))
            while self._waiting.is_over and len(self._waiting) > 1:
                self._waiting.get()
                self.refused["flood"] = self.refused.get("flood", 0) + 1
        self.wake.set()

    def get(self) -> Message | None:
        """Returns the message that waits longest, or None."""
        with self._lock:
            return self._waiting.get()

    def check_silence(self) -> None:
        """Notices when the learner falls silent, which is counted and logged. To be called now and then."""
        self._guard.check_silence()
        if self._guard.silences:
            self.refused["silence"] = self._guard.silences

    def vitals(self) -> dict[str, Any]:
        """Returns what was refused, by fields of `messages.Vitals`."""
        return {"refused": dict(self.refused)}

    def _refuse(self, error: errors.MessageError, topic: str) -> None:
        if error.reason not in self.refused:
            _log.warning("message refused: %s (%s)", error.what, topic)  # said once per reason, counted each time
        self.refused[error.reason] = self.refused.get(error.reason, 0) + 1


def _subject(message: Message) -> object:
    """Returns what a message is about: another one about the same replaces it."""
    if isinstance(message, messages.Command):
        return message.command_id
    return type(message), 0 if isinstance(message, (messages.LearnerState, messages.Orders)) else message.boot
