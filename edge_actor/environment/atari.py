"""Atari 2600 games as they are trained on: the preprocessing that published results have in common.

Machado et al. 2018 (https://arxiv.org/abs/1709.06009), with the names and values of Stable-Baselines3's `AtariWrapper`,
in its order:

| | value | |
|---|---|---|
| noop_max | 30 | up to so many no-ops begin an episode |
| frame_skip | 4 | an action is repeated so often, and the last two frames are seen as their maximum |
| terminal_on_life_loss | training only | a lost life ends an episode, and the next one goes on with the game |
| fire | | an episode begins with FIRE where the game has it |
| screen_size | 84 | gray |
| clip_reward | training only | to its sign |
| frame_stack | 4 | |

Sticky actions are the id's: `ALE/*-v5` repeat an action with probability 0.25, `*NoFrameskip-v4` never do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformReward

from broker.contract import errors

_ENTRY_POINT = "ale_py.env:AtariEnv"
_NOOP, _FIRE = 0, 1
FRAME_STACK = 4


def is_game(env_id: str) -> bool:
    """Returns whether an id, of a module that is imported, is that of an Atari game."""
    known = gymnasium.registry.get(env_id)
    return known is not None and known.entry_point == _ENTRY_POINT


def make(env_id: str, arguments: Mapping[str, Any], *, training: bool) -> gymnasium.Env[Any, Any]:
    """Makes a game with all that.

    Args:
        env_id: For which `is_game`.
        arguments: Passed to the game; `frameskip` is not among them.
        training: Whether a lost life ends an episode, and rewards are clipped. Scores are of whole games as they are.

    Raises:
        ConfigError: `frameskip` is.
    """
    if "frameskip" in arguments:
        raise errors.ConfigError(
            "frames of Atari games are skipped here", where="env_kwargs", todo="leave frameskip out: it is 4"
        )
    made: gymnasium.Env[Any, Any] = gymnasium.make(env_id, frameskip=1, **arguments)
    fires = made.unwrapped.get_action_meanings()[_FIRE : _FIRE + 1] == ["FIRE"]  # type: ignore[attr-defined]
    made = AtariPreprocessing(
        made, noop_max=30, frame_skip=4, screen_size=84, grayscale_obs=True, grayscale_newaxis=True
    )
    if training:
        made = _EpisodicLife(made)
    if fires:
        made = _FireReset(made)
    if training:
        made = TransformReward(made, lambda reward: float(np.sign(float(reward))))
    return FrameStackObservation(made, FRAME_STACK)


class _EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode with each life; resets the game only when it is over, or when a seed asks for a new one."""

    def __init__(self, game: gymnasium.Env[Any, Any]) -> None:
        super().__init__(game)
        self._lives = 0
        self._over = True

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        seen, reward, terminated, truncated, info = self.env.step(action)
        self._over = terminated or truncated
        left = self.unwrapped.ale.lives()  # type: ignore[attr-defined]
        lost, self._lives = left < self._lives, left
        return seen, reward, terminated or lost, truncated, info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if not (self._over or seed is not None):
            seen, _, terminated, truncated, info = self.env.step(_NOOP)
            self._over = terminated or truncated
        if self._over or seed is not None:
            seen, info = self.env.reset(seed=seed, options=options)
        self._over = False
        self._lives = self.unwrapped.ale.lives()  # type: ignore[attr-defined]
        return seen, info


class _FireReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Fires first: some games wait for that."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.env.reset(seed=seed, options=options)
        seen, _, terminated, truncated, info = self.env.step(_FIRE)
        return self.env.reset(options=options) if terminated or truncated else (seen, info)
