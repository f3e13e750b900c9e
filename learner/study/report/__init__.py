"""The report: what runs and comparisons came to, as one HTML page that needs no network."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from broker.contract import errors
from broker.program import storage


def write(directories: Sequence[Path], output: Path) -> Path:
    """Draws runs and comparisons, and returns the page's path. What cannot be used is logged, and left out.

    Args:
        directories: Of runs, or of comparisons.
        output: The page; replaced if it is there.

    Raises:
        RunError: None of them can be used.
        RuntimeMissing: There is no matplotlib.
        StorageError: The page cannot be written.
    """
    return make(directories, output)[0]


def make(directories: Sequence[Path], output: Path) -> tuple[Path, list[str], list[Path]]:
    """Does what `write` does; returns also what could not be used, and the directories of the runs that are drawn."""
    from learner.study.report import reading

    found = reading.read(directories)
    if not found.runs and not found.comparisons:
        raise errors.RunError(
            "there is no run to report on",
            where=", ".join(map(str, directories)),
            todo="name run directories, as in runs/",
        )
    try:
        from learner.study.report import page  # here: matplotlib takes half a second to load
    except ImportError as error:
        raise errors.RuntimeMissing(
            f"the report needs matplotlib: {error}", todo="install the extra `learner`, or run `make demo` once"
        ) from error
    drawn = page.render(found)
    try:
        storage.write_atomic(output, drawn.encode("utf-8", "replace"), mode=0o644, sync=False)
    except OSError as error:
        if storage.of_disk(error):
            raise
        what = "is a directory" if error.errno == errno.EISDIR else error.strerror or str(error)
        raise storage.at(
            f"the page cannot be written: {what}", str(output), todo="name a file: -o PAGE.html"
        ) from error
    return output, found.problems, [run.path for run in found.all_runs]
