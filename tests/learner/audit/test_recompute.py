"""What the actor's own code did is found true, whatever its task and exploration; and each lie is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from broker.contract import specs
from broker.contract.acting import draws
from learner.audit import recompute
from learner.quantize.tflite import interpreter
from tests.fakes.environments import liars, toys
from tests.learner.audit import acting

HONEST: dict[str, tuple[str, str, dict[str, Any]]] = {
    "greedy": ("CartPole-v1", "q_values", {}),
    "epsilon": ("CartPole-v1", "q_values", {"epsilon_start": 0.3, "epsilon_end": 0.3, "seed": 5, "slot": 2}),
    "epsilon that falls": (
        "CartPole-v1", "q_values", {"epsilon_start": 1.0, "epsilon_end": 0.05, "epsilon_decay_steps": 1500,
                                    "epsilon_offset": 100},
    ),
    "six of sixteen": ("Acrobot-v1", "q_values", {"n_envs": 16, "epsilon_start": 0.2, "epsilon_end": 0.2}),
    "half of the episodes": ("CartPole-v1", "q_values", {"record_fraction": 0.5, "epsilon_start": 0.2}),
    "stacked frames": (
        f"{toys.__file__}:Frames", "q_values", {"stack": 3, "n_envs": 2, "epsilon_start": 0.2, "epsilon_end": 0.2},
    ),
    "noise": ("Pendulum-v1", "deterministic", {"noise_std": 0.3}),
    "correlated noise": ("Pendulum-v1", "deterministic", {"noise_std": 0.3, "noise_correlation_steps": 8.0}),
    "noise and epsilon": ("Pendulum-v1", "deterministic", {"noise_std": 0.1, "epsilon_start": 0.2, "epsilon_end": 0.2}),
    "no noise": ("Pendulum-v1", "deterministic", {}),
    "categorical": ("CartPole-v1", "categorical", {"n_envs": 2}),
    "several choices": (f"{toys.__file__}:Taker", "categorical", {"n_envs": 2, "arguments": {"kind": "panel"}}),
    "gaussian": ("Pendulum-v1", "gaussian", {}),
    "squashed gaussian": ("Pendulum-v1", "squashed_gaussian", {"n_envs": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("kernels", ["XNNPACK", "built-in"])
def test_what_an_honest_actor_did_is_true(name: str, kernels: str) -> None:
    task, head, settings = HONEST[name]
    actor = acting.Actor(task, **settings)
    made = acting.model(actor.spec, head)
    policy = actor.policy(made, head, delegated=kernels == "XNNPACK")
    assert policy.delegate == kernels
    rows = draws.BLOCK + 50 if "stack" not in settings else 150  # those are dear
    while actor.explorer.row < rows:
        experience = actor.act(policy, rows=100 if actor.seq % 2 else 0)
        verdict = acting.audited(actor, experience, made, head, kernels)
        assert verdict == (len(experience.reward), 0, "")


@pytest.mark.parametrize("precision", ["float32", "float16", "dynamic"])
def test_other_precisions_are_held_to_what_float_kernels_may_differ_by(precision: str) -> None:
    actor = acting.Actor("CartPole-v1", epsilon_start=0.2, epsilon_end=0.2)
    made = acting.model(actor.spec, precision=precision)
    experience = actor.act(actor.policy(made, "q_values"))
    assert acting.audited(actor, experience, made, precision=precision).wrong == 0
    lie = dataclasses.replace(experience, action=1 - experience.action)
    assert acting.audited(actor, lie, made, precision=precision).wrong > 100


LIES = (
    ("CartPole-v1", "q_values", 0.1),
    ("Pendulum-v1", "deterministic", 0.0),
    ("CartPole-v1", "categorical", 0.0),
    (f"{toys.__file__}:Panel", "categorical", 0.0),
)


@pytest.mark.parametrize(("task", "head", "epsilon"), LIES)
def test_an_actor_that_says_it_did_something_else_is_found(task: str, head: str, epsilon: float) -> None:
    actor = acting.Actor(task, epsilon_start=epsilon, epsilon_end=epsilon)
    made = acting.model(actor.spec, head)
    experience = actor.act(actor.policy(made, head))
    action = experience.action.copy()
    for step in (100, 200, 300, 400):  # four steps of 512
        action[step] = 1 - action[step] if head != "deterministic" else 0.98 * action[step] + 0.01
    verdict = acting.audited(actor, dataclasses.replace(experience, action=action), made, head)
    assert 1 <= verdict.wrong <= 4  # of two actions, the other one may be what was drawn
    assert "no policy here explains" in verdict.why


def test_an_actor_that_explores_when_it_likes_is_found() -> None:
    actor = acting.Actor("CartPole-v1", epsilon_start=1.0, epsilon_end=1.0)
    made = acting.model(actor.spec)
    experience = actor.act(actor.policy(made, "q_values"))
    actor.assignment = dataclasses.replace(actor.assignment, epsilon_start=0.05, epsilon_end=0.05)
    assert acting.audited(actor, experience, made).wrong > 100


def test_an_actor_that_plays_another_version_is_found_and_the_version_named() -> None:
    actor = acting.Actor("CartPole-v1", epsilon_start=0.1, epsilon_end=0.1)
    old, new = (acting.model(actor.spec, seed=seed) for seed in (1, 2))
    experience = actor.act(actor.policy(old, "q_values"), version=2)
    verdict = acting.audited(actor, experience, new, others=(("version 1, and says 2", old),))
    assert verdict.wrong
    assert verdict.why == "it plays version 1, and says 2"


def test_a_flipped_bit_in_a_model_file_is_found_as_soon_as_it_changes_an_action() -> None:
    actor = acting.Actor("Pendulum-v1", n_envs=4, message_steps=400)
    made = acting.model(actor.spec, "deterministic")
    weights = liars.weights(made)
    changed = 0
    for at in weights[:: len(weights) // 20]:
        broken = bytearray(made)
        broken[at] ^= 1 << 7
        experience = actor.act(actor.policy(bytes(broken), "deterministic"))  # it loads without a word
        seen = recompute.observed(experience, np.arange(len(experience.reward)), 1)
        differs = (
            np.abs(np.clip(interpreter.answer(made, seen)[0], -2, 2) - np.asarray(experience.action, np.float32)) > 1e-3
        )
        verdict = acting.audited(actor, experience, made, "deterministic")
        assert verdict.wrong == np.count_nonzero(differs)
        changed += verdict.wrong > 0
    assert changed >= 10


def test_an_actor_with_other_kernels_than_it_says_is_found_and_they_are_named() -> None:
    actor = acting.Actor("Pendulum-v1")
    made = acting.model(actor.spec, "deterministic")
    experience = actor.act(actor.policy(made, "deterministic", delegated=False))
    verdict = acting.audited(actor, experience, made, "deterministic")
    assert verdict.wrong
    assert verdict.why == "its kernels are not XNNPACK, as it says"
    assert acting.audited(actor, experience, made, "deterministic", "built-in").wrong == 0


def test_more_environments_than_it_was_born_with_are_found() -> None:
    actor = acting.Actor("CartPole-v1", n_envs=3)
    made = acting.model(actor.spec)
    experience = actor.act(actor.policy(made, "q_values"))
    actor.n_envs = 2
    assert "more environments" in acting.audited(actor, experience, made).why


def test_rows_that_are_said_to_lie_anywhere_keep_nobody_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = acting.Actor("CartPole-v1", n_envs=16)
    made = acting.model(actor.spec)
    experience = actor.act(actor.policy(made, "q_values"))
    far = np.arange(len(experience.row), dtype=np.int32) * 100_000
    drawn: list[int] = []
    exploring = draws.exploring

    def counted(seed: int, slot: int, block: int, action: specs.ActionSpec, n_envs: int) -> Any:
        drawn.append(block)
        return exploring(seed, slot, block, action, n_envs)

    monkeypatch.setattr(draws, "exploring", counted)
    acting.audited(actor, dataclasses.replace(experience, row=far, draw=10**17), made)
    assert 0 < len(drawn) <= 16
    assert len(drawn) <= len(experience.row)
