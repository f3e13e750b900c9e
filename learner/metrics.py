"""Metrics of a run, under the same keys in metrics.jsonl, TensorBoard and on the console. README.md explains each."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import tensorflow as tf

from learner import console


class Metrics:
    """Writes rows of metrics; a resumed run goes on in the same files.

    Args:
        directory: The run directory.
        screen: Shows the newest row.
        started_s: Monotonic time from which `wall_s` counts.
    """

    def __init__(self, directory: Path, screen: console.Console, started_s: float) -> None:
        self._file = open(directory / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115  open as long as the run
        self._board = tf.summary.create_file_writer(str(directory / "tensorboard"))
        self._screen = screen
        self._started = started_s

    def write(self, row: dict[str, float]) -> None:
        """Writes one row; `env_steps` is its step, and a value that is not finite becomes null."""
        wall_s = round(time.monotonic() - self._started, 3)
        clean = {key: (value if math.isfinite(value) else None) for key, value in row.items()}
        self._file.write(json.dumps({"wall_s": wall_s, **clean}) + "\n")
        self._file.flush()
        # One record for all. `tf.summary.scalar` would import TensorBoard, for a second in the middle of training, and
        # then take 5 ms a row
        shown = [
            tf.compat.v1.Summary.Value(tag=key, simple_value=value) for key, value in clean.items() if value is not None
        ]
        with self._board.as_default():
            tf.summary.experimental.write_raw_pb(
                tf.compat.v1.Summary(value=shown).SerializeToString(), step=int(row["env_steps"])
            )
        self._screen.show(wall_s, clean)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        self._board.close()
