"""Small fleets and experience for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from broker.contract import messages, specs

SPEC = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2))
OTHER_SPEC = specs.EnvSpec(specs.ObservationSpec((6,)), specs.ActionSpec("discrete", n=3))


def birth(env_id: str = "CartPole-v1", spec: specs.EnvSpec = SPEC) -> messages.Birth:
    return messages.Birth(env_id, spec, 1, "a board", "3.11.2", "ai-edge-litert 2.3.0", "XNNPACK", 0.0)


def state(**changes: Any) -> messages.ActorState:
    values: dict[str, Any] = {"online": True, "session": "one", "boot": 1, "heartbeat": 1, "birth": birth()}
    return messages.ActorState(**(values | changes))


def experience(lengths: Sequence[int] = (2, 1), **changes: Any) -> messages.Experience:
    """Returns segments of these lengths under SPEC, of boot 1, epoch 1, policy version 1."""
    steps, segments = sum(lengths), len(lengths)
    values: dict[str, Any] = {
        "boot": 1,
        "seq": 1,
        "oldest": 1,
        "step": 0,
        "fingerprint": SPEC.fingerprint,
        "assigned_epoch": 1,
        "epoch": 1,
        "version": 1,
        "length": np.array(lengths, np.int32),
        "draw": 0,
        "env_index": np.zeros(segments, np.int32),
        "row": np.zeros(segments, np.int32),
        "terminated": np.ones(segments, np.uint8),
        "truncated": np.zeros(segments, np.uint8),
        "episode_return": np.array(lengths, np.float32),
        "episode_length": np.array(lengths, np.int32),
        "observation": np.arange((steps + segments) * 4, dtype=np.float32).reshape(-1, 4),
        "action": np.zeros(steps, np.int32),
        "reward": np.ones(steps, np.float32),
    }
    return messages.Experience(**(values | changes))
