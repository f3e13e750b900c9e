"""Several choices at once: their outputs lie side by side, and each choice has a softmax of its own.

An action of D elements with n_1 to n_D choices comes from n_1 + ... + n_D logits. Elements are independent given the
observation, so that the log-probability of an action is the sum of those of its elements, and so is a divergence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEVER = -1e9
"""The logit of a choice that an element does not have. Its probability is 0 to the bit, and no difference is NaN."""


def places(choices: Sequence[int]) -> NDArray[np.bool_]:
    """Returns which of [D, max n] are choices: each element has its first few."""
    found: NDArray[np.bool_] = np.arange(max(choices)) < np.array(choices)[:, None]
    return found


def spread(outputs: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns outputs [N, n_1 + ... + n_D] by element [N, D, max n], and NEVER where it has no such choice.

    Args:
        outputs: Logits.
        where: What `places` returns.
    """
    found: NDArray[Any] = np.full((len(outputs), *where.shape), NEVER, outputs.dtype)
    found[:, where] = outputs
    return found


def log_probs(logits: NDArray[Any], chosen: NDArray[Any]) -> NDArray[Any]:
    """Returns the log-probabilities [N] of actions [N, D] by logits [N, D, max n]."""
    shifted = logits - logits.max(2, keepdims=True)
    taken = np.take_along_axis(shifted, chosen[:, :, None], axis=2)[:, :, 0]
    found: NDArray[Any] = (taken - np.log(np.exp(shifted).sum(2))).sum(1)
    return found
