"""Metrics of a run, by the same keys in metrics.jsonl, TensorBoard and on the console; docs/metrics.md has each."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from broker.program import storage
from learner.files import records
from learner.run.reports import console


class Metrics:
    """Writes rows of metrics; a resumed run goes on in the same files.

    Args:
        path: metrics.jsonl.
        file: The same, open.
        board: Writes TensorBoard's rows.
        display: Shows the newest row.
        started_s: Monotonic time from which `wall_s` counts.
        kept: Counts what the disk does not take.
    """

    @classmethod
    def open(
        cls, directory: Path, display: console.Console, started_s: float, kept: records.Records | None = None
    ) -> Metrics:
        """Opens the files in a run directory; further arguments are the constructor's."""
        path = directory / "metrics.jsonl"
        file = open(path, "ab", buffering=0)  # noqa: SIM115  open as long as the run
        board = tf.summary.create_file_writer(str(directory / "tensorboard"))
        return cls(path, file, board, display, started_s, kept or records.Records())

    def __init__(
        self,
        path: Path,
        file: io.FileIO,
        board: Any,
        display: console.Console,
        started_s: float,
        kept: records.Records,
    ) -> None:
        self._path, self._file, self._board = path, file, board
        self._display, self._started, self._kept = display, started_s, kept

    def write(self, row: dict[str, float]) -> None:
        """Writes one row; `env_steps` is its step, and a value that is not finite becomes null."""
        wall_s = round(time.monotonic() - self._started, 3)
        clean = {key: (value if math.isfinite(value) else None) for key, value in row.items()}
        with self._kept.attempt("metrics"):
            storage.append(self._file, (json.dumps({"wall_s": wall_s, **clean}) + "\n").encode(), self._path)
        # One record for all. `tf.summary.scalar` would import TensorBoard, for a second in the middle of training, and
        # then take 5 ms a row
        shown = [
            tf.compat.v1.Summary.Value(tag=key, simple_value=value) for key, value in clean.items() if value is not None
        ]
        try:
            with self._board.as_default():
                tf.summary.experimental.write_raw_pb(
                    tf.compat.v1.Summary(value=shown).SerializeToString(), step=int(row["env_steps"])
                )
        except tf.errors.OpError as error:  # its way to say that the disk is full
            self._kept.note("TensorBoard's rows", error)
        self._display.show(wall_s, clean)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        try:
            self._board.close()
        except tf.errors.OpError as error:
            self._kept.note("TensorBoard's rows", error)


def merged(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of several stages as one row; what two of them count by one name is added up."""
    row: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            row[name] = row[name] + value if name in row else value
    return row
