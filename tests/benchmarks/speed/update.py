"""Updates of every algorithm per second with everything around them, against the bare compiled update.

`value` counts gradient steps of: sample from replay, hand to TensorFlow, K compiled steps, and with prioritised
replay the new priorities; of PPO and A2C, a whole phase, from taking its steps on. `reference` runs the same compiled
function over and over on one batch that TensorFlow holds already, and as TensorFlow calls it; `explain` has the rate of
calls by its graph, as an algorithm's are (`xla.Program`). All alternate within one process, so that a machine that
slows down slows each.

A second row of each has the limit as its reference: what the core does on a product of 64x256x256, over the operations
of the products of one update (`_flops`). That is measured in the same turns, and updates are counted per second of CPU,
of which others who share the core take none; where nobody does, it is the same.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import messages, specs
from learner import config
from learner.experience import rate_limiter
from learner.experience.buffers import replay, rollouts
from learner.run.loop import updating
from tests.benchmarks.speed import _flops, _pixels, _untimed
from tests.fakes import fleet_examples

if TYPE_CHECKING:
    from learner.algorithms import xla

ALTERNATIONS = 9
CALLS = 8  # of K updates each, per timing
_OBSERVATION = specs.ObservationSpec((24,))
DISCRETE = specs.EnvSpec(_OBSERVATION, specs.ActionSpec("discrete", n=6))
CONTINUOUS = specs.EnvSpec(_OBSERVATION, specs.ActionSpec("continuous", shape=(6,), low=(-1.0,) * 6, high=(1.0,) * 6))
TRANSITIONS = 100_000


class _Segments:
    """Random experience in segments of 200 steps."""

    def __init__(self, spec: specs.EnvSpec, rng: np.random.Generator, transitions: int) -> None:
        count = transitions // 200
        self.length = np.full(count, 200, np.int32)
        self.terminated = np.ones(count, np.uint8)
        shape = (transitions + count * spec.observation.stack, *spec.observation.frame_shape)
        self.observation: NDArray[np.generic] = (
            rng.integers(0, 256, shape, np.uint8)
            if spec.observation.dtype == "uint8"
            else rng.normal(size=shape).astype(np.float32)
        )
        self.action: NDArray[np.generic] = rng.uniform(-1, 1, (transitions, *spec.action.shape)).astype(np.float32)
        if spec.action.kind == "discrete":
            self.action = rng.integers(0, spec.action.n, transitions).astype(np.int32)
        self.reward = rng.normal(size=transitions).astype(np.float32)


def run() -> Iterator[dict[str, Any]]:
    """Yields two rows per case; one of PPO and A2C, and of frames."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # another benchmark has started TensorFlow already
        tf.config.threading.set_intra_op_parallelism_threads(1)  # as learner.config's default
    for name, prioritized in (("uniform", False), ("prioritised", True)):
        for heads, dueling in (("", False), ("dueling ", True)):
            dqn = config.DqnConfig(hidden=(256, 256), batch_size=64, prioritized=prioritized, dueling=dueling)
            yield from _rows(f"{heads}DQN, {name} replay, MLP 256x2, batch 64", "dqn", DISCRETE, dqn)
        d4pg = config.D4pgConfig(batch_size=64, prioritized=prioritized)
        yield from _rows(f"D4PG, {name} replay, two MLPs 256x2, 51 atoms, batch 64", "d4pg", CONTINUOUS, d4pg)
        sac = config.SacConfig(batch_size=64, prioritized=prioritized)
        yield from _rows(f"SAC, {name} replay, three MLPs 256x2, batch 64", "sac", CONTINUOUS, sac)
    yield _instruments()
    nature = config.DqnConfig(hidden=_pixels.HIDDEN, batch_size=32, dueling=False, updates_per_call=4)
    case = "DQN, uniform replay, Nature CNN, frames 84x84 stacked by 4, batch 32"
    yield from itertools.islice(_rows(case, "dqn", _pixels.SPEC, nature, transitions=4000, calls=2), 1)
    wide: dict[str, Any] = {"hidden": (256, 256), "value_hidden": (256, 256), "kept_steps": 1_000_000}
    for spec, actions in ((DISCRETE, "choices"), (CONTINUOUS, "Gaussian")):
        ppo = config.PpoConfig(**wide)
        yield _phase_row(f"PPO, {actions}, two MLPs 256x2, 10 epochs of 2048 steps, batch 64", "ppo", spec, ppo)
        a2c = config.A2cConfig(**wide)
        yield _phase_row(f"A2C, {actions}, two MLPs 256x2, 256 steps at once", "a2c", spec, a2c)


