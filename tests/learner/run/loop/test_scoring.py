"""Screening on one set of seeds, confirmation on another, int8 beside fp32; one command at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from broker.contract import messages
from learner import config
from learner.fleet import actors
from learner.policies import publisher
from learner.quantize import gate
from learner.run.loop import scoring
from tests.fakes import fleet_examples

MANIFEST = messages.Manifest(1, 3, "main", 4, "0" * 64, "f" * 16, "q_values", "int8", 1.0)
POLICY = publisher.Published(MANIFEST, b"int8", gate.Verdict(True, ""), (), np.zeros((1, 4), np.float32))
POLICY.__dict__["float32"] = b"float32"  # as if it had been converted
ACTORS = [actors.Actor("a", 0, boot=1), actors.Actor("b", 1, boot=1)]
SETTINGS = config.TrainConfig(solved_return=100.0, evaluate_episodes=2, evaluate_seed=50)


class Recorder:
    """Stands where the link is: remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, messages.Command]] = []

    def __call__(self, actor_id: str, command: messages.Command) -> bool:
        self.sent.append((actor_id, command))
        return True

    def answer(self, *returns: float, error: str = "") -> messages.Report:
        command = self.sent[-1][1]
        return messages.Report(
            command.command_id, command.kind, error=error, episode_return=np.array(returns, np.float32)
        )


def begun() -> tuple[scoring.Scoring, Recorder]:
    recorder = Recorder()
    found = scoring.Scoring(recorder, SETTINGS, "session")
    found.begin(POLICY)
    found.advance(ACTORS, 0.0)
    return found, recorder


def test_a_poor_policy_is_done_after_screening() -> None:
    found, recorder = begun()
    actor_id, command = recorder.sent[0]
    assert (actor_id, command.kind, command.seed, command.episodes) == ("a", "evaluate", 50, 2)
    assert command.model.tobytes() == b"int8"
    score = found.receive(recorder.answer(99.0, 100.0))
    assert score is not None
    assert not score.confirming
    assert score.mean("published") == 99.5
    assert not found.busy


def test_nobody_answers_for_another() -> None:
    found, recorder = begun()
    answer = recorder.answer(999.0, 999.0)
    assert found.awaits(answer, "a")
    assert not found.awaits(answer, "b")
    assert not found.awaits(messages.Report("session-2", "evaluate"), "a")


def test_a_late_answer_was_asked_for_but_is_no_score() -> None:
    found, recorder = begun()
    late = recorder.answer(0.0, 0.0)
    found.begin(POLICY, final=True)
    assert found.awaits(late, "a"), "not to be counted as a refusal"
    found.advance(ACTORS, 1.0)
    assert found.awaits(late, "a")
    assert not found.awaits(late, "b")
    assert found.receive(late) is None
    assert found.busy and not found.failures
    assert not found.awaits(late, "a"), "once"
    assert found.awaits(recorder.answer(0.0, 0.0), "b"), "whose turn it was"


def test_remembers_a_bounded_number_of_commands_without_an_answer() -> None:
    found, recorder = begun()
    answers = [recorder.answer(0.0, 0.0)]
    for connection in range(1, 1000):
        found.advance(ACTORS[:1], 1.0, connection)
        answers.append(recorder.answer(0.0, 0.0))
    assert sum(found.awaits(answer, "a") for answer in answers) < 100
    assert found.awaits(answers[-1], "a")


def test_returns_that_are_no_numbers_are_no_score() -> None:
    found, recorder = begun()
    assert found.receive(recorder.answer(np.inf, np.inf)) is None
    assert found.failures == 1
    found.advance(ACTORS[:1], 1.0)
    assert not found.busy, "there is nobody else to ask"


def test_a_good_policy_is_confirmed_on_seeds_of_its_own_beside_fp32() -> None:
    found, recorder = begun()
    assert found.receive(recorder.answer(100.0, 100.0)) is None
    found.advance(ACTORS, 1.0)
    assert found.receive(recorder.answer(120.0, 130.0)) is None
    found.advance(ACTORS, 2.0)
    score = found.receive(recorder.answer(140.0, 150.0))
    assert score is not None
    assert score.confirming
    assert (score.mean("published"), score.mean("float32")) == (125.0, 145.0)
    seeds = [command.seed for _, command in recorder.sent]
    assert seeds[0] == 50
    assert seeds[1] == seeds[2] != 50, "paired, and not the seeds that chose the policy"
    manifest = recorder.sent[2][1].manifest
    assert manifest is not None
    assert (manifest.precision, manifest.length) == ("float32", len(b"float32"))


