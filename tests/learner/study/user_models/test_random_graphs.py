"""Random Keras models and ONNX graphs, from file to float32 and int8 .tflite: near fp32, or refused by operation.

GRAPHS says how many Keras models, and ONNX graphs half as many; `GRAPHS=200` is what docs/policy/any_policy.md has
figures of. Seeds are the first ones, so that what fails there fails again.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner.quantize import ptq
from learner.quantize.tflite import interpreter
from learner.study.user_models import reading, recipe
from learner.study.user_models.converter import keras_model
from tests.learner.study.user_models.formats import test_onnx_file

GRAPHS = int(os.environ.get("GRAPHS", "12"))
SELU = 71
"""The seed of a Keras model in which inputs of up to 5.4 go into a SELU."""
FLOAT_ERROR, INT8_ERROR = 1e-3, 0.05
"""Largest error of the float32 model, mean error of an output of int8, in the range of the outputs with zero."""
OPERATION = re.compile(r"no operation for \w+|no int8 kernel: \w+")
Rows = NDArray[np.float32]
own = keras.layers


def random_model(seed: int) -> Any:
    """Dense layers, convolutions and their relatives, normalisation, activations, shortcuts, pooling."""
    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    is_image = rng.random() < 0.4
    entry = keras.Input((int(rng.integers(7, 13)),) * 2 + (2,) if is_image else (int(rng.integers(1, 9)),))
    x = own.Rescaling(0.5, offset=0.1)(entry) if rng.random() < 0.3 else entry

    def after(x: Any) -> Any:
        kind = rng.choice(["none", "batch", "layer", "group"], p=[0.5, 0.3, 0.15, 0.05])
        if kind == "batch":
            x = own.BatchNormalization(moving_mean_initializer="random_normal", beta_initializer="random_normal")(x)
        elif kind == "layer":
            x = own.LayerNormalization(beta_initializer="random_normal")(x)
        elif kind == "group":
            x = own.GroupNormalization(1)(x)
        names = ["relu", "tanh", "sigmoid", "relu6", "linear", "elu", "gelu", "swish", "leaky_relu", "softplus", "selu"]
        names += ["hard_swish", "mish", "softmax"]
        shares = np.array([6, 4, 2, 2, 2, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5])
        return own.Activation(str(rng.choice(names, p=shares / shares.sum())))(x)

    if is_image:
        for _ in range(int(rng.integers(1, 3))):
            side, padding = int(rng.integers(1, 4)), "same" if rng.random() < 0.3 else "valid"
            kind = rng.choice(["plain", "depthwise", "separable"], p=[0.7, 0.15, 0.15])
            if kind == "plain":
                y = own.Conv2D(int(rng.integers(1, 5)), side, strides=int(rng.integers(1, 3)), padding=padding)(x)
            elif kind == "depthwise":
                y = own.DepthwiseConv2D(side, padding=padding)(x)
            else:
                y = own.SeparableConv2D(3, side, padding=padding)(x)
            y = after(y)
            x = own.Add()([x, y]) if x.shape == y.shape else y
        kind = rng.choice(["none", "max", "average", "global"], p=[0.6, 0.15, 0.15, 0.1])
        if kind != "none" and min(x.shape[1:3]) >= 2:
            pools = {"max": own.MaxPooling2D(2), "average": own.AveragePooling2D(2)}
            x = pools.get(str(kind), own.GlobalAveragePooling2D())(x)
        x = own.Flatten()(x)
    for _ in range(int(rng.integers(1, 4))):
        y = after(own.Dense(8, use_bias=bool(rng.random() < 0.8))(x))
        join = rng.choice([own.Add, own.Multiply, own.Concatenate])
        x = join()([x, y]) if rng.random() < 0.2 and x.shape == y.shape else y
    return keras.Model(entry, own.Dense(3)(x))


def outcome(path: Path, rows: Rows, exact: NDArray[Any]) -> str:
    """`recipe`, `converter`, `refused` or `unrunnable`; raises AssertionError for what is off, and whatever crashes."""
    try:
        policy, _ = reading.read(path, outputs="actions", low=None, high=None, normaliser=None, verbose=False)
        span = max(exact.max(), 0.0) - min(exact.min(), 0.0)  # what eight bits divide
        answer, _, _ = interpreter.run(policy.float32(), rows)
        off = float((np.abs(answer - exact) / span).max())
        assert off < FLOAT_ERROR, f"float32 is off by {off:.2%}"
        made = policy.make(rows, "int8", beyond=ptq.BEYOND)
    except errors.PolicyError as error:
        if not OPERATION.search(error.what):
            raise
        return "refused"
    try:
        answer, _, _ = interpreter.run(made.model, rows)
    except RuntimeError:
        return "unrunnable"  # which the command says, and writes nothing: scales too far apart for the kernels
    error_mean = float((np.abs(answer - made.exact(rows)).mean(0) / span).max())
    assert error_mean < INT8_ERROR, f"int8 is off by {error_mean:.2%}"
    return "recipe" if isinstance(policy, recipe.ChainSubject) else "converter"


def tried(seeds: Iterable[int], one: Any) -> Counter[str]:
    found, failed = Counter[str](), {}
    for seed in seeds:
        try:
            found[name := one(seed)] += 1
            print(f"{seed}:{name}", end=" ", flush=True)
        except Exception as error:  # each seed is to be named
            failed[seed] = f"{type(error).__name__}: {str(error)[:300]}"
            print(seed, failed[seed])
    print(dict(found), failed)
    assert not failed
    return found


def test_keras(tmp_path: Path) -> None:
    def one(seed: int) -> str:
        model, path = random_model(seed), tmp_path / "model.keras"
        model.save(path)
        rows = np.random.default_rng(seed).normal(size=(128, *model.inputs[0].shape[1:])).astype(np.float32)
        return outcome(path, rows, keras_model.outputs(model, rows))

    found = tried({*range(GRAPHS), SELU}, one)
    assert found["recipe"] and found["converter"]


def test_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnx")

    def one(seed: int) -> str:
        graph, rows, refused = test_onnx_file.random_graph(seed)
        path = graph.save(tmp_path / "g.onnx")
        if refused:
            with pytest.raises(errors.PolicyError, match=refused):
                reading.read(path, outputs="actions", low=None, high=None, normaliser=None, verbose=False)
            return "refused"
        return outcome(path, np.moveaxis(rows, 1, 3) if rows.ndim == 4 else rows, graph.x)

    assert tried(range(GRAPHS // 2), one)["recipe"] > GRAPHS / 10
