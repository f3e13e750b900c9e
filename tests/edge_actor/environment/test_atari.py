"""Atari's preprocessing: lives and FIRE on a game made of numbers, the rest on the real one where it is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from broker.contract import errors, specs
from edge_actor.environment import atari, env


class Game(gymnasium.Env[Any, Any]):
    """Loses a life at every third step, of three in all. What it is asked is in `log`: seeds and actions."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.steps = 0
        self.ale = SimpleNamespace(lives=lambda: max(0, 3 - self.steps // 3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.log.append(("reset", seed))
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.log.append(int(action))
        self.steps += 1
        return np.array([self.steps], np.float32), 2.0, self.ale.lives() == 0, False, {}


def test_a_life_is_an_episode_and_the_game_goes_on() -> None:
    game = Game()
    wrapped = atari._EpisodicLife(game)
    assert wrapped.reset(seed=5)[0] == [0]
    assert [wrapped.step(1)[2] for _ in range(3)] == [False, False, True]
    assert wrapped.reset()[0] == [4], "a no-op, as the game has lives left"
    assert [wrapped.step(1)[2] for _ in range(2)] == [False, True]
    wrapped.reset()
    assert [wrapped.step(1)[2] for _ in range(2)] == [False, True], "the last life"
    assert wrapped.reset()[0] == [0]
    assert game.log == [("reset", 5), 1, 1, 1, 0, 1, 1, 0, 1, 1, ("reset", None)]
    wrapped.step(1)
    wrapped.reset(seed=6)
    assert game.log[-1] == ("reset", 6), "who seeds wants a game of its own"


def test_fires_at_the_start() -> None:
    game = Game()
    assert atari._FireReset(atari._EpisodicLife(game)).reset(seed=1)[0] == [1]
    assert game.log == [("reset", 1), 1]


def test_frames_are_skipped_in_one_place() -> None:
    with pytest.raises(errors.ConfigError, match="skipped here"):
        atari.make("ALE/Pong-v5", {"frameskip": 4}, training=False)
    assert not atari.is_game("CartPole-v1")


def test_the_real_game() -> None:
    pytest.importorskip("ale_py", reason="extra atari is not installed")
    pytest.importorskip("cv2", reason="extra atari is not installed")
    training, whole = (env.make("ALE/Breakout-v5", training=training) for training in (True, False))
    assert training.spec == whole.spec
    assert training.spec.observation == specs.ObservationSpec((84, 84, 4), "uint8", 4)

    def lengths(made: env.Environment, episodes: int) -> list[int]:
        found = []
        for k in range(episodes):
            made.reset(**({"seed": 0} if k == 0 else {}))
            steps, over = 0, False
            while not over:
                _, reward, terminated, truncated, _ = made.step(made.to_env(steps % 4))
                assert made is whole or reward in (0, 1)
                steps, over = steps + 1, terminated or truncated
            found.append(steps)
        made.close()
        return found

    assert lengths(whole, 1)[0] > 1.5 * max(lengths(training, 5))
