"""Actions sampled by stochastic heads; their log-probabilities are worked out for many steps at once.

A step invokes the policy, picks the action, and keeps the outputs as bytes, which takes a tenth of a microsecond. What
they say of the probability of each action is worked out when a burst is over: a call of numpy takes a microsecond, and
hardly longer for hundreds of steps than for one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from broker.contract.acting import factored
from edge_actor.policies import runtimes

FloatArray = NDArray[np.float32]
Act = Callable[[NDArray[Any]], Any]
_FEW = 16
"""Choices among which Python finds the best one sooner than numpy does."""
_SPREAD_AT_ONCE = 1 << 18
"""Logits of several choices, by element, that are in memory at once, unless one step has more."""
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Sampler(NamedTuple):
    """Samples some steps in a row, each with the next row of noise."""

    act: Act
    """Samples an action for a row of raw observations."""
    skip: Callable[[], None]
    """Passes over a step and its row of noise; its log-probability means nothing."""
    log_probs: Callable[[NDArray[Any]], FloatArray]
    """Returns the log-probabilities [T, batch] of the first T steps' actions, as they were recorded [T, batch, ...]."""


class Head(Protocol):
    """A kind of distribution over actions, behind one policy."""

    def start(self, rows: FloatArray, keep: Callable[[bytes], None]) -> tuple[Act, Iterator[Any]]:
        """Returns what samples and keeps the outputs' bytes, and the noise [rows, batch, size] that it goes through."""

    def log_probs(self, outputs: FloatArray, noise: FloatArray, actions: NDArray[Any]) -> FloatArray:
        """Returns log-probabilities [N], by outputs [N, outputs], of actions [N, ...] that came of noise [N, size]."""


def sampler(head: Head, interpreter: runtimes.Built, noise: FloatArray) -> Sampler:
    """Returns what samples as many steps as there are rows of noise.

    Args:
        head: What `of` returned for the interpreter.
        interpreter: Runs the policy.
        noise: Gumbel noise [rows, batch, outputs] (categorical) or normal noise [rows, batch, size].
    """
    kept: list[bytes] = []
    act, rows = head.start(noise, kept.append)
    nothing, batch = bytes(interpreter.output.nbytes), len(interpreter.output)

    def skip() -> None:
        next(rows)
        kept.append(nothing)

    def log_probs(actions: NDArray[Any]) -> FloatArray:
        steps = len(actions)
        if not steps:
            return np.zeros((0, batch), np.float32)
        n = steps * batch
        outputs = np.frombuffer(b"".join(kept[:steps]), np.float32).reshape(n, -1)
        flat = actions.reshape(n, *actions.shape[2:])
        return head.log_probs(outputs, noise[:steps].reshape(n, -1), flat).reshape(steps, batch)

    return Sampler(act, skip, log_probs)


def of(interpreter: runtimes.Built, head: specs.Head, action: specs.ActionSpec) -> Head:
    """Returns the distribution that a policy's outputs describe; `head` is one of `specs.SAMPLED_HEADS`.

    Log-probabilities are of the density in the action's units, from the outputs as they are, so at the model's
    precision.
    """
    if head == "squashed_gaussian":
        return _SquashedGaussian(interpreter, action)
    if head == "gaussian":
        return _Gaussian(interpreter, action)
    return _SeveralChoices(interpreter, action) if action.kind == "multi_discrete" else _Choice(interpreter)


class _Choice:
    """One of some choices, whose logits are the outputs: the largest of logits plus Gumbel noise is a sample."""

    def __init__(self, interpreter: runtimes.Built) -> None:
        self._interpreter = interpreter

    def start(self, rows: FloatArray, keep: Callable[[bytes], None]) -> tuple[Act, Iterator[Any]]:
        x, y, invoke = self._interpreter.input, self._interpreter.output, self._interpreter.invoke
        batch, choices = y.shape
        kept, sums, add = y.tobytes, np.empty_like(y), np.add

        def many(row: NDArray[Any]) -> Any:
            x[...] = row
            invoke()
            keep(kept())
            return add(y, next(noise), sums).argmax(1)

        def one(row: NDArray[Any]) -> int:
            x[...] = row
            invoke()
            keep(kept())
            return int(add(y, next(noise), sums).argmax())

        logits, plus = y[0].tolist, operator.add

        def one_of_few(row: NDArray[Any]) -> int:
            x[...] = row
            invoke()
            keep(kept())
            values = [*map(plus, logits(), next(noise))]
            return values.index(max(values))

        if batch == 1 and choices <= _FEW:
            noise = iter(rows[:, 0].tolist())
            return one_of_few, noise
        noise = iter(rows)
        return (one if batch == 1 else many), noise

    def log_probs(self, outputs: FloatArray, noise: FloatArray, actions: NDArray[Any]) -> FloatArray:
        logits = outputs - outputs.max(1, keepdims=True)
        found: FloatArray = logits[np.arange(len(logits)), actions] - np.log(np.exp(logits).sum(1))
        return found


