"""Tells what the runs were: the fleets, the settings, the versions, and the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from learner.study.report import grouping, reading, tables

_OF_ONE_PROCESS = ("broker", "run_dir", "fleet")
ACTORS_SHOWN = 200
"""Actors of one run in the table."""


def glance(panels: Sequence[grouping.Panel]) -> str:
    """Returns a table with one line an arm: what became of its runs."""
    head = (
        *("task", "runs", "of", "solved", "steps", "wall, s", "return as published", "fp32, same seeds"),
        *("file", "publish to acting, ms", "lag, versions"),
    )
    body = []
    for panel in panels:
        for arm in panel.arms:
            ended = [run.summary for run in arm.runs if run.summary]
            aimed = [run.summary for run in arm.runs if run.summary and run.goal is not None]
            solved = f"{sum(one.get('solved') is True for one in aimed)} of {len(aimed)}" if aimed else "no goal"
            body.append(
                (
                    panel.title,
                    arm.label,
                    arm.seeds,
                    solved if ended else "not ended",
                    _range(one.get("env_steps") for one in ended),
                    _range(run.wall_s for run in arm.runs),
                    _range(run.summary.get(f"{run.precision}_return_mean") for run in arm.runs),
                    _range(one.get("fp32_return_mean") for one in ended),
                    tables.size(next((run.summary.get(f"policy_{run.precision}_bytes") for run in arm.runs), None)),
                    _range(one.get("publish_to_acting_ms_p50") for one in ended),
                    _range(one.get("policy_lag_mean_versions") for one in ended),
                )
            )
    return tables.table(head, body, words=(0, 1, 2), ranges=range(4, len(head)))


def fleet(runs: Sequence[reading.Run]) -> str:
    """Returns the tables of the actors of each run that kept them; one open where there is one."""
    head = (
        *("actor", "board", "runtime", "kernels", "environments", "steps", "energy, J", "how", "covered", "source"),
        *("Python", "refused"),
    )
    made = []
    for run in runs:
        actors = run.details.get("fleet")
        known = [one for one in actors if isinstance(one, dict)] if isinstance(actors, list) else []
        body = [
            (
                one.get("actor_id", "?"),
                one.get("board", "-"),
                one.get("runtime", "-"),
                one.get("delegate") or "-",
                tables.shown(one.get("n_envs")),
                tables.shown(one.get("steps")),
                tables.shown(one.get("joules")),
                _how(one),
                _percent(one.get("coverage")),
                one.get("power_source") or "none",
                one.get("python", "-"),
                one.get("refused") or "-",
            )
            for one in known[:ACTORS_SHOWN]
        ]
        if table := tables.table(head, body, words=(0, 1, 2, 3, 7, 9, 11)):
            more = f", the first {ACTORS_SHOWN} of {len(known)}" if len(known) > ACTORS_SHOWN else ""
            made.append((f"{run.name}: {len(known)} actor{'' if len(known) == 1 else 's'}{more}", table))
    if len(made) == 1:
        return f"<p>{tables.escape(made[0][0])}</p>{made[0][1]}"
    return "".join(tables.folded(*one) for one in made)


def configuration(runs: Sequence[reading.Run]) -> str:
    """Returns the settings: those that differ between runs first, the rest on request; and the versions."""
    known = [run for run in runs if run.settings]
    if not known:
        return "<p>None of these runs kept its settings.</p>"
    names = [name for name in grouping.differing(known) if name not in _OF_ONE_PROCESS]
    parts = []
    if names:
        body = [(run.name, *(grouping.setting(run.settings.get(name, "none")) for name in names)) for run in known]
        head: Sequence[str] = ("run", *names)
        if len(head) > len(known) + 1:  # the other way round, lest it is wider than any page
            (_, *head), *body = zip(head, *body, strict=True)
            head = ("setting", *head)
        parts.append(f"<p>What differs between the runs:</p>{tables.table(head, body)}")
    same = {name: value for name, value in known[0].settings.items() if name not in (*names, *_OF_ONE_PROCESS)}
    listed = [(name, grouping.setting(value)) for name, value in same.items()]
    parts.append(
        tables.folded("What is the same in all of them", tables.table(("setting", "value"), listed, words=(0, 1)))
    )
    return "".join(parts) + tables.folded("Versions and machines", _versions(runs))


def commands(found: reading.Found) -> str:
    """Returns the commands that make the runs and comparisons again."""
    made = [comparison_command(one) for one in found.comparisons] + [command_of(run) for run in found.runs]
    lines = [command for command in made if command]
    if not lines:
        return "<p>None of these runs kept its command.</p>"
    shown = "\n".join(tables.escape(line, 4000) for line in dict.fromkeys(lines))
    return f"<div class=scroll tabindex=0><pre>{shown}</pre></div>"


def command_of(run: reading.Run) -> str:
    """Returns the command that makes a run again; empty where that was not kept."""
    if run.by_demo:
        again = ["actorq-learner", "demo", "--config", str(run.path / "demo.toml"), "--run-dir", f"{run.path}-again"]
        actors = run.details.get("fleet")
        envs = actors[0].get("n_envs") if isinstance(actors, list) and actors and isinstance(actors[0], dict) else 1
        again += ["--envs", str(envs)] if isinstance(envs, int) and envs > 1 else []
        return shlex.join(map(tables.plain, again))
    command = run.starts[0].get("command") if run.starts else None
    if not isinstance(command, list) or not command:
        return ""
    return shlex.join(["actorq-learner", *(tables.plain(word) for word in command[1:])])


def comparison_command(comparison: reading.Comparison) -> str:
    """Returns the command that makes a comparison again; empty where its plan was not kept."""
    plan = comparison.plan
    if not plan:
        return ""
    words = ["actorq-learner", "compare"]
    for name, value in plan.items():
        flag = "--set" if name == "settings" else f"--{str(name).replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        elif not isinstance(value, list):
            words += [flag, str(value)] if value not in ("", 0, None) else []
        elif name in ("hidden", "settings"):
            words += [word for one in value for word in (flag, _comma(one))]
        elif value:
            words += [flag, _comma(value)]
    return shlex.join(map(tables.plain, [*words, "-o", f"{comparison.path}-again"]))


def _comma(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _versions(runs: Sequence[reading.Run]) -> str:
    body = []
    for run in runs:
        for start in run.starts:
            versions = start.get("versions")
            named = [f"{k} {v}" for k, v in versions.items() if v] if isinstance(versions, dict) else []
            about = (
                start.get("time", "-"),
                start.get("git") or "-",
                start.get("python", "-"),
                start.get("platform", "-"),
            )
            body.append((run.name, *about, tables.listed(named)))
    return tables.table(("run", "started", "git", "Python", "machine", "versions"), body, words=range(6))


def _range(values: Any) -> str:
    """Returns the median and, of several, the ends."""
    found = sorted(value for item in values if (value := tables.number(item)) is not None)
    if not found:
        return "-"
    middle = (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
    if len(found) == 1:
        return tables.shown(middle)
    return f"{tables.shown(middle)} ({tables.shown(found[0])} to {tables.shown(found[-1])})"


def _how(actor: dict[str, Any]) -> str:
    if tables.number(actor.get("joules")) is None:
        return "-"
    return "modelled" if actor.get("power_modelled", True) else "measured"


def _percent(value: Any) -> str:
    found = tables.number(value)
    return "-" if found is None else f"{100 * found:.0f} %"
