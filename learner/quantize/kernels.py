"""Compiled loops over the kernels [outputs, inputs] of a policy, row by row: each weight comes from memory once.

numpy takes a pass for each step, and a multiplication by a row or a column costs two: that took three times as long
(docs/policy/quantization.md). BLAS copies a kernel before it multiplies it, which few inputs do not repay. Nothing here
holds Python's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

_HALVES_OUT = types.Array(types.uint16, 2, "C")
_IN, _VECTOR_IN = (types.Array(types.float32, n, "C", readonly=True) for n in (2, 1))
_FINE_IN = types.Array(types.float64, 1, "C", readonly=True)
_OUT, _VECTOR_OUT = types.Array(types.int8, 2, "C"), types.Array(types.float32, 1, "C")
_MATRIX_OUT = types.Array(types.float32, 2, "C")
_INPUTS_MIN = 32
"""Fewer of them, and BLAS is faster."""
_BELOW_HALF = np.float32(0.49999997)  # the float32 before 0.5: 0.5 itself would round 0.49999997 up to 1
_BELOW_HALF_64 = float(np.nextafter(0.5, 0))
_HALF, _HALF_BITS = np.float32(0.5), np.int32(0x3F000000)
_SMALLEST_USUAL = np.int32(113 << 23)  # the bits of 2^-14, below which float16 has fewer digits
_REBIASED = np.int32(-112 * (1 << 23) + 0xFFF)  # the difference of the exponents' biases, and just under half a unit
_INFINITY = np.int32(0x7C00)  # in float16
_SIZE = np.int32(0x7FFFFFFF)  # of a float32's bits: as integers, they are in the order of the sizes, NaN above all


def compiled(signature: Any, **options: Any) -> Callable[[Any], Any]:
    """Compiles for this machine, once: later processes load it from __pycache__ or the user's cache."""

    def compile_it(function: Any) -> Any:
        try:
            return numba.njit(signature, nogil=True, cache=True, **options)(function)
        except (RuntimeError, OSError):  # neither can be written, or their disk is full
            return numba.njit(signature, nogil=True, **options)(function)

    return compile_it


@compiled(types.void(_IN, _VECTOR_IN, _VECTOR_OUT))
def row_maxima(weights: FloatArray, columns: FloatArray, largest: FloatArray) -> None:
    """Writes the largest size in each row of `weights * columns`; NaN where one is.

    Args:
        weights: float32 [R, C].
        columns: float32 [C].
        largest: float32 [R], written.
    """
    for i in range(len(weights)):
        row, size = weights[i], np.int32(0)
        for j in range(len(row)):
            size = max(size, np.int32(np.float32(row[j] * columns[j]).view(np.int32) & _SIZE))
        largest[i] = np.int32(size).view(np.float32)


@numba.njit(fastmath={"reassoc"})  # in any order: the compiler may add up several at once
def _dot(one: FloatArray, other: FloatArray) -> np.float32:
    total = np.float32(0)
    for j in range(len(one)):
        total += one[j] * other[j]
    return total


@compiled(types.void(_IN, _VECTOR_IN, _VECTOR_IN, _VECTOR_IN, _OUT, _VECTOR_OUT, _VECTOR_OUT))
def round_rows(
    weights: FloatArray,
    columns: FloatArray,
    factors: FloatArray,
    mean: FloatArray,
    rounded: NDArray[np.int8],
    raised: FloatArray,
    largest: FloatArray,
) -> None:
    """Writes `weights * columns * factors[:, None]`, each product rounded to float32, as integers; halves away from 0.

    Args:
        weights: float32 [R, C].
        columns: float32 [C].
        factors: float32 [R].
        mean: float32 [C], or [0] if nobody asks what rounding changes.
        rounded: int8 [R, C], written; what does not fit 8 bits gives any number.
        raised: float32 [R], written: what rounding adds to each row's product with `mean`.
        largest: float32 [R], written as by `row_maxima`.
    """
    change = np.empty(len(columns), np.float32)
    for i in range(len(weights)):
        row, into, factor, size = weights[i], rounded[i], factors[i], np.int32(0)
        for j in range(len(row)):
            product = np.float32(row[j] * columns[j])
            size = max(size, np.int32(product.view(np.int32) & _SIZE))
            x = product * factor
            integer = np.int32(x + math.copysign(_BELOW_HALF, x))
            into[j] = np.int8(integer)
            change[j] = np.float32(integer) - x
        raised[i] = _dot(change, mean) if len(mean) else np.float32(0)
        largest[i] = np.int32(size).view(np.float32)


