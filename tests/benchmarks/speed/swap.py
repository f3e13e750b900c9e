"""Publish to acting: from the end of an update to the actor's state that names the new version, by the learner's clock.

A real broker, a real actor process that sends all its experience, and here the learner's own session and
`publisher.Publisher`: requantizing, gate, delta, digest, signature, broker, verification, building, swap, and the
state's way back are all in it. The actor holds a control rate, as on real hardware, or acts flat out. Weights change
between two publishes by about two int8 levels, which is what 32 Adam steps do to a 256x2 policy in the middle of
LunarLander (3 to 4 bits a weight on the wire). The environment clocks its own steps, so that the longest step around a
swap is measured where it is felt.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import codec, messages
from broker.fleet import identity
from learner import config
from learner.files import records, run_directory
from learner.fleet import gathering, roster, session
from learner.networks import layers
from learner.policies import publisher, timings
from learner.run import train
from tests.benchmarks import _broker
from tests.benchmarks.speed import _clocked, _pixels

FLEET = "bench"
ACTOR = "bench-actor"
LEVELS = 2.0
"""Standard deviation of a weight's change between two publishes, in int8 steps of its output."""
TRAINING_S = (0.02, 0.06)
"""Between two publishes, drawn anew each time, so that they fall anywhere in the actor's turn."""
UPDATE_S = 0.005
"""Seconds of an update, after each of which TrainingLoop does what can wait (`Publisher.tidy`)."""
TIMEOUT_S = 10.0
RATE_HZ = 200.0
"""The rate of the actor that holds a control rate."""


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per case."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # another benchmark has started TensorFlow already
        tf.config.threading.set_intra_op_parallelism_threads(1)  # as learner.config's default
    sys.setswitchinterval(train.SWITCH_S)
    for rate_hz in (RATE_HZ, 0.0):
        yield _case("MLP 256x2", (256, 256), rate_hz, publishes=300)
        yield _case("MLP 2048x3", (2048, 2048, 2048), rate_hz, publishes=100)
        yield _case("Nature CNN", (), rate_hz, publishes=100)


