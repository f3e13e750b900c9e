"""Numbers that training cannot compute with: refused at the door, survived inside, and never kept."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, messages, signing, specs
from learner import config
from learner.algorithms import Algorithm, Update, d4pg, ddpg, dqn
from learner.experience import dead_letters, ledger, validate
from learner.experience.buffers import replay
from learner.files import checkpoint, run_directory
from learner.networks import optimizer
from tests.conftest import BrokerProcess
from tests.fakes import fleet_examples, log_reader
from tests.learner.run.loop import test_training_loop as loops

pytestmark = pytest.mark.fault(8)

LARGEST = np.float32(3e38)
MAX = np.float32(1e9)
MAC = signing.ActorMac(b"k" * 32)
TOPIC = "actorq/lab/actor/pi/experience"


def spoil(monkeypatch: pytest.MonkeyPatch, seq: int, kind: str, value: np.float32) -> None:
    """The test's actor sends this message with numbers that an odd environment gives."""
    make = fleet_examples.experience

    def experience(lengths: tuple[int, ...], **changes: Any) -> messages.Experience:
        made: messages.Experience = make(lengths, **changes)
        if made.seq == seq and kind == "observation":
            observation = made.observation.copy()
            observation[3, 1] = value
            return make(lengths, **changes, observation=observation)
        if made.seq == seq:
            return make(lengths, **changes, reward=np.where(np.arange(12) < 2, value, 1).astype(np.float32))
        return made

    monkeypatch.setattr(fleet_examples, "experience", experience)


def is_finite(state: dict[str, Any]) -> bool:
    return all(np.isfinite(array).all() for array in state.values())


def saved_state(run: Path) -> dict[str, Any]:
    found = checkpoint.load_newest(run / "checkpoints")
    assert found is not None
    return found.parts["algorithm"]


@pytest.mark.mosquitto
@pytest.mark.parametrize("kind", ["observation", "reward"])
def test_one_odd_number_spoils_no_weights(
    mosquitto: BrokerProcess,
    actorq_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    log: log_reader.LogReader,
) -> None:
    """A lidar's FLT_MAX, or two such rewards: the message is refused, kept as a dead letter, and its actor named."""
    spoil(monkeypatch, 2, kind, LARGEST)
    stop = threading.Event()
    with loops.training(mosquitto.port, tmp_path, stop, evaluate_episodes=0, samples_per_insert=64.0) as (loop, _, _):
        update = loop.parts.algorithm.update

        def counted(batch: replay.Batch) -> Update:
            if loop.parts.algorithm.updates >= 320:
                stop.set()
            return update(batch)

        monkeypatch.setattr(loop.parts.algorithm, "update", counted)
        loop.train()
        state = loop.parts.algorithm.state()
    run = tmp_path / "run"
    assert is_finite(state)
    assert is_finite(saved_state(run))
    assert isinstance(loop.parts.validator, validate.Validator)
    assert loop.parts.validator.refused["value"] == 1
    beyond = loop.parts.validator.refused["grant"]  # this actor heeds no grant, and updates may be slow
    assert loop.parts.validator.steps_refused == 12 * (1 + beyond)
    assert "value" in (run / dead_letters.NAME).read_text()
    assert sum("what pi sends is refused (value)" in line for line in log.lines) == 1
    assert loop.parts.recovery.recoveries == 0


