"""Policies that are chains: the bytes that publish makes, what refining gains, and random Keras chains."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import specs
from learner import config
from learner.networks import layers
from learner.policies import outgoing_policy, policy_maker
from learner.quantize import compare, fp32, scales
from learner.quantize.tflite import interpreter
from learner.study.user_models import recipe
from learner.study.user_models.converter import keras_model
from learner.study.user_models.formats import chain, keras_chain
from tests.learner.quantize.distil import test_aware

FloatArray = NDArray[np.float32]


class Sink:
    """Takes in a policy's bytes, as what publishes them does."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, piece: memoryview | bytes) -> None:
        self.size += len(piece)

    def cancel(self) -> None:
        raise AssertionError("the converter had to make it")


def published(policy: chain.Policy, action: specs.ActionSpec, rows: NDArray[Any]) -> bytes:
    """What the learner would publish of the same layers and calibration."""
    spec = specs.EnvSpec(specs.ObservationSpec(policy.shape, str(rows.dtype)), action)
    maker = policy_maker.PolicyMaker(spec, policy.head, config.GateConfig())
    sink: Any = Sink()

    def begin(executor: Any) -> outgoing_policy.OutgoingPolicy:
        return sink  # type: ignore[no-any-return]

    try:
        return maker.make(policy.layers, rows, rows[:64], begin, None).model
    finally:
        maker.close()


def grown(kind: str) -> tuple[chain.Policy, specs.ActionSpec, NDArray[Any]]:
    rng = np.random.default_rng(0)
    rows: NDArray[Any] = rng.normal(size=(256, 6)).astype(np.float32) * np.logspace(-1, 1, 6, dtype=np.float32)
    bounds = np.array([-2.0, -1.0, 0.0]), np.array([2.0, 1.0, 4.0])
    discrete, continuous = (
        specs.ActionSpec("discrete", n=3),
        specs.ActionSpec("continuous", shape=(3,), low=(-2.0, -1.0, 0.0), high=(2.0, 1.0, 4.0)),
    )
    if kind == "frames":
        rows = rng.integers(0, 256, (256, 9, 9, 2)).astype(np.uint8)
        made = chain.Chain((9, 9, 2))
        made.affine(1 / 255, 0)
        made.convolve(rng.normal(size=(4, 3, 3, 2)), rng.normal(size=4), 2)
        made.activate("relu")
        made.flatten()
        made.dense(rng.normal(size=(3, 64)) / 8)
        return chain.Policy(made.value(), (9, 9, 2), "values", None, None, False, ""), discrete, rows
    made = chain.Chain((6,))
    for _ in range(2):
        made.dense(rng.normal(size=(32, made.shape[0])) / 6, rng.normal(size=32) / 6)
        made.activate("relu")
    made.dense(rng.normal(size=(3, 32)) / 6, rng.normal(size=3))
    if kind == "values":
        return chain.Policy(made.value(), (6,), "values", None, None, False, ""), discrete, rows
    made.activate("tanh")
    made.affine((bounds[1] - bounds[0]) / 2, (bounds[1] + bounds[0]) / 2)
    found, clips = made.bounded(*bounds)
    return chain.Policy(found, (6,), "actions", *bounds, clips, ""), continuous, rows


@pytest.mark.parametrize("kind", ["values", "actions", "frames"])
def test_the_bytes_are_those_that_publish_makes(kind: str) -> None:
    policy, action, rows = grown(kind)
    made = recipe.ChainSubject(policy).make(rows, "int8")
    assert made.model == published(policy, action, rows)


def test_training_does_not_harm_what_the_recipe_holds() -> None:
    """Values near 95 are lost by the converter, whose model training simulates, and not by the recipe, which ships."""
    rows, fresh = test_aware.observations(), test_aware.observations(10)
    found = test_aware.random_policy(2, value=95)
    policy = recipe.ChainSubject(chain.Policy(found, (4,), "values", None, None, False, ""))
    exact = policy.exact(fresh).argmax(1)
    plain, trained = (
        (interpreter.run(made.model, fresh)[0].argmax(1) == exact).mean()
        for made in (policy.make(rows, "int8"), policy.make_aware(rows, 100, 0))
    )
    assert plain > 0.95 and trained >= plain - 0.005, (plain, trained)


