"""Messages of experience have a bounded size, whatever the environment, the assignment, and what lies in the spool."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import codec, errors, frames, messages, specs
from edge_actor.environment import env
from edge_actor.experience import journal, spool, trajectory
from tests.edge_actor.experience import test_spool
from tests.edge_actor.run import test_acting_loop
from tests.edge_actor.run.test_acting_loop import site  # noqa: F401  its fixture
from tests.fakes.environments import toys

pytestmark = pytest.mark.fault(6)
Site = test_acting_loop.Site
LIMIT_BYTES = 8_000_000
TWO = specs.ActionSpec("discrete", n=2)
ARM = specs.ActionSpec("continuous", shape=(7,), low=(-1.0,) * 7, high=(1.0,) * 7)
SPECS = {
    "a number": specs.EnvSpec(specs.ObservationSpec((1,)), TWO),
    "a screen": specs.EnvSpec(specs.ObservationSpec((210, 160, 3), "uint8"), TWO),
    "a stack": specs.EnvSpec(specs.ObservationSpec((84, 84, 4), "uint8", 4), ARM),
    "a cloud": specs.EnvSpec(specs.ObservationSpec((300_000,)), ARM),
}


def filled(spec: specs.EnvSpec, n_envs: int, episode_rows: int) -> tuple[trajectory.Trajectory, bytes]:
    """A record that is full, asked for a million steps, and its message with the most beside the arrays."""
    record = trajectory.Trajectory(spec, n_envs, 1_000_000)
    record.sampled = True
    record.terminated[episode_rows - 1 :: episode_rows] = True
    record.advance(record.free)
    segments = record.flush()
    fields = {field.name: getattr(segments, field.name) for field in dataclasses.fields(segments)}
    del fields["finished"]
    if segments.observation.dtype == np.uint8:
        noise = np.random.default_rng(0).integers(0, 256, segments.observation.shape, np.uint8)
        fields["observation"] = frames.pack(noise)
    most = 2**63 - 1
    numbers: dict[str, Any] = dict.fromkeys(
        ("boot", "seq", "oldest", "step", "assigned_epoch", "epoch", "version"), most
    )
    return record, codec.encode(messages.Experience(fingerprint=spec.fingerprint, **numbers, **fields))


@pytest.mark.parametrize("episode_rows", [2, 1000])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("name", SPECS)
def test_a_full_message_is_bounded_whatever_was_asked_for(name: str, n_envs: int, episode_rows: int) -> None:
    spec = SPECS[name]
    record, body = filled(spec, n_envs, episode_rows)
    assert len(body) <= LIMIT_BYTES
    assert len(body) <= spec.experience_bytes(record.capacity, n_envs)
    assert len(body) <= max(trajectory._MESSAGE_BYTES, spec.experience_bytes(1, n_envs))
    assert codec.decode(messages.Experience, body).step == 2**63 - 1


def test_an_environment_of_which_one_step_does_not_fit_is_refused() -> None:
    with pytest.raises(errors.SpecError, match="one step of obs float32.12000000. .* 8000000 at most") as caught:
        env.make(f"{toys.__file__}:Panorama")
    assert caught.value.where == f"{toys.__file__}:Panorama"
    assert caught.value.todo
    assert env.make(f"{toys.__file__}:Panorama", 1, {"elements": 990_000}).spec.observation.size == 990_000


def test_an_actor_says_so_at_its_start(site: Site) -> None:  # noqa: F811
    with pytest.raises(errors.SpecError, match="one step of") as caught:
        site.start(env=f"{toys.__file__}:Panorama")
    assert caught.value.exit_code == 12
    with pytest.raises(errors.SpecError, match="one step of 100 environments") as caught:
        site.start(env=f"{toys.__file__}:Frames", envs=100)
    assert "--envs" in caught.value.todo


def test_a_birth_fits_its_header() -> None:
    """Bounds of actions travel as text, of which a header holds 64 KB."""

    def of(size: int) -> specs.ActionSpec:
        third = float(np.float32(-1 / 3e5))
        return specs.ActionSpec("continuous", shape=(size,), low=(third,) * size, high=(-third,) * size)

    spec = specs.EnvSpec(specs.ObservationSpec((4,)), of(1024))
    birth = messages.Birth("x" * 200, spec, 1, "board", "3.11", "runtime", "XNNPACK", 0.0)
    state = messages.ActorState(True, "s", 1, 1, birth, messages.Vitals(env_failure="x" * 300))
    assert codec.decode(messages.ActorState, codec.encode(state)) == state
    with pytest.raises(errors.SpecError, match="elements"):
        of(1025)


def test_screens_flat_out_arrive_over_one_connection(site: Site) -> None:  # noqa: F811
    """They came as one message that the broker refused, with the connection, again and again."""
    running = site.start(env=f"{toys.__file__}:Frames", heartbeat_s=1.0)
    site.assign(steps_granted=450, message_steps=1 << 20, message_period_s=1000.0)
    site.learner.await_steps(450)
    assert running.actor.connection.link.connections == 1
    assert running.error is None


def test_what_an_earlier_release_left_and_no_broker_takes_is_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = journal.Journal.open(tmp_path, 64_000_000)
    small = codec.encode(
        messages.Experience(
            boot=1, seq=2, oldest=1, step=70, fingerprint="f" * 16, assigned_epoch=1, epoch=1, version=1,
            **{field.name: getattr(test_spool.taken(), field.name)
               for field in dataclasses.fields(test_spool.taken()) if field.name != "finished"},
        )
    )  # fmt: skip
    files.append(1, 1, 1, 70, bytes(LIMIT_BYTES + 1))
    files.append(1, 2, 1, 10, small)
    files.close()
    broker = test_spool.Broker()
    files = journal.Journal.open(tmp_path, 64_000_000)
    outbox = spool.Spool.open(2, "f" * 16, lambda body: b"sealed" + body, files)
    outbox.pump(broker.publish)
    assert [(message.seq, message.oldest) for message in broker.messages] == [(2, 2)], (
        "it says that the gap is for good"
    )
    assert outbox.steps_dropped == 70
    assert "1 messages of the spool have more than 8000000 bytes" in caplog.text
    outbox.acknowledge(messages.Receipt("ledger", 1, 2))
    assert len(outbox) == 0
    outbox.close()
    assert not list(tmp_path.glob("*.segment")), "nothing of it is left"
