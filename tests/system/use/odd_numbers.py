"""Environments that answer anything: seeded, and with a tally of what must count as a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIZE = 3
_EVALUATED = range(10_000, 10_000_000)
"""Seeds of scored episodes; the acting environment's first one is drawn from far more."""


class Tally:
    """The counts of one test, over all environments that it made.

    Attributes:
        answers: Those of environments that acted and had not failed yet.
        failed: What each of them failed with first, and how many did.
        carried: Odd answers that are to be carried.
    """

    def __init__(self, seed: int, odd_share: float) -> None:
        self.random = np.random.default_rng(seed)
        self.odd_share = odd_share
        self.answers = 0
        self.failed: Counter[str] = Counter()
        self.carried: Counter[str] = Counter()


tally = Tally(0, 0.0)
_buffer = np.zeros(SIZE, np.float32)


class Unhelpful:
    """Raises at whatever is done with it."""

    def __array__(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


def _with(value: float, dtype: Any = np.float32) -> Callable[[np.random.Generator], Any]:
    def made(random: np.random.Generator) -> Any:
        array = random.normal(size=SIZE).astype(dtype)
        array[random.integers(SIZE)] = value
        return array

    return made


def _aliased(random: np.random.Generator) -> Any:
    _buffer[:] = random.normal(size=SIZE)
    return _buffer


def _locked(random: np.random.Generator) -> Any:
    array = random.normal(size=SIZE).astype(np.float32)
    array.flags.writeable = False
    return array


def _raised(error: BaseException) -> Callable[[np.random.Generator], Any]:
    def made(random: np.random.Generator) -> Any:
        raise type(error)(*error.args)

    return made


def _is(value: Any) -> Callable[[np.random.Generator], Any]:
    return lambda random: value


Kinds = dict[str, Callable[[np.random.Generator], Any]]
FAILING: dict[str, Kinds] = {
    "observation": {
        "nan": _with(np.nan), "infinite": _with(-np.inf), "beyond float32": _with(1e39, np.float64),
        "none": _is(None), "text": _is(np.array(["1", "2", "3"])), "word": _is("abc"), "number": _is(1.0),
        "short": _is(np.zeros(SIZE - 1, np.float32)), "one": _is(np.zeros(1, np.float32)),
        "deep": _is(np.zeros((2, SIZE), np.float32)), "empty": _is(np.zeros(0)),
        "complex": _is(np.zeros(SIZE, complex)),
        "objects": _is(np.array([1.0, None, 2.0], object)), "dates": _is(np.zeros(SIZE, "M8[s]")),
        "ragged": _is([[1.0], [2.0, 3.0], 4.0]), "dict": _is({"a": 1}), "unhelpful": _is(Unhelpful()),
        "raises": _raised(OSError("the wheel came off")), "says nothing": _raised(AssertionError()),
        "many lines": _raised(ValueError("a\nb\0\udc80" * 1000)), "leaves": _raised(SystemExit(4)),
    },
    "reward": {
        "nan": _is(np.nan), "infinite": _is(np.inf), "beyond float32": _is(1e39), "too large": _is(-3e38),
        "huge": _is(10**400), "none": _is(None), "text": _is("1.0"), "two": _is(np.ones(2)), "complex": _is(1j),
        "nan array": _is(np.array([np.nan])), "empty": _is(np.zeros(0)), "dict": _is({}), "unhelpful": _is(Unhelpful()),
    },
    "terminated": {"text": _is("no"), "nan": _is(np.nan), "none": _is(None), "unhelpful": _is(Unhelpful())},
    "truncated": {"two": _is(np.array([True, False])), "seven": _is(7), "list": _is([]), "half": _is(0.5)},
}  # fmt: skip
CARRIED: dict[str, Kinds] = {
    "observation": {
        "largest": _with(float(np.finfo(np.float32).max)), "large": _with(-2e9, np.float64), "denormal": _with(1e-45),
        "aliased": _aliased, "locked": _locked, "list": lambda random: random.normal(size=SIZE).tolist(),
        "big-endian": _with(1.0, ">f8"), "half": _with(1.0, np.float16), "integers": _is(np.arange(SIZE)),
        "strided": lambda random: random.normal(size=2 * SIZE)[::2], "booleans": _is(np.ones(SIZE, bool)),
        "masked": _is(np.ma.zeros(SIZE)),
    },
    "reward": {
        "integer": _is(3), "boolean": _is(True), "array": _is(np.array([2.5])), "scalar": _is(np.array(1.5)),
        "half": _is(np.float16(0.5)), "denormal": _is(5e-324), "large": _is(9e8), "long": _is(np.longdouble(1.25)),
    },
    "terminated": {"numpy": _is(np.True_), "integer": _is(1), "array": _is(np.array([False]))},
    "truncated": {"numpy": _is(np.False_), "zero": _is(0), "float": _is(1.0)},
    "info": {"none": _is(None), "text": _is("well"), "list": _is([1, 2]), "nested": _is({1: {None: Unhelpful()}})},
}  # fmt: skip


class OddWorld(gymnasium.Env[Any, Any]):
    """Its observations are noise; every so often something in an answer is odd."""

    observation_space = spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)

    def __init__(self) -> None:
        self.is_scored = self.has_failed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.is_scored |= seed in _EVALUATED if seed is not None else False
        return self._answer({"observation": self._noise(), "info": {}})

    def step(self, action: Any) -> Any:
        over = tally.random.random() < 0.05
        sound = {"observation": self._noise(), "reward": float(np.sum(action)), "terminated": over, "truncated": False}
        return self._answer({**sound, "info": {}})

    def _noise(self) -> Any:
        return tally.random.normal(size=SIZE).astype(np.float32)

    def _answer(self, answer: dict[str, Any]) -> Any:
        random = tally.random
        counts = not (self.is_scored or self.has_failed)
        tally.answers += counts
        if random.random() >= tally.odd_share:
            return tuple(answer.values())
        kinds = CARRIED if random.random() < 0.7 else FAILING
        field = random.choice([field for field in answer if field in kinds])
        name = random.choice(list(kinds[field]))
        if kinds is FAILING and counts:
            self.has_failed = True
            tally.failed[f"{field} {name}"] += 1
        elif counts:
            tally.carried[f"{field} {name}"] += 1
        if kinds is FAILING and random.random() < 0.05:
            return None if random.random() < 0.5 else tuple(answer.values())[:-1]
        answer[field] = kinds[field][name](random)
        return tuple(answer.values())


class Choices(OddWorld):
    """An odd world for DQN."""

    action_space = spaces.Discrete(3)


class Levers(OddWorld):
    """An odd world for D4PG."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)
