"""Frames are sent once: what the learner samples is what the policy saw, wherever messages were cut."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from numpy.typing import NDArray

from broker.contract import codec, errors, frames, messages, specs
from edge_actor.acting import evaluate, exploration, rollout
from edge_actor.environment import env
from edge_actor.experience import journal, recorder, spool, trajectory
from learner.experience import validate
from learner.experience.buffers import replay
from tests.fakes import fake_learner

HERE = __file__
STACK = 4
FIELDS = 3  # of a frame: environment, episode, step


class Numbered(gymnasium.Env[Any, Any]):
    """Frames tell which they are; episodes last 1 to 9 steps."""

    made = 0

    def __init__(self, dtype: str = "uint8", channels: int = 1) -> None:
        self.observation_space = spaces.Box(0, 255, (2, FIELDS, channels), np.dtype(dtype).type)
        self.action_space = spaces.Discrete(2)
        self._dtype, self._channels = dtype, channels
        self._env, self._episode, self._step = Numbered.made % 7, 0, 0
        Numbered.made += 1

    def _frame(self) -> NDArray[Any]:
        fields = np.array([self._env, self._episode % 256, self._step], self._dtype)
        return np.broadcast_to(fields[None, :, None], (2, FIELDS, self._channels)).copy()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        length = 1 + (5 * self._episode + 3 * self._env) % 9
        return self._frame(), float(self._step), self._step >= length, False, {}


def stacked_by_gymnasium() -> gymnasium.Env[Any, Any]:
    return FrameStackObservation(Numbered(), STACK)


def zero_padded() -> gymnasium.Env[Any, Any]:
    return FrameStackObservation(Numbered(), STACK, padding_type="zero")


class Watched:
    """A policy that remembers what it saw."""

    head, stochastic = "q_values", False

    def __init__(self, n_envs: int) -> None:
        self.n_envs = n_envs
        self.seen: list[NDArray[Any]] = []

    def act(self, row: NDArray[Any]) -> Any:
        self.seen += list(row.copy())
        return np.zeros(self.n_envs, np.intp) if self.n_envs > 1 else 0


def check(stack: NDArray[Any], channels: int = 1) -> tuple[int, ...]:
    """Holds a stack [2, FIELDS, STACK * channels] against its closed form; returns its newest frame's fields."""
    newest = stack[0, :, -1].astype(int)
    steps = np.maximum(newest[2] + np.arange(1 - STACK, 1), 0)
    expected = np.tile(newest[:, None], STACK)
    expected[2] = steps
    np.testing.assert_array_equal(stack, np.broadcast_to(np.repeat(expected, channels, axis=1), stack.shape))
    return tuple(newest.tolist())


