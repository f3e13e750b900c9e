"""Tuned settings by environment, from tasks.toml."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("learner").joinpath("tasks.toml").read_text(encoding="utf-8"))


def settings(env_id: str) -> dict[str, Any]:
    """What tasks.toml holds for an environment; empty for one it does not know, which then trains on the defaults."""
    return _tables().get(env_id, {})
