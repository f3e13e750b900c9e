"""What it costs and finds when a learner computes steps of its actors again (learner/audit).

Cost: a learner trains beside actors at a control rate and checks as much as it ever may (auditor.DUTY), but for every
other check, by the toss of a coin: what one takes of the updates in the moment after it, times how often one is due.
A check takes milliseconds, and rates by the second differ by a tenth. Found: four actors that lie, each in its own way,
and an honest one, at a share of 1 %: from the policy with which the lie begins until it is named. Honest steps: the
actor's own code acts with each kind of policy, and every step is computed again; of each policy a message with the
actions moved by a step must be found. AUDIT_PHASE_S=0, AUDIT_NAMINGS=0, AUDIT_HONEST_S=0 leave one out each, and
AUDIT_HONEST_SEED=0, 1, ... are other policies, episodes and draws, so that many steps may come in parts: the rows add
up.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import _load, _windows
from tests.fakes.environments import liars, toys
from tests.learner.audit import acting

SHARE = 0.01
PHASE_S = float(os.environ.get("AUDIT_PHASE_S", "120"))
WINDOW_S = 0.05
"""After a check was due: within it one is over."""
NAMINGS = int(os.environ.get("AUDIT_NAMINGS", "2"))
HONEST_S = float(os.environ.get("AUDIT_HONEST_S", "120"))
HONEST_STEPS = int(os.environ.get("AUDIT_HONEST_STEPS", "10000000"))
HONEST_SEED = int(os.environ.get("AUDIT_HONEST_SEED", "0"))
MESSAGES = 20
"""Of each policy."""
NAMED_WITHIN_S = 120.0
TASKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("CartPole-v1", "q_values", {"epsilon_start": 0.1, "epsilon_end": 0.1}),
    ("Acrobot-v1", "categorical", {}),
    (f"{toys.__file__}:Taker", "categorical", {"arguments": {"kind": "panel"}}),
    ("Pendulum-v1", "deterministic", {"noise_std": 0.2, "noise_correlation_steps": 10.0}),
    ("Pendulum-v1", "squashed_gaussian", {}),
    ("Pendulum-v1", "gaussian", {}),
)


def run() -> Iterator[dict[str, Any]]:
    """Yields the cost in updates, the seconds until each liar is named, and honest steps without a false alarm."""
    if PHASE_S:
        yield _cost()
    if NAMINGS:
        yield from _named()
    if HONEST_S:
        yield _honest()


def _cost() -> dict[str, Any]:
    with _load.Site(2) as site:
        passes, checks = site.directory / "passes.txt", site.directory / "checks.txt"
        learner = site.spawn(
            ["tests.benchmarks._noted", str(passes), str(checks), "train", "--fleet", _load.FLEET]
            + ["--broker", site.address, "--json", "--no-energy", "--evaluate-episodes", "0"]
            + ["--run-dir", str(site.directory / "run"), "--actors", "2", "--env", "CartPole-v1"]
            + ["--samples-per-insert", "256", "--batch-size", "128", "--learning-starts", "2000"]
            + ["--publish-period-updates", "1000", "--checkpoint-period-s", "3600"]
            + ["--max-env-steps", "1000000000", "--solved-return", "inf", "--audit-share", "1"]
        )
        for index in range(2):
            site.actor(f"actor-{index:04}", "--env", "CartPole-v1", "--rate-hz", "250", "--envs", "8")
        while site.newest_metrics()["policy_version"] < 3:
            time.sleep(0.1)
        began = time.monotonic()
        time.sleep(PHASE_S)
        summary = site.stop_learner(learner)
        made, tossed = _windows.read(passes), _windows.read(checks)
    tossed = tossed[(tossed[:, 0] > began) & (tossed[:, 0] < began + PHASE_S)]
    found = _windows.compare(made, tossed, WINDOW_S)
    each_s = len(tossed) / PHASE_S
    lost, error = ((1 - found.value) * WINDOW_S, found.error * WINDOW_S)
    cpu_s = summary["audit_cpu_s"] / summary["audited_messages"]
    return {
        "benchmark": "audit",
        "case": "updates/s of a learner that computes steps again as often as it ever may, beside one that does not",
        "value": round(found.reference * (1 - lost * each_s), 1),
        "unit": "updates/s",
        "reference": round(found.reference, 1),
        "ratio": round(1 - lost * each_s, 4),
        "runs": found.windows,
        "spread": round(error * each_s, 4),
        "explain": f"MLP 256x2, batch 128; 2 actors of 8 environments; {each_s:.1f} times a second a check was due, "
        f"and made or not by the toss of a coin: in the {1e3 * WINDOW_S:g} ms after it updates are {found.value:.4f} "
        f"(standard error {found.error:.4f}) with it, so that it takes {1e3 * lost:.2f} ms ({1e3 * error:.2f}) of them "
        f"and {1e3 * cpu_s:.2f} ms of CPU; the spread is the ratio's standard error",
    }


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
    first = 10_000 * HONEST_SEED
    actors = [(acting.Actor(task, 16, message_steps=4096, seed=first, **given), head) for task, head, given in TASKS]
    steps = messages = wrong = accused = policies = caught = 0
    audit_s = 0.0
    ends = time.monotonic() + HONEST_S
    for seed in itertools.count(first):
        for actor, head in actors:
            model = acting.model(actor.spec, head, seed)
            policy = actor.policy(model, head)
            policies += 1
            for _ in range(MESSAGES):
                experience = actor.act(policy, part=256)
                began = time.perf_counter()
                verdict = acting.audited(actor, experience, model, head)
                audit_s += time.perf_counter() - began
                steps, messages = steps + verdict.steps, messages + 1
                wrong, accused = wrong + verdict.wrong, accused + bool(verdict.wrong)
            lie = dataclasses.replace(experience, action=np.roll(experience.action, 1, axis=0))
            caught += bool(acting.audited(actor, lie, model, head).wrong)
        if steps >= HONEST_STEPS or time.monotonic() > ends:
            break
    if caught < policies:
        raise RuntimeError(f"of {policies} messages whose actions were moved by a step, {policies - caught} passed")
    return {
        "benchmark": "audit",
        "case": "steps of honest actors that were computed again, all kinds of policies; and messages accused of them",
        "value": steps,
        "unit": "steps",
        "reference": accused,
        "ratio": None,
        "runs": policies,
        "spread": None,
        "explain": f"{wrong} steps of {messages} messages were found wrong, and some of each of {caught} whose "
        f"actions were moved by a step; {steps / audit_s / 1e6:.2f} M steps/s are computed again; heads "
        f"{', '.join(np.unique([head for _, head, _ in TASKS]))}; {len(TASKS)} tasks of 16 environments; "
        f"AUDIT_HONEST_SEED={HONEST_SEED}",
    }