def _instruments() -> dict[str, Any]:
    """The learner's calls of updates with the breakdown's instruments and without."""
    from learner.algorithms import registry

    rng = np.random.default_rng(0)
    settings = config.DqnConfig(hidden=(64, 64), batch_size=64)  # a small network: the most calls in a second
    memory = replay.of(DISCRETE, settings)
    memory.insert(_Segments(DISCRETE, rng, TRANSITIONS))
    agent = registry.make(config.Settings(config.TrainConfig(algorithm="dqn"), settings, config.GateConfig()), DISCRETE)
    limiter = rate_limiter.RateLimiter(1.0, 1, 1e12)
    limiter.insert(TRANSITIONS)
    updater = updating.ReplayUpdater(settings, settings.updates_per_call, agent, memory, limiter, rng)
    instruments = {True: updater.times, False: _untimed.NoStopwatch()}

    def call() -> None:
        assert updater.may_update
        batch = updater.draw()
        began = time.perf_counter()
        update = updater.compute(batch)
        updater.note(batch, update, time.perf_counter() - began)

    def rate(is_timed: bool) -> float:
        updater.times = instruments[is_timed]
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        return CALLS * settings.updates_per_call / (time.perf_counter() - began)

    for _ in range(2):  # compiles, and notes what compiling took
        call()
    case = "DQN, uniform replay, MLP 64x2, batch 64, with the instruments of the breakdown"
    return {"benchmark": "update", "case": case, "unit": "updates/s", **_untimed.row(8 * ALTERNATIONS, rate)}