@compiled(types.void(_IN, _MATRIX_OUT, _VECTOR_OUT))
def copy_rows(weights: FloatArray, copied: FloatArray, largest: FloatArray) -> None:
    """Copies `weights` [R, C], and writes the largest size in each row to `largest` [R]; NaN where one is."""
    for i in range(len(weights)):
        row, into, size = weights[i], copied[i], np.int32(0)
        for j in range(len(row)):
            into[j] = row[j]
            size = max(size, np.int32(np.float32(row[j]).view(np.int32) & _SIZE))
        largest[i] = np.int32(size).view(np.float32)


@compiled(types.void(_IN, _HALVES_OUT, _VECTOR_OUT))
def half_rows(weights: FloatArray, halves: NDArray[np.uint16], largest: FloatArray) -> None:
    """Does what `copy_rows` does, to the bits of float16: rounded to the nearest, ties to the even one.

    Sizes from 65520 on become infinity, and NaN does too: the caller looks at `largest`. numpy takes one number at a
    time, four to ten times as long.
    """
    for i in range(len(weights)):
        row, into, size = weights[i], halves[i], np.int32(0)
        for j in range(len(row)):
            number = np.int32(np.float32(row[j]).view(np.int32))
            bare = np.int32(number & _SIZE)
            size = max(size, bare)
            # Too small for an exponent of float16: adding a half shifts and rounds its bits as is wanted
            small = np.int32(np.float32(np.int32(bare).view(np.float32) + _HALF).view(np.int32) - _HALF_BITS)
            usual = np.int32(bare + _REBIASED + ((bare >> 13) & 1)) >> 13
            half = small if bare < _SMALLEST_USUAL else usual
            half = min(half, _INFINITY)
            into[j] = np.uint16(half | ((number >> 16) & 0x8000))
        largest[i] = np.int32(size).view(np.float32)


@compiled(types.void(_IN, _FINE_IN, _OUT))
def round_rows_finely(weights: FloatArray, factors: NDArray[np.float64], rounded: NDArray[np.int8]) -> None:
    """Writes `weights * factors[:, None]` as integers, computed in float64; halves away from 0.

    Args:
        weights: float32 [R, C].
        factors: float64 [R].
        rounded: int8 [R, C], written; what does not fit 8 bits gives any number.
    """
    for i in range(len(weights)):
        row, into, factor = weights[i], rounded[i], factors[i]
        for j in range(len(row)):
            x = np.float64(row[j]) * factor
            into[j] = np.int8(np.int32(x + math.copysign(_BELOW_HALF_64, x)))


def half_away(x: FloatArray) -> FloatArray:
    """Rounds float32 to integers, halves away from zero: what `round_rows` does to weights."""
    rounded: FloatArray = np.trunc(x + np.copysign(_BELOW_HALF, x))
    return rounded


def product(x: FloatArray, weights: FloatArray) -> FloatArray:
    """Returns `x @ weights.T`: float32 [N, R], from [N, C] and [R, C].

    Two to three times as fast as OpenBLAS without AVX-512, about as fast with it (docs/policy/quantization.md).
    """
    if len(x) < 4 or len(weights) < 2 or weights.shape[1] < _INPUTS_MIN:
        return x @ weights.T
    y = np.empty((len(x), len(weights)), np.float32)
    _multiply(np.ascontiguousarray(x, np.float32), np.ascontiguousarray(weights, np.float32), y)
    return y


@compiled(types.void(_IN, _IN, _MATRIX_OUT), fastmath={"reassoc", "contract"})
def _multiply(x: FloatArray, weights: FloatArray, y: FloatArray) -> None:
    """Multiplies with eight sums at a time, so that six loads serve eight multiplications.

    x needs at least 4 rows, and weights 2.
    """
    for i in range(0, len(weights), 2):
        r = min(i, len(weights) - 2)  # the last ones overlap those before
        v, w = weights[r], weights[r + 1]
        for j in range(0, len(x), 4):
            n = min(j, len(x) - 4)
            a, b, c, d = x[n], x[n + 1], x[n + 2], x[n + 3]
            av = bv = cv = dv = aw = bw = cw = dw = np.float32(0)
            for k in range(weights.shape[1]):
                av += a[k] * v[k]
                bv += b[k] * v[k]
                cv += c[k] * v[k]
                dv += d[k] * v[k]
                aw += a[k] * w[k]
                bw += b[k] * w[k]
                cw += c[k] * w[k]
                dw += d[k] * w[k]
            y[n, r], y[n + 1, r], y[n + 2, r], y[n + 3, r] = av, bv, cv, dv
            y[n, r + 1], y[n + 1, r + 1], y[n + 2, r + 1], y[n + 3, r + 1] = aw, bw, cw, dw
