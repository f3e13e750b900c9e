"""Steps per second of the whole actor, against a bare loop of pre-drawn actions over the same environments.

The actor is the real one: int8 policy 256x2, exploration, recording, encoding, sealing, and publishing to a broker
from which another process receives as the learner does. The bare loop replays the very actions that the actor took, so
that both step through episodes of the same lengths. The two alternate within one process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from broker.contract import specs
from broker.fleet import identity
from edge_actor import config
from edge_actor.acting import evaluate
from edge_actor.environment import env as environments
from edge_actor.experience import journal
from edge_actor.policies import policy
from edge_actor.run import acting_loop, build
from tests.benchmarks import _broker
from tests.benchmarks.speed import _pixels, _untimed

ALTERNATIONS = 31
SLICE_S = 0.25
ENV = "CartPole-v1"


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per case."""
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name:
        directory = Path(name)
        model = _model(directory, "q_values")
        yield _steps(directory, model, n_envs=1, epsilon=0.05, message_steps=8192)
        yield _steps(directory, model, n_envs=1, epsilon=0.0, message_steps=8192)
        yield _steps(directory, model, n_envs=16, epsilon=0.05, message_steps=8192)
        yield _instruments(directory, model)
        for head in specs.SAMPLED_HEADS:
            yield _sampled(directory, head)
        yield _latency(model)
        yield _frames(directory)


def _model(directory: Path, head: str) -> Path:
    file = directory / f"{head}.tflite"
    # In a process of its own: TensorFlow would change what this one measures
    words = [sys.executable, "-m", "tests.edge_actor.policies.models.make", "256", "int8", head, str(file)]
    subprocess.run(words, check=True)
    return file


def _sampled(directory: Path, head: specs.Head) -> dict[str, Any]:
    """Each step samples an action, and works out its log-probability, which is sent with it."""
    name = ENV if head == "categorical" else "Pendulum-v1"
    model, case = _model(directory, head), f"{name}, gymnasium.make, sampled: {head}"
    return _compared(directory, model, name, gymnasium.make(name), 1, 0.0, 8192, case, "MLP 256x2", head)


def _steps(directory: Path, model: Path, *, n_envs: int, epsilon: float, message_steps: int) -> dict[str, Any]:
    kind = "gymnasium.make" if n_envs == 1 else f"{n_envs} at once, native vector entry point"
    case, network = f"{ENV}, {kind}, epsilon {epsilon:g}", "MLP 256x2"
    return _compared(directory, model, ENV, _bare_env(n_envs), n_envs, epsilon, message_steps, case, network)


def _frames(directory: Path) -> dict[str, Any]:
    model = directory / "nature.tflite"
    subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.speed._pixels", "96", "96", "12", "5", str(model)], check=True
    )
    case, name = "CarRacing-v3, four frames of 96x96x3, epsilon 0.05", f"{_pixels.__file__}:car_racing"
    return _compared(directory, model, name, _pixels.car_racing(), 1, 0.05, 64, case, "Nature CNN")


def _compared(
    directory: Path,
    model: Path,
    name: str,
    bare_env: Any,
    n_envs: int,
    epsilon: float,
    message_steps: int,
    case: str,
    network: str,
    head: specs.Head = "q_values",
) -> dict[str, Any]:
    ratios, rates, references = [], [], []
    with _acting(directory, model, name, n_envs, epsilon, message_steps, head) as (loop, broker):
        for _ in range(ALTERNATIONS):
            rate, actions = _slice(loop)
            rates.append(rate)
            references.append(_bare(bare_env, actions))
            ratios.append(rate / references[-1])
        acting, dropped = loop.policies.acting, loop._spool.steps_dropped
        assert acting is not None
    return {
        "benchmark": "actor",
        "broker": broker,
        "case": case,
        "value": round(statistics.median(rates)),
        "unit": "steps/s",
        "reference": round(statistics.median(references)),
        "ratio": round(statistics.median(ratios), 3),
        "runs": ALTERNATIONS,
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": f"int8 {network} on {acting.interpreter.runtime}, {acting.delegate}; messages of {message_steps} "
        f"steps over {broker}, {dropped} steps dropped; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
    }


