"""The same keys in the file, in TensorBoard and on the console."""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator

from learner.run import console, metrics

ROW = {"env_steps": 1200.0, "updates": 30, "loss": 0.5, "return_mean": math.nan}


def test_one_row_reaches_file_board_and_console(tmp_path: Path) -> None:
    stream = io.StringIO()
    found = metrics.Metrics(tmp_path, console.Console(stream), started_s=0.0)
    found.write(ROW)
    found.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["loss"] == 0.5
    assert row["return_mean"] is None, "NaN is no JSON"
    assert row["wall_s"] > 0
    board = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    assert shown == {"env_steps": [(1200, 1200.0)], "updates": [(1200, 30.0)], "loss": [(1200, 0.5)]}
    assert "env_steps 1,200  updates 30" in stream.getvalue()


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        found = metrics.Metrics(tmp_path, console.Console(io.StringIO()), started_s=0.0)
        found.write(ROW)
        found.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_renews_itself() -> None:
    stream = Terminal()
    found = console.Console(stream)
    found.show(1.0, {"updates": 1})
    found.show(2.0, {"updates": 2})
    found.handle(logging.makeLogRecord({"msg": "an actor %s", "args": ("joined",)}))
    found.show(3.0, {"updates": 3})
    found.close()
    assert stream.getvalue().count("\r") == 3
    assert "\nan actor joined\n" in stream.getvalue()
    assert stream.getvalue().endswith("updates 3\n")


def test_elsewhere_lines_are_plain_and_few() -> None:
    stream = io.StringIO()
    found = console.Console(stream)
    for _ in range(10):
        found.show(1.0, {"updates": 1})
    assert stream.getvalue() == "   1.0 s  updates 1\n"
