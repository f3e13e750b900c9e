"""`actorq-learner` that audits in every other turn of a few seconds, and notes how many updates it made by when.

`python -m tests.benchmarks._in_turn FILE TURN_S train ...` writes lines of monotonic seconds and updates, one for each
pass of the loop.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from learner import __main__ as program
from learner.audit import auditor
from learner.run.loop import training_loop


def is_on(now_s: float, turn_s: float) -> bool:
    """Returns whether it audits now."""
    return int(now_s / turn_s) % 2 == 1


def main(file: str, turn_s: float, argv: list[str]) -> int:
    consider, tick = auditor.Auditor.consider, training_loop.TrainingLoop._tick
    with open(file, "w") as notes:

        def in_turn(self: auditor.Auditor, *told: Any) -> None:
            if is_on(time.monotonic(), turn_s):
                consider(self, *told)

        def noted(self: training_loop.TrainingLoop) -> None:
            tick(self)
            notes.write(f"{time.monotonic()} {self.parts.algorithm.updates}\n")

        auditor.Auditor.consider = in_turn  # type: ignore[assignment, method-assign]
        training_loop.TrainingLoop._tick = noted  # type: ignore[method-assign]
        return program.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