def _case(name: str, hidden: tuple[int, ...], rate_hz: float, *, publishes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as temporary, home(Path(temporary)) as directory:
        log = directory / "gaps.json"
        game = f"{_clocked.__file__}:Clocked" if hidden else f"{_pixels.__file__}:Game"
        with _fleet(directory, log, rate_hz, game) as (here, actors, broker):
            bench = _Bench(here, actors, hidden, directory / "run")
            bench.publish()  # the first one has a keyframe, and the template that `prepare` made
            bench.publisher.timings = timings.Timings()
            bench.received = 0
            for _ in range(publishes):
                bench.train()
                bench.publish()
        pace = f"actor at {rate_hz:.0f} Hz" if rate_hz else "actor flat out"
        return {"broker": broker} | _row(f"{name}, {pace}", bench, json.loads(log.read_text()))


class _Bench:
    """A learner whose training is a random walk of the weights."""

    def __init__(self, here: session.Session, actors: roster.Roster, hidden: tuple[int, ...], directory: Path) -> None:
        self.here, self.actors = here, actors
        self.rng = np.random.default_rng(0)
        spec = actors.the_spec
        self.policy = (
            initial(hidden, spec.observation.shape[0], spec.action.n, self.rng)
            if hidden
            else _pixels.nature(spec, self.rng)
        )
        # A random network's actions nearly tie; what the gate would say of it is not the matter here
        settings = config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0, gate_saturation_max=1.0)
        self.publisher = publisher.Publisher(
            here,
            here.topics,
            actors.the_spec,
            "q_values",
            here.epoch,
            0,
            settings,
            run_directory.RunDirectory.open(directory, resume=False),
            records.Records(),
        )
        self.publisher.prepare(self.policy)
        sample = self.publisher.sample(self.policy)
        shape = (sample.total, *spec.observation.shape)
        seen = self.rng.standard_normal(shape, np.float32) if hidden else _pixels.observations(sample.total)
        self.observations = sample.split(seen)
        self.windows: list[tuple[float, float]] = []
        self.pauses_ms: list[float] = []
        self.received = self.deadlines_missed = 0
        (self.actor,) = actors.working()

    def train(self) -> None:
        """Changes the weights, and serves the actor meanwhile."""
        self.policy = trained(self.policy, self.rng)
        until = time.monotonic() + self.rng.uniform(*TRAINING_S)
        while (left := until - time.monotonic()) > 0:
            self._serve(min(left, UPDATE_S))

    def publish(self) -> None:
        """Publishes, and waits until the actor says that it acts on it."""
        began = time.monotonic()
        verdict = self.publisher.publish(self.policy, *self.observations).result()
        assert verdict.passed, verdict.reason
        version = self.publisher.version
        self.here.announce(self.actors.the_spec.fingerprint, version)
        while self.actor.version < version:
            self._serve(0.05)
            assert time.monotonic() - began < TIMEOUT_S, f"version {version} does not act"
        self.windows.append((began, time.monotonic()))

    def _serve(self, wait_s: float) -> None:
        """Does what TrainingLoop does with what arrives, but for learning from it."""
        boot = seq = 0
        for arrival in self.here.drain(wait_s):
            message = arrival.message
            if isinstance(message, messages.ActorState):
                self.actors.observe(ACTOR, message, retained=arrival.retained, now_s=time.monotonic())
                vitals = message.vitals
                self.deadlines_missed = vitals.deadlines_missed
                if vitals.policy_epoch == self.here.epoch and vitals.policy_version > self.actor.version:
                    self.actor.version = vitals.policy_version
                    self.publisher.acts(vitals.policy_version, time.monotonic())
                    self.pauses_ms.append(vitals.swap_pause_ms or 0.0)
            elif isinstance(message, bytes):
                experience = codec.decode(messages.Experience, self.here.macs[ACTOR].open(arrival.topic, message))
                self.received += len(experience.reward)
                boot, seq = experience.boot, experience.seq
        if seq:
            self.here.retain(self.here.topics.receipt(ACTOR), messages.Receipt("bench", boot, seq))
        self.publisher.tidy()


def trained(policy: layers.PolicyLayers, rng: np.random.Generator) -> layers.PolicyLayers:
    """The policy after about as much training as lies between two publishes."""
    changed = []
    for array in layers.arrays(policy).values():
        step = LEVELS * np.abs(array).max(-1, keepdims=True) / 127.0
        changed.append((array + step * rng.standard_normal(array.shape, np.float32)).astype(np.float32))
    return layers.with_arrays(policy, changed)


def initial(hidden: tuple[int, ...], inputs: int, outputs: int, rng: np.random.Generator) -> layers.PolicyLayers:
    """A policy with weights as at the start of training."""
    made: list[layers.Layer] = []
    for width in (*hidden, outputs):
        limit = np.sqrt(6.0 / (inputs + width))
        kernel = rng.uniform(-limit, limit, (width, inputs)).astype(np.float32)
        bias = rng.uniform(-0.1, 0.1, width).astype(np.float32)
        made.append(layers.Dense(kernel, bias, "relu" if len(made) < len(hidden) else "none"))
        inputs = width
    return tuple(made)


