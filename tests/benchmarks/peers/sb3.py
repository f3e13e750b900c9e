"""Stable-Baselines3, in a process of `.venv/peers`: python -m tests.benchmarks.peers.sb3 updates|learn.

`learn` takes one request and prints when it had learnt the task; `updates` answers each line with a rate. One thread:
for networks of this size it is the fastest.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common import callbacks, env_util, logger, noise, on_policy_algorithm, vec_env

EPISODES = 20
PERIOD_STEPS = 500
"""Between two evaluations, which its clock does not count; who learns on policy is evaluated after each phase."""
_FIRST_SEED, _CONFIRMING_SEED = 10_000, 20_000


class Scoring(callbacks.BaseCallback):
    """Scores the greedy policy as our actors do, the untrained one too: 20 episodes, and 20 others where these do.

    Attributes:
        train_s: Seconds of training alone until it was solved, or until now.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.environment = gymnasium.make(request["env"])
        self.target, self.best, self.timeout_s = request["target"], request["best"], request["timeout_s"]
        self.solved, self.train_s, self.scored = False, 0.0, 0
        self.returns: list[float] = []
        self._began = 0.0

    def _on_training_start(self) -> None:
        self._began = time.monotonic()

    def _on_rollout_start(self) -> None:
        if self._is_on_policy:
            self._score()

    def _on_step(self) -> bool:
        if not (self._is_on_policy or self.num_timesteps % PERIOD_STEPS):
            self._score()
        return not self.solved and self.train_s < self.timeout_s

    @property
    def _is_on_policy(self) -> bool:
        return isinstance(self.model, on_policy_algorithm.OnPolicyAlgorithm)

    def _score(self) -> None:
        self.train_s += time.monotonic() - self._began
        self.returns = self._play(_FIRST_SEED + EPISODES * self.scored)
        self.scored += 1
        if self._reached(self.returns):
            self.returns = self._play(_CONFIRMING_SEED + EPISODES * self.scored)
            self.solved = self._reached(self.returns)
        self._began = time.monotonic()

    def _reached(self, returns: list[float]) -> bool:
        """Returns whether they reach the target, or may once there are as many as there should be."""
        return bool(sum(returns) + (EPISODES - len(returns)) * self.best >= EPISODES * self.target)

    def _play(self, seed: int) -> list[float]:
        """Returns the returns of all episodes, or of the first ones that make it impossible to reach the target."""
        found: list[float] = []
        normalizer = self.model.get_vec_normalize_env()
        for episode in range(EPISODES):
            observation, _ = self.environment.reset(seed=seed + episode)
            total, over = 0.0, False
            while not over:
                seen = observation if normalizer is None else normalizer.normalize_obs(observation)
                action, _ = self.model.predict(seen, deterministic=True)
                observation, reward, terminated, truncated, _ = self.environment.step(action)
                total, over = total + float(reward), terminated or truncated
            found.append(total)
            if not self._reached(found):
                break
        return found


def _schedule(value: Any) -> Any:
    """Returns what falls from X to 0 for "lin_X", and any other setting as it is."""
    if not (isinstance(value, str) and value.startswith("lin_")):
        return value
    first = float(value.removeprefix("lin_"))
    return lambda left: left * first


def learn(request: dict[str, Any]) -> dict[str, Any]:
    """Returns how one run went.

    Args:
        request: algorithm, settings, noise_std, total_steps, n_envs, normalizes (as arms.Arm); env, target, best; seed,
            timeout_s.
    """
    settings = {name: _schedule(value) for name, value in request["settings"].items()}
    environment: Any = gymnasium.make(request["env"])
    if request["n_envs"] > 1:
        environment = env_util.make_vec_env(request["env"], request["n_envs"], seed=request["seed"])
    if request["normalizes"]:
        environment = vec_env.VecNormalize(environment, gamma=settings.get("gamma", 0.99))
    if request["noise_std"]:
        size = environment.action_space.shape or ()
        settings["action_noise"] = noise.NormalActionNoise(np.zeros(size), np.full(size, request["noise_std"]))
    made = getattr(stable_baselines3, request["algorithm"])
    model = made("MlpPolicy", environment, seed=request["seed"], device="cpu", **settings)
    scoring = Scoring(request)
    model.learn(request["total_steps"], callback=scoring)
    return {
        "solved": scoring.solved,
        "seconds": scoring.train_s,
        "env_steps": model.num_timesteps,
        "updates": model._n_updates,
        "return_mean": float(np.mean(scoring.returns)) if scoring.returns else None,  # of fewer where it failed
        "versions": f"stable-baselines3 {stable_baselines3.__version__}, torch {torch.__version__}",
    }


class Rates:
    """A DQN with a full replay buffer, to be updated.

    Args:
        request: hidden, batch_size, features, actions, transitions.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        features, actions, count = request["features"], request["actions"], request["transitions"]
        self._batch = request["batch_size"]
        self._model = stable_baselines3.DQN(
            "MlpPolicy",
            _Nothing(features, actions),
            batch_size=self._batch,
            buffer_size=count,
            device="cpu",
            seed=0,
            policy_kwargs={"net_arch": list(request["hidden"])},
        )
        self._model.set_logger(logger.Logger(folder=None, output_formats=[]))
        rng, buffer = np.random.default_rng(0), self._model.replay_buffer
        assert buffer is not None
        for array in (buffer.observations, buffer.next_observations, buffer.rewards):
            array[...] = rng.normal(size=array.shape)
        buffer.actions[...] = rng.integers(0, actions, buffer.actions.shape)
        buffer.full = True

    def measure(self, updates: int) -> float:
        """Returns updates per second, sampling included."""
        began = time.perf_counter()
        self._model.train(updates, self._batch)
        return updates / (time.perf_counter() - began)


class _Nothing(gymnasium.Env[Any, Any]):
    """Spaces, and nothing that happens in them."""

    def __init__(self, features: int, actions: int) -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, (features,), np.float32)
        self.action_space = spaces.Discrete(actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(self.observation_space.shape, np.float32), {}


def main() -> None:
    """Answers requests until there are no more."""
    torch.set_num_threads(1)
    if sys.argv[1] == "learn":
        print(json.dumps(learn(json.loads(sys.stdin.readline()))), flush=True)
        return
    rates: Rates | None = None
    for line in sys.stdin:
        request = json.loads(line)
        rates = rates or Rates(request)
        print(json.dumps({"rate": rates.measure(request["updates"])}), flush=True)


if __name__ == "__main__":
    main()
