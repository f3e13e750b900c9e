"""Finds the package of an environment that Gymnasium does not know."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

_PACKAGES = (
    # how its ids begin, the module that registers them, its name on PyPI
    ("ALE/", "ale_py", "ale-py"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
    ("MiniWorld-", "miniworld", "miniworld"),
    ("PyFlyt/", "PyFlyt.gym_envs", "PyFlyt"),
    ("Panda", "panda_gym", "panda-gym"),
    ("FlappyBird-", "flappy_bird_gymnasium", "flappy-bird-gymnasium"),
    *((name, "highway_env", "highway-env") for name in ("highway-", "merge-", "roundabout-", "parking-", "racetrack-")),
    *((name, "highway_env", "highway-env") for name in ("intersection-", "exit-", "two-way-", "u-turn-")),
    *((name, "gymnasium_robotics", "gymnasium-robotics") for name in ("Fetch", "Hand", "Adroit", "Franka")),
    *((name, "gymnasium_robotics", "gymnasium-robotics") for name in ("AntMaze_", "PointMaze_")),
)
"""The packages whose environments are most often asked for, and not found by reading their code."""
_SOURCE_BYTES = 1 << 20


def registering(env_id: str) -> str:
    """Returns what to do about an environment that a package registers when imported; empty if none is known.

    Nothing is imported for that: its code runs when the user names it.
    """
    for begins, module, project in _PACKAGES:
        if env_id.startswith(begins):
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                return f"{module} registers it: --env {module}:{env_id}"
            return f"it is of the package {project}: pip install {project}, then --env {module}:{env_id}"
    found = _found(env_id)
    return f"{found} registers it: --env {found}:{env_id}" if found else ""


def _found(env_id: str) -> str:
    """Returns an installed package made for Gymnasium in whose code the id stands; empty if there is none."""
    needles = tuple(f"{quote}{env_id}{quote}".encode() for quote in "'\"")
    for distribution in importlib.metadata.distributions():
        needs = any(re.match(r"gymnasium\b(?!-)", needed) for needed in distribution.requires or ())
        if not needs or distribution.metadata["Name"] == "actorq-fleet":
            continue
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            module = file.parts[0].removesuffix(".py")
            if file.suffix != ".py" or not module.isidentifier():
                continue
            try:
                with path.open("rb") as source:
                    text = source.read(_SOURCE_BYTES)
            except OSError:
                continue
            if any(needle in text for needle in needles):
                return module
    return ""
