"""A learner that notes when each of its commits has returned: `python -m tests.benchmarks._committed LOG train ...`.

A message is durable from then on; its receipt comes later, by way of the broker and the actors' process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from unittest import mock

from learner import __main__ as learner
from learner.experience import ledger


def main() -> int:
    """Runs the learner; LOG gets `first id, id behind the last, monotonic seconds` of each commit."""
    path, *arguments = sys.argv[1:]
    write = ledger.Ledger._write
    with open(path, "w", buffering=1) as log:  # by line: it is read meanwhile

        def noted(self: ledger.Ledger, ids: range, entries: Sequence[ledger.Entry], forget_before: int) -> None:
            write(self, ids, entries, forget_before)
            log.write(f"{ids.start} {ids.stop} {time.monotonic()}\n")

        with mock.patch.object(ledger.Ledger, "_write", noted):
            return learner.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