def test_refining_holds_choices_that_hang_by_what_large_weights_leave_of_each_other() -> None:
    """Two values whose difference is along directions in which the last hidden layer hardly varies."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(3000, 4)).astype(np.float32)
    made = chain.Chain((4,))
    for _ in range(2):
        made.dense(rng.normal(size=(64, made.shape[0])) / np.sqrt(made.shape[0]), rng.normal(size=64) / 4)
        made.activate("relu")
    hidden = fp32.outputs(made.value()[:-1], rows).astype(np.float64)
    directions = np.linalg.svd(hidden - hidden.mean(0), full_matrices=False)[2]
    difference = directions[12:24].sum(0)
    bias = -float(hidden.mean(0) @ difference)
    made.dense(np.stack([np.ones(64), np.ones(64) + difference]), np.array([0, bias]))
    subject = recipe.ChainSubject(chain.Policy(made.value(), (4,), "values", None, None, False, ""))
    exact = subject.exact(rows[2000:])
    plain = interpreter.run(subject.make(rows[:2000], "int8").model, rows[2000:])[0]
    refined = subject.make_refined(rows[:2000])
    assert refined is not None
    answer = interpreter.run(refined.model, rows[2000:])[0]
    assert compare.states(exact, plain).agreement < 0.99
    assert 1 - compare.states(exact, answer).agreement < 0.7 * (1 - compare.states(exact, plain).agreement)


def test_clipping_is_two_relus() -> None:
    made = chain.Chain((3,))
    made.dense(np.eye(3))
    made.clip(-1.5, 0.5)
    x = np.linspace(-4, 4, 30, dtype=np.float32).reshape(10, 3)
    np.testing.assert_allclose(fp32.outputs(made.value(), x), np.clip(x, -1.5, 0.5), atol=1e-6)


def random_chain(rng: np.random.Generator) -> Any:
    own = keras.layers
    is_image = rng.random() < 0.4
    entry = keras.Input((int(rng.integers(7, 11)),) * 2 + (2,) if is_image else (int(rng.integers(1, 9)),))
    x = own.Rescaling(0.5, offset=0.1)(entry) if rng.random() < 0.3 else entry

    def after(x: Any) -> Any:
        if rng.random() < 0.4:
            parts: dict[str, Any] = {"moving_mean_initializer": "random_normal", "beta_initializer": "random_normal"}
            x = own.BatchNormalization(**parts)(x)
        return own.Activation(str(rng.choice(["relu", "tanh", "sigmoid", "relu6", "linear", "elu", "gelu"])))(x)

    if is_image:
        for _ in range(int(rng.integers(1, 3))):
            padding = "same" if rng.random() < 0.15 else "valid"
            x = after(own.Conv2D(int(rng.integers(1, 5)), int(rng.integers(1, 4)), padding=padding)(x))
        x = own.MaxPooling2D()(x) if rng.random() < 0.15 else x
        x = own.Flatten()(x)
    for _ in range(int(rng.integers(1, 4))):
        y = after(own.Dense(8, use_bias=bool(rng.random() < 0.8))(x))
        x = own.Add()([x, y]) if rng.random() < 0.1 and x.shape == y.shape else y
    return keras.Model(entry, own.Dense(3)(x))


def test_random_keras_graphs_answer_alike_as_chains_or_are_no_chain() -> None:
    mapped = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        keras.utils.set_random_seed(seed)
        model = random_chain(rng)
        x = rng.normal(size=(8, *model.inputs[0].shape[1:])).astype(np.float32)
        try:
            policy = keras_chain.read(model, "values", None, None)
        except scales.Unmapped:
            continue
        mapped += 1
        assert all(isinstance(layer, layers.Weighted | layers.Flatten) for layer in policy.layers)
        np.testing.assert_allclose(
            fp32.outputs(policy.layers, x), keras_model.outputs(model, x), rtol=1e-3, atol=1e-3, err_msg=str(seed)
        )
    assert 40 < mapped < 160
