"""Files of a run that training does not depend on: where the disk takes none of it, that is said, counted and survived.

The ledger is not among them: what it cannot write gets no receipt, and the learner ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from broker.program import logs

_log = logging.getLogger(__name__)
_AGAIN_S = 60.0


class Records:
    """Counts what could not be written, and logs it, each kind once a minute. From any thread.

    Attributes:
        failed: Writes that failed, by kind.
    """

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()

    def metrics(self) -> dict[str, float]:
        """Returns the count of writes that failed, for a row of metrics."""
        return {"writes_failed": sum(self.failed.values())}

    def summary(self) -> dict[str, Any]:
        """Returns the writes that failed by kind, for the summary."""
        return {"writes_failed": dict(self.failed)}

    @contextlib.contextmanager
    def attempt(self, kind: str) -> Iterator[None]:
        """Lets what is written inside fail.

        Args:
            kind: Names it, in the plural.
        """
        try:
            yield
        except OSError as error:
            self.note(kind, error)

    def note(self, kind: str, error: Exception) -> None:
        """Notes that one write failed."""
        self.failed[kind] += 1
        first = str(error).strip().partition("\n")[0]
        _log.warning(
            "%s cannot be written (%d times now): %s; training goes on without",
            kind,
            self.failed[kind],
            first,
            extra=logs.once(kind, again_s=_AGAIN_S),
        )
