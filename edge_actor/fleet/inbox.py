"""What the learner says to this actor: opened, decoded, queued for the acting loop; or refused and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from broker.contract import codec, errors, messages, signing
from edge_actor.fleet import replay_guard

_M = TypeVar("_M", bound=messages.Message)
Word = messages.Assignment | messages.Receipt | messages.Command | messages.LearnerState
LIMIT = 64
LIMIT_BYTES = 2 * messages.MAX_POLICY_BYTES
"""Of words that wait for a loop that is busy: a broker may repeat what is genuine while an evaluation goes on. Beyond
them the oldest goes, counted as `flood`; whatever was retained comes again."""


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
        self._authority = replay_guard.Authority(on_log)
        self._words: dict[object, tuple[Word, int]] = {}  # with the bytes that each came in
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self.wake = threading.Event()
        self.refused: dict[str, int] = {}

    def opener(self, kind: type[_M], use: Callable[[_M, bytes], None]) -> Callable[[str, bytes, bool], None]:
        """A handler for `Link.subscribe` that gives each sound message of `kind` to `use`, with its sealed bytes.

        A state of the learner is passed on once: what was heard already is no sign of life.
        """

        def handle(topic: str, payload: bytes, retained: bool) -> None:
            if not payload:
                return  # a retained message was deleted
            try:
                message = codec.decode(kind, self._verifier.open(topic, payload))
                is_new = self._authority.check(message, self._boot)
            except errors.MessageError as error:
                self._refuse(error, topic)
                return
            if is_new:
                use(message, payload)

        return handle

    def put(self, message: Word, sealed: bytes = b"") -> None:
        """Keeps a message for the acting loop; of those that replace each other only the newest."""
        with self._lock:
            self._take(_subject(message))
            self._words[_subject(message)] = message, len(sealed)
            self._waiting_bytes += len(sealed)
            while len(self._words) > LIMIT or (self._waiting_bytes > LIMIT_BYTES and len(self._words) > 1):
                self._take(next(iter(self._words)))
                self.refused["flood"] = self.refused.get("flood", 0) + 1
        self.wake.set()

    def get(self) -> Word | None:
        """The message that waits longest, or None."""
        with self._lock:
            return self._take(next(iter(self._words), None))

    def listen(self) -> None:
        """To be called now and then: notices when the learner falls silent, which is counted and said."""
        self._authority.listen()
        if self._authority.silences:
            self.refused["silence"] = self._authority.silences

    def _take(self, subject: object) -> Word | None:
        word, size = self._words.pop(subject, (None, 0))
        self._waiting_bytes -= size
        return word

    def _refuse(self, error: errors.MessageError, topic: str) -> None:
        if error.reason not in self.refused:
            self._on_log(f"message refused: {error.what} ({topic})")  # said once per reason, counted each time
        self.refused[error.reason] = self.refused.get(error.reason, 0) + 1


def _subject(message: Word) -> object:
    """What a message is about: another one about the same replaces it."""
    if isinstance(message, messages.Command):
        return message.command_id
    return type(message), 0 if isinstance(message, messages.LearnerState) else message.boot
