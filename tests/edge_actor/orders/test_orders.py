"""Orders: done once, whatever a broker or a crash makes of them; refused, counted and answered where they must be."""

from __future__ import annotations

import dataclasses
import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from broker.program import storage
from edge_actor import config
from edge_actor.board import clock
from edge_actor.fleet import inbox
from edge_actor.orders import log_lines, order_log, runner

NAMES = topics.Topics("lab")
LATER_S = time.time() + 1e6


def order(number: int, kind: str = "pause", **options: str) -> messages.Instruction:
    return messages.Instruction(number, kind, LATER_S, options)


class Board:
    """What of an actor orders pass through; `start` makes its next process."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.settings = config.ActorConfig(**settings)
        self.fleet = identity.Fleet.open("lab", directory / "fleet")
        self.start()

    def start(self) -> None:
        self.inbox = inbox.Inbox(signing.LearnerVerifier(self.fleet.sealer.public_key), 5)
        self.log = order_log.OrderLog.open(self.directory / "state", self.fleet.sealer.public_key)
        self.answers: list[messages.Answer] = []
        self.starts: list[str] = []
        self.lines = log_lines.LogLines()
        self.runner = runner.OrderRunner(self.log, self.settings, self.lines, self.answers.append, self.starts.append)

    def sealed(self, *orders: messages.Instruction, name: str = "pi", fleet: identity.Fleet | None = None) -> bytes:
        body = codec.encode(messages.Orders(orders))
        return (fleet or self.fleet).sealer.seal(NAMES.orders(name), body)

    def send(self, sealed: bytes) -> list[messages.Answer]:
        """The answers to what a broker brings."""
        before = len(self.answers)
        self.inbox.opener(messages.Orders, self.inbox.put)(NAMES.orders("pi"), sealed, True)
        while (message := self.inbox.get()) is not None:
            assert isinstance(message, messages.Orders)
            self.runner.run(message)
        return self.answers[before:]

    def give(self, *orders: messages.Instruction) -> list[tuple[int, str]]:
        return [(one.number, one.outcome) for one in self.send(self.sealed(*orders))]

    def is_paused(self) -> bool:
        return self.runner.paused

    def last_lines(self) -> list[str]:
        """The last word of each line that came last."""
        return [line.rpartition(" ")[2] for line in self.answers[-1].lines]

    @property
    def refused(self) -> dict[str, int]:
        return {**self.inbox.refused, **self.runner.vitals()["refused"]}


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_what_is_ordered_is_done_once_over_all_processes(board: Board) -> None:
    assert board.give(order(7)) == [(7, "done")]
    assert board.is_paused()
    assert board.give(order(8, "resume")) == [(8, "done")]
    board.start()
    assert not board.is_paused()
    assert board.give(order(7), order(8, "resume"), order(9)) == [(7, "done"), (8, "done"), (9, "done")]
    board.start()
    assert board.is_paused(), "9 alone was new"
    assert board.refused == {}


def test_a_replayed_order_is_refused(board: Board) -> None:
    old = board.sealed(order(7))
    board.send(old)
    board.give(order(8, "resume"))
    for process in range(2):
        assert board.send(old) == [], process
        assert not board.is_paused()
        assert board.refused == {"older_order": 1}
        board.start()


def test_an_altered_order_is_refused(board: Board) -> None:
    sealed = board.sealed(order(7, "resume"))
    board.give(order(6))
    assert board.send(sealed.replace(b"resume", b"Resume")) == []
    assert board.send(sealed[:-1] + bytes([sealed[-1] ^ 1])) == []
    assert board.is_paused()
    assert board.refused == {"signature": 2}


def test_foreign_orders_are_refused(board: Board, tmp_path: Path) -> None:
    other = identity.Fleet.open("lab", tmp_path / "other")
    assert board.send(board.sealed(order(7), fleet=other)) == [], "of another fleet's owner"
    assert board.send(board.sealed(order(7), name="other")) == [], "to another actor"
    mine = signing.ActorMac(board.fleet.enroll("pi").mac_key)
    assert board.send(mine.seal(NAMES.orders("pi"), codec.encode(messages.Orders((order(7),))))) == [], "of an actor"
    assert not board.is_paused() and board.log.number == 0
    assert board.refused == {"signature": 3}


def test_an_expired_order_is_answered_and_not_done(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now_s", time.time)
    assert board.give(dataclasses.replace(order(7), expires_s=time.time() - 60.0)) == [(7, "expired")]
    assert not board.is_paused()
    assert board.refused == {"order_expired": 1}
    monkeypatch.setattr(clock, "now_s", lambda: None)
    assert board.give(dataclasses.replace(order(8), expires_s=1.0)) == [(8, "done")], (
        "a board that does not know the date cannot tell"
    )


@pytest.mark.parametrize("kind", ["restart", "reboot", "evaluate", "exec"])
def test_what_the_board_does_not_allow_is_refused(board: Board, kind: str) -> None:
    assert board.give(order(7, kind, command="rm -rf /")) == [(7, "refused")]
    assert board.starts == []
    assert board.refused == {"order_refused": 1}


def test_nothing_is_done_that_cannot_be_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(tmp_path, allow=messages.ORDER_KINDS)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(storage, "write_atomic", full)
        for number, wanted in enumerate(
            (order(7, "set", rate_hz="5"), order(8), order(9, "logs"), order(10, "restart"))
        ):
            (answer,) = board.send(board.sealed(wanted))
            assert answer.outcome == "failed" and "No space left" in answer.text and answer.lines == ()
            assert board.refused == {"order_unwritten": number + 1}
    assert board.starts == [] and board.log.trial is None and not board.is_paused()


def _cut(raw: bytes) -> bytes:
    return raw[:-9]


def _flipped(raw: bytes) -> bytes:
    return raw.replace(b"true", b"false")


def _emptied(raw: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [_cut, _flipped, _emptied])
def test_a_damaged_file_makes_no_order_new(board: Board, damage: Callable[[bytes], bytes]) -> None:
    number = int(time.time() * 1000) - 1000
    board.give(order(number))
    file = board.directory / "state" / "orders.json"
    file.write_bytes(damage(file.read_bytes()))
    board.start()
    assert board.give(order(number)) == []
    assert board.refused == {"stored": 1, "older_order": 1}
    assert board.give(order(int(time.time() * 1000) + 1000)) != []


def test_a_key_that_was_rotated_begins_anew(board: Board) -> None:
    board.give(order(7))
    board.fleet.rotate()
    board.start()
    assert board.is_paused(), "what it is told stays"
    assert board.give(order(1, "resume")) == [(1, "done")]


class TestSet:
    def test_is_tried_by_the_next_process_and_kept(self, board: Board) -> None:
        assert board.give(order(7, "set", rate_hz="50", seed="3")) == [(7, "taken")]
        assert board.starts == ["restart"]
        board.runner.poll(lambda: True)
        assert board.log.settings == {}, "this process does not run with them"
        board.start()
        assert board.log.in_force == {"rate_hz": "50", "seed": "3"} and board.log.begin()
        board.runner.poll(lambda: False)
        assert board.give(order(7, "set", rate_hz="50", seed="3")) == [(7, "taken")]
        board.runner.poll(lambda: True)
        assert board.answers[-1].outcome == "done"
        board.start()
        assert not board.log.begin() and board.log.in_force == {"rate_hz": "50", "seed": "3"}
        assert board.give(order(8, "set", seed="")) == [(8, "taken")]
        assert board.log.in_force == {"rate_hz": "50"}

    def test_is_undone_by_whoever_comes_after_a_crash(self, board: Board) -> None:
        board.give(order(7, "set", rate_hz="50"))
        board.start()
        assert board.log.begin()
        board.start()
        assert board.log.in_force == {} and not board.log.begin()
        (answer,) = board.send(board.sealed(order(7, "set", rate_hz="50")))
        assert answer.outcome == "undone"

    def test_one_at_a_time(self, board: Board) -> None:
        assert board.give(order(7, "set", rate_hz="50")) == [(7, "taken")]
        assert board.give(order(8, "set", rate_hz="60")) == [(8, "refused")]

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"runtime": "evil:Class"}, "not from the network: runtime"),
            ({"env": "other.py:Env"}, "not from the network: env"),
            ({"env_kwargs.path": "1"}, "not from the network: env_kwargs.path"),
            ({"env_kwargs.wind": "[1]"}, "must be a number"),
            ({"rate_hz": "-1"}, "must not be negative"),
            ({"seed": "1.5"}, "whole number"),
        ],
    )
    def test_refuses_what_the_board_does_not_allow(self, tmp_path: Path, options: dict[str, str], text: str) -> None:
        board = Board(tmp_path, allow_env_kwargs=("wind",))
        (answer,) = board.send(board.sealed(order(7, "set", **options)))
        assert answer.outcome == "refused" and text in answer.text
        assert board.starts == [] and board.log.trial is None


class TestStartingAgain:
    def test_a_restart_is_answered_by_the_next_process(self, tmp_path: Path) -> None:
        board = Board(tmp_path, allow=("restart",))
        assert board.give(order(7, "restart")) == [(7, "taken")]
        assert board.starts == ["restart"]
        board.start()
        assert board.give(order(7, "restart")) == [(7, "done")] and board.starts == []

    def test_is_answered_after_newer_orders_and_that_is_no_replay(self, tmp_path: Path) -> None:
        """The learner asks no more for the pause once that is answered; the restart alone is older than the pause."""
        board = Board(tmp_path, allow=("restart", "pause", "resume", "set"))
        assert board.give(order(7, "restart")) == [(7, "taken")]
        assert board.give(order(7, "restart"), order(8)) == [(7, "taken"), (8, "done")]
        assert board.give(order(7, "restart")) == [(7, "taken")]
        board.start()
        assert board.give(order(7, "restart")) == [(7, "done")]
        assert board.is_paused() and board.starts == [] and board.refused == {}
        assert board.give(order(9, "set", seed="3"), order(10, "resume")) == [(9, "taken"), (10, "done")]
        assert board.give(order(9, "set", seed="3")) == [(9, "taken")] and board.starts == ["restart"]
        board.start()
        assert board.log.begin()
        assert board.give(order(9, "set", seed="3")) == [(9, "taken")] and board.refused == {}
        board.runner.poll(lambda: True)
        assert board.answers[-1].outcome == "done"
        assert board.give(order(8)) == [] and not board.is_paused(), "an old pause is a replay"
        assert board.refused == {"older_order": 1}

    def test_one_at_a_time(self, tmp_path: Path) -> None:
        board = Board(tmp_path, allow=("restart", "reboot"))
        assert board.give(order(7, "reboot"), order(8, "restart")) == [(7, "taken"), (8, "refused")]
        assert board.starts == ["reboot"]

    def test_a_reboot_is_done_when_the_board_has_booted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        boot_id = tmp_path / "boot_id"
        boot_id.write_text("one\n")
        monkeypatch.setattr(order_log, "_BOOT_ID", boot_id)
        board = Board(tmp_path, allow=("reboot",))
        assert board.give(order(7, "reboot")) == [(7, "taken")] and board.starts == ["reboot"]
        board.start()
        assert board.give(order(7, "reboot")) == [(7, "taken")], "the process came back, the board did not boot"
        boot_id.write_text("two\n")
        board.start()
        assert board.give(order(7, "reboot")) == [(7, "done")]

    def test_a_reboot_that_does_not_come_has_failed(self, tmp_path: Path) -> None:
        board = Board(tmp_path, allow=("reboot",))
        board.give(order(7, "reboot"))
        board.log.give_up("no such command")
        board.start()
        (answer,) = board.send(board.sealed(order(7, "reboot")))
        assert (answer.outcome, answer.text) == ("failed", "no such command")


def _log(board: Board, *texts: str) -> None:
    for text in texts:
        board.lines.handle(logging.LogRecord("edge_actor", logging.INFO, "", 0, text, None, None))


def test_lines_come_in_pieces_that_fit(board: Board) -> None:
    _log(board, *(f"line {number} " + "\x01" * 900 for number in range(60)))
    answers = board.send(board.sealed(order(7, "logs", lines="50")))
    told = [line for answer in answers for line in answer.lines]
    assert len(told) == 50 and "line 59" in told[-1] and len(answers) > 1
    for answer in answers:
        assert codec.decode(messages.Answer, codec.encode(answer)).lines == answer.lines


def test_lines_are_followed_until_nobody_asks(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    _log(board, "before")
    board.send(board.sealed(order(7, "logs", lines="0", follow_s="30")))
    assert board.last_lines() == []
    _log(board, "one", "two")
    for _ in range(3):
        now[0] += 1.0
        board.runner.poll(lambda: True)
    assert board.last_lines() == ["one", "two"] and len(board.answers) == 2
    now[0] += 31.0
    _log(board, "three")
    board.runner.poll(lambda: True)
    board.runner.poll(lambda: True)
    assert len(board.answers) == 2
    _log(board, *map(str, range(log_lines.KEPT + 5)))
    assert board.lines.since(0)[0] == f"... {9} lines were not kept"
