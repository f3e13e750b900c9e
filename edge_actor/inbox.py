"""What the learner says to this actor: opened, decoded, queued for the acting loop; or refused and counted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from broker import codec, errors, messages, signing
from edge_actor import authority

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
QUEUE_LIMIT = 256
QUEUE_LIMIT_BYTES = 2 * messages.MAX_POLICY_BYTES
"""Of words that the acting loop has not read yet: a broker may repeat what is genuine while an evaluation goes on."""


class Inbox:
    """Opens sealed payloads on the thread that they come on.

    Args:
        verifier: Knows the learner's signature.
        boot: Of this actor.
        on_log: Takes one line for people.

    Attributes:
        wake: Set whenever something came in.
        refused: Refusals by reason. `flood` counts genuine words that came faster than they could be obeyed; `silence`
            how often the learner was not heard of for long.
    """

    def __init__(self, verifier: signing.LearnerVerifier, boot: int, on_log: Callable[[str], None]) -> None:
        self._verifier = verifier
        self._boot = boot
        self._on_log = on_log
        self._authority = authority.Authority(on_log)
        self._queue: queue.SimpleQueue[tuple[Word, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self.wake = threading.Event()
        self.refused: dict[str, int] = {}

    def opener(self, kind: type[_M], use: Callable[[_M, bytes], None]) -> Callable[[str, bytes, bool], None]:
        """A handler for `Link.subscribe` that gives each sound message of `kind` to `use`, with its sealed bytes."""

        def handle(topic: str, payload: bytes, retained: bool) -> None:
            if not payload:
                return  # a retained message was deleted
            try:
                message = codec.decode(kind, self._verifier.open(topic, payload))
                self._authority.check(message, self._boot)
            except errors.MessageError as error:
                self._refuse(error, topic)
                return
            use(message, payload)

        return handle

    def put(self, message: Word, sealed: bytes = b"") -> None:
        """Queues a message for the acting loop."""
        with self._lock:
            if self._queue.qsize() >= QUEUE_LIMIT or self._queued_bytes + len(sealed) > QUEUE_LIMIT_BYTES:
                self.refused["flood"] = self.refused.get("flood", 0) + 1
                return
            self._queued_bytes += len(sealed)
            self._queue.put((message, len(sealed)))
        self.wake.set()

    def get(self) -> Word | None:
        """The next message, or None."""
        try:
            word, size = self._queue.get_nowait()
        except queue.Empty:
            return None
        with self._lock:
            self._queued_bytes -= size
        return word

    def listen(self) -> None:
        """To be called now and then: notices when the learner falls silent, which is counted and said."""
        self._authority.listen()
        if self._authority.silences:
            self.refused["silence"] = self._authority.silences

    @property
    def empty(self) -> bool:
        return self._queue.empty()

    def _refuse(self, error: errors.MessageError, topic: str) -> None:
        if error.reason not in self.refused:
            self._on_log(f"message refused: {error.what} ({topic})")  # said once per reason, counted each time
        self.refused[error.reason] = self.refused.get(error.reason, 0) + 1