def test_what_is_not_confirmed_is_done_without_fp32_and_the_next_confirmation_has_new_seeds() -> None:
    found, recorder = begun()
    for _ in range(2):
        found.receive(recorder.answer(100.0, 100.0))
        found.advance(ACTORS, 1.0)
        score = found.receive(recorder.answer(0.0, 0.0))
        assert score is not None
        assert list(score.reports) == ["published"]
        found.begin(POLICY)
        found.advance(ACTORS, 1.0)
    confirmations = {command.seed for _, command in recorder.sent} - {50}
    assert len(confirmations) == 2


def test_the_last_score_has_fp32_beside_it_whatever_it_is() -> None:
    found, recorder = begun()
    found.begin(POLICY, final=True)
    found.advance(ACTORS, 1.0)
    assert found.receive(recorder.answer(0.0, 0.0)) is None
    found.advance(ACTORS, 2.0)
    score = found.receive(recorder.answer(1.0, 1.0))
    assert score is not None
    assert (score.mean("published"), score.mean("float32")) == (0.0, 1.0)


def test_waits_for_the_answer_then_asks_another_actor() -> None:
    found, recorder = begun()
    found.advance(ACTORS, 1.0)
    assert len(recorder.sent) == 1
    found.advance(ACTORS, scoring.TIMEOUT_S + 1.0)
    assert [actor_id for actor_id, _ in recorder.sent] == ["a", "b"]
    assert found.failures == 1


def test_does_not_wait_for_an_actor_that_is_gone_or_was_replaced() -> None:
    found, recorder = begun()
    found.advance(ACTORS[1:], 1.0)
    found.advance([actors.Actor("b", 1, boot=2)], 2.0)
    assert [(actor_id, command.boot) for actor_id, command in recorder.sent] == [("a", 1), ("b", 1), ("b", 2)]


def test_asks_again_over_a_new_connection() -> None:
    found, recorder = begun()
    found.advance(ACTORS, 1.0, connection=1)
    assert len({command.command_id for _, command in recorder.sent}) == 2, "an actor carries out each id once"
    assert found.receive(messages.Report(recorder.sent[0][1].command_id, "evaluate")) is None, "too late"
    assert found.busy


def test_ignores_answers_that_nobody_awaits() -> None:
    found, _ = begun()
    stale = messages.Report("other-1", "evaluate", episode_return=np.full(2, 1e6, np.float32))
    assert found.receive(stale) is None
    assert found.busy


def test_a_failed_or_short_answer_is_no_score() -> None:
    for answer in ((("error", "env broke"),), (("returns", 1),)):
        found, recorder = begun()
        for actor_id in ("a", "b"):
            report = recorder.answer(error="broke") if answer[0][0] == "error" else recorder.answer(500.0)
            assert recorder.sent[-1][0] == actor_id
            assert found.receive(report) is None
            found.advance(ACTORS, 1.0)
        assert not found.busy, "each has failed once"
        assert found.failures == len(recorder.sent) == 2


@pytest.mark.fault(2)
def test_every_evaluation_has_limits_and_one_at_a_control_rate_has_longer() -> None:
    _, recorder = begun()
    order = recorder.sent[0][1]
    assert order.max_steps == SETTINGS.evaluate_episodes * SETTINGS.evaluate_steps
    assert order.max_s == SETTINGS.evaluate_s
    found = scoring.Scoring(recorder, SETTINGS, "session")
    found.begin(POLICY)
    born = fleet_examples.birth()
    rated = actors.Actor("a", 0, state=fleet_examples.state(birth=replace(born, rate_hz=50.0)), boot=1)
    found.advance([rated], 0.0)
    assert recorder.sent[-1][1].max_s == scoring.RATED * SETTINGS.evaluate_s


@pytest.mark.fault(25)
def test_no_evaluation_lasts_beyond_the_end() -> None:
    found, recorder = begun()
    found.set_end(10.0)
    found.begin(POLICY, final=True)
    found.advance(ACTORS, 7.5)
    assert 2.0 < recorder.sent[-1][1].max_s < 2.5, "the answer has to come, too"
    found.begin(POLICY, final=True)
    found.advance(ACTORS, 10.0)
    assert len(recorder.sent) == 2, "nobody is asked what cannot be answered in time"
    assert found.busy


