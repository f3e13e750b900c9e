"""A broker can repeat the learner's genuine words, and hold them back."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from broker.contract import codec, errors, messages, signing
from broker.fleet import identity
from edge_actor.fleet import inbox, replay_guard
from tests.fakes import fake_learner


class Actor:
    """A replay guard with a clock that is turned by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.guard = replay_guard.ReplayGuard(lambda: self.now_s)

    def hears(self, message: messages.LearnerState | messages.Assignment) -> str:
        """The reason of the refusal, if it is refused."""
        try:
            self.guard.check(message, boot=5)
        except errors.MessageError as error:
            return error.reason
        return ""


def state(epoch: int, heartbeat: int, *, online: bool = True) -> messages.LearnerState:
    return messages.LearnerState(online=online, session=f"s{epoch}", epoch=epoch, heartbeat=heartbeat)


def test_states_go_forward_alone() -> None:
    actor = Actor()
    assert not actor.hears(state(2, 7))
    assert not actor.hears(state(2, 7)), "retained, and heard again after a reconnect"
    assert not actor.hears(state(2, 8))
    assert actor.hears(state(2, 7)) == "older_state"
    assert actor.hears(state(1, 99)) == "older_state"
    assert not actor.hears(state(2, 0, online=False)), "its will"
    assert actor.hears(state(1, 0, online=False)) == "older_state"
    assert not actor.hears(state(3, 1)), "a new learner begins anew"


@pytest.mark.fault(11)
def test_what_was_heard_already_is_no_sign_of_life() -> None:
    """A broker may repeat the last state for ever: it reaches nobody a second time, the spool's window included."""
    sealer = identity.Fleet.open("f").sealer
    heard: list[messages.LearnerState] = []
    opened = inbox.Inbox(signing.LearnerVerifier(sealer.public_key), 5)
    handle = opened.opener(messages.LearnerState, lambda message, sealed: heard.append(message))
    for heartbeat in (7, 7, 8, 7, 8, 8):
        handle("t", sealer.seal("t", codec.encode(state(2, heartbeat))), True)
    handle("t", sealer.seal("t", codec.encode(state(2, 0, online=False))), True)  # a will, of before
    assert [one.heartbeat for one in heard] == [7, 8]
    assert opened.refused == {"older_state": 1}, "what is retained comes again with every connection"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epoch": 2, "steps_granted": 10}, ""),
        ({"epoch": 2, "steps_granted": 11}, ""),
        ({"epoch": 3, "steps_granted": 0}, ""),
        ({"epoch": 2, "steps_granted": 9}, "older_assignment"),
        ({"epoch": 2, "steps_granted": 11, "lockstep_version": 3}, "older_assignment"),
        ({"epoch": 1, "steps_granted": 99}, "older_assignment"),
    ],
)
def test_assignments_go_forward_alone(changes: dict[str, Any], reason: str) -> None:
    actor = Actor()
    assert not actor.hears(fake_learner.assignment(5, epoch=2, steps_granted=10, lockstep_version=4))
    replay = dataclasses.replace(fake_learner.assignment(5, lockstep_version=4), **changes)
    assert actor.hears(replay) == reason


def test_an_assignment_of_another_life_says_nothing_about_this_one() -> None:
    actor = Actor()
    assert not actor.hears(fake_learner.assignment(4, epoch=9, steps_granted=1 << 40))
    assert not actor.hears(fake_learner.assignment(5, epoch=2, steps_granted=10))


def test_silence_is_counted_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    actor = Actor()
    actor.hears(state(2, 7))
    for _ in range(5):  # frozen: the same old state for ever
        actor.now_s += replay_guard.SILENCE_S
        actor.hears(state(2, 7))
        actor.hears(state(2, 0, online=False))
        actor.guard.check_silence()
    assert actor.guard.silences == 1
    assert len(caplog.messages) == 1 and "someone holds it back" in caplog.messages[0]
    actor.hears(state(2, 8))
    actor.guard.check_silence()
    assert "heard again" in caplog.messages[1]
    actor.now_s += replay_guard.SILENCE_S + 1
    actor.guard.check_silence()
    assert actor.guard.silences == 2
