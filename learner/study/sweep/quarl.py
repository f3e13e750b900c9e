"""What QuaRL reports (Krishnan et al., arXiv:1910.01055), each with how well it is known here."""

from __future__ import annotations

import dataclasses

RECALLED = "R: recalled, not read again in the paper; check before quoting"
COLUMN = "int8-weights"
"""The column that is made as QuaRL's: weights alone, one scale a layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A figure of the paper: int8 after training, mean over its tasks.

    Attributes:
        algorithm: As policies are called, lower case.
        error_percent: Mean relative error.
        grade: How well that is known.
        remark: What belongs to it.
    """

    algorithm: str
    error_percent: float
    grade: str
    remark: str = ""


ROWS = (
    Row("a2c", 2.3, RECALLED),
    Row("dqn", 8.6, RECALLED, "Breakout 64 %"),
    Row("ddpg", 4.9, RECALLED),
)
