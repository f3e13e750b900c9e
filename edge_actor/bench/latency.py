"""Times, load and memory by width, precision, kernels, batch and threads.

The processes of one shape take turns, `repeats` times round, so that whatever drifts on the board meets all alike.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from broker.contract import errors, messages
from edge_actor.bench import child, models, records
from edge_actor.bench.config import BenchConfig
from edge_actor.board import board

_MEMORY_SHARE = 0.5
"""The share of the available memory that a policy may take; what would need more is left out, and said."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The work of one process."""

    precision: str
    kernels: str
    threads: int


def shapes(settings: BenchConfig) -> list[models.Shape]:
    """Returns all policies to measure, small ones first."""
    dense = [models.Shape(width, layers) for width in sorted(settings.widths) for layers in settings.layers]
    return dense + ([models.CNN] if settings.cnn else [])


def cells(settings: BenchConfig) -> list[Cell]:
    """Returns all that is measured of each policy; int8 and fp32 stand beside each other."""
    found = []
    for threads, kernels, precision in itertools.product(settings.threads, settings.kernels, settings.precisions):
        if kernels != "numpy" or precision == "float32":
            found.append(Cell(precision, kernels, threads))
    return found


def run(settings: BenchConfig, scratch: Path, emit: records.Sink, progress: Callable[[str], None]) -> None:
    """Measures all; each row goes to `emit` when its shape is done.

    Args:
        settings: What to measure.
        scratch: Directory for models.
        emit: Gets rows of kind `latency`, and of kind `skipped` with the reason.
        progress: Gets what is being measured.
    """
    todo = shapes(settings)
    for index, shape in enumerate(todo):
        if why := _too_large(20 * shape.weights):  # float32 weights, the file, and the copies while it is written
            emit({"kind": "skipped", "policy": shape.name, "why": why})
            continue
        policy = models.make(shape)
        files: dict[str, Path] = {}
        for precision in settings.precisions:
            files[precision] = scratch / f"{shape.name}-{precision}.tflite"
            files[precision].write_bytes(models.tflite(policy, precision))
        del policy
        measured: dict[tuple[Cell, int], list[records.Row]] = {}
        skipped: dict[Cell, str] = {}
        for repeat, (number, cell) in itertools.product(range(settings.repeats), enumerate(cells(settings))):
            if cell in skipped:
                continue
            progress(
                f"latency: policy {index + 1} of {len(todo)}, {shape.name}; round {repeat + 1} of {settings.repeats}; "
                f"{number + 1} of {len(cells(settings))}, {cell.precision} on {cell.kernels}"
            )
            try:
                for row in _measure(settings, shape, cell, files[cell.precision], scratch):
                    measured.setdefault((cell, row["batch"]), []).append(row)
            except errors.PolicyError as error:
                skipped[cell] = error.what
        for (cell, _), repeats in measured.items():
            if cell not in skipped:
                emit(records.median(repeats, spread=("invoke_us_p50", "observation_to_action_us_p50")))
        for cell, why in skipped.items():
            emit({"kind": "skipped", **_labels(shape, cell), "why": why})
        for file in files.values():
            file.unlink()


def _measure(
    settings: BenchConfig, shape: models.Shape, cell: Cell, file: Path, scratch: Path
) -> Iterator[records.Row]:
    if why := _too_large(4 * file.stat().st_size):  # the file, the runtime's packed copy, and as much while packing
        raise errors.PolicyError(why)
    with child.Child.start(
        shape,
        None if cell.kernels == "numpy" else file,
        runtime=settings.runtime,
        delegated=cell.kernels == "XNNPACK",
        threads=cell.threads,
        log=scratch / "child.log",
    ) as process:
        model = b"" if cell.kernels == "numpy" else file.read_bytes()
        for batch in settings.batches:
            times = process.ask({"batch": batch, "seconds": settings.seconds})
            yield {
                "kind": "latency",
                **_labels(shape, cell),
                # Never by what was asked for: what the delegate did not take ran on something else
                "kernels": process.facts["delegate"] or "numpy",
                "batch": batch,
                **process.facts,
                **times,
                "model_bytes": len(model),
                "sha256": hashlib.sha256(model).hexdigest() if model else "",
                "publishable": len(model) <= messages.MAX_POLICY_BYTES,
                **records.moment(),
            }


def _too_large(needed_bytes: int) -> str:
    """Returns why so much cannot be had; empty if it can."""
    available = board.memory_available_bytes()
    if available is None or needed_bytes <= _MEMORY_SHARE * available:
        return ""
    return f"takes about {needed_bytes / 1e6:.0f} MB, and {available / 1e6:.0f} are available"


def _labels(shape: models.Shape, cell: Cell) -> records.Row:
    return {
        "policy": shape.name,
        "width": shape.width,
        "layers": shape.layers,
        "cnn": shape.cnn,
        "precision": cell.precision,
        "kernels_wanted": cell.kernels,
        "threads": cell.threads,
    }
