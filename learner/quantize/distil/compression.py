"""Takes weights away: fewer bits for each, and none for the smallest of each output.

int8 files hold such weights in eight bits all the same: what changes is the policy, not its size or speed. Both are
done in the units in which the int8 model has the first kernel, so behind the scaling of its input, where a weight is as
large as what it moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import bits, input_scaling

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Compression:
    """What weights are left.

    Attributes:
        weight_bits: 2 (-1, 0 and 1 times the scale of an output) to 8.
        prune: Share of the weights of each output that become 0, from 0 to less than 1; one is left at least.
    """

    weight_bits: int = bits.BITS_MAX
    prune: float = 0.0

    @property
    def is_none(self) -> bool:
        """True where weights stay what int8 makes of them."""
        return self.weight_bits == bits.BITS_MAX and not self.prune

    def check(self) -> None:
        """Raises ConfigError if so many bits, or such a share, are not offered."""
        if not bits.BITS_MIN <= self.weight_bits <= bits.BITS_MAX:
            raise errors.ConfigError(
                f"weights of {self.weight_bits} bits are not offered", todo=f"use {bits.BITS_MIN} to {bits.BITS_MAX}"
            )
        if not 0 <= self.prune < 1:
            raise errors.ConfigError(
                f"a share of {self.prune:g} of the weights cannot be pruned", todo="use 0 to less than 1, such as 0.5"
            )


def mask(kernel: FloatArray, share: float) -> NDArray[np.bool_]:
    """Returns which weights [outputs, ...] stay when that share of each output's, the smallest, becomes 0."""
    size = np.abs(kernel).reshape(len(kernel), -1)
    dropped = min(int(share * size.shape[1]), size.shape[1] - 1)
    kept = np.ones(size.shape, bool)
    if dropped:
        np.put_along_axis(kept, np.argpartition(size, dropped - 1, axis=1)[:, :dropped], False, axis=1)
    return kept.reshape(kernel.shape)


def compress(
    policy: layers.PolicyLayers,
    compression: Compression,
    affine: input_scaling.Affine | None,
    means: Sequence[FloatArray] | None = None,
) -> layers.PolicyLayers:
    """Returns the policy with weights pruned and rounded.

    Args:
        policy: Layers for raw observations.
        compression: What weights are left.
        affine: How the int8 model scales its input; None where it does not.
        means: Mean inputs as `calibrate.QuantParams` has them: biases make up for what is taken away there. None leaves
            biases as they are.
    """
    if compression.is_none:
        return policy
    plain = dataclasses.replace(affine, hi_lo=False) if affine else None
    scaled = input_scaling.compensate(policy, plain) if plain else policy
    pruned = tuple(
        dataclasses.replace(layer, kernel=layer.kernel * mask(layer.kernel, compression.prune))
        if isinstance(layer, layers.Weighted)
        else layer
        for layer in scaled
    )
    rounded = bits.rounded(pruned, compression.weight_bits)
    if means is not None:
        rounded = _corrected(scaled, rounded, affine, means)
    return layers.absorb(rounded, plain.gain, plain.offset) if plain else rounded


def _corrected(
    before: layers.PolicyLayers,
    after: layers.PolicyLayers,
    affine: input_scaling.Affine | None,
    means: Sequence[FloatArray],
) -> layers.PolicyLayers:
    """Subtracts from each bias what the change of the weights adds at the mean input."""
    remaining = list(means)
    if affine and affine.hi_lo:  # of each feature the lo part is 0 on average
        features = affine.gain.shape
        remaining[0] = remaining[0].reshape(*features[:-1], -1)[..., : features[-1]].reshape(-1)
    found, at = [], 0
    for old, new in zip(before, after, strict=True):
        if isinstance(old, layers.Weighted) and isinstance(new, layers.Weighted):
            excess = (new.kernel - old.kernel).reshape(len(old.kernel), -1) @ remaining[at]
            new = dataclasses.replace(new, bias=(new.bias - excess).astype(np.float32))
            at += 1
        found.append(new)
    return tuple(found)


def nonzero(policy: layers.PolicyLayers) -> float:
    """Returns the share of weights, biases aside, that are not 0."""
    kernels: list[NDArray[Any]] = [layer.kernel for layer in layers.weighted(policy)]
    return sum(int(np.count_nonzero(kernel)) for kernel in kernels) / sum(kernel.size for kernel in kernels)
