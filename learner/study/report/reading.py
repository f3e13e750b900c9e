"""Reads what runs and comparisons left in their directories. What cannot be used is said in one line, and left out."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from learner.files import run_directory
from learner.study.report import tables

_log = logging.getLogger(__name__)
SERIES = (
    *("wall_s", "env_steps", "updates", "return_mean", "published_return_mean", "policy_lag_mean"),
    *("publish_to_acting_ms", "env_steps_per_s"),
)
"""Figures that are read of the rows of metrics."""
ROWS_MAX = 4000
"""Rows of one run that are kept, evenly spread: no picture shows more."""
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The remains of one run; whatever it did not write is empty.

    Attributes:
        path: Of its directory.
        settings: Its config.toml.
        summary: Its summary.json; empty where it has not ended.
        rows: Its metrics, oldest first: numbers by name. `wall_s` goes on where the session before ended.
        wall_before_s: The seconds of all sessions but the last.
        starts: Who started it with which command and versions.
        details: Its details.json: fleet, and distributions.
        fidelity: Its fidelity.json.
        by_demo: Whether `demo` started it.
        arm: What it stands for in a comparison; empty for a run by itself.
    """

    path: Path
    settings: Object = field(default_factory=dict)
    summary: Object = field(default_factory=dict)
    rows: Sequence[Mapping[str, float]] = ()
    wall_before_s: float = 0.0
    starts: Sequence[Object] = ()
    details: Object = field(default_factory=dict)
    fidelity: Object = field(default_factory=dict)
    by_demo: bool = False
    arm: Object = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return tables.plain(self.path.resolve().name)

    @property
    def task(self) -> str:
        """The environment that it is about."""
        return tables.plain(self.summary.get("env_id") or self.settings.get("env") or "unknown task")

    @property
    def seed(self) -> int | None:
        """The seed of its weights and sampling."""
        found = self.settings.get("seed", self.summary.get("seed"))
        return found if isinstance(found, int) else None

    @property
    def goal(self) -> float | None:
        """The return at which it is solved; None where no return ends it."""
        return tables.number(self.settings.get("solved_return", self.summary.get("solved_return")))

    @property
    def session_steps(self) -> float | None:
        """The environment steps of the last session, which times, bytes and joules of the summary are of."""
        return tables.number(self.summary.get("session_env_steps", self.summary.get("env_steps")))

    @property
    def wall_s(self) -> float | None:
        """The seconds that it took: those of its learner's sessions, or from the first process of a demo on."""
        last_s = tables.number(self.summary.get("train_wall_s", self.summary.get("learner_wall_s")))
        return None if last_s is None else self.wall_before_s + last_s

    @property
    def precision(self) -> str:
        """The precision of the policies that it published."""
        return tables.plain(self.settings.get("precision") or self.summary.get("precision") or "int8")

    def series(self, name: str, by: str = "env_steps") -> list[tuple[float, float]]:
        """Returns the rows that have a figure, as pairs of (`by`, figure)."""
        return [(row[by], row[name]) for row in self.rows if by in row and name in row]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The remains of a comparison: one row per ratio, and the runs that they come from."""

    path: Path
    rows: Sequence[Object]
    runs: Sequence[Run]
    plan: Object


@dataclass(slots=True)
class Found:
    """All that was read, and what was not."""

    runs: list[Run] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, path: Path, problem: str) -> None:
        """Notes, and logs, in one line what cannot be used."""
        line = tables.plain(f"{path}: {problem}")
        self.problems.append(line)
        _log.warning("%s", line)

    @property
    def all_runs(self) -> list[Run]:
        """The runs, those of comparisons included."""
        return [*self.runs, *(run for one in self.comparisons for run in one.runs)]


def read(directories: Iterable[Path]) -> Found:
    """Reads runs and comparisons, each once."""
    found = Found()
    seen: set[Path] = set()
    for path in directories:
        if (resolved := path.resolve()) in seen:
            continue
        seen.add(resolved)
        if not path.is_dir():
            found.note(path, "there is no such directory" if not path.exists() else "is a file, and no run directory")
        elif any((path / name).exists() for name in ("rows.jsonl", "runs.jsonl")):
            found.comparisons.append(_comparison(path, found))
        elif any((path / name).exists() for name in ("config.toml", "metrics.jsonl", "summary.json")):
            found.runs.append(run(path, found))
        else:
            found.note(path, "is no run directory: it has neither config.toml nor metrics.jsonl nor summary.json")
    return found


def run(path: Path, found: Found, arm: Object | None = None) -> Run:
    """Reads one run; notes what of it cannot be read."""
    starts = _json(path / "run.json", found).get("starts", [])
    settings, summary = _settings(path, found), _json(path / "summary.json", found)
    rows, wall_before_s = _metrics(path, found)
    return Run(
        path,
        settings=settings,
        summary=summary,
        rows=rows,
        wall_before_s=wall_before_s,
        starts=[one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else [],
        details=_json(path / run_directory.DETAILS, found),
        fidelity=_json(path / "fidelity.json", found),
        by_demo=(path / "demo.toml").exists(),
        arm=arm or {},
    )


def _comparison(path: Path, found: Found) -> Comparison:
    rows = [row for row in _lines(path / "rows.jsonl", found) if row]
    runs = []
    for line in _lines(path / "runs.jsonl", found):
        arm, summary = line.get("arm"), line.get("summary")
        if not isinstance(arm, dict) or not isinstance(summary, dict):
            found.note(path / "runs.jsonl", "a line without `arm` and `summary` is left out")
            continue
        if line.get("failed"):
            found.note(path, f"run {line.get('run')} failed, and is left out: {line['failed']}")
            continue
        directory = _directory_of(path, line)
        one = run(directory, found, arm) if directory else Run(path, arm=arm)
        settings = one.settings or {"seed": line.get("seed"), "precision": arm.get("precision")}
        runs.append(
            Run(
                one.path,
                settings=settings,
                summary=one.summary or summary,
                rows=one.rows,
                wall_before_s=one.wall_before_s,
                starts=one.starts,
                details=one.details,
                fidelity=one.fidelity,
                by_demo=one.by_demo,
                arm=arm | {"kind": line.get("kind", "")},
            )
        )
    return Comparison(path, rows, runs, _json(path / "plan.json", found))


def _directory_of(path: Path, line: Object) -> Path | None:
    """Returns the directory of a comparison's run, which lies within the comparison's; None where it is not there."""
    name = line.get("directory")
    if not isinstance(name, str) or "\0" in name:
        return None
    directory = (path / name).resolve()
    return directory if path.resolve() in directory.parents and directory.is_dir() else None


def _settings(path: Path, found: Found) -> Object:
    file = path / "config.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        found.note(file, f"cannot be read, and is left out: {error}")
        return {}


def _json(file: Path, found: Found) -> Object:
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        found.note(file, f"cannot be read, and is left out: {error}")
        return {}
    if not isinstance(value, dict):
        found.note(file, "is no JSON object, and is left out")
        return {}
    return value


def _lines(file: Path, found: Found) -> Iterator[Object]:
    """Yields the JSON objects of a file of lines; those that are none are counted and left out."""
    broken, first = 0, 0
    if not file.exists():
        return
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            for count, line in enumerate(opened, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    broken, first = broken + 1, first or count
    except OSError as error:
        found.note(file, f"cannot be read to its end: {error}")
    if broken:
        which = f"line {first}" if broken == 1 else f"line {first} and {broken - 1} more"
        found.note(file, f"{which} cannot be read, and {'is' if broken == 1 else 'are'} left out")


def _metrics(path: Path, found: Found) -> tuple[list[dict[str, float]], float]:
    """Reads the rows of metrics; of many, ever fewer of the old and the new alike.

    Returns:
        The rows, and the seconds of all sessions but the last: each counts from its own start, a resumed one too.
    """
    file = path / "metrics.jsonl"
    kept: list[dict[str, float]] = []
    newest: dict[str, float] = {}
    count, step, before_s, last_s = 0, 1, 0.0, 0.0
    for row in _lines(file, found):
        newest = {key: value for key in SERIES if (value := tables.number(row.get(key))) is not None}
        if (wall_s := newest.get("wall_s")) is not None:
            before_s += last_s if wall_s < last_s else 0.0
            last_s, newest["wall_s"] = wall_s, before_s + wall_s
        if count % step == 0:
            kept.append(newest)
            if len(kept) >= ROWS_MAX:
                kept, step = kept[::2], 2 * step
        count += 1
    if not count:
        found.note(path, "the run has no metrics: it is left out of the curves")
    elif kept[-1] is not newest:
        kept.append(newest)
    return kept, before_s
