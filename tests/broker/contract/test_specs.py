"""Specs: what can be carried, which head fits, and the fingerprint that says whether policies are interchangeable."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from broker.contract import errors, specs

DISCRETE = specs.ActionSpec("discrete", n=2)
TORQUE = specs.ActionSpec("continuous", shape=(1,), low=(-2.0,), high=(2.0,))


def spec(**changes: object) -> specs.EnvSpec:
    base = specs.EnvSpec(specs.ObservationSpec((4,)), DISCRETE)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_fingerprint_is_pinned() -> None:
    """A policy's manifest carries it: another value would make every stored policy unusable."""
    assert spec().fingerprint == "96d4be29640310f7"


@pytest.mark.parametrize(
    "other",
    [
        spec(observation=specs.ObservationSpec((5,))),
        spec(observation=specs.ObservationSpec((4, 1))),
        spec(observation=specs.ObservationSpec((4,), "uint8")),
        spec(observation=specs.ObservationSpec((4,), stack=2)),
        spec(action=specs.ActionSpec("discrete", n=3)),
        spec(action=TORQUE),
    ],
)
def test_fingerprints_differ(other: specs.EnvSpec) -> None:
    assert other.fingerprint != spec().fingerprint


def test_fingerprints_tell_bounds_apart() -> None:
    wider = dataclasses.replace(TORQUE, high=(2.5,))
    assert spec(action=TORQUE).fingerprint != spec(action=wider).fingerprint


def test_sizes_and_description() -> None:
    assert specs.ObservationSpec((84, 84, 4), "uint8").size == 84 * 84 * 4
    assert DISCRETE.size == 2 and TORQUE.size == 1
    assert spec().describe() == "obs float32[4] -> 2 actions"
    assert spec(action=TORQUE).describe() == "obs float32[4] -> continuous[1]"


@pytest.mark.parametrize("shape", [(), (0,), (-1,), (1, 2, 3, 4, 5), (1 << 25,)])
def test_observation_shapes_that_are_not_carried(shape: tuple[int, ...]) -> None:
    with pytest.raises(errors.SpecError, match="flatten it"):
        specs.ObservationSpec(shape)


def test_a_stack_is_frames_side_by_side() -> None:
    stacked = spec(observation=specs.ObservationSpec((84, 84, 12), "uint8", 4))
    assert stacked.observation.frame_shape == (84, 84, 3)
    assert stacked.observation.frame_bytes == 84 * 84 * 3
    assert stacked.describe() == "obs uint8[84,84,12] of 4 frames -> 2 actions"
    one, two = stacked.experience_bytes(1), stacked.experience_bytes(2)
    assert two - one == 84 * 84 * 3 + 4 + 8 + 22
    assert stacked.experience_bytes(99) // (84 * 84 * 3) == 50 * 5  # episodes of one step
    assert one - specs.EXPERIENCE_HEADER_BYTES == 5 * 84 * 84 * 3 + 4 + 8 + 22
    assert specs.from_dict(json.loads(json.dumps(dataclasses.asdict(stacked)))) == stacked


@pytest.mark.parametrize(("shape", "stack"), [((4,), 3), ((4,), 0), ((4,), -2), ((17,), 17)])
def test_stacks_that_are_not_carried(shape: tuple[int, ...], stack: int) -> None:
    with pytest.raises(errors.SpecError, match="a stack of"):
        specs.ObservationSpec(shape, stack=stack)


@pytest.mark.fault(14)
def test_what_would_take_more_memory_than_there_is_is_no_spec() -> None:
    with pytest.raises(errors.SpecError, match="one step of"):
        specs.EnvSpec(specs.ObservationSpec((1 << 22,)), specs.ActionSpec("discrete", n=2))
    with pytest.raises(errors.SpecError, match="elements"):
        specs.ActionSpec("continuous", shape=(5000,), low=(-1.0,) * 5000, high=(1.0,) * 5000)
    assert specs.ObservationSpec((480, 640, 3), "uint8").size < 1 << 20


@pytest.mark.parametrize("dtype", ["float64", "int8", "object", ""])
def test_observation_dtypes_that_are_not_carried(dtype: str) -> None:
    with pytest.raises(errors.SpecError, match="are not carried"):
        specs.ObservationSpec((4,), dtype)


@pytest.mark.parametrize("n", [-1, 0, 1, (1 << 16) + 1])
def test_discrete_actions_need_choices(n: int) -> None:
    with pytest.raises(errors.SpecError, match="choices"):
        specs.ActionSpec("discrete", n=n)


@pytest.mark.parametrize(
    ("low", "high"),
    [((-1.0,), (math.inf,)), ((math.nan,), (1.0,)), ((1.0,), (1.0,)), ((2.0,), (1.0,))],
)
def test_bounds_must_be_finite_and_ordered(low: tuple[float, ...], high: tuple[float, ...]) -> None:
    with pytest.raises(errors.SpecError, match="TransformAction"):
        specs.ActionSpec("continuous", shape=(1,), low=low, high=high)


def test_bounds_must_cover_the_action() -> None:
    with pytest.raises(errors.SpecError, match="one value per element"):
        specs.ActionSpec("continuous", shape=(2,), low=(-1.0,), high=(1.0,))


def test_unknown_kind_of_action() -> None:
    with pytest.raises(errors.SpecError, match="unknown kind"):
        specs.ActionSpec("text", n=2)


@pytest.mark.parametrize(
    ("head", "action", "fits"),
    [
        ("q_values", DISCRETE, True),
        ("categorical", DISCRETE, True),
        ("deterministic", DISCRETE, False),
        ("gaussian", DISCRETE, False),
        ("deterministic", TORQUE, True),
        ("gaussian", TORQUE, True),
        ("squashed_gaussian", DISCRETE, False),
        ("squashed_gaussian", TORQUE, True),
        ("q_values", TORQUE, False),
        ("beta", TORQUE, False),
    ],
)
def test_heads(head: str, action: specs.ActionSpec, fits: bool) -> None:
    if fits:
        assert specs.check_head(head, action) == head
    else:
        with pytest.raises(errors.SpecError, match="cannot choose"):
            specs.check_head(head, action)