@pytest.mark.mosquitto
def test_what_spoilt_training_is_put_aside_and_the_last_good_state_comes_back(
    mosquitto: BrokerProcess,
    actorq_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: log_reader.LogReader,
) -> None:
    """Here the network cannot take what the bound still lets pass: weights and errors are NaN after such a batch."""
    spoil(monkeypatch, 3, "observation", MAX)
    stop, spoilt = threading.Event(), [0]
    with loops.training(mosquitto.port, tmp_path, stop, evaluate_episodes=0, samples_per_insert=64.0) as (loop, _, _):
        update = loop.parts.algorithm.update

        def brittle(batch: replay.Batch) -> Update:
            found = update(batch)
            if np.abs(batch.observation).max() > 1e8:
                spoilt[0] += 1
                if spoilt[0] > 10:
                    stop.set()
                loop.parts.algorithm.restore(
                    {k: v * np.nan if v.dtype == np.float32 else v for k, v in loop.parts.algorithm.state().items()}
                )
                return Update(dict.fromkeys(found.metrics, np.nan), found.td_error * np.nan)
            if (spoilt[0] and loop.parts.algorithm.updates >= 640) or loop.parts.pace.env_steps > 5000:
                stop.set()
            return found

        monkeypatch.setattr(loop.parts.algorithm, "update", brittle)
        loop.train()
        state = loop.parts.algorithm.state()
    run = tmp_path / "run"
    assert is_finite(state)
    assert is_finite(saved_state(run))
    assert loop.parts.recovery.recoveries == spoilt[0] == 1, "what is put aside is never drawn again"
    assert loop.parts.recovery.steps_quarantined == 12
    assert any("pi (boot 1, message 3, 12 steps)" in line for line in log.lines)
    with closing(sqlite3.connect(run / run_directory.LEDGER)) as book:
        assert book.execute("SELECT seq FROM messages WHERE verdict = 'quarantined'").fetchall() == [(3,)]
    again = ledger.Ledger.open(run / run_directory.LEDGER)
    assert again.totals()[0] == loop.parts.pace.env_steps, "it counts as before"
    held = [codec.decode(messages.Experience, body) for _, body in again.newest(10**6)]
    again.close()
    assert len(held) > 3 and all(one.seq != 3 for one in held), "nor after a restart"
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["recoveries"] <= 1 for row in rows)


@pytest.mark.mosquitto
def test_a_run_that_diverges_again_and_again_ends_with_what_to_do(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, calls = threading.Event(), [0]
    with loops.training(mosquitto.port, tmp_path, stop, evaluate_episodes=0) as (loop, _, _):
        update = loop.parts.algorithm.update

        def diverges(batch: replay.Batch) -> Update:
            found = update(batch)
            calls[0] += 1
            if calls[0] > 10:
                stop.set()
            loop.parts.algorithm.restore(
                {k: v * np.nan if v.dtype == np.float32 else v for k, v in loop.parts.algorithm.state().items()}
            )
            return Update(dict.fromkeys(found.metrics, np.nan), found.td_error)

        monkeypatch.setattr(loop.parts.algorithm, "update", diverges)
        with pytest.raises(errors.RunError, match="NaN or infinity 4 times") as caught:
            loop.train()
    assert "learning_rate" in caught.value.todo
    assert is_finite(saved_state(tmp_path / "run"))
    assert loop.parts.publisher.published == 0 or not loop.parts.publisher.held_back["not_finite"]


ALGORITHMS = [
    (dqn.Dqn, config.DqnConfig(hidden=(8,), updates_per_call=2)),
    (ddpg.Ddpg, config.DdpgConfig(hidden=(64, 64), critic_hidden=(64, 64), normalizer_floor=0.001)),
    (d4pg.D4pg, config.D4pgConfig(hidden=(8,), critic_hidden=(8,))),
]


@pytest.mark.parametrize(("algorithm", "settings"), ALGORITHMS, ids=["dqn", "ddpg", "d4pg"])
def test_numbers_at_the_bound_leave_all_finite(algorithm: Any, settings: Any) -> None:
    """The normaliser has not seen them, and as many rewards are summed as n-step returns have."""
    rng, shape = np.random.default_rng(0), (2, 16)
    action = specs.ActionSpec("continuous", shape=(1,), low=(-float(MAX),), high=(float(MAX),))
    discrete = algorithm is dqn.Dqn
    spec = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=2) if discrete else action)
    learner: Algorithm = algorithm(spec, settings, 0)
    learner.normalize(rng.normal(size=(64, 4)).astype(np.float32) * 1e-6)

    def observed() -> Any:
        ends = rng.choice([-MAX, MAX], (*shape, 4))
        return np.where(rng.random((*shape, 4)) < 0.3, ends, rng.normal(size=(*shape, 4))).astype(np.float32)

    actions = np.zeros(shape, np.int32) if discrete else rng.choice([-MAX, MAX], (*shape, 1)).astype(np.float32)
    reward = rng.choice(np.array([-MAX, 0, MAX]), shape).astype(np.float32) * settings.n_step
    discount, weight = np.full(shape, 0.95, np.float32), np.ones(shape, np.float32)
    batch = replay.Batch(observed(), actions, reward, discount, observed(), weight, np.zeros(shape, np.int64))
    for _ in range(3):
        update = learner.update(batch)
        assert np.isfinite(update.td_error).all()
        assert np.isfinite(list(update.metrics.values())).all(), update.metrics
    assert is_finite(learner.state())