def _phase_row(case: str, name: str, spec: specs.EnvSpec, settings: config.OnPolicyConfig) -> dict[str, Any]:
    from learner.algorithms import on_policy, registry

    rng, newest, phases = np.random.default_rng(0), messages.Order(1, 1), ALTERNATIONS * CALLS + 2
    memory, steps = rollouts.of(spec, settings), settings.rollout_steps
    made = _Segments(spec, rng, 1000)
    names = ("length", "observation", "action", "reward")
    message = fleet_examples.experience(
        made.length.tolist(), log_prob=np.full(1000, -1.8, np.float32), **{name: getattr(made, name) for name in names}
    )
    memory.insert(*[message] * (phases * steps // 1000 + 1))
    agent = registry.make(config.Settings(config.TrainConfig(algorithm=name), settings, config.GateConfig()), spec)
    assert isinstance(agent, on_policy.OnPolicy)

    def whole() -> None:
        agent.update(memory.draw(steps, settings.epochs, settings.batch_size, newest, rng))

    one = memory.draw(steps, settings.epochs, settings.batch_size, newest, rng)
    found = (rng.normal(size=steps).astype(np.float32) for _ in range(3))  # advantages, targets and values
    arrays = one.observation[one.at], one.action, one.log_prob, *found
    bare, by_graph = _bare(agent._steps, [array[one.minibatches] for array in arrays])
    for warm_up in (whole, bare):
        warm_up()
    rates: dict[Callable[[], object], list[float]] = {bare: [], by_graph: [], whole: []}
    for _ in range(ALTERNATIONS):
        for side, seen in rates.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                side()
            seen.append(CALLS * settings.updates_per_phase / (time.perf_counter() - started))
    bare_rates, graph_rates, whole_rates = rates.values()
    ratios = [w / r for w, r in zip(whole_rates, bare_rates, strict=True)]
    return {
        "benchmark": "update",
        "case": case,
        "value": round(statistics.median(whole_rates), 1),
        "unit": "updates/s",
        "runs": ALTERNATIONS,
        "reference": round(statistics.median(bare_rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": f"{settings.updates_per_phase} updates a phase; around them: joining segments, values and "
        "log-probabilities (one more pass, unless there is one update), advantages, and minibatches; the reference has "
        "these ready, and is the gradient steps alone; called by their graph they make "
        f"{statistics.median(graph_rates):.1f}",
    }


def _bare(program: xla.Program, arrays: Sequence[NDArray[Any]]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns what runs a program on these arrays: as TensorFlow calls it, on tensors; and by its graph."""
    import tensorflow as tf

    tensors = [tf.constant(array) for array in arrays]
    return lambda: program.function(*tensors), program.given(*arrays)


def _rows(
    case: str,
    name: str,
    spec: specs.EnvSpec,
    settings: config.OffPolicyConfig,
    *,
    transitions: int = TRANSITIONS,
    calls: int = CALLS,
) -> Iterator[dict[str, Any]]:
    from learner.algorithms import compiled, registry

    rng = np.random.default_rng(0)
    memory = replay.of(spec, settings)
    memory.insert(_Segments(spec, rng, transitions))
    chosen = config.Settings(config.TrainConfig(algorithm=name), settings, config.GateConfig())
    agent = registry.make(chosen, spec)
    assert isinstance(agent, compiled.Compiled)
    k, b = settings.updates_per_call, settings.batch_size
    one = memory.sample(k, b, rng)
    arrays = one.observation, one.action, one.reward, one.discount, one.bootstrap, one.weight
    bare, by_graph = _bare(agent._steps, arrays)

    def whole() -> None:
        batch = memory.sample(k, b, rng)
        memory.update_priorities(batch.ids, agent.update(batch).td_error)

    for warm_up in (bare, whole):
        warm_up()
    rates: dict[Callable[[], object], list[float]] = {bare: [], by_graph: [], whole: []}
    by_cpu: dict[Callable[[], object], list[float]] = {side: [] for side in rates}
    core: list[float] = []
    for _ in range(ALTERNATIONS):
        core.append(_flops.core_rate())
        for side, seen in rates.items():
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                side()
            seen.append(calls * k / (time.perf_counter() - started))
            by_cpu[side].append(calls * k / (time.process_time() - cpu))
    value, reference = statistics.median(rates[whole]), statistics.median(rates[bare])
    ratios = [w / r for w, r in zip(rates[whole], rates[bare], strict=True)]
    row = {"benchmark": "update", "case": case, "value": round(value, 1), "unit": "updates/s", "runs": ALTERNATIONS}
    yield {
        **row,
        "reference": round(reference, 1),
        "ratio": round(statistics.median(ratios), 3),
        "spread": round(max(ratios) - min(ratios), 3),
        "explain": f"{k} updates per call; sampling costs one gather and one copy per array and call, on the way to "
        "TensorFlow"
        + (", but a sum tree is walked twice" if settings.prioritized else "")
        + f"; called by its graph the bare update makes {statistics.median(rates[by_graph]):.1f}",
    }
    operations = _flops.of_update(settings, spec.observation.size, spec.action.size)
    shares, bare_shares = (
        [n * operations / rate for n, rate in zip(by_cpu[side], core, strict=True)] for side in (whole, by_graph)
    )
    yield {
        **row,
        "case": f"{case}, of the core's limit",
        "value": round(statistics.median(by_cpu[whole]), 1),
        "unit": "updates per second of CPU",
        "reference": round(statistics.median(core) / operations, 1),
        "ratio": round(statistics.median(shares), 3),
        "spread": round(max(shares) - min(shares), 3),
        "explain": f"the products of an update are {operations / 1e6:.1f} million operations; the core does "
        f"{statistics.median(core) / 1e9:.1f} ({min(core) / 1e9:.1f} to {max(core) / 1e9:.1f}) billion a second on "
        "64x256x256, one thread; the bare compiled update reaches "
        f"{statistics.median(bare_shares):.2f}",
    }
