"""Students: that the simulation is what ships, what training mends, and when it ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner.networks import layers
from learner.quantize import input_scaling
from learner.quantize.distil import compression, dagger, goals, simulation, students, training
from learner.quantize.tflite import interpreter, quantizer
from tests.learner.quantize.distil.test_compression import policy, rows

FloatArray = NDArray[np.float32]
pytestmark = pytest.mark.usefixtures("short")
BOUNDS = layers.Rescale(np.array([2, 1, 3], np.float32), np.array([0, 1, 0], np.float32))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of a fraction of their steps."""
    monkeypatch.setattr(training, "_STEPS", 300)
    monkeypatch.setattr(training, "_STEPS_FRESH", 1000)
    monkeypatch.setattr(dagger, "ROUNDS", 2)


def teacher(kind: str) -> goals.Teacher:
    if kind == "values":
        return goals.Teacher.of(policy(), (4,), "values")
    if kind == "tanh":
        return goals.Teacher.of((*policy(last="tanh"), BOUNDS), (4,), "actions")
    return goals.Teacher.of((*policy(), BOUNDS), (4,), "actions", clips=True)


def failing(taught: goals.Teacher, model: bytes) -> float:
    """On observations that nobody has seen."""
    fresh = rows(7)
    return float(taught.failings(interpreter.run(model, fresh)[0], taught.exact(fresh)).mean())


@pytest.mark.parametrize("kind", ["values", "tanh", "clipped"])
@pytest.mark.parametrize("compressed", [compression.Compression(), compression.Compression(3, 0.5)])
def test_the_simulation_is_what_ships(kind: str, compressed: compression.Compression) -> None:
    taught, x, goal = teacher(kind), rows(), goals.Goal(compressed=compressed)
    start = students.first(taught, goal, x, np.random.default_rng(0))
    fitted, params = students.fitted(taught, start, x, goal)
    real = interpreter.run(quantizer.Quantizer().quantize(fitted, params, x), x)[0]
    if taught.rescale:
        real = (real - taught.rescale.offset) / taught.rescale.gain
    assert params.affine is not None
    scaled = input_scaling.compensate(start, dataclasses.replace(params.affine, hi_lo=False))
    simulated = simulation.Simulation(scaled, compressed, params.affine, passes=kind != "values")
    simulated.refresh(params)
    for mask, layer in zip(simulated.masks, layers.weighted(scaled), strict=True):
        mask.assign(compression.mask(layer.kernel, compressed.prune).astype(np.float32))
    weights = list(layers.arrays(scaled).values())
    rounded, exact = (
        simulated.run(weights, simulation.inputs(params.affine, x)).numpy(),
        np.clip(
            simulated.run(
                weights, dataclasses.replace(params.affine, hi_lo=False).apply(x), rounds=False
            ).numpy(), *params.outputs[-1]
        ),
    )  # fmt: skip
    off = np.abs(rounded - real).mean()
    assert off < 0.004 * np.ptp(real)
    if compressed.weight_bits < 8:  # rounding the weights is seen, too
        assert off < 0.1 * np.abs(exact - real).mean()


@pytest.mark.parametrize("kind", ["values", "clipped"])
def test_training_mends_what_few_bits_break(kind: str) -> None:
    taught, goal = teacher(kind), goals.Goal(compressed=compression.Compression(2))
    before = students.plain(taught, rows(count=4096), goal)
    after = dagger.distil(taught, rows(count=4096), goal, budget_s=600)
    assert failing(taught, after.model) < 0.5 * failing(taught, before.model)
    assert after.failing == pytest.approx(failing(taught, after.model), rel=0.5)
    again = quantizer.Quantizer().quantize(after.layers, after.params, rows())
    assert again == after.model  # by the code that publishes


def test_a_smaller_student_with_pruned_weights() -> None:
    taught, goal = teacher("clipped"), goals.Goal((16, 8), compression.Compression(prune=0.3))
    student = dagger.distil(taught, rows(count=4096), goal, budget_s=600)
    assert [layer.bias.size for layer in layers.weighted(student.layers)] == [16, 8, 3]
    assert compression.nonzero(student.layers) <= 0.75
    nothing = np.broadcast_to(taught.exact(rows()).mean(0), (1024, 3)).astype(np.float32)
    assert failing(taught, student.model) < 0.3 * float(taught.failings(nothing, taught.exact(rows(7))).mean())


def test_states_that_a_student_meets_are_learned() -> None:
    """Calibration has one half of the space, and exploring the other."""
    taught, goal = teacher("tanh"), goals.Goal(compressed=compression.Compression(3))
    x, fresh = rows(count=4096), rows(7)
    asked: list[int] = []

    def explore(model: bytes, number: int) -> NDArray[Any]:
        assert interpreter.run(model, x[:8])[0].shape == (8, 3)
        asked.append(number)
        return x[x[:, 0] > 0]

    half = x[x[:, 0] < 0]
    off = []
    for play in (None, explore):
        student = dagger.distil(taught, half, goal, explore=play, budget_s=600)
        met = fresh[fresh[:, 0] > 0]
        off.append(float(taught.failings(interpreter.run(student.model, met)[0], taught.exact(met)).mean()))
    assert asked == [0] and student.ended == "rounds" and student.rows > len(half)
    assert off[1] < 0.5 * off[0]


def test_the_same_seed_gives_the_same_student_and_acceptance_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_STEPS", 100)
    taught, goal = teacher("values"), goals.Goal(compressed=compression.Compression(4))
    made = [
        dagger.distil(
            taught, rows(), goal, seed=3, explore=lambda model, number: rows(number), accept=lambda one: one.rounds == 2
        )
        for _ in range(2)
    ]
    assert made[0].model == made[1].model
    assert (made[0].ended, made[0].rounds, made[0].steps) == ("accepted", 2, 200)
    assert made[0].model != students.plain(taught, rows(), goal).model


def test_the_budget_ends_training_and_what_there_is_is_a_model() -> None:
    student = dagger.distil(teacher("values"), rows(), goals.Goal((8,)), budget_s=0.3)
    assert student.ended == "budget" and student.steps < 1000
    assert interpreter.run(student.model, rows())[0].shape == (1024, 3)


def test_a_policy_that_is_no_chain_needs_a_shape() -> None:
    taught = dataclasses.replace(teacher("values"), own=None)
    with pytest.raises(errors.ConfigError, match="no chain of layers"):
        dagger.distil(taught, rows(), goals.Goal())
    with pytest.raises(errors.ConfigError, match="takes images"):
        dagger.distil(dataclasses.replace(taught, shape=(8, 8, 3)), rows(), goals.Goal((8,)))
