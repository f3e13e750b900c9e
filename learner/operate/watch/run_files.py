"""What a learner wrote of a run: its rows of metrics, followed while it trains, or read once it has ended."""

from __future__ import annotations

import contextlib
import json
import math
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.files import run_directory
from learner.operate.watch import history

POINTS_MAX = 2000
CURVE = (
    *("wall_s", "env_steps", "updates", "episodes", "return_mean", "published_return_mean", "updates_per_s"),
    *("env_steps_per_s", "policy_version", "policy_lag_mean", "actors_live", "loss", "actors_measured_j"),
)
"""Keys of metrics.jsonl that the page draws."""
_READ_BYTES = 1 << 20
_HOUR_S = 3600.0
_LINE_BYTES = 1 << 16
_SILENCE_S = 60.0
"""A learner writes a row a second."""


class RunFiles:
    """Follows metrics.jsonl. Of many rows it keeps ever fewer, so that its memory is bounded.

    Args:
        path: Run directory.

    Attributes:
        newest: The last row, all of it.
        points: Rows by the keys of CURVE; `wall_s` goes on over the sessions of a run.
        drift: How actors drift, by name and kind, while the run goes on.
        generation: Grows whenever `points` is not only longer than before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.newest: dict[str, Any] = {}
        self.points: list[dict[str, float]] = []
        self.drift: dict[str, dict[str, str]] = {}
        self.generation = 0
        self._offset, self._rest = 0, b""
        self._count, self._step = 0, 1
        self._before_s = self._last_s = 0.0

    def follow(self) -> None:
        """Reads what was written since, and who drifts."""
        self._follow_rows()
        self.drift = {}
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            if time.time() - (self.path / "metrics.jsonl").stat().st_mtime < _SILENCE_S:  # else its learner was killed
                told = json.loads((self.path / run_directory.DRIFT).read_text())
                self.drift = {name: found for name, found in told.items() if isinstance(found, dict)}

    def _follow_rows(self) -> None:
        """Reads the new rows. A line that is no row is passed over: it may be half of one, of a full disk."""
        try:
            with open(self.path / "metrics.jsonl", "rb") as file:
                file.seek(self._offset)
                while chunk := file.read(_READ_BYTES):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    self._rest = self._rest[-_LINE_BYTES:]
                    for line in lines:
                        with contextlib.suppress(ValueError, RecursionError):
                            self._note_row(json.loads(line))
        except OSError:
            return

    def actors(self) -> list[dict[str, Any]]:
        """Returns who took part in a run that has ended, as its details have it; of one that was killed, names alone.

        Those are of whom its files have an hour.
        """
        with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            rows = json.loads((self.path / "details.json").read_text())["fleet"]
            return [row for row in rows if isinstance(row, dict)]
        names = {name for line in self._hours() for name in line["actors"]}
        return [{"actor_id": name} for name in sorted(names)]

    def history(self, actor_id: str) -> dict[str, list[float | None]] | None:
        """Returns the last hour of an actor as `history.History.series` does; None if nothing is known of it.

        The hour is that before the last line of the whole fleet.
        """
        found: dict[str, list[float | None]] = {key: [] for key in ("at_s", *history.KEYS)}
        newest_s = -math.inf
        for line in self._hours():
            newest_s = max(newest_s, line["at_s"])
            row = line["actors"].get(actor_id)
            if not isinstance(row, list):
                continue
            figures = dict(zip(line["keys"], row, strict=False))
            found["at_s"].append(line["at_s"])
            for key in history.KEYS:
                value = figures.get(key)
                found[key].append(value if isinstance(value, int | float) else None)
        if not found["at_s"]:
            return None
        recent = [at for at, at_s in enumerate(found["at_s"]) if at_s is not None and at_s > newest_s - _HOUR_S]
        return {key: [values[at] for at in recent] for key, values in found.items()}

    def _hours(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of what the learner wrote of its actors. One that is none is passed over."""
        for name in (f"{run_directory.ACTOR_HOURS}.1", run_directory.ACTOR_HOURS):
            with contextlib.suppress(OSError), open(self.path / name, "rb") as file:
                for text in file:
                    with contextlib.suppress(ValueError, RecursionError):
                        line = json.loads(text)
                        if (
                            isinstance(line, dict)
                            and isinstance(line.get("at_s"), int | float)
                            and isinstance(line.get("actors"), dict)
                            and isinstance(line.get("keys"), list)
                        ):
                            yield line

    def _note_row(self, row: Any) -> None:
        if not isinstance(row, dict):
            return
        self.newest = {key: value for key, value in row.items() if isinstance(value, int | float)}
        point = {key: float(self.newest[key]) for key in CURVE if key in self.newest}
        wall_s = point.get("wall_s", 0.0)
        if wall_s < self._last_s:  # a resumed run counts from its own start
            self._before_s += self._last_s
        self._last_s, point["wall_s"] = wall_s, self._before_s + wall_s
        if self._count % self._step == 0:
            self.points.append(point)
        self._count += 1
        if len(self.points) >= POINTS_MAX:
            self.points, self._step = self.points[::2], 2 * self._step
            self.generation += 1


def open_run(path: Path) -> RunFiles:
    """Returns the files of a run, read to their end.

    Raises:
        RunError: There is no run.
    """
    if not (path / "metrics.jsonl").exists():
        raise errors.RunError(
            "there is no run to show: it has no metrics.jsonl", where=str(path), todo="name a directory as in runs/"
        )
    run = RunFiles(path)
    run.follow()
    return run


def newest_run(fleet: str, directory: Path = Path("runs")) -> Path | None:
    """Returns the run of a fleet that wrote its metrics last, of those in a directory; None if there is none."""
    found = [(file.stat().st_mtime, file.parent) for file in directory.glob("*/metrics.jsonl") if file.exists()]
    for _, path in sorted(found, reverse=True):
        with contextlib.suppress(OSError, tomllib.TOMLDecodeError):
            settings = tomllib.loads((path / "config.toml").read_text())
            if fleet in (settings.get("fleet"), settings.get("train", {}).get("fleet")):
                return path
    return None
