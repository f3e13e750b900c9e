"""Keeps XNNPACK off Intel's AMX units, on both sides, because they make acting and judging slower.

On a Xeon with AMX, XNNPACK runs int8 layers on it whatever their size. At batch 1 and 256x2 that costs 0.85 us more
per invoke than AVX-512 (2.2 against 1.4), and the Python beside it ran up to 16 % slower; why was not found. XNNPACK
has no switch. But it must ask the kernel for AMX, once per process, and the kernel refuses as long as any thread has a
signal stack too small for AMX's registers. Numbers do not change: int8 kernels are bit-identical. Nothing of this
concerns a Pi.

Packing 8.4 M weights for AMX takes 6.5 ms instead of 2, which the learner's gate pays for every policy. TensorFlow asks
for AMX as well, and uses it for nothing that the learner does, so the learner refuses it as long as it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Iterator

_STACK_BYTES = 8192  # AVX-512 needs 3.6 KB of signal stack, AMX 11 KB


class _SignalStack(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Has the kernel refuse AMX to this process within a `with` block, if not granted yet. Only on x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    memory = ctypes.create_string_buffer(_STACK_BYTES)
    small, before = _SignalStack(ctypes.addressof(memory), 0, _STACK_BYTES), _SignalStack()
    changed = sigaltstack(ctypes.byref(small), ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if changed:
            sigaltstack(ctypes.byref(before), None)
