"""What was refused for its content, kept for whoever looks for the cause: why, from whom, and how it begins.

Lines of JSON and not a table of the ledger: read with any tool, written when the ledger is not, and forged messages by
the thousand cost no transaction. Two files of half the limit, the older one thrown away when both are full. Not synced.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

NAME = "dead_letters.jsonl"
LIMIT_BYTES = 1_000_000
_FIRST_BYTES = 96


class DeadLetters:
    """An open file of refused messages.

    Args:
        path: Appended to, and made when there is something to write.
        limit_bytes: Of this file and the older one, `.1` behind its name.
    """

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._size = path.stat().st_size if path.exists() else 0

    def add(self, topic: str, reason: str, what: str, payload: bytes) -> None:
        """Keeps one message.

        Args:
            topic: Where it came by.
            reason: Slug that it is counted under.
            what: A sentence.
            payload: As it came.
        """
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "topic": topic,
            "reason": reason,
            "what": what,
            "bytes": len(payload),
            "begins": bytes(payload[:_FIRST_BYTES]).hex(),
        }
        line = (json.dumps(row) + "\n").encode()
        if self._size + len(line) > self._limit_bytes // 2 and self._size:
            os.replace(self._path, f"{self._path}.1")
            self._size = 0
        with open(self._path, "ab", buffering=0) as file:
            file.write(line)
        self._size += len(line)