def _instruments(directory: Path, model: Path) -> dict[str, Any]:
    """The same loop with the breakdown's instruments and without."""
    with _acting(directory, model, ENV, 1, 0.05, 8192, "q_values") as (loop, broker):
        instruments = {True: (loop._times, loop._idle), False: (_untimed.NoStepTimes(), _untimed.NoStopwatch())}

        def rate(is_timed: bool) -> float:
            loop._times, loop._idle = instruments[is_timed]
            return _slice(loop)[0]

        figures = _untimed.row(2 * ALTERNATIONS, rate)
    case = f"{ENV}, gymnasium.make, epsilon 0.05, with the instruments of the breakdown"
    return {"benchmark": "actor", "broker": broker, "case": case, "unit": "steps/s", **figures}


def _slice(loop: acting_loop.ActingLoop) -> tuple[float, NDArray[Any]]:
    """Runs the actor for a while: its steps per second, and the actions [rows, n_envs] that it took."""
    record, recorder = loop.recorder.trajectory, loop.recorder
    recorder.flush()
    taken: list[NDArray[Any]] = []
    flush = record.flush

    def keep() -> Any:
        taken.append(record.action[: record.used].copy())
        return flush()

    record.flush = keep  # type: ignore[method-assign]
    before, began = recorder.recorded, time.perf_counter()
    while time.perf_counter() - began < SLICE_S:
        loop.run_once()
    rate = (recorder.recorded - before) / (time.perf_counter() - began)
    recorder.flush()
    record.flush = flush  # type: ignore[method-assign]
    return rate, np.concatenate(taken)


def _bare_env(n_envs: int) -> Any:
    if n_envs == 1:
        return gymnasium.make(ENV)
    return gymnasium.make_vec(ENV, num_envs=n_envs, vectorization_mode="vector_entry_point")


def _bare(environment: Any, actions: NDArray[Any]) -> float:
    """Steps per second of nothing but the environment."""
    rows = list(actions[:, 0] if actions.shape[1] == 1 else actions)
    environment.reset(seed=0)
    step, reset = environment.step, environment.reset
    steps = float(len(actions) * actions.shape[1])
    began = time.perf_counter()
    if actions.shape[1] == 1:
        for action in rows:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                reset()
    else:
        for action in rows:
            step(action)
    return steps / (time.perf_counter() - began)


@contextlib.contextmanager
def _acting(
    directory: Path, model: Path, name: str, n_envs: int, epsilon: float, message_steps: int, head: specs.Head
) -> Iterator[tuple[acting_loop.ActingLoop, str]]:
    """An actor that has its policy and its grant, and the kind of its broker."""
    fleet = identity.Fleet.open("bench", directory / "fleet")
    with _broker.plain("bench") as (address, kind):
        bundle = fleet.enroll("bench-actor", [address])
        learner = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.fake_learner"]
            + [address, str(directory / "fleet"), "bench", "bench-actor", str(model), str(epsilon), str(message_steps)]
            + [head],
        )
        state = directory / f"state-{name.rpartition(':')[2]}-{head}-{n_envs}-{epsilon}"
        settings = config.ActorConfig(env=name, envs=n_envs, state_dir=str(state))
        actor = build.build(settings, bundle)
        try:
            loop = actor.start()
            assert loop is not None
            while loop.policies.acting is None or loop.recorder.recorded < 4 * message_steps:
                loop.run_once()
            yield loop, kind
        finally:
            actor.close()
            shutil.rmtree(journal.default_directory(state, ""), ignore_errors=True)
            learner.terminate()
            learner.wait()


def _latency(model: Path) -> dict[str, Any]:
    """Observation to action, against the interpreter alone."""
    environment = environments.make(ENV)
    acting = policy.Policy(model.read_bytes(), "q_values", environment.spec, 1)
    scores = [evaluate.run(acting, environment, 4, seed) for seed in range(ALTERNATIONS)]
    environment.close()
    timings = [score.timing for score in scores if score is not None]
    ratios = [t["observation_to_action_us_p50"] / t["invoke_us_p50"] for t in timings]
    median = {name: statistics.median(t[name] for t in timings) for name in timings[0]}
    return {
        "benchmark": "actor",
        "case": "observation to action",
        "value": median["observation_to_action_us_p50"],
        "unit": "us",
        "reference": median["invoke_us_p50"],
        "ratio": round(statistics.median(ratios), 3),
        "runs": ALTERNATIONS,
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": f"int8 MLP 256x2 on {acting.interpreter.runtime}, {acting.delegate}; reference is invoke only; "
        f"p99 {median['observation_to_action_us_p99']} and {median['invoke_us_p99']} us",
    }
