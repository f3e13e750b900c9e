"""Whose turn it is, what cannot be checked, and what follows from what was found."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, messages
from learner.audit import auditor, holding, model_store, recompute
from learner.files import records
from learner.fleet import actors
from tests.fakes import fleet_examples, log_reader
from tests.learner.audit import acting


class Site:
    """An auditor with one honest actor, whose clock the test moves."""

    def __init__(self, share: float = 0.0001, **born: Any) -> None:
        self.actor = acting.Actor("CartPole-v1", epsilon_start=0.2, epsilon_end=0.2, message_steps=64)
        self.model = acting.model(self.actor.spec)
        self.policy = self.actor.policy(self.model, "q_values")
        birth = dataclasses.replace(fleet_examples.birth(spec=self.actor.spec), **born)
        one = actors.Actor("pi", 0, fleet_examples.state(birth=birth), boot=1, assignment=self.actor.assignment)
        self.now, self.stored = 0.0, dict[messages.Order, bytes]()
        self.models = model_store.ModelStore(self.stored.get)
        self.auditor = auditor.Auditor(
            *(self.actor.spec, "q_values", "int8", {"pi": one}, share, self.models), clock=lambda: self.now
        )
        self.models.note(messages.Order(1, 1), self.model)

    def send(self, **changes: Any) -> auditor.Finding | None:
        """Has the next message considered; what was found, if it was checked."""
        self.auditor.consider("pi", dataclasses.replace(self.actor.act(self.policy), **changes))
        return self.auditor.wait()


def test_the_first_message_of_an_actor_and_then_one_in_a_period_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.thread_time", lambda: 0.0)  # a check takes no time, and needs no rest
    site = Site(share=1e-12)
    found = [site.send() is not None]
    for _ in range(10):
        site.now += auditor.PERIOD_S / 4
        found.append(site.send() is not None)
    assert found == [True, False, False, False, True, False, False, False, True, False, False]
    assert site.auditor.checked == 3
    assert 150 < site.auditor.steps <= 3 * 64  # without the rows that only reset
    site.auditor.close()


def test_after_a_check_it_rests_so_that_it_takes_a_share_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.thread_time", itertools.count().__next__)  # a second goes by at each look
    site = Site(share=1.0)
    assert site.send() is not None
    assert site.send() is None
    site.now += 1000.0
    assert site.send() is not None
    site.auditor.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"boot": 7}, "unknown boot"),
        ({"assigned_epoch": 9}, "recorded for an earlier session"),
        ({"version": 5}, "policy no longer kept"),
    ],
)
def test_what_cannot_be_checked_is_counted(changes: dict[str, Any], reason: str) -> None:
    site = Site()
    assert site.send(**changes) is None
    assert site.auditor.summary()["audits_passed_over"] == {reason: 1}
    site.auditor.close()


@pytest.mark.parametrize("kernels", ["edgetpu", ""])
def test_kernels_of_which_nothing_is_known_are_not_held_to_ours(kernels: str) -> None:
    site = Site(delegate=kernels)
    assert site.send() is None
    assert site.auditor.passed_over == {"its kernels are not known here": 1}
    site.auditor.close()


def test_built_in_kernels_are_held_to_a_step_and_counted() -> None:
    site = Site(delegate="built-in")
    assert site.send() is not None
    assert site.auditor.summary()["audited_with_tolerance"] == 1
    site.auditor.close()


def test_steps_of_the_random_policy_are_nobodys() -> None:
    site = Site()
    assert site.send(version=0) is None
    assert site.auditor.summary()["audits_passed_over"] == {}
    site.auditor.close()


def test_a_policy_of_which_memory_has_no_room_is_read_from_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_MODELS_MAX", 1)
    site = Site()
    site.models.note(messages.Order(1, 2), site.model)
    site.stored[messages.Order(1, 1)] = site.model
    found = site.send()
    assert found is not None and found.verdict.wrong == 0 < found.verdict.steps
    site.auditor.close()


class Source:
    """An ingest that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.steps_held = 0

    def hold(self, *told: Any) -> int:
        self.told.append(("hold", *told))
        return 12

    def release(self, actor_id: str) -> list[messages.Experience]:
        self.told.append(("release", actor_id))
        return [fleet_examples.experience()]

    def discard(self, actor_id: str) -> int:
        self.told.append(("discard", actor_id))
        return 7


@pytest.fixture
def source() -> Source:
    return Source()


def made(site: Site, source: Source, path: Path, counted: list[Any]) -> holding.Holding:
    return holding.Holding(
        *(site.auditor, source, path, lambda: None, counted.append, holding.read(path), records.Records())  # type: ignore[arg-type]
    )


def test_who_lies_is_held_since_the_last_good_message_and_named_once(
    tmp_path: Path, source: Source, log: log_reader.LogReader
) -> None:
    site, counted = Site(), list[Any]()
    held = made(site, source, tmp_path, counted)
    held.follow(auditor.Finding("pi", 1, 3, recompute.Verdict(64, 0)))
    for seq in (9, 10):
        held.follow(auditor.Finding("pi", 1, seq, recompute.Verdict(64, 5, "its kernels are wrong")))
    assert source.told == [("hold", "pi", (1, 3))]
    assert held.summary()["actors_held"] == {"pi": "its kernels are wrong"}
    assert held.metrics()["actors_held"] == held.named == 1
    (line,) = [line for line in log.lines if "pi did not do what it says" in line]
    assert "5 of 64 steps in message 9" in line and f"held {tmp_path} --release pi" in line

    again = made(site, source, tmp_path, counted)
    assert again.held == held.held, "it outlives the learner"
    holding.decide(tmp_path, "pi", holding.RELEASE)
    again.advance()
    assert source.told[1:] == [("release", "pi")]
    assert len(counted) == 1
    assert holding.read(tmp_path) == {}
    assert not list((tmp_path / holding.DECISIONS).iterdir())
    site.auditor.close()


def test_a_person_may_discard_what_is_held_and_decides_of_nobody_else(tmp_path: Path, source: Source) -> None:
    site = Site()
    held = made(site, source, tmp_path, [])
    held.follow(auditor.Finding("pi", 1, 9, recompute.Verdict(64, 5, "why")))
    with pytest.raises(errors.ConfigError, match="po is not held back"):
        holding.decide(tmp_path, "po", holding.DISCARD)
    holding.decide(tmp_path, "pi", holding.DISCARD)
    held.advance()
    assert source.told == [("hold", "pi", None), ("discard", "pi")]
    site.auditor.close()


def test_a_broken_file_of_who_is_held_is_one_error(tmp_path: Path) -> None:
    (tmp_path / holding.HELD).write_text("[1]")
    with pytest.raises(errors.RunError, match="who is held cannot be read"):
        holding.read(tmp_path)
