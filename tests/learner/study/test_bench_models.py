"""The actor's benchmark measures the graph that the learner ships."""

from __future__ import annotations

import numpy as np
import pytest

from edge_actor.bench import models
from learner.networks import layers
from learner.quantize.tflite import convert, template


@pytest.mark.parametrize("shape", [models.Shape(32, 2), models.CNN], ids=lambda shape: shape.name)
def test_a_benchmark_policy_has_the_operators_of_a_published_one(shape: models.Shape) -> None:
    policy = models.make(shape)
    stack: list[layers.Layer] = []
    for layer in policy.layers:
        activation: layers.Activation = "relu" if layer.relu else "none"
        if layer.stride:
            stack.append(layers.Conv2D(layer.kernel.transpose(3, 0, 1, 2), layer.bias, layer.stride, activation))
        else:
            stack.extend([layers.Flatten()] if shape.cnn and not isinstance(stack[-1], layers.Dense) else [])
            stack.append(layers.Dense(layer.kernel.T, layer.bias, activation))
    published = convert.convert(tuple(stack), models.observations(shape, 8), "int8")
    count = len(policy.layers)
    ours = template.locate(models.tflite(policy, "int8"), count)
    theirs = template.locate(published, count)
    assert {name: (a.shape, a.dtype) for name, a in ours.numbers().items()} == {
        name: (a.shape, a.dtype) for name, a in theirs.numbers().items()
    }
    np.testing.assert_array_equal(ours.layers[-1].weights, theirs.layers[-1].weights)
