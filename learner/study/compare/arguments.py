"""The arguments of `actorq-learner compare`, and what it does with those that cannot be met."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner import config
from learner.study.compare import headroom, peers, plan

_log = logging.getLogger(__name__)
_DEFAULT = plan.Request()


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. None stands for what was not given, so that `--resume` can tell."""
    d = _DEFAULT
    lists = [
        ("--precisions", d.precisions, "of published policies; the first is what the others are compared with"),
        (
            "--regimes",
            d.regimes,
            "what is waited for: the learner, as tuned; or actors, each held to a share of a core",
        ),
        ("--kinds", d.kinds, "runs of equally many steps; runs until the task's threshold"),
        ("--peers", d.peers, "runtimes of others beside ours: tensorflow, torch-int8, onnx-int8 (`make peers`)"),
    ]
    for flag, default, text in lists:
        shown = f" (default: {','.join(default)})" if default else ""
        parser.add_argument(flag, type=_words, metavar="NAME,...", help=text + shown)
    parser.add_argument(
        "--hidden",
        type=_widths,
        action="append",
        metavar="N,N,...",
        help="widths of the policy's hidden layers; may be repeated (default: the task's)",
    )
    numbers: list[tuple[str, Any, Any, str, str]] = [
        ("--seeds", int, d.seeds, "N", "seeds, each of them with every arm"),
        ("--seed", int, d.seed, "N", "the first of them"),
        ("--actors", int, d.actors, "N", "in each fleet"),
        ("--actor-cpu-share", float, d.actor_cpu_share, "X", "of a core, for each actor where actors are waited for"),
        ("--run-s", float, d.run_s, "X", "what a run of equally many steps shall take its fastest arm"),
        ("--steps", int, d.steps, "N", "environment steps of such a run instead; 0: by a first short run"),
        (
            *("--samples-per-insert", float, d.samples_per_insert, "X"),
            "where actors are waited for; 0: by a first short run",
        ),
        ("--max-s", float, d.max_s, "X", "give a run towards the threshold up after so long"),
        ("--wait-s", float, d.wait_s, "X", "for the actors of --fleet"),
    ]
    for flag, kind, default, metavar, text in numbers:
        parser.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (default: {default:g})")
    parser.add_argument("--env", metavar="ID", help=f"the task (default: {d.env})")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        metavar="NAME=VALUE",
        help="a setting of `actorq-learner demo`, such as batch_size=64; may be repeated",
    )
    parser.add_argument("--fleet", metavar="NAME", help="actors that are there, instead of some on this machine")
    parser.add_argument("--broker", metavar="HOST[:PORT],...", help="of that fleet, as in `actorq-learner train`")
    parser.add_argument(
        "--keep", action="store_true", default=None, help="keep checkpoints, ledgers and policies of runs that ended"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="(default: runs/compare-ENV-TIME)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with a comparison that was interrupted")


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a request that were given, by name."""
    found = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(plan.Request)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items() if value is not None
    }


def request(values: Mapping[str, Any]) -> plan.Request:
    """Returns a request of what was given, without the precisions and peers that there are not: each is logged.

    Raises:
        ConfigError: The rest makes no comparison.
    """
    asked = plan.Request(**values)
    _check(asked)
    left_out = {
        name: f"precision {name!r} is unknown; use some of {', '.join(config.PRECISIONS)}"
        for name in asked.precisions
        if name not in config.PRECISIONS
    }
    for line in left_out.values():
        _log.warning("left out: %s", line)
    without = absent_peers(asked)
    kept = dataclasses.replace(
        asked,
        precisions=tuple(dict.fromkeys(name for name in asked.precisions if name not in left_out)),
        peers=tuple(dict.fromkeys(name for name in asked.peers if name not in without)),
    )
    if not kept.precisions or len(kept.precisions) + len(kept.peers) < 2:
        raise errors.ConfigError(
            f"there is nothing to compare: {', '.join((*kept.precisions, *kept.peers)) or 'no precision'} alone",
            where="--precisions",
            todo=f"name two or more of {', '.join(config.PRECISIONS)}",
        )
    return kept


def absent_peers(asked: plan.Request) -> frozenset[str]:
    """Returns the peers that cannot act here now; each is logged with the reason."""
    absent = peers.missing(asked.peers)
    if asked.fleet and asked.peers:
        absent = dict.fromkeys(asked.peers, "left to the actors of --fleet, which run what they have")
    for name, why in absent.items():
        _log.warning("left out: peer %r is %s", name, why)
    return frozenset(absent)


def complete(asked: plan.Request, tuned: Mapping[str, Any]) -> plan.Request:
    """Returns a request with the task's own widths where none were named, and without what the task has not.

    Raises:
        ConfigError: Nothing is left to run.
    """
    if asked.samples_per_insert and not headroom.has_replay(tuned):
        raise errors.ConfigError(
            f"{tuned['algorithm']} learns from a step as often as its phases say, and samples none from replay",
            where="--samples-per-insert",
            todo="leave it out; --set epochs=N says how often it learns from a phase",
        )
    hidden = asked.hidden or (tuple(tuned["hidden"]),)
    kinds = asked.kinds
    if plan.THRESHOLD in kinds and not math.isfinite(tuned["solved_return"]):
        kinds = tuple(kind for kind in kinds if kind != plan.THRESHOLD)
        _log.warning("left out: runs to the threshold, which is not known of %s; --set solved_return=X", asked.env)
    if not kinds:
        raise errors.ConfigError("no kind of run is left", where="--kinds", todo="add throughput")
    return dataclasses.replace(asked, hidden=tuple(dict.fromkeys(hidden)), kinds=kinds)


def _check(asked: plan.Request) -> None:
    problems = []
    for field, known in (("regimes", plan.REGIMES), ("kinds", plan.KINDS)):
        named = getattr(asked, field)
        if not named or any(name not in known for name in named):
            problems.append(f"--{field} takes some of {', '.join(known)}, not {','.join(named) or 'nothing'}")
    for field in ("seeds", "actors", "run_s", "max_s", "actor_cpu_share"):
        if not 0 < getattr(asked, field) < math.inf:
            problems.append(f"--{field.replace('_', '-')} must be positive, not {getattr(asked, field)}")
    for field in ("seed", "steps", "samples_per_insert"):
        if not 0 <= getattr(asked, field) < math.inf:
            problems.append(f"--{field.replace('_', '-')} must not be negative: {getattr(asked, field)}")
    problems += [f"--set takes NAME=VALUE, not {pair!r}" for pair in asked.settings if not pair.partition("=")[2]]
    if asked.broker and not asked.fleet:
        problems.append("--broker goes with --fleet")
    if problems:
        raise errors.ConfigError("; ".join(problems), todo="`actorq-learner compare --help` lists what there is")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _widths(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in _words(text))
    if not found or min(found) < 1:
        raise ValueError(text)
    return found
