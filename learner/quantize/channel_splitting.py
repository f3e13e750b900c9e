"""Splits channels of one policy and fits its outputs anew, where rounding activations costs too many choices.

No publish has the time for it.

Policies of action values often choose by a hundredth of what their last hidden layer carries, and 256 levels of it are
then too few: on public DQN agents rounding those activations alone changes an eighth of the choices. Two steps, after
`ptq`:

* Channel splitting: a ReLU channel becomes n successive windows of its range, each of which has all 256 levels and
  saturates where the channel is beyond it; the next kernel adds them up. The noise of a channel falls to 1 / n.
  Channels get windows by the cube root of the noise they pass on, which makes the sum least (after outlier channel
  splitting, Zhao et al. 2019, https://arxiv.org/abs/1901.09504). The layer grows by `GROWTH`.
* Refitted outputs: the last kernel is fitted anew, from the int8 activations that the model really has to the outputs
  that fp32 has, by ridge regression around the kernel that was. Hidden units say much the same, so that there are many
  kernels for one function, and this one passes on the least noise.

The layers that come out are those of an int8 model: in fp32, where nothing saturates, they would answer otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.networks import layers
from learner.quantize import calibrate, fp32

FloatArray = NDArray[np.float32]
Run = Callable[[layers.PolicyLayers, calibrate.QuantParams], FloatArray]
"""Makes the int8 model of layers, and returns what it answers to the calibration observations."""

GROWTH = 1.0
"""The share by which the last hidden layer grows at most."""
_WINDOWS_MAX = 16
_INPUTS_MAX = 1024
"""Layers with more inputs are not split: they would cost too much."""
_MARGIN = 1.02
"""What calibration saw of a channel is its range but for so much."""
_FLOOR = 0.05
"""Channels smaller than this beside the largest count as that large: they may yet grow."""
_RIDGE = 1e-4
_BEYOND_CLIP = 0.05
"""The weight of rows where a saturated output does not count."""


def split_and_refit(
    policy: layers.PolicyLayers, params: calibrate.QuantParams, observations: NDArray[Any], run: Run, *, end: float
) -> tuple[layers.PolicyLayers, calibrate.QuantParams]:
    """Returns layers and parameters for a more faithful int8 model.

    Args:
        policy: Layers as `ptq` leaves them, of which at least two have weights.
        params: What its int8 model would be fitted to.
        observations: Calibration sample [N, *shape].
        run: See `Run`.
        end: Size at which outputs saturate anyhow (`ptq`), infinite where each counts.
    """
    linear: list[FloatArray] = []
    hidden: list[FloatArray] = []

    def see(layer: layers.Weighted, inputs: FloatArray, before: FloatArray, outputs: FloatArray) -> None:
        linear.append(before)
        hidden.append(outputs)

    fp32.outputs(policy, observations, see)
    wanted = linear[-1]
    before = layers.weighted(policy)[-2]
    if isinstance(before, layers.Dense) and before.activation == "relu" and before.kernel.shape[1] <= _INPUTS_MAX:
        policy, params = split(policy, params, hidden[-2])
    return _refitted(policy, params, wanted, run, end)


def split(
    policy: layers.PolicyLayers, params: calibrate.QuantParams, hidden: FloatArray
) -> tuple[layers.PolicyLayers, calibrate.QuantParams]:
    """Splits the channels of the last hidden layer, which is dense and has ReLU.

    Args:
        policy: As for `split_and_refit`.
        params: As for `split_and_refit`.
        hidden: Outputs of that layer in fp32 [N, c].
    """
    at, last_at = [i for i, layer in enumerate(policy) if isinstance(layer, layers.Weighted)][-2:]
    layer, last = policy[at], policy[last_at]
    assert isinstance(layer, layers.Dense)
    assert isinstance(last, layers.Dense)
    reach = hidden.max(0).astype(np.float64) * _MARGIN
    reach = np.maximum(reach, _FLOOR * max(float(reach.max()), _FLOOR))
    passed_on = np.cbrt(np.square(last.kernel.astype(np.float64)).sum(0) * np.square(reach))
    share = (1 + GROWTH) * len(reach) * passed_on / max(float(passed_on.sum()), np.finfo(np.float64).tiny)
    windows = np.clip(np.floor(share), 1, _WINDOWS_MAX).astype(np.int64)
    channel = np.repeat(np.arange(len(reach)), windows)
    number = np.concatenate([np.arange(count) for count in windows])
    width = (reach / windows)[channel]
    kernel = layer.kernel[channel] / width[:, None]
    bias = (layer.bias[channel] - number * width) / width
    grown = replace(layer, kernel=kernel.astype(np.float32), bias=bias.astype(np.float32))
    summed = replace(last, kernel=(last.kernel[:, channel] * width).astype(np.float32))
    rewritten = (*policy[:at], grown, *policy[at + 1 : last_at], summed, *policy[last_at + 1 :])
    mean = np.clip(hidden[:, channel] / width - number, 0, 1).mean(0).astype(np.float32)
    factors = params.factors and (*params.factors[:-1], np.ones(len(channel), np.float32))
    return rewritten, replace(
        params,
        outputs=(*params.outputs[:-2], (0.0, 1.0), params.outputs[-1]),
        factors=factors,
        means=params.means and (*params.means[:-1], mean),
    )


def _refitted(
    policy: layers.PolicyLayers, params: calibrate.QuantParams, wanted: FloatArray, run: Run, end: float
) -> tuple[layers.PolicyLayers, calibrate.QuantParams]:
    """Fits the last kernel and bias to outputs [N, n] before any activation, from the int8 model's own last inputs."""
    at = max(i for i, layer in enumerate(policy) if isinstance(layer, layers.Weighted))
    last = policy[at]
    assert isinstance(last, layers.Dense)
    inner = replace(
        params,
        outputs=params.outputs[:-1],
        factors=params.factors and params.factors[:-1],
        means=params.means and params.means[:-1],
    )
    factor = params.factors[-1].astype(np.float64) if params.factors else np.ones(last.kernel.shape[1])
    # Without a layer behind it the last of these has no factor; its range is that of what was divided
    body = policy[:at]
    scaled = body[-1]
    assert isinstance(scaled, layers.Weighted)
    by_row = scaled.kernel / factor.reshape(-1, *[1] * (scaled.kernel.ndim - 1))
    divided = replace(scaled, kernel=by_row.astype(np.float32), bias=(scaled.bias / factor).astype(np.float32))
    inputs = run((*body[:-1], divided), inner).astype(np.float64)
    x = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    kernel = last.kernel * factor
    missing = wanted - (inputs @ kernel.T + last.bias)
    change = np.empty((x.shape[1], len(kernel)))
    weights = np.where(np.abs(wanted) > end, _BEYOND_CLIP, 1.0)
    shared = bool((weights == 1).all())
    for k in range(1 if shared else len(kernel)):
        weighted = x * weights[:, k : k + 1]
        square = weighted.T @ x
        square += np.eye(len(square)) * (_RIDGE * np.trace(square) / len(square))
        if shared:
            change = np.linalg.solve(square, weighted.T @ missing)
        else:
            change[:, k] = np.linalg.solve(square, weighted.T @ missing[:, k])
    fitted = replace(
        last,
        kernel=((kernel + change[:-1].T) / factor).astype(np.float32),
        bias=(last.bias + change[-1]).astype(np.float32),
    )
    mean = (inputs.mean(0) * factor).astype(np.float32)
    return (*policy[:at], fitted, *policy[at + 1 :]), replace(params, means=params.means and (*params.means[:-1], mean))
