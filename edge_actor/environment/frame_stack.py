"""The newest frames of each environment side by side: what a policy sees where one frame tells too little.

The environment below gives single frames, and so do `step` and `reset` here: those are recorded and sent, each once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from edge_actor.environment import answers


class FrameStack:
    """Keeps `seen` up to date.

    An episode's first frame stands in for those before it, as in Gymnasium's `FrameStackObservation` with
    `padding_type="reset"`.

    Args:
        spec: Of what the policy sees.
        n_envs: Environments; 0 for one that is no vector.
        step: Of the environment; resets on the next step where it is a vector.
        reset: Of the environment.

    Attributes:
        seen: What the policy sees now: [environments, *spec.shape], always the same array.
    """

    def __init__(
        self,
        spec: specs.ObservationSpec,
        n_envs: int,
        step: Callable[[Any], tuple[Any, Any, Any, Any, Any]],
        reset: Callable[..., tuple[Any, Any]],
    ) -> None:
        # Infinities stay: whoever records the frame refuses it
        self._step = step if spec.dtype == "uint8" else answers.clipped(step)
        self._reset = reset if spec.dtype == "uint8" else answers.clipped(reset)
        self._shape = (n_envs, *spec.frame_shape) if n_envs else spec.frame_shape
        self._dtype = spec.dtype
        self._resets_itself = n_envs > 0
        self._ended = np.zeros(max(1, n_envs), bool)
        self.seen: NDArray[Any] = np.zeros((max(1, n_envs), *spec.shape), spec.dtype)
        self._one_by_one = self.seen.reshape(max(1, n_envs), *spec.shape[:-1], spec.stack, -1)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Takes a step; returns what the environment does."""
        frame, reward, terminated, truncated, info = self._step(action)
        frame = answers.observation(frame, self._shape, self._dtype)
        stacked = self._one_by_one
        stacked[..., :-1, :] = stacked[..., 1:, :]
        stacked[..., -1, :] = frame
        if self._ended.any():  # these were reset
            self._fill(frame, self._ended)
        if self._resets_itself:
            self._ended = np.logical_or(terminated, truncated)
        return frame, reward, terminated, truncated, info

    def reset(self, **named: Any) -> tuple[Any, Any]:
        """Begins an episode everywhere; returns what the environment does."""
        frame, info = self._reset(**named)
        frame = answers.observation(frame, self._shape, self._dtype)
        self._ended = np.zeros(len(self.seen), bool)
        self._fill(frame, ~self._ended)
        return frame, info

    def _fill(self, frame: NDArray[Any], which: NDArray[np.bool_]) -> None:
        frames = frame.reshape(len(self.seen), *self._one_by_one.shape[1:-2], -1)
        self._one_by_one[which] = frames[which][..., None, :]
