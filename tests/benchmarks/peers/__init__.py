"""Offers of others for the same work: runtimes for a policy, and a library that learns. `make peers` installs them.

They live in an environment of their own, `.venv/peers`, and this one never imports them. `make bench ONLY=peers`
measures what a runtime takes for an action; `make bench-peers` how soon Stable-Baselines3 has learnt a task.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from broker.contract import errors

REPOSITORY = Path(__file__).parents[3]
RUNTIMES = {
    "tensorflow": f"{__name__}.on_tensorflow:Float32",
    "torch-float32": f"{__name__}.on_torch:Float32",
    "torch-int8": f"{__name__}.on_torch:Int8",
    "onnx-float32": f"{__name__}.on_onnx:Float32",
    "onnx-int8": f"{__name__}.on_onnx:Int8",
}
"""Values of `actorq-actor run --runtime`, by name. All read the .tflite files of `--precision float32`, and quantize
those themselves where they are int8. A process that uses one starts in `REPOSITORY`, where they are found."""


def python() -> str:
    """Returns the Python that has the peers.

    Raises:
        RuntimeMissing: They are not installed.
    """
    found = REPOSITORY / ".venv" / "peers" / "bin" / "python"
    if not (REPOSITORY / ".venv" / ".peers").exists() or not found.exists():
        raise errors.RuntimeMissing("the peers are not installed", where=str(found), todo="make peers")
    return str(found)


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per runtime and width."""
    from tests.benchmarks.peers import latency

    return latency.run()
