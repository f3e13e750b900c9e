"""Checks what an environment answers against what it should: whatever may be at fault there is found here.

Shapes and types are looked at step by step, as an assignment would broadcast or convert them in silence; numbers in
whole blocks (trajectory.py), which costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs

_REAL = "fiub"


def observation(answer: Any, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Returns an observation as an array of `shape`, of numbers that `dtype` can hold.

    Raises:
        EnvironmentFailure: It is something else.
    """
    try:
        found = np.asarray(answer)
    except Exception as error:  # ragged lists; objects that fail as they are converted
        raise _failure(f"an observation is no array: {shown(answer)}") from error
    if found.shape != shape:
        raise _failure(f"an observation has shape {found.shape}, the space says {shape}")
    if found.dtype.kind not in ("uib" if dtype == "uint8" else _REAL):
        raise _failure(f"an observation is of dtype {found.dtype}, the space says {dtype}: {shown(answer)}")
    if dtype == "uint8" and found.dtype != np.uint8 and found.size and not 0 <= found.min() <= found.max() <= 255:
        raise _failure(f"an observation has values beyond those of uint8: {shown(answer)}")
    return found


def over(answer: Any) -> bool:
    """Returns `terminated` or `truncated` as a boolean.

    Raises:
        EnvironmentFailure: It is neither a boolean nor 0 or 1.
    """
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    found = _scalar(answer)
    if found is None or found not in (0.0, 1.0):
        raise _failure(f"terminated and truncated must be booleans, not {shown(answer)}")
    return bool(found)


def rewards(answers: Sequence[Any]) -> NDArray[np.float64]:
    """Returns the rewards [T] of as many steps; NaN in the place of what is no number."""
    try:
        found = np.array(answers)
    except Exception:  # ragged
        found = np.array(None)
    if found.ndim == 1 and found.dtype.kind in _REAL:
        return found.astype(np.float64, copy=False)
    numbers = [_scalar(answer) for answer in answers]
    return np.array([np.nan if number is None else number for number in numbers], np.float64)


def fitted(answer: Any, spec: specs.ObservationSpec) -> NDArray[Any]:
    """Returns a frame as `observation` does, in the dtype of the spec."""
    found = observation(answer, spec.frame_shape, spec.dtype)
    with np.errstate(over="ignore"):  # what becomes infinite is found as that
        return found.astype(spec.dtype, copy=False)


def fitting(step: Callable[[Any], Any], spec: specs.ObservationSpec) -> Callable[[Any], Any]:
    """Wraps an environment's `step`, so that frames are `fitted`."""
    array, shape, dtype = np.ndarray, spec.frame_shape, np.dtype(spec.dtype)

    def answer(action: Any) -> Any:
        seen, reward, terminated, truncated, info = step(action)
        if type(seen) is not array or seen.shape != shape or seen.dtype is not dtype:
            seen = fitted(seen, spec)
        return seen, reward, terminated, truncated, info

    return answer


def finite(answer: Any, spec: specs.ObservationSpec) -> NDArray[Any]:
    """Returns a frame as `fitted` does; EnvironmentFailure if it is not finite."""
    found = fitted(answer, spec)
    if not np.isfinite(found).all():
        raise _failure(f"an observation is not finite: {shown(answer)}")
    return found


def reward(answer: Any) -> float:
    """Returns one reward as a number.

    Raises:
        EnvironmentFailure: It is no number, or none that is carried.
    """
    if isinstance(answer, float) and -specs.MAX_MAGNITUDE <= answer <= specs.MAX_MAGNITUDE:
        return float(answer)
    number = float(rewards([answer])[0])
    if not abs(number) <= specs.MAX_MAGNITUDE:
        raise _failure(f"a reward is {shown(answer)}, not a number within ±{specs.MAX_MAGNITUDE:g}")
    return number


def clipped(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an environment's `step` or `reset`, so that finite observations stay within ±MAX_MAGNITUDE."""

    def answer(*arguments: Any, **named: Any) -> Any:
        first, *rest = method(*arguments, **named)
        return _clip(first), *rest

    return answer


def carried(method: Callable[..., Any], spec: specs.ObservationSpec) -> Callable[..., Any]:
    """Wraps an environment's `step` or `reset`, so that frames are `finite`, and within ±MAX_MAGNITUDE."""
    array, shape, dtype = np.ndarray, spec.frame_shape, np.dtype(spec.dtype)
    most = specs.MAX_MAGNITUDE**2 if dtype.kind == "f" else np.inf

    def answer(*arguments: Any, **named: Any) -> Any:
        first, *rest = method(*arguments, **named)
        is_fitting = type(first) is array and first.shape == shape and first.dtype is dtype
        if not (is_fitting and np.vdot(first, first) <= most):  # one pass, which NaN and infinity do not pass
            first = finite(_clip(first), spec)
        return first, *rest

    return answer


def _clip(answer: Any) -> NDArray[Any]:
    found = np.asarray(answer)
    if found.dtype.kind == "f":
        with np.errstate(over="ignore"):
            found = found.astype(np.float32)
        found = np.where(np.isfinite(found), np.clip(found, -specs.MAX_MAGNITUDE, specs.MAX_MAGNITUDE), found)
    return found


def shown(answer: Any) -> str:
    """Returns an answer as an error shows it, shortened."""
    try:
        words = repr(answer)
    except Exception:  # of a class that somebody wrote
        words = f"an object of type {type(answer).__name__}"
    return words if len(words) <= 60 else f"{words[:57]}..."


def _scalar(answer: Any) -> float | None:
    """Returns one real number, also of an array of one; None if it is none."""
    try:
        found = np.asarray(answer)
        return float(found.item()) if found.size == 1 and found.dtype.kind in _REAL else None
    except Exception:  # objects that fail as they are converted
        return None


def _failure(what: str) -> errors.EnvironmentFailure:
    return errors.EnvironmentFailure(what, todo="mend the environment: check_env of gymnasium.utils shows more")