class _SeveralChoices:
    """Several choices at once, each as in `_Choice`; their log-probabilities add up."""

    def __init__(self, interpreter: runtimes.Built, action: specs.ActionSpec) -> None:
        self._interpreter = interpreter
        self._where = factored.places(action.choices)

    def start(self, rows: FloatArray, keep: Callable[[bytes], None]) -> tuple[Act, Iterator[Any]]:
        x, y, invoke = self._interpreter.input, self._interpreter.output, self._interpreter.invoke
        kept, where, noise, is_one = y.tobytes, self._where, iter(rows), len(y) == 1

        def act(row: NDArray[Any]) -> Any:
            x[...] = row
            invoke()
            keep(kept())
            chosen = factored.spread(y + next(noise), where).argmax(2)
            return chosen[0] if is_one else chosen

        return act, noise

    def log_probs(self, outputs: FloatArray, noise: FloatArray, actions: NDArray[Any]) -> FloatArray:
        few = max(1, _SPREAD_AT_ONCE // self._where.size)
        found: FloatArray = np.empty(len(outputs), np.float32)
        for first in range(0, len(outputs), few):
            some = slice(first, first + few)
            found[some] = factored.log_probs(factored.spread(outputs[some], self._where), actions[some])
        return found


class _Gaussian:
    """Independent normal distributions, of which the outputs are means and logs of the deviations."""

    def __init__(self, interpreter: runtimes.Built, action: specs.ActionSpec) -> None:
        self._interpreter = interpreter
        self._size = action.size
        self._shape = action.shape if len(interpreter.output) == 1 else (len(interpreter.output), *action.shape)

    def start(self, rows: FloatArray, keep: Callable[[bytes], None]) -> tuple[Act, Iterator[Any]]:
        x, y, invoke = self._interpreter.input, self._interpreter.output, self._interpreter.invoke
        kept, noise = y.tobytes, iter(rows.reshape(len(rows), *self._shape))
        mean, log_std = (half.reshape(self._shape) for half in (y[:, : self._size], y[:, self._size :]))
        moved, exp, multiply, add = np.empty(self._shape, np.float32), np.exp, np.multiply, np.add

        def act(row: NDArray[Any]) -> Any:
            x[...] = row
            invoke()
            keep(kept())
            multiply(exp(log_std, moved), next(noise), moved)
            return add(mean, moved)

        return act, noise

    def log_probs(self, outputs: FloatArray, noise: FloatArray, actions: NDArray[Any]) -> FloatArray:
        found: FloatArray = (-0.5 * noise * noise - outputs[:, self._size :] - _HALF_LOG_2PI).sum(1)
        return found


class _SquashedGaussian:
    """As `_Gaussian`, with tame outputs (specs.SQUASHED_MEAN_MAX), and a tanh that brings a sample to the bounds."""

    def __init__(self, interpreter: runtimes.Built, action: specs.ActionSpec) -> None:
        self._interpreter = interpreter
        self._size = action.size
        self._shape = action.shape if len(interpreter.output) == 1 else (len(interpreter.output), *action.shape)
        low, high = np.array(action.low, np.float32), np.array(action.high, np.float32)
        lowest, highest = specs.SQUASHED_LOG_STD
        self._slope, self._middle = np.float32((highest - lowest) / 2), np.float32((highest + lowest) / 2)
        self._half, self._bounds = (high - low) / 2, ((high + low) / 2, low, high)
        self._constant = np.float32(action.size * (_HALF_LOG_2PI + 2.0 * math.log(2.0)) + np.log(self._half).sum())
        # Of one shape, since numpy takes longer over numbers and over what it has to broadcast
        ends = -specs.SQUASHED_MEAN_MAX, specs.SQUASHED_MEAN_MAX
        self._filled: list[NDArray[Any]] = [
            np.full(self._shape, value, np.float32) for value in (self._slope, self._middle, *ends)
        ]
        self._filled += [
            np.broadcast_to(bound.reshape(action.shape), self._shape).copy() for bound in (self._half, *self._bounds)
        ]

    def start(self, rows: FloatArray, keep: Callable[[bytes], None]) -> tuple[Act, Iterator[Any]]:
        x, y, invoke = self._interpreter.input, self._interpreter.output, self._interpreter.invoke
        kept, noise = y.tobytes, iter(rows.reshape(len(rows), *self._shape))
        mean, spread = (part.reshape(self._shape) for part in (y[:, : self._size], y[:, self._size :]))
        std, u = np.empty(self._shape, np.float32), np.empty(self._shape, np.float32)
        slope, middle, least, most, half, centre, low, high = self._filled
        tanh, exp, add, multiply, minimum, maximum = np.tanh, np.exp, np.add, np.multiply, np.minimum, np.maximum

        def act(row: NDArray[Any]) -> Any:
            x[...] = row
            invoke()
            keep(kept())
            add(multiply(tanh(spread, std), slope, std), middle, std)
            multiply(exp(std, std), next(noise), std)
            add(minimum(maximum(mean, least, out=u), most, out=u), std, u)
            add(multiply(tanh(u, u), half, u), centre, u)
            return minimum(maximum(u, low, out=u), high)  # rounding may pass the bounds

        return act, noise

    def log_probs(self, outputs: FloatArray, noise: FloatArray, actions: NDArray[Any]) -> FloatArray:
        """The density of an action is that of u before the tanh, over the slope there.

        That is half the range of the bounds times 1 - tanh(u)^2, whose log is 2 (log 2 - log(exp(u) + exp(-u))), which
        is exact where tanh(u) rounds to 1.
        """
        mean, spread = outputs[:, : self._size], outputs[:, self._size :]
        most = np.float32(specs.SQUASHED_MEAN_MAX)
        log_std = np.tanh(spread) * self._slope + self._middle
        u = np.clip(mean, -most, most) + np.exp(log_std) * noise
        found: FloatArray = (2.0 * np.logaddexp(u, -u) - 0.5 * noise * noise - log_std).sum(1) - self._constant
        return found
