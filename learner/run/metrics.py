"""Metrics of a run, by the same keys in metrics.jsonl, TensorBoard and on the console; docs/metrics.md has each."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import tensorflow as tf

from broker.program import storage
from learner.files import records
from learner.run import console


class Metrics:
    """Writes rows of metrics; a resumed run goes on in the same files.

    Args:
        directory: The run directory.
        display: Shows the newest row.
        started_s: Monotonic time from which `wall_s` counts.
        kept: Counts what the disk does not take.
    """

    def __init__(
        self, directory: Path, display: console.Console, started_s: float, kept: records.Records | None = None
    ) -> None:
        self._path = directory / "metrics.jsonl"
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  open as long as the run
        self._kept = kept or records.Records()
        self._board = tf.summary.create_file_writer(str(directory / "tensorboard"))
        self._display = display
        self._started = started_s

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