@pytest.mark.fault(2)
def test_each_failure_after_every_actor_s_first_makes_a_longer_rest() -> None:
    found, recorder = begun()
    rests = []
    for _ in range(6):
        now_s = time.monotonic()
        found.receive(recorder.answer(error="gave up"))
        rests.append(found.rests_until_s - now_s)
        found.begin(POLICY)
        found.advance(ACTORS, now_s)
    assert rests[0] < 0, "the other actor may do better"
    assert all(2 * before <= after + 1.0 for before, after in itertools.pairwise(rests[1:]))
    found.receive(recorder.answer(1.0, 2.0))
    found.begin(POLICY)
    found.advance(ACTORS, 0.0)
    found.receive(recorder.answer(error="gave up"))
    assert found.rests_until_s - time.monotonic() < rests[-1], "a score makes up for them"


def course(
    answers: Mapping[str, Callable[[messages.Command], float | None]], policies: int, *, final: bool = False
) -> list[scoring.Score]:
    """Scores of so many policies, by actors that answer with a mean return, or fail (None)."""
    recorder = Recorder()
    found, done, clock = scoring.Scoring(recorder, SETTINGS, "session"), list[scoring.Score](), itertools.count()
    alive = [actors.Actor(name, slot, boot=1) for slot, name in enumerate(answers)]
    for _ in range(policies):
        found.begin(POLICY, final=final)
        while True:
            found.advance(alive, float(next(clock)))
            if not found.busy:
                break
            mean = answers[recorder.sent[-1][0]](recorder.sent[-1][1])
            report = recorder.answer(error="broke") if mean is None else recorder.answer(mean, mean)
            if (score := found.receive(report)) is not None:
                done.append(score)
    return done


def is_solved(score: scoring.Score) -> bool:
    return score.confirming and score.mean("published") >= SETTINGS.solved_return


GOOD = lambda _: 500.0  # noqa: E731
BAD = lambda _: 9.0  # noqa: E731
SILENT = lambda _: None  # noqa: E731


@pytest.mark.fault(12)
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("liar_first", [False, True])
def test_one_liar_cannot_end_training(final: bool, liar_first: bool) -> None:
    """Whichever slot it has, whether it is asked while training goes on or at its end."""
    names = {"liar": GOOD, "honest": BAD} if liar_first else {"honest": BAD, "liar": GOOD}
    scores = course(names, policies=20, final=final)
    assert len(scores) == 20
    assert not any(map(is_solved, scores))


@pytest.mark.fault(12)
def test_nor_can_one_that_denies_prevent_the_end_for_ever() -> None:
    scores = course({"liar": BAD, "a": GOOD, "b": GOOD}, policies=3)
    solved = [score for score in scores if is_solved(score)]
    assert solved and all(score.scored_by in (["a", "b"], ["b", "a"]) and not score.alone for score in solved)


@pytest.mark.fault(12)
@pytest.mark.parametrize("final", [False, True])
def test_one_that_fails_in_the_first_slot_holds_no_score_up(final: bool) -> None:
    scores = course({"deaf": SILENT, "a": BAD, "b": BAD}, policies=4, final=final)
    assert len(scores) == 4 and {score.by for score in scores} == {"a", "b"}
    scores = course({"deaf": SILENT, "a": GOOD, "b": GOOD}, policies=1, final=final)
    assert [score.scored_by for score in scores] == [["a", "b"]]


def test_one_without_another_that_answers_is_said_to_be_alone() -> None:
    assert [(is_solved(s), s.alone, s.scored_by) for s in course({"a": GOOD}, 1)] == [(True, True, ["a"])]
    assert [(is_solved(s), s.alone, s.scored_by) for s in course({"a": GOOD}, 1, final=True)] == [(True, True, ["a"])]
    scores = course({"deaf": SILENT, "a": GOOD}, policies=5)
    assert [(is_solved(score), score.alone) for score in scores] == [(True, True)] * len(scores) != []
    assert len(scores) < 5, "not before the other one has failed several times in a row"


def test_both_halves_of_a_pair_come_from_one_actor() -> None:
    found, recorder = begun()
    assert found.receive(recorder.answer(100.0, 100.0)) is None
    found.advance(ACTORS, 1.0)
    assert recorder.sent[-1][0] == "b"
    assert found.receive(recorder.answer(100.0, 100.0)) is None
    found.advance(ACTORS[:1], 2.0)  # b has gone between the two
    for _ in range(2):
        assert recorder.sent[-1][0] == "a"
        manifest = recorder.sent[-1][1].manifest
        score = found.receive(recorder.answer(100.0, 100.0))
        found.advance(ACTORS[:1], 3.0)
    assert manifest is not None and manifest.precision == "float32"
    assert score is not None and score.alone and score.reports.keys() == {"published", "float32"}


def test_everybody_takes_turns() -> None:
    assert {score.by for score in course({"a": BAD, "b": BAD, "c": BAD}, policies=3)} == {"a", "b", "c"}
