"""Convolutional stacks by name, and a convolution that XLA's compiled loops compute as products of matrices.

A stack is a chain: the larger of IMPALA's networks adds the inputs of its blocks to their outputs, which no chain of
layers can say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from broker.contract import errors, specs
from learner import config

Tensor = Any  # TensorFlow ships no types


class Convolution(NamedTuple):
    """One layer, without padding, ReLU behind it."""

    filters: int
    size: int
    stride: int


_STACKS: dict[str, tuple[Convolution, ...]] = {
    "nature": (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1)),  # Mnih et al. 2015
    "impala-small": (Convolution(16, 8, 4), Convolution(32, 4, 2)),  # Espeholt et al. 2018, figure 3, left
    "minatar": (Convolution(16, 3, 1),),  # Young and Tian 2019
    "mlp": (),
}
assert {"auto", *_STACKS} == set(config.NETWORKS)
_AUTO = ("nature", "minatar")


def is_image(observation: specs.ObservationSpec) -> bool:
    """Returns True for uint8 [height, width, channels] large enough for a convolution."""
    return observation.dtype == "uint8" and len(observation.shape) == 3 and _fits(_STACKS["minatar"], observation)


def stack(name: str, observation: specs.ObservationSpec) -> tuple[Convolution, ...]:
    """Returns the convolutions in front of an image's dense layers; none for other observations.

    Args:
        name: One of config.NETWORKS; `auto` is the first of nature and minatar that has a pixel left at its end.
        observation: What it is for.

    Raises:
        ConfigError: The image is too small for it.
    """
    if not is_image(observation):
        return ()
    if name == "auto":
        name = next(one for one in _AUTO if _fits(_STACKS[one], observation))
    if not _fits(_STACKS[name], observation):
        raise errors.ConfigError(
            f"the convolutions of {name} leave nothing of observations {observation.shape}",
            where="network",
            todo="use auto, or make frames larger",
        )
    return _STACKS[name]


def _fits(convolutions: tuple[Convolution, ...], observation: specs.ObservationSpec) -> bool:
    side = min(observation.shape[:2])
    for _, size, stride in convolutions:
        side = (side - size) // stride + 1
    return side >= 1


def native(x: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """Convolves [B, height, width, in] with a kernel [out, size, size, in], as TFLiteConverter knows it."""
    return tf.nn.conv2d(x, tf.transpose(kernel, (1, 2, 3, 0)), strides=stride, padding="VALID")


def by_products(x: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """Does what `native` does, as one product.

    XLA's own convolution takes 27 times as long within a compiled loop (Nature stack and its gradients). Where the
    stride divides the kernel's size, squares of stride x stride pixels become channels: then kernels overlap less.

    With fewer outputs than channels, each pixel meets the whole kernel, and what belongs to one place is added up. Else
    the pixels of each place are laid side by side, as often as kernels overlap, and meet the kernel.
    """
    outputs, size, _, channels = kernel.shape
    height, width = ((side - size) // stride + 1 for side in x.shape[1:3])
    if stride > 1 and size % stride == 0:
        n = size // stride
        rows, columns = height + n - 1, width + n - 1
        x = tf.reshape(
            x[:, : rows * stride, : columns * stride], (-1, rows, stride, columns, stride, channels)
        )  # what is left at the edges no kernel meets
        x = tf.reshape(tf.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, rows, columns, stride * stride * channels))
        kernel = tf.reshape(kernel, (outputs, n, stride, n, stride, channels))
        kernel = tf.transpose(kernel, (0, 1, 3, 2, 4, 5))
        size, stride = n, 1
    at = [(i, j) for i in range(size) for j in range(size)]
    if stride == 1 and outputs < x.shape[-1]:
        rows, columns, channels = x.shape[1:]
        kernel = tf.transpose(tf.reshape(kernel, (outputs, size, size, channels)), (3, 1, 2, 0))
        product = tf.matmul(tf.reshape(x, (-1, channels)), tf.reshape(kernel, (channels, -1)))
        parts = tf.split(tf.reshape(product, (-1, rows, columns, size * size * outputs)), size * size, axis=-1)
        return tf.add_n([part[:, i : i + height, j : j + width] for part, (i, j) in zip(parts, at, strict=True)])
    patches = tf.concat(
        [x[:, i : i + (height - 1) * stride + 1 : stride, j : j + (width - 1) * stride + 1 : stride] for i, j in at],
        axis=-1,
    )
    flat = tf.reshape(patches, (-1, patches.shape[-1]))
    product = tf.matmul(flat, tf.reshape(kernel, (outputs, -1)), transpose_b=True)
    return tf.reshape(product, (-1, height, width, outputs))
