"""What the learner says to this actor: opened, decoded, queued for the acting loop; or refused and counted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from broker import codec, errors, messages, signing

_M = TypeVar(
    "_M",
    messages.Policy,
    messages.PolicyDelta,
    messages.Assignment,
    messages.LearnerState,
    messages.Receipt,
    messages.Command,
)
Word = messages.Assignment | messages.Receipt | messages.Command | messages.LearnerState


class Inbox:
    """Opens sealed payloads on the thread that they come on.

    Args:
        verifier: Knows the learner's signature.
        on_log: Takes one line for people.

    Attributes:
        wake: Set whenever something came in.
        refused: Refusals by reason.
    """

    def __init__(self, verifier: signing.LearnerVerifier, on_log: Callable[[str], None]) -> None:
        self._verifier = verifier
        self._on_log = on_log
        self._queue: queue.SimpleQueue[Word] = queue.SimpleQueue()
        self.wake = threading.Event()
        self.refused: dict[str, int] = {}

    def opener(self, kind: type[_M], use: Callable[[_M, bytes], None]) -> Callable[[str, bytes, bool], None]:
        """A handler for `Link.subscribe` that gives each sound message of `kind` to `use`, with its sealed bytes."""

        def handle(topic: str, payload: bytes, retained: bool) -> None:
            if not payload:
                return  # a retained message was deleted
            try:
                message = codec.decode(kind, self._verifier.open(topic, payload))
            except errors.MessageError as error:
                if error.reason not in self.refused:
                    self._on_log(f"message refused: {error.what} ({topic})")
                self.refused[error.reason] = self.refused.get(error.reason, 0) + 1
                return
            use(message, payload)

        return handle

    def put(self, message: Word, sealed: bytes = b"") -> None:
        """Queues a message for the acting loop."""
        self._queue.put(message)
        self.wake.set()

    def get(self) -> Word | None:
        """The next message, or None."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    @property
    def empty(self) -> bool:
        return self._queue.empty()
