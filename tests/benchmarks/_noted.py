"""`actorq-learner` that notes how many updates it has made by when, and may leave out every other audit.

`python -m tests.benchmarks._noted PASSES CHECKS train ...` writes a line of monotonic seconds and updates to PASSES for
each pass of the loop. Each audit whose turn it is is made, or not, by the toss of a coin: CHECKS gets a line of
monotonic seconds and 1 or 0. With `-` in the place of CHECKS all are made.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from learner import __main__ as program
from learner.audit import auditor
from learner.run.loop import training_loop


def main(passes: str, checks: str, argv: list[str]) -> int:
    check, tick = auditor.Auditor._check, training_loop.TrainingLoop._tick
    coin = random.Random(0)
    rest_s = 0.0
    with open(passes, "w", buffering=1) as noted, open("/dev/null" if checks == "-" else checks, "w") as tossed:

        def tossed_check(self: auditor.Auditor, *about: Any) -> auditor.Finding | None:
            nonlocal rest_s
            is_made = coin.random() < 0.5
            tossed.write(f"{time.monotonic()} {int(is_made)}\n")
            if is_made:
                found = check(self, *about)
                rest_s = self._resumes_at - self._clock()
                return found
            self._resumes_at = self._clock() + rest_s  # as long as after one that was made
            return None

        def noted_tick(self: training_loop.TrainingLoop) -> None:
            tick(self)
            noted.write(f"{time.monotonic()} {self.parts.algorithm.updates}\n")

        if checks != "-":
            auditor.Auditor._check = tossed_check  # type: ignore[assignment, method-assign]
        training_loop.TrainingLoop._tick = noted_tick  # type: ignore[method-assign]
        return program.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
