"""Tuned settings by environment, from tasks.toml."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("learner.config").joinpath("tasks.toml").read_text(encoding="utf-8"))


def algorithms(env_id: str) -> list[str]:
    """Returns the algorithms that are tuned for an environment, in the file's order; none if it is not in there."""
    return [name for name, value in _tables().get(env_id, {}).items() if isinstance(value, dict)]


def settings(env_id: str, algorithm: str = "") -> dict[str, Any]:
    """Returns what tasks.toml holds for an environment, with what it holds for one of its algorithms.

    Empty for an environment that it does not know, which then trains on the defaults.
    """
    task = _tables().get(env_id, {})
    common = {key: value for key, value in task.items() if not isinstance(value, dict)}
    tuned: dict[str, Any] = task.get(algorithm, {})
    return common | tuned
