"""Draws the pictures of the README from runs: python -m tests.benchmarks.pictures.picture docs/pictures RUN..."""

from __future__ import annotations

import sys
from pathlib import Path

from learner.study.report import breakdown, curves, grouping, reading, svg


def draw(directory: Path, runs: list[Path]) -> None:
    """Writes curve.svg and breakdown.svg."""
    (panel,) = grouping.panels(reading.read(runs))
    with svg.style():
        learned = next(one for one in curves.pictures(panel) if one.title.startswith("Return of the policies"))
        beside = breakdown.published([panel])
    assert beside is not None
    for name, picture in (("curve", learned), ("breakdown", beside)):
        (directory / f"{name}.svg").write_text(picture.alone, encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
