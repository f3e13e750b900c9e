"""Reverb's rate with equal chunks, for ingest.py. Runs in a Python of its own: Reverb 0.14 wants TensorFlow 2.14.

python -m venv rv && rv/bin/pip install 'dm-reverb[tensorflow]==0.14.0' 'numpy<2'
make bench ONLY=ingest ACTORQ_BENCH_REVERB=rv/bin/python
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import os
import sys
import time

WRITERS = 2
ITEMS = 10_000
STEPS = 256


def write(port: int, items: int, ready: object, go: object) -> None:
    """One publisher: `items` trajectories of 256 steps, one chunk each."""
    import numpy as np
    import reverb

    observation, action, reward = np.ones(24, np.float32), np.int32(1), np.float32(1.0)
    with reverb.Client(f"localhost:{port}").trajectory_writer(num_keep_alive_refs=STEPS) as writer:
        for column in ("observation", "action", "reward"):
            writer.configure((column,), num_keep_alive_refs=STEPS, max_chunk_length=STEPS)
        ready.release()  # type: ignore[attr-defined]
        go.wait()  # type: ignore[attr-defined]
        for _ in range(items):
            for _ in range(STEPS):
                writer.append({"observation": observation, "action": action, "reward": reward})
            writer.create_item("replay", 1.0, {k: v[-STEPS:] for k, v in writer.history.items()})
            writer.flush(block_until_num_items=8)
        writer.flush()


def main() -> None:
    """Prints one JSON object."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb

    table = reverb.Table(
        "replay",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=1_000_000 // STEPS,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    writers = [
        context.Process(target=write, args=(server.port, ITEMS // WRITERS, ready, go), daemon=True)
        for _ in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    for _ in writers:
        ready.acquire()
    began = time.monotonic()
    go.set()
    for writer in writers:
        writer.join()
    wall_s = time.monotonic() - began
    server.stop()
    if any(writer.exitcode for writer in writers):
        sys.exit("a writer failed")
    print(
        json.dumps(
            {
                "rate": ITEMS * STEPS / wall_s,
                "explain": f"Reverb {importlib.metadata.version('dm-reverb')}, TrajectoryWriter, {WRITERS} processes, "
                f"chunks and items of {STEPS} steps, {ITEMS} items in {wall_s:.0f} s, in memory, without TLS",
            }
        )
    )


if __name__ == "__main__":
    main()
