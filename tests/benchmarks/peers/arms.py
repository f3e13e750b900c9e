"""Who learns against whom, on which task, with which settings.

Two of Stable-Baselines3 for each of ours. `matched` has our tuned settings as far as it has such settings: network,
batch, steps of a return, discount, replay, pace of updates and targets, exploration. It has no counterpart of double
and dueling DQN, of normalised inputs, or of a Huber loss that is quadratic beyond 1. `zoo` has what its own authors
tuned for the task: rl-baselines3-zoo, hyperparams/*.yml of April 2026. PPO and SAC meet the zoo's alone: their settings
have too little in common with ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from learner.config import tasks

_FOR_EVER = 10_000_000
_CARTPOLE, _PENDULUM = "CartPole-v1", "Pendulum-v1"
_ZOO_PENDULUM = {
    "gamma": 0.98,
    "buffer_size": 200_000,
    "learning_starts": 10_000,
    "train_freq": 1,
    "gradient_steps": 1,
    "learning_rate": 1e-3,
    "policy_kwargs": {"net_arch": [400, 300]},
}
_ZOO_CARTPOLE = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16 * 5e4 / _FOR_EVER,  # 0.16 of its 50 000 steps; here it may take more
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
_ZOO_LANDER_SAC = {
    "batch_size": 256,
    "learning_rate": "lin_7.3e-4",
    "buffer_size": 1_000_000,
    "tau": 0.01,
    "learning_starts": 10_000,
    "policy_kwargs": {"net_arch": [400, 300]},
}
_ZOO_CARTPOLE_PPO = {
    "n_steps": 32,
    "batch_size": 256,
    "gae_lambda": 0.8,
    "gamma": 0.98,
    "n_epochs": 20,
    "learning_rate": "lin_0.001",
    "clip_range": "lin_0.2",
}
_ZOO_PENDULUM_PPO = {"n_steps": 1024, "gamma": 0.9, "learning_rate": 1e-3, "use_sde": True, "sde_sample_freq": 4}
_ZOO_ACROBOT_PPO = {"n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4}
_ZOO_WALKER_PPO = {"n_steps": 2048, "gamma": 0.999, "clip_range": 0.18}
_ZOO_LANDER_PPO = {"n_steps": 1024, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4, "ent_coef": 0.01}


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison.

    Attributes:
        library: "actorq" or "sb3".
        settings: Arguments of Stable-Baselines3's algorithm; ours are in tasks.toml. "lin_X" falls from X to 0.
        noise_std: Of its Gaussian noise on actions of -1 to 1; 0: none.
        total_steps: At which it ends, solved or not, and to which "lin_X" falls.
        n_envs: Environments that it steps together.
        normalizes: Whether it normalises observations and rewards (its VecNormalize).
    """

    library: str
    name: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    noise_std: float = 0.0
    total_steps: int = _FOR_EVER
    n_envs: int = 1
    normalizes: bool = False


@dataclass(frozen=True, slots=True)
class Duel:
    """A task, the mean return of 20 greedy episodes that solves it, the best that one may have, ours and theirs."""

    env: str
    target: float
    best: float
    ours: Arm
    theirs: tuple[Arm, ...]


