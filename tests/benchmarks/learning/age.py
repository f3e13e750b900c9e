"""Learning from experience that is 1, 10 or 100 s old when it comes, on two tasks, in virtual time.

The learner's own algorithm, replay and rate limiter, with the settings that are tuned for each task. Ten actors step
real environments at a control rate, and act on each new policy at once; what they record enters replay so long after
its sealing, as where a fleet speaks rarely, or its messages have a long way. The learner keeps up, policies are not
rounded, and nobody waits for grants: what is measured is age alone.

AGE_SEEDS (3) says how many seeds, AGE_TASKS names the tasks with commas. A task takes minutes: with BENCH_KEPT=FILE one
that was ended goes on where it was (`_kept.py`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from edge_actor.environment import env
from learner import config
from learner.algorithms import registry
from learner.experience import rate_limiter
from learner.experience.buffers import replay
from learner.networks import layers
from learner.quantize import fp32
from tests.benchmarks import _kept

AGES_S = 1.0, 10.0, 100.0
SEEDS = int(os.environ.get("AGE_SEEDS", "3"))
TASKS = os.environ.get("AGE_TASKS", "CartPole-v1,Pendulum-v1").split(",")
RATES = {"CartPole-v1": 50.0, "Pendulum-v1": 20.0}
"""Steps/s of each actor: what the tasks' own time step is."""
ACTORS, MESSAGE_S = 10, 1.0
LIMIT_S = 900.0
SCORE_S, EPISODES, FIRST_SEED = 5.0, 20, 10_000


class Learned(NamedTuple):
    """When a policy was good for the first time, in seconds since the actors began and in steps they had taken."""

    seconds: float
    steps: int
    is_good: bool


@dataclass(eq=False)
class _Segment:
    """What one actor saw within a message, and within one episode."""

    observation: NDArray[np.float32]
    action: NDArray[Any]
    reward: NDArray[np.float32]
    terminated: NDArray[np.uint8]
    length: NDArray[np.int32]


class _Actor:
    """One environment, and what is recorded of it since the last message."""

    def __init__(self, env_id: str, seed: int) -> None:
        self._env = gymnasium.make(env_id)
        self.observation, _ = self._env.reset(seed=seed)
        self._begin()

    def _begin(self) -> None:
        self._seen, self._rewards = [self.observation], list[float]()
        self._actions: list[Any] = []

    def step(self, action: Any) -> _Segment | None:
        """Takes a step; returns what ended with it."""
        self.observation, reward, terminated, truncated, _ = self._env.step(action)
        self._seen.append(self.observation)
        self._actions.append(action)
        self._rewards.append(float(reward))
        if not (terminated or truncated):
            return None
        ended = self.cut(terminated=terminated)
        self.observation, _ = self._env.reset()
        self._begin()
        return ended

    def cut(self, *, terminated: bool = False) -> _Segment | None:
        """Returns what there is, and goes on in the same episode."""
        if not self._actions:
            return None
        made = _Segment(
            np.array(self._seen, np.float32),
            np.array(self._actions),
            np.array(self._rewards, np.float32),
            np.array([terminated], np.uint8),
            np.array([len(self._actions)], np.int32),
        )
        self._begin()
        return made


class _Fleet:
    """Actors that explore as their settings say."""

    def __init__(self, env_id: str, chosen: config.OffPolicyConfig, action: specs.ActionSpec, seed: int) -> None:
        self.actors = [_Actor(env_id, 1000 * seed + number) for number in range(ACTORS)]
        self._chosen, self._action, self._rng = chosen, action, np.random.default_rng(seed)
        self.steps = 0

    def step(self, policy: layers.PolicyLayers | None) -> Iterator[_Segment]:
        """Has each actor take a step."""
        seen = np.array([actor.observation for actor in self.actors])
        chosen = _greedy(policy, seen, self._action) if policy else None
        epsilon, noise = self._chosen.epsilon, self._chosen.noise
        done = min(1.0, self.steps / max(1, epsilon.decay_steps))
        share = epsilon.start + (epsilon.end - epsilon.start) * done
        for number, actor in enumerate(self.actors):
            if chosen is None or self._rng.random() < share:
                action = self._draw()
            elif self._action.kind == "discrete":
                action = chosen[number]
            else:
                low, high = (np.array(bound, np.float32) for bound in (self._action.low, self._action.high))
                pushed = chosen[number] + noise.std * (high - low) / 2 * self._rng.standard_normal(len(low))
                action = np.clip(pushed, low, high).astype(np.float32)
            if (ended := actor.step(action)) is not None:
                yield ended
        self.steps += len(self.actors)

    def _draw(self) -> Any:
        if self._action.kind == "discrete":
            return int(self._rng.integers(self._action.n))
        return self._rng.uniform(self._action.low, self._action.high).astype(np.float32)


