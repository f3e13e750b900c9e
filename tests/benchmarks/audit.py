"""What it costs and finds when a learner computes steps of its actors again (learner/audit).

Cost: a learner that is never short of experience trains beside actors at a control rate, with and without, in turn.
Found: four actors that lie, each in its own way, and an honest one, at a
share of 1 %: from the policy with which the lie begins until it is named. Honest steps: the actor's own code acts with
each kind of policy, and every step is computed again.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import _load
from tests.fakes import liars
from tests.learner.audit import acting

SHARE = 0.01
TURNS = int(os.environ.get("AUDIT_TURNS", "3"))
PHASE_S = float(os.environ.get("AUDIT_PHASE_S", "20"))
NAMINGS = int(os.environ.get("AUDIT_NAMINGS", "2"))
HONEST_S = float(os.environ.get("AUDIT_HONEST_S", "120"))
HONEST_STEPS = int(os.environ.get("AUDIT_HONEST_STEPS", "10000000"))
NAMED_WITHIN_S = 120.0
TASKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("CartPole-v1", "q_values", {"epsilon_start": 0.1, "epsilon_end": 0.1}),
    ("Acrobot-v1", "categorical", {}),
    ("Pendulum-v1", "deterministic", {"noise_std": 0.2, "noise_correlation_steps": 10.0}),
    ("Pendulum-v1", "squashed_gaussian", {}),
    ("Pendulum-v1", "gaussian", {}),
)


def run() -> Iterator[dict[str, Any]]:
    """Yields the cost in updates, the seconds until each liar is named, and honest steps without a false alarm."""
    if TURNS:
        yield _cost()
    for _ in range(min(1, NAMINGS)):
        yield from _named()
    if HONEST_S:
        yield _honest()


def _cost() -> dict[str, Any]:
    with_it, without = [], []
    audited = 0
    for _ in range(TURNS):
        for share, rates in ((0.0, without), (SHARE, with_it)):
            rate, steps = _updates_per_s(share)
            rates.append(rate)
            audited += steps
    ratios = [a / b for a, b in zip(with_it, without, strict=True)]
    return {
        "benchmark": "audit",
        "case": "updates/s of a learner that computes 1 % of the messages again, beside one that does not",
        "value": round(statistics.median(with_it), 1),
        "unit": "updates/s",
        "reference": round(statistics.median(without), 1),
        "ratio": round(statistics.median(ratios), 3),
        "runs": TURNS,
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": f"MLP 256x2, batch 128; 2 actors of 8 environments at 250 Hz; {audited} steps were computed again",
    }


def _updates_per_s(share: float) -> tuple[float, int]:
    """Returns updates/s over a phase, and how many steps were audited in all."""
    with _load.Site(2) as site:
        learner = site.learner(
            *("--actors", "2", "--samples-per-insert", "1000", "--batch-size", "128", "--env", "CartPole-v1"),
            *("--learning-starts", "2000", "--max-env-steps", "1000000000", "--solved-return", "inf"),
            *("--audit-share", str(share)),
        )
        for index in range(2):
            site.actor(f"actor-{index:04}", "--env", "CartPole-v1", "--rate-hz", "250", "--envs", "8")
        while site.newest_metrics()["policy_version"] < 3:
            time.sleep(0.1)
        first = site.newest_metrics()
        time.sleep(PHASE_S)
        last = site.newest_metrics()
        summary = site.stop_learner(learner)
    rate = (last["updates"] - first["updates"]) / (last["wall_s"] - first["wall_s"])
    return rate, int(summary["audited_steps"])


def _named() -> Iterator[dict[str, Any]]:
    took: dict[str, list[float]] = {name: [] for name in liars.LIARS}
    audited = 0
    for _ in range(NAMINGS):
        with _load.Site(5) as site:
            names = {f"actor-{index:04}": name for index, name in enumerate(("honest", *liars.LIARS))}
            learner = site.learner(
                *("--actors", "5", "--algorithm", "ddpg", "--hidden", "64,64", "--critic-hidden", "32"),
                *("--learning-starts", "1000", "--batch-size", "32", "--samples-per-insert", "1"),
                *("--max-env-steps", "1000000000", "--audit-share", str(SHARE)),
            )
            for actor_id, name in names.items():
                liar = f"{liars.__file__}:{liars.LIARS[name][0]}" if name in liars.LIARS else "Pendulum-v1"
                site.actor(actor_id, "--env", liar)
            held = _held(site.directory / "run")
            first = _created_s(site.directory / "run", 1)
            second = _created_s(site.directory / "run", 2)
            for actor_id, name in names.items():
                if name in liars.LIARS:
                    began = second if name == "older" else first
                    took[name].append(held[actor_id]["since_s"] - began)
                elif actor_id in held:
                    raise RuntimeError(f"the honest actor was named: {held[actor_id]}")
            audited += int(site.stop_learner(learner)["audited_steps"])
    for name, seconds in took.items():
        yield {
            "benchmark": "audit",
            "case": f"until an actor is named, of five that act at once: {liars.LIARS[name][0]}",
            "value": round(statistics.median(seconds), 2),
            "unit": "s",
            "reference": None,
            "ratio": None,
            "runs": NAMINGS,
            "spread": round(max(seconds) - min(seconds), 2),
            "explain": f"from the policy with which the lie begins; most {max(seconds):.1f} s; {audited} steps were "
            "computed again in all, of 1 % of the messages and one in 2 s",
        }


def _held(run: Path) -> dict[str, Any]:
    deadline = time.monotonic() + NAMED_WITHIN_S
    while time.monotonic() < deadline:
        file = run / "held.json"
        held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if len(held) >= len(liars.LIARS):
            return held
        time.sleep(0.1)
    raise RuntimeError(f"within {NAMED_WITHIN_S:g} s only {', '.join(held) or 'nobody'} was named")


def _created_s(run: Path, version: int) -> float:
    return float(json.loads((run / "policies" / f"v{version:06d}.int8.json").read_text())["created_s"])


def _honest() -> dict[str, Any]:
    """Lets the actor's own code act, and computes every step again."""
    actors = [(acting.Actor(task, 16, message_steps=4096, **given), head) for task, head, given in TASKS]
    steps = wrong = policies = 0
    began = audit_s = 0.0
    ends = time.monotonic() + HONEST_S
    for seed in itertools.count():
        for actor, head in actors:
            model = acting.model(actor.spec, head, seed)
            policy = actor.policy(model, head)
            policies += 1
            for _ in range(20):
                experience = actor.act(policy, part=256)
                began = time.perf_counter()
                verdict = acting.audited(actor, experience, model, head)
                audit_s += time.perf_counter() - began
                steps += verdict.steps
                wrong += verdict.wrong
        if steps >= HONEST_STEPS or time.monotonic() > ends:
            break
    rate = steps / audit_s
    return {
        "benchmark": "audit",
        "case": "steps of honest actors that were computed again, all kinds of policies; and false alarms",
        "value": steps,
        "unit": "steps",
        "reference": wrong,
        "ratio": None,
        "runs": policies,
        "spread": None,
        "explain": f"{wrong} steps were found wrong; {rate / 1e6:.2f} M steps/s are computed again; "
        f"heads {', '.join(np.unique([head for _, head, _ in TASKS]))}; 16 environments",
    }