def duels() -> dict[str, Duel]:
    """Returns all of them by name."""
    return {
        "cartpole": Duel(
            _CARTPOLE,
            475.0,
            500.0,
            Arm("actorq", "actorq-dqn", "dqn"),
            (Arm("sb3", "sb3-dqn-matched", "DQN", _dqn()), Arm("sb3", "sb3-dqn-zoo", "DQN", _ZOO_CARTPOLE)),
        ),
        "pendulum-d4pg": Duel(
            _PENDULUM,
            -170.0,
            0.0,
            Arm("actorq", "actorq-d4pg", "d4pg"),
            (
                Arm("sb3", "sb3-td3-matched", "TD3", _continuous("d4pg"), noise_std=0.1),
                Arm("sb3", "sb3-td3-zoo", "TD3", _ZOO_PENDULUM, noise_std=0.1),
            ),
        ),
        "pendulum-ddpg": Duel(
            _PENDULUM,
            -170.0,
            0.0,
            Arm("actorq", "actorq-ddpg", "ddpg"),
            (
                Arm("sb3", "sb3-ddpg-matched", "DDPG", _continuous("ddpg"), noise_std=0.2),
                Arm("sb3", "sb3-ddpg-zoo", "DDPG", _ZOO_PENDULUM, noise_std=0.1),
            ),
        ),
        "pendulum-sac": _beside_zoo("sac", _PENDULUM, -170.0, 0.0, {"learning_rate": 1e-3}, 20_000),
        "lunarlander-sac": _beside_zoo("sac", "LunarLanderContinuous-v3", 230.0, 330.0, _ZOO_LANDER_SAC, 500_000),
        "cartpole-ppo": _beside_zoo("ppo", _CARTPOLE, 475.0, 500.0, _ZOO_CARTPOLE_PPO, 100_000, n_envs=8),
        "pendulum-ppo": _beside_zoo("ppo", _PENDULUM, -170.0, 0.0, _ZOO_PENDULUM_PPO, 100_000, n_envs=4),
        "acrobot-ppo": _beside_zoo(
            "ppo", "Acrobot-v1", -90.0, 0.0, _ZOO_ACROBOT_PPO, 1_000_000, n_envs=16, normalizes=True
        ),
        "lunarlander-ppo": _beside_zoo("ppo", "LunarLander-v3", 220.0, 330.0, _ZOO_LANDER_PPO, 1_000_000, n_envs=16),
        "bipedalwalker-ppo": _beside_zoo(
            "ppo", "BipedalWalker-v3", 280.0, 330.0, _ZOO_WALKER_PPO, 5_000_000, n_envs=32, normalizes=True
        ),
        "halfcheetah-sac": _beside_zoo("sac", "HalfCheetah-v5", 5000.0, 7000.0, {"learning_starts": 10_000}, 1_000_000),
    }


def _beside_zoo(
    algorithm: str,
    env: str,
    target: float,
    best: float,
    settings: dict[str, Any],
    total_steps: int,
    n_envs: int = 1,
    normalizes: bool = False,
) -> Duel:
    theirs = Arm(
        "sb3",
        f"sb3-{algorithm}-zoo",
        algorithm.upper(),
        settings,
        total_steps=total_steps,
        n_envs=n_envs,
        normalizes=normalizes,
    )
    return Duel(env, target, best, Arm("actorq", f"actorq-{algorithm}", algorithm), (theirs,))


def _dqn() -> dict[str, Any]:
    tuned = tasks.settings(_CARTPOLE, "dqn")
    period = round(tuned["batch_size"] / tuned["samples_per_insert"])
    return {
        **_common(tuned, period),
        "learning_rate": tuned["learning_rate"],
        "target_update_interval": tuned["target_period"] * period,  # there in steps, here in updates
        "max_grad_norm": tuned["max_grad_norm"],
        "exploration_initial_eps": tuned["epsilon_start"],
        "exploration_final_eps": tuned["epsilon_end"],
        "exploration_fraction": tuned["epsilon_decay_steps"] / _FOR_EVER,
        "policy_kwargs": {"net_arch": list(tuned["hidden"])},
    }


def _continuous(algorithm: str) -> dict[str, Any]:
    tuned = {"n_step": 5, "gamma": 0.99, "critic_learning_rate": 1e-3} | tasks.settings(_PENDULUM, algorithm)
    period = round(tuned["batch_size"] / tuned["samples_per_insert"])
    return {
        **_common(tuned, period),
        "learning_rate": tuned["critic_learning_rate"],  # it has one for both
        "policy_kwargs": {"net_arch": {"pi": list(tuned["hidden"]), "qf": list(tuned["critic_hidden"])}},
    }


def _common(tuned: dict[str, Any], period: int) -> dict[str, Any]:
    return {
        "batch_size": tuned["batch_size"],
        "buffer_size": tuned["replay_capacity"],
        "learning_starts": tuned["learning_starts"],
        "gamma": tuned["gamma"],
        "n_steps": tuned["n_step"],
        "train_freq": period,
        "gradient_steps": 1,
    }
