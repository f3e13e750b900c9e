"""Puts runs together that differ in nothing but their seed, and says in what the others differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from learner.study.report import reading, tables

_OF_ONE_RUN = {"seed", "run_dir", "broker", "fleet", "energy", "country", "evaluate_seed", "max_wall_s"}
"""Settings by which runs may differ and yet be seeds of the same."""
ARMS_MAX = 6
"""Arms that one picture tells apart."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs of one task and settings, whatever their seeds.

    Attributes:
        label: What is particular about it among its panel; `all runs` or `this run` where it is alone.
        runs: At least one.
    """

    label: str
    runs: Sequence[reading.Run]

    @property
    def seeds(self) -> str:
        """The number of runs, and their seeds, for people."""
        seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        named = f", seed{'' if len(seeds) == 1 else 's'} {tables.listed(seeds)}" if seeds else ""
        return f"{len(self.runs)} run{'' if len(self.runs) == 1 else 's'}{named}"


@dataclass(frozen=True, slots=True)
class Panel:
    """Arms of one task that are drawn together."""

    title: str
    arms: Sequence[Arm]


def panels(found: reading.Found) -> list[Panel]:
    """Returns a panel for each task, and for each regime and width of a comparison."""
    made: list[Panel] = []
    for task, runs in _by(found.runs, lambda run: run.task):
        made += _panels(task, _arms(runs))
    for comparison in found.comparisons:
        for title, runs in _by(comparison.runs, _place):
            made += _panels(title, [Arm(label, of) for label, of in _by(runs, _arm_label)])
    return made


def differing(runs: Sequence[reading.Run]) -> list[str]:
    """Returns the names of settings that are not the same in all of these runs."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings)
    return [n for n in names if any(s.get(n, _MISSING) != known[0].get(n, _MISSING) for s in known)]


def setting(value: Any) -> str:
    """Returns a setting for people."""
    if isinstance(value, list):
        return tables.listed(value) or "none"
    return tables.plain(value if value != "" else "none")


def _panels(title: str, arms: Sequence[Arm]) -> list[Panel]:
    parts = [arms[k : k + ARMS_MAX] for k in range(0, len(arms), ARMS_MAX)]
    if len(parts) == 1:
        return [Panel(title, parts[0])]
    return [Panel(f"{title}, {k} of {len(parts)}", part) for k, part in enumerate(parts, 1)]


def _arms(runs: Sequence[reading.Run]) -> list[Arm]:
    names = [name for name in differing(runs) if name not in _OF_ONE_RUN]
    groups = _by(runs, lambda run: tuple(setting(run.settings.get(name, "none")) for name in names))
    if len(groups) == 1:
        return [Arm("all runs" if len(runs) > 1 else "this run", runs)]
    return [Arm(", ".join(f"{name} {value}" for name, value in zip(names, key, strict=True)), of) for key, of in groups]


def _place(run: reading.Run) -> str:
    hidden = run.arm.get("hidden")
    width = "x".join(map(str, hidden)) if isinstance(hidden, list) else str(hidden or "")
    return tables.plain(", ".join(part for part in (run.task, *_words(run.arm, "regime", "kind"), width) if part))


def _words(arm: dict[str, Any], *names: str) -> list[str]:
    return [str(arm.get(name) or "") for name in names]


def _arm_label(run: reading.Run) -> str:
    return tables.plain(run.arm.get("peer") or run.arm.get("precision") or run.precision)


def _by(runs: Iterable[reading.Run], key: Any) -> list[tuple[Any, list[reading.Run]]]:
    groups: dict[Any, list[reading.Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.items())