def test_large_gradients_are_scaled_down_and_not_lost() -> None:
    gradients, norm = optimizer.clipped([np.array([3e25, 4e25], np.float32)], 10.0)
    assert float(norm) == pytest.approx(5e25)
    np.testing.assert_allclose(gradients[0], [6.0, 8.0], rtol=1e-6)


def test_the_bound_is_1e9_and_the_console_names_an_actor_once(tmp_path: Path, log: log_reader.LogReader) -> None:
    checks = validate.Validator(
        {"pi": MAC},
        fleet_examples.SPEC,
        (1, 2),
        {},
        dead_letters.DeadLetters(tmp_path / "letters"),
        lambda steps, segments: True,
    )
    odd = np.nextafter(MAX, LARGEST)
    verdicts = []
    odd_ones: list[dict[str, Any]] = [
        {"observation": np.full((5, 4), MAX, np.float32), "reward": np.full(3, -MAX)},
        {"observation": np.array([[0, 0, 0, -odd]] * 5, np.float32)},
        {"reward": np.array([0, 0, odd], np.float32)},
        {"reward": np.array([0, LARGEST, -LARGEST], np.float32)},
        {"observation": np.full((5, 4), np.nan, np.float32)},
        {},
    ]
    for seq, changes in enumerate(odd_ones, 1):
        sealed = MAC.seal(TOPIC, codec.encode(fleet_examples.experience(seq=seq, **changes)))
        taken = checks.validate("pi", TOPIC, sealed, 5)
        assert taken is not None
        verdicts.append(taken.entry.verdict)
    assert verdicts == ["ok", "value", "value", "value", "value", "ok"]
    assert len(log.lines) == 1 and "pi" in log.lines[0] and "1e+09" in log.lines[0]


@pytest.mark.parametrize("prioritized", [False, True])
def test_what_is_dropped_from_replay_is_never_drawn(prioritized: bool) -> None:
    memory = replay.Replay(fleet_examples.SPEC, 60, n_step=2, gamma=0.9, prioritized=prioritized)
    rng = np.random.default_rng(0)

    def add(value: float) -> None:
        memory.insert(fleet_examples.experience((6, 4), observation=np.full((12, 4), value, np.float32)))

    for value in (1, 2, 3):
        add(value)
    memory.drop(10, 20)
    assert len(memory) == 20
    memory.update_priorities(np.arange(10, 20), np.full(10, 1e6, np.float32))
    for _ in range(3):  # while others come, and until it has left replay by itself
        for _ in range(20):
            batch = memory.sample(2, 8, rng)
            assert not (batch.observation == 2).any() and not (batch.bootstrap == 2).any()
        assert not (memory.observations(1000, rng) == 2).any()
        for _ in range(3):
            add(4)
    assert len(memory) == memory.inserted - memory.oldest
    memory.drop(memory.oldest, memory.inserted)
    assert len(memory) == 0
    with pytest.raises(IndexError):
        memory.sample(1, 1, rng)


def test_an_error_that_is_not_finite_spoils_no_priorities() -> None:
    memory = replay.Replay(fleet_examples.SPEC, 64, n_step=1, gamma=0.9, prioritized=True)
    memory.insert(fleet_examples.experience((10,)))
    memory.update_priorities(np.arange(10), np.array([np.nan, np.inf, -np.inf, *[1.0] * 7], np.float32))
    memory.insert(fleet_examples.experience((10,)))
    batch = memory.sample(4, 64, np.random.default_rng(0))
    assert np.isfinite(batch.weight).all()
    assert len(np.unique(batch.ids)) == 20