def kept(name: str, n_envs: int, cuts: list[int], arguments: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Plays, with a message after so many rows each; returns spec, what the policy saw, and the encoded messages."""
    environment = env.make(name, n_envs, arguments, **({"frame_stack": STACK} | changed))
    record = trajectory.Trajectory(environment.spec, n_envs, 40 * n_envs)
    record.configure(50 * n_envs, 1.0)
    explorer = exploration.Explorer(environment.spec.action, n_envs, 0, lambda: record.recorded)
    explorer.assign(fake_learner.assignment(1, epsilon_start=0.3, epsilon_end=0.3))
    watched = Watched(n_envs)
    record.start(environment.reset(seed=0)[0])
    parts = []
    for cut in cuts:
        goal = record.used + cut
        while record.used < goal:
            rollout.burst(environment, watched, explorer, record, goal - record.used)  # type: ignore[arg-type]
        parts.append(record.flush())
    return environment.spec, watched.seen, [part for part in parts if part.steps]


def experience(spec: specs.EnvSpec, part: trajectory.Segments) -> messages.Experience:
    """The message as the learner gets it."""
    observation = frames.pack(part.observation) if part.observation.dtype == np.uint8 else part.observation
    whole = {name: getattr(part, name) for name in part.__slots__ if name not in ("finished", "observation")}
    numbers = dict.fromkeys(("boot", "seq", "oldest", "step", "assigned_epoch", "epoch", "version"), 1)
    made = messages.Experience(fingerprint=spec.fingerprint, observation=observation, **numbers, **whole)  # type: ignore[arg-type]
    return validate.unpacked(codec.decode(messages.Experience, codec.encode(made)), spec)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("cuts", [[1] * 40, [2, 3, 1, 4, 30], [40], [5] * 8])
@pytest.mark.parametrize(("dtype", "channels"), [("uint8", 1), ("uint8", 3), ("float32", 1)])
def test_samples_are_what_the_policy_saw(n_envs: int, cuts: list[int], dtype: str, channels: int) -> None:
    spec, seen, parts = kept(f"{HERE}:Numbered", n_envs, cuts, {"dtype": dtype, "channels": channels})
    assert spec.observation.shape == (2, FIELDS, STACK * channels)
    shown = {check(stack, channels) for stack in seen}
    buffer = replay.Replay(spec, 1000, 1, 0.9)
    for part in parts:
        buffer.insert(experience(spec, part))
    steps = sum(part.steps for part in parts)
    assert len(buffer) == steps
    batch = buffer.sample(40, 50, np.random.default_rng(0))
    _, each = np.unique(batch.ids.reshape(-1), return_index=True)
    observed, bootstrap = (
        array.reshape(-1, *spec.observation.shape)[each] for array in (batch.observation, batch.bootstrap)
    )
    found = {check(stack, channels) for stack in observed}
    assert len(found) == steps  # all of them
    assert shown - found <= {(e, n, s + 1) for e, n, s in found}  # but for last observations, in front of a reset
    for one, following in zip(observed, bootstrap, strict=True):
        before, after = check(one, channels), check(following, channels)
        assert after == (*before[:2], before[2] + 1)
    sample = buffer.observations(steps, np.random.default_rng(0))
    assert {check(stack, channels) for stack in sample} == found


def test_replay_that_wraps_around_samples_no_torn_stack() -> None:
    spec, _, parts = kept(f"{HERE}:Numbered", 1, [7] * 60)
    buffer = replay.Replay(spec, 32, 3, 0.9)
    for part in parts:
        buffer.insert(experience(spec, part))
        batch = buffer.sample(4, 16, np.random.default_rng(0))
        for stack in (*batch.observation.reshape(-1, 2, FIELDS, STACK), *batch.bootstrap.reshape(-1, 2, FIELDS, STACK)):
            check(stack)
    buffer.drop(buffer.oldest, buffer.inserted - 3)
    assert len(buffer.observations(100, np.random.default_rng(0))) == 3


@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_stack_of_gymnasiums_is_taken_apart(n_envs: int) -> None:
    spec, seen, parts = kept(f"{HERE}:stacked_by_gymnasium", n_envs, [9, 2, 20], frame_stack=1)
    assert spec.observation == specs.ObservationSpec((2, FIELDS, STACK), "uint8", STACK)
    assert parts[0].observation.shape[1:] == (2, FIELDS, 1)
    for stack in seen:
        check(stack)
    with pytest.raises(errors.ConfigError, match="stacks 4 frames itself"):
        env.make(f"{HERE}:stacked_by_gymnasium", n_envs, frame_stack=2)


def test_a_stack_that_begins_with_zeros_is_carried_whole() -> None:
    assert env.make(f"{HERE}:zero_padded").spec.observation == specs.ObservationSpec((STACK, 2, FIELDS, 1), "uint8")


def test_a_new_episode_begins_with_its_first_frame_alone() -> None:
    environment = env.make(f"{HERE}:Numbered", 1, frame_stack=STACK)
    assert environment.seen is not None
    for _ in range(2):  # in the middle of an episode, too
        environment.reset(seed=3)
        check(environment.seen[0])
        environment.step(np.int64(0))
        check(environment.seen[0])


def test_what_was_cut_off_is_in_front_of_nothing() -> None:
    """The environment broke, or somebody else used it: the next message has no frame of the episode before."""
    environment = env.make(f"{HERE}:Numbered", 1, frame_stack=STACK)
    record = trajectory.Trajectory(environment.spec, 1, 40)
    record.start(environment.reset(seed=0)[0])
    parts = []
    for _ in range(4):
        rollout.run(environment, [np.int64(0)] * 2, record)
        record.cut()
        parts.append(record.flush())
        record.start(environment.reset()[0])
    buffer = replay.Replay(environment.spec, 100, 1, 0.9)
    for part in parts:
        if part.steps:
            buffer.insert(experience(environment.spec, part))
    batch = buffer.sample(1, 100, np.random.default_rng(0))
    found = {check(stack) for stack in (*batch.observation[0], *batch.bootstrap[0])}
    assert len({episode for _, episode, _ in found}) == len(parts)


def test_scores_are_played_on_stacks() -> None:
    environment = env.make(f"{HERE}:Numbered", 1, frame_stack=STACK)
    watched = Watched(1)
    returns, steps, _ = evaluate._play(watched.act, environment, 3, 0, lambda: False, evaluate.NO_LIMITS)  # type: ignore[misc]
    assert len(returns) == 3
    assert len(watched.seen) == steps
    for stack in watched.seen:
        check(stack)


def test_a_frame_is_sent_once_and_packed(tmp_path: Any) -> None:
    """Through recorder and spool, as an actor's loop does."""
    environment = env.make(f"{HERE}:Numbered", 1, {"channels": 64}, frame_stack=STACK)
    record = trajectory.Trajectory(environment.spec, 1, 200)
    sent: list[messages.Experience] = []
    files = journal.Journal.open(tmp_path, 10_000_000)
    outbox = spool.Spool.open(1, environment.spec.fingerprint, lambda body: body, files)
    recorded = recorder.Recorder(record, outbox)
    record.start(environment.reset(seed=0)[0])
    rollout.run(environment, [np.int64(0)] * 200, record)
    recorded.flush()

    def publish(body: bytes) -> bool:
        sent.append(codec.decode(messages.Experience, body))
        return True

    outbox.pump(publish)
    (message,) = sent
    raw = len(message.reward) * environment.spec.observation.frame_bytes
    assert message.observation.nbytes < raw / 4
    outbox.close()


def test_policies_get_the_stack_in_the_place_of_a_row() -> None:
    assert env.make("CartPole-v1").seen is None
    environment = env.make("CartPole-v1", 2, frame_stack=3)
    assert environment.spec.observation == specs.ObservationSpec((12,), "float32", 3)
    with pytest.raises(errors.SpecError, match="stack of 17"):
        env.make("CartPole-v1", frame_stack=17)