def _row(name: str, bench: _Bench, gaps: list[tuple[float, float]]) -> dict[str, Any]:
    took, sent = bench.publisher.timings, bench.publisher.summary()
    acting_ms = took.acting_ms
    stages = ("calibrate", "quantize", "gate", "delta", "send")
    medians = {stage: statistics.median(getattr(took, f"{stage}_ms")) for stage in stages}
    assert bench.publisher.newest is not None
    size = len(bench.publisher.newest.model)
    rest = statistics.median(acting_ms) - sum(medians.values())
    begin, end = bench.windows[1][0], bench.windows[-1][1]
    around = [max((s for at, s in gaps if b <= at <= e), default=0.0) * 1e3 for b, e in bench.windows[1:]]
    apart = [s * 1e3 for at, s in gaps if begin < at < end and not any(b <= at <= e for b, e in bench.windows)]
    return {
        "benchmark": "swap",
        "case": f"publish to acting, {name}",
        "value": round(statistics.median(acting_ms), 2),
        "unit": "ms",
        "reference": None,
        "ratio": None,
        "runs": len(acting_ms),
        "spread": round(max(acting_ms) - min(acting_ms), 2),
        "explain": f"p50 {np.percentile(acting_ms, 50):.1f}, p99 {np.percentile(acting_ms, 99):.1f}, "
        f"max {max(acting_ms):.1f} ms; medians: {', '.join(f'{k} {v:.2f}' for k, v in medians.items())}, "
        f"rest (broker, actor, answer) {rest:.2f} ms; "
        f"digest or parts, beside: {statistics.median(took.parts_ms):.2f} ms; put off until then "
        f"{statistics.median(took.put_off_ms):.2f} ms (the next one's ranges, files); "
        f"the acting loop stood still for "
        f"{statistics.median(bench.pauses_ms):.2f} ms a swap (max {max(bench.pauses_ms):.2f}); longest step while "
        f"publishing: median {statistics.median(around):.2f}, p99 {np.percentile(around, 99):.2f} ms, "
        f"apart from it {max(apart, default=0.0):.2f} ms; {sent['keyframes']} keyframes, {sent['deltas']} deltas, "
        f"{(sent['bytes_per_policy'] or 0) / 1e3:.1f} kB a policy of {size / 1e3:.1f} kB; "
        f"{bench.received / (end - begin):.0f} steps/s received, {bench.deadlines_missed} deadlines missed; "
        f"load average {os.getloadavg()[0]:.1f}, "
        f"{os.cpu_count()} cores",
    }


@contextlib.contextmanager
def _fleet(home: Path, log: Path, rate_hz: float, game: str) -> Iterator[tuple[session.Session, roster.Roster, str]]:
    """Broker, actor and session, and the broker's kind; the actor has a grant without end."""
    fleet = identity.Fleet.open(FLEET)
    with _broker.plain(FLEET) as (address, kind):
        bundle = home / "actor.json"
        fleet.enroll(ACTOR, [address]).write(bundle)
        command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(bundle), "--heartbeat-s", "2"]
        command += ["--rate-hz", str(rate_hz)] if rate_hz else []
        command += ["--env", game, "--env-kwargs", json.dumps({"log": str(log)})]
        command += ["--frame-stack", str(_pixels.STACK)] if game.endswith(":Game") else []
        settings = config.TrainConfig(fleet=FLEET, broker=(address,), message_steps=4096, wait_s=30.0)
        exploration = config.DqnConfig(epsilon_start=0.05, epsilon_end=0.05)
        actor = subprocess.Popen([*command, "--state-dir", str(home / "state")], stderr=subprocess.DEVNULL)
        here = session.Session.open(settings)
        try:
            found = roster.Roster(here.id, here.epoch, "")
            gathering.gather(settings, here, found, threading.Event())
            (working,) = found.working()
            assignment = found.assign(
                working,
                steps_left=1 << 40,
                env_steps=0,
                lockstep_version=0,
                settings=settings,
                exploration=exploration,
                now_s=time.monotonic(),
            )
            assert assignment is not None
            here.retain(here.topics.assignment(ACTOR), assignment)
            yield here, found, kind
        finally:
            here.close()
            actor.terminate()
            actor.wait(10.0)


@contextlib.contextmanager
def home(directory: Path) -> Iterator[Path]:
    """Keys and boot counters lie there meanwhile."""
    before = os.environ.get("ACTORQ_HOME")
    os.environ["ACTORQ_HOME"] = str(directory / "home")
    try:
        yield directory
    finally:
        if before is None:
            del os.environ["ACTORQ_HOME"]
        else:
            os.environ["ACTORQ_HOME"] = before
