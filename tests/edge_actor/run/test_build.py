"""Parts that `build` makes are whole, and have not begun to work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, messages
from broker.fleet import identity
from edge_actor import config
from edge_actor.run import actor, build
from tests.edge_actor.policies import plugins


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Makes an actor whose broker is nowhere."""
    bundle = identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", ["127.0.0.1:1"])
    made: list[actor.Actor] = []

    def make(**settings: Any) -> actor.Actor:
        directories: dict[str, Any] = {"state_dir": str(tmp_path / "state"), "spool_dir": str(tmp_path / "spool")}
        made.append(build.build(config.ActorConfig(**directories, connect_timeout_s=0.1, **settings), bundle))
        return made[-1]

    yield make
    for one in made:
        if one.loop is not None:
            one.loop.close()


def test_an_actor_with_an_environment_has_its_loop_and_no_thread(made: Any) -> None:
    before = set(threading.enumerate())
    loop = made(env="CartPole-v1").loop
    assert loop is not None and loop.environment.environment.name == "CartPole-v1"
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
    assert loop.policies.acting is None and loop.recorder.steps == 0


def test_a_runtime_of_the_users_own_is_in_the_birth_certificate(made: Any) -> None:
    actor = made(env="CartPole-v1", runtime=f"{plugins.__name__}:Numpy")
    states: list[messages.ActorState] = []
    actor.connection.states._seal = states.append  # in the clear
    actor.loop.status._state()
    assert states[0].birth is not None and states[0].birth.runtime == "numpy-double 1.0"
    with pytest.raises(errors.RuntimeMissing, match="no class Nowhere"):
        made(env="CartPole-v1", runtime=f"{plugins.__name__}:Nowhere")


def test_without_one_the_learner_names_it(made: Any, tmp_path: Path) -> None:
    actor = made()
    assert actor.loop is None
    assert actor.connection.boot >> 28 == int((tmp_path / "state" / "boot").read_text())
    assert not (tmp_path / "spool").exists(), "the spool is for an environment"


def test_two_cannot_share_a_spool(made: Any) -> None:
    made(env="CartPole-v1")
    with pytest.raises(errors.ConfigError, match="using the spool"):
        made(env="CartPole-v1")


def test_one_that_was_told_to_stop_starts_nothing_for_a_task(made: Any) -> None:
    actor = made()
    actor.stop()
    actor.run()
    assert actor.loop is None


def test_what_cannot_be_sent_at_the_end_leaves_the_environment_safe_and_everything_closed(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = made(env="CartPole-v1")
    closed: list[str] = []

    def fail() -> None:
        raise RuntimeError("nothing can be sent")

    with monkeypatch.context() as broken:
        broken.setattr(actor.loop.recorder, "flush", fail)
        for name in ("environment", "status", "policies"):
            part = getattr(actor.loop, name)
            broken.setattr(part, "close", lambda name=name: closed.append(name))
        broken.setattr(actor.connection, "close", lambda: closed.append("connection"))
        with pytest.raises(RuntimeError, match="nothing can be sent"):
            actor.close()
    assert closed == ["environment", "status", "policies", "connection"]
    actor.loop = None  # the rest of it is closed
