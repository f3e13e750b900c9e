"""What a process of a study does: it begins, and computes one cell after another."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.program import children, logs
from learner.quantize.tflite import stderr_filter

if TYPE_CHECKING:
    from learner.study.sweep import opening, plan, policies


def begin(parent: int) -> None:
    """Prepares a process: it ends with its parent, leaves signals to it, and loads TensorFlow without its words."""
    children.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its actors ignore it, too, and end their episodes
    signal.signal(signal.SIGTERM, lambda signum, frame: None)  # actors do not: they die by it with this process
    with stderr_filter.filtered(everything=True):
        from learner.study.sweep import cell  # noqa: F401
    logs.configure(level=logging.WARNING)


def attempt(
    entry: policies.Entry, column: str, request: plan.Request, directory: Path
) -> dict[str, Any] | opening.Unusable:
    """Computes a cell; returns why not where its policy has none at all."""
    from learner.study.sweep import cell, opening

    try:
        return cell.compute(entry, column, request, directory)
    except opening.Unusable as why:
        return why
