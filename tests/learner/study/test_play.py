"""Actors that play for the learner: what they say meanwhile, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.contract import errors
from learner.study import play
from tests.edge_actor.policies.models import files

ENVIRONMENT = """
import sys
import gymnasium
import numpy as np

class Talking(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        print("INFO: a library says something", file=sys.stderr)
        print("played 1 of 2 episodes: return 1 on average", file=sys.stderr)
        return np.zeros(4, np.float32), 1.0, TERMINATED, False, {}
"""


def task(tmp_path: Path, *, terminated: str) -> play.Task:
    (tmp_path / "talking.py").write_text(ENVIRONMENT.replace("TERMINATED", terminated))
    return play.Task(f"{tmp_path / 'talking.py'}:Talking")


def test_how_far_an_actor_is_is_passed_on_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "learner"):
        played = play.score(play.RANDOM, task(tmp_path, terminated="True"), episodes=2, seed=0)
    assert played.episode_return.tolist() == [1.0, 1.0]
    assert caplog.messages == ["random: played 1 of 2 episodes: return 1 on average"] * 2


def test_policies_are_told_apart_by_their_names_and_not_by_their_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "learner"):
        play.at_once({"fp32": files.INT8}, task(tmp_path, terminated="True"), episodes=2, seed=0, head="q_values")
    assert caplog.messages == ["fp32: played 1 of 2 episodes: return 1 on average"] * 2 + ["played 1 of 1: fp32"]


def test_what_an_actor_ends_with_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "_EPISODE_S", 0.2)
    with pytest.raises(errors.EnvironmentFailure, match=r"gave up after \d+ steps .* in episode 1 of 2"):
        play.score(play.RANDOM, task(tmp_path, terminated="False"), episodes=2, seed=0)
