"""Filters what TensorFlow's and LiteRT's C++ always prints to stderr, and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from broker.program import storage

_ALWAYS_SAID = (
    b"WARNING: All log messages before absl::InitializeLog()",
    b"I0000 ",
    b"W0000 ",
    b"fully_quantize:",
    b"INFO: Created TensorFlow Lite XNNPACK delegate",
)
"""Beginnings of the lines that TensorFlow, its converter and LiteRT print whatever the log level."""


@contextlib.contextmanager
def filtered(*, everything: bool = False) -> Iterator[None]:
    """Holds back stderr, the C++ side's included; at the end passes on all but `_ALWAYS_SAID`, or nothing at all."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with storage.scratch() as (held, _):
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not everything and not line.startswith(_ALWAYS_SAID):
                    os.write(2, line)