def run() -> Iterator[dict[str, Any]]:
    """Yields a row for each task and age; reference is the least of the ages."""
    for env_id in TASKS:
        found = {age_s: [_kept_or_learned(env_id, age_s, seed) for seed in range(SEEDS)] for age_s in AGES_S}
        least = statistics.median(one.seconds for one in found[AGES_S[0]])
        for age_s, each in found.items():
            seconds = [one.seconds for one in each]
            late = sum(not one.is_good for one in each)
            yield {
                "benchmark": "age",
                "case": f"{env_id}, experience {age_s:g} s old: seconds of the fleet until a policy is good",
                "value": round(statistics.median(seconds), 1),
                "unit": "s",
                "reference": round(least, 1),
                "ratio": round(statistics.median(seconds) / least, 2),
                "runs": len(each),
                "spread": round(max(seconds) - min(seconds), 1),
                "explain": f"virtual; {ACTORS} actors at {RATES[env_id]:g} steps/s; {[round(s) for s in seconds]} s, "
                f"{[one.steps for one in each]} steps taken; {late} not within {LIMIT_S:g} s, and count with it",
            }


def _kept_or_learned(env_id: str, age_s: float, seed: int) -> Learned:
    found = _kept.or_found(["age", env_id, age_s, seed], lambda: _learned(env_id, age_s, seed)._asdict())
    return Learned(**found)


def _learned(env_id: str, age_s: float, seed: int) -> Learned:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    with contextlib.closing(env.make(env_id)) as made:
        spec = made.spec
    settings = config.effective(parser.parse_args(["--seed", str(seed)]), env_id, actions=spec.action.kind)
    train, chosen = settings.train, settings.algorithm
    assert isinstance(chosen, config.OffPolicyConfig)
    agent, memory, rng = registry.make(settings, spec), replay.of(spec, chosen), np.random.default_rng(seed)
    samples = chosen.batch_size * chosen.updates_per_call
    limiter = rate_limiter.RateLimiter(train.samples_per_insert, train.learning_starts, 2.0 * samples)
    fleet, rate = _Fleet(env_id, chosen, spec.action, seed), RATES[env_id]
    on_its_way: collections.deque[tuple[float, list[_Segment]]] = collections.deque()
    message: list[_Segment] = []
    policy: layers.PolicyLayers | None = None
    published, scored_at, now_s, ticks = 0, 0.0, 0.0, 0
    while now_s < LIMIT_S:
        message += fleet.step(policy)
        ticks += 1
        now_s = ticks / rate
        if ticks % round(MESSAGE_S * rate) == 0:
            message += [cut for actor in fleet.actors if (cut := actor.cut()) is not None]
            on_its_way.append((now_s + age_s, message))
            message = []
        while on_its_way and on_its_way[0][0] <= now_s:
            _, came = on_its_way.popleft()
            limiter.insert(memory.insert(*came))
        while len(memory) and limiter.may_sample(samples):
            if agent.updates == 0:
                agent.normalize(memory.observations(1024, rng))
            batch = memory.sample(chosen.updates_per_call, chosen.batch_size, rng)
            limiter.sample(samples)
            update = agent.update(batch)
            memory.update_priorities(batch.ids, update.td_error)
        if agent.updates >= published + train.publish_period_updates:
            published, policy = agent.updates, agent.policy_layers()
        if policy and now_s >= scored_at + SCORE_S:
            scored_at = now_s
            if _score(env_id, policy, spec.action) >= train.solved_return:
                return Learned(now_s, fleet.steps, True)
    return Learned(now_s, fleet.steps, False)


def _greedy(policy: layers.PolicyLayers, seen: NDArray[Any], action: specs.ActionSpec) -> NDArray[Any]:
    outputs = fp32.outputs(policy, seen)
    return outputs.argmax(1) if action.kind == "discrete" else outputs


def _score(env_id: str, policy: layers.PolicyLayers, action: specs.ActionSpec) -> float:
    """The mean return of episodes without exploration."""
    each = [gymnasium.make(env_id) for _ in range(EPISODES)]
    seen = {number: one.reset(seed=FIRST_SEED + number)[0] for number, one in enumerate(each)}
    total = 0.0
    while seen:
        actions = _greedy(policy, np.array(list(seen.values())), action)
        for number, chosen in zip(list(seen), actions, strict=True):
            seen[number], reward, terminated, truncated, _ = each[number].step(chosen)
            total += float(reward)
            if terminated or truncated:
                del seen[number]
    return total / EPISODES
