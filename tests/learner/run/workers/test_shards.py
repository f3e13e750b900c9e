"""The learner's side of its workers, which here are scripts: those that die, are of another release, or say nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, messages
from learner.fleet import gathering
from learner.run.workers import cluster, plan, sampling, shards
from tests.fakes import fleet_examples


class Script:
    """A worker that answers as a test wants: by method, a value, or an error that it dies of."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.killed = answers, False

    def ask(self, method: str, *arguments: Any) -> futures.Future[Any]:
        asked: futures.Future[Any] = futures.Future()
        answer = self.answers.get(method)
        if callable(answer):
            answer = answer(*arguments)
        if isinstance(answer, Exception):
            asked.set_exception(answer)
        elif answer is not None or method == "flush":
            asked.set_result(answer)
        return asked

    def kill(self) -> None:
        self.killed = True


class Scripts:
    """Starts one script after the other, the last one again and again."""

    def __init__(self, *scripts: Callable[[], dict[str, Any]]) -> None:
        self._scripts = list(scripts)
        self.started: list[Script] = []

    def start_worker(self) -> cluster.Worker:
        made = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        self.started.append(Script(made()))
        return self.started[-1]

    def close(self) -> None:
        pass


class Counted:
    """What the learner is told."""

    def __init__(self) -> None:
        self.received: list[plan.Received] = []
        self.missed: list[tuple[int, int]] = []

    def shards(self, place: cluster.Cluster, n: int = 1) -> shards.Shards:
        def make_plan(shard: int) -> Any:
            return shard

        def miss(steps: int, episodes: int) -> None:
            self.missed.append((steps, episodes))

        return shards.Shards(place, n, 4, make_plan, self.received.append, miss, lambda: None)


def begun(steps: int, episodes: int = 0, **marks: int) -> plan.Begun:
    return plan.Begun(steps, episodes, {(name, 1): mark for name, mark in marks.items()}, steps, 99)


@pytest.fixture(autouse=True)
def no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports may follow each other at once."""
    monkeypatch.setattr(shards, "GAP_S", 0.0)


def alive(start: plan.Begun, *reports: Any) -> Callable[[], dict[str, Any]]:
    left = list(reports)
    return lambda: {
        "release_name": plan.release(),
        "begin": start,
        "report": lambda *told: left.pop(0) if left else None,
    }


def report(*inserted: messages.Experience, mark: int = 0) -> plan.Report:
    came = [plan.Received("pi", 1, 4, len(one.reward), mark) for one in inserted]
    found = [
        plan.Inserted("pi", 1, one.epoch, one.version, len(one.reward), one.episode_return.tolist(), [one.created_ms])
        for one in inserted
    ]
    counts = {"experience_messages": len(inserted), "messages_refused": {"gap": 1}}
    return plan.Report(came, found, [], 10, 0, 0, 0, counts, {})


def commit_often(made: shards.Shards) -> None:
    for _ in range(100):
        made.commit(wait=False)
        time.sleep(0.001)


def test_a_worker_that_dies_is_started_again_and_its_ledger_tells_what_it_did_not() -> None:
    told = Counted()
    place = Scripts(
        alive(begun(0), report(fleet_examples.experience((3,)), mark=3), cluster.Died("killed")),
        alive(begun(8, 2, pi=8)),
    )
    made = told.shards(place)
    made.begin()
    made.commit(wait=False)
    counted = made.commit(wait=False)
    assert [(len(one.reward), one.version, one.episode_return.tolist()) for one in counted] == [(3, 1, [3.0])]
    commit_often(made)
    assert made.restarts == 1 and place.started[0].killed
    assert told.missed == [(5, 1)], "8 steps and 2 episodes are in the ledger, 3 and 1 were reported"
    assert [one.steps for one in told.received] == [3, 5]
    assert made.metrics()["messages"] == 1 and made.refused == {"gap": 1}, "what the dead one counted stays counted"


def test_one_that_dies_again_and_again_ends_the_run() -> None:
    made = Counted().shards(Scripts(lambda: alive(begun(0), cluster.Died("no memory"))()))  # noqa: PLW0108  anew for each
    made.begin()
    with pytest.raises(errors.RunError, match="died 6 times within 60 s: no memory"):
        commit_often(made)


def test_one_that_cannot_be_started_is_named() -> None:
    made = Counted().shards(
        Scripts(lambda: {"release_name": cluster.Died("x\nModuleNotFoundError: No module 'learner'")})
    )
    with pytest.raises(errors.RunError, match="cannot be started: ModuleNotFoundError"):
        made.begin()


def test_one_of_another_release_is_named() -> None:
    made = Counted().shards(Scripts(lambda: {"release_name": "actorq-fleet 0.0.9, schema 3"}))
    with pytest.raises(errors.RunError, match=r"another release: actorq-fleet 0\.0\.9, schema 3"):
        made.begin()


def test_what_a_worker_failed_of_is_the_run_s_error() -> None:
    failed = plan.Failed.of(errors.StorageError("the disk is full", where="/x", todo="make room"))
    made = Counted().shards(Scripts(alive(begun(0), failed)))
    made.begin()
    with pytest.raises(errors.StorageError, match="the disk is full") as caught:
        commit_often(made)
    assert (caught.value.where, caught.value.todo) == ("/x", "make room")


def test_batches_are_uniform_over_all_shards_and_others_stand_in_for_one_that_died() -> None:
    def sampled(shard: int) -> Callable[[int, int], Any]:
        def sample(n: int, seed: int) -> tuple[Any, ...]:
            ids = np.random.default_rng(seed).integers(0, 10, n)
            return (*[np.full(n, shard, np.float32)] * 6, ids)

        return sample

    place = Scripts(
        lambda: alive(begun(100))() | {"sample": sampled(0)},
        lambda: alive(begun(300))() | {"sample": sampled(1)},
        lambda: {"release_name": plan.release()},
    )
    made = Counted().shards(place, 2)
    made.begin()
    memory = sampling.ShardedReplay(made, 1000)
    assert len(memory) == 400
    batch = memory.sample(10, 100, np.random.default_rng(0))
    assert batch.observation.shape == batch.ids.shape == (10, 100)
    assert batch.observation.mean() == pytest.approx(0.75, abs=0.05)
    assert batch.observation.std(1).min() > 0, "shards are mixed in each minibatch"
    np.testing.assert_array_equal(batch.ids >> 56, batch.observation.astype(int))
    place.started[1].answers["sample"] = cluster.Died("killed")
    for _ in range(100):  # some were asked for before that
        batch = memory.sample(10, 100, np.random.default_rng(2))
        assert batch.ids.shape == (10, 100)
        if made.restarts:
            break
    assert made.restarts == 1
    assert batch.observation.max() == 0.0, "all of the shard that is there"
    assert len(memory) == 100


def one_of(transitions: int, **answers: Any) -> Callable[[], dict[str, Any]]:
    """Returns a worker whose replay has so many."""

    def sample(n: int, seed: int) -> tuple[Any, ...]:
        return (*[np.full(n, transitions, np.float32)] * 6, np.arange(n))

    return lambda: alive(begun(transitions))() | {"sample": sample, "report": reporting(transitions), **answers}


def reporting(transitions: int) -> Callable[[plan.Told, float], plan.Report]:
    """Returns a `report` of a worker that has nothing to tell but how many are in its replay."""
    return lambda told, wait_s: plan.Report([], [], [], transitions, 0, 0, 0, {}, {})


def test_a_batch_waits_for_the_next_worker_where_all_have_died() -> None:
    beats: list[float] = []
    made = Counted().shards(Scripts(one_of(100, sample=cluster.Died("killed")), one_of(7)))
    made.begin(lambda: beats.append(time.monotonic()))
    memory, before = sampling.ShardedReplay(made, 1000), len(beats)
    batch = memory.sample(2, 5, np.random.default_rng(0))
    assert made.restarts == 1 and (batch.observation == 7).all(), "all of it is of the worker that came back"
    assert len(beats) > before, "the learner is heard meanwhile"


def counting(asked: list[int]) -> Callable[[int, int], Any]:
    """Returns a `sample` of a worker that notes how many transitions it was asked for, and numbers the questions."""

    def sample(n: int, seed: int) -> tuple[Any, ...]:
        asked.append(n)
        return (*[np.full(n, len(asked), np.float32)] * 6, np.arange(n))

    return sample


def test_small_batches_of_several_calls_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "STALE_S", 1e9)
    monkeypatch.setattr(sampling, "DRAW_S", 1e9)
    monkeypatch.setattr(sampling, "DRAW_BYTES", 10 * 6 * (6 * 4 + 8))
    asked: list[int] = []
    made = Counted().shards(Scripts(one_of(100, sample=counting(asked))))
    made.begin()
    memory, rng = sampling.ShardedReplay(made, 1000), np.random.default_rng(0)
    batches = [memory.sample(2, 3, rng) for _ in range(22)]
    assert asked == [6, 6, 60, 60, 60], "one call each, as none went before, then as many as fit, the last ones ahead"
    assert all(one.observation.shape == (2, 3) for one in batches)
    found = np.sort(np.concatenate([one.ids.reshape(-1) for one in batches[2:12]]))
    np.testing.assert_array_equal(found, np.arange(60), "each transition of a draw once")
    monkeypatch.setattr(sampling, "STALE_S", -1.0)
    asked.clear()
    assert memory.sample(2, 3, rng).observation.min() == 1.0, "what is of before is forgotten"


def test_nothing_that_was_drawn_before_an_actor_was_held_back_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "DRAW_S", 1e9)
    asked: list[int] = []
    made = Counted().shards(Scripts(one_of(100, sample=counting(asked), hold=3, quarantine=[])))
    made.begin()
    memory, rng = sampling.ShardedReplay(made, 1000), np.random.default_rng(0)
    for put_aside in (lambda: made.hold("pi", None), lambda: made.quarantine([1])):
        for _ in range(3):
            memory.sample(2, 3, rng)
        put_aside()
        before = len(asked)
        assert memory.sample(2, 3, rng).observation.min() > before


def test_observations_of_several_policies_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But none are given that were asked for before an actor was held back, or long ago."""
    asked: list[int] = []

    def look(n: int, seed: int) -> Any:
        asked.append(n)
        return len(asked) * 1000 + np.arange(min(n, 17))

    monkeypatch.setattr(sampling, "STALE_S", 1e9)
    monkeypatch.setattr(sampling, "DRAW_S", 1e9)
    monkeypatch.setattr(sampling, "DRAW_BYTES", 4 * 5 * 8)
    made = Counted().shards(Scripts(one_of(100, observations=look, hold=3)))
    made.begin()
    memory, rng = sampling.ShardedReplay(made, 1000), np.random.default_rng(0)
    given = [memory.observations(5, rng) for _ in range(4)]
    assert asked == [5, 20, 20], "one, as none went before, then as many as fit, the last ones ahead"
    assert [one[0] // 1000 for one in given] == [1, 2, 2, 2] and all(len(one) == 5 for one in given)
    assert len(np.unique(given[1:])) == 15, "all of them different"
    made.hold("pi", None)
    assert memory.observations(5, rng)[0] // 1000 == 4
    monkeypatch.setattr(sampling, "STALE_S", -1.0)
    assert memory.observations(5, rng)[0] // 1000 > 4
    assert len(memory.observations(30, rng)) == 17, "all that there are"


def test_where_all_of_replay_is_held_back_there_is_nothing_to_sample_at_once() -> None:
    place = Scripts(one_of(100, hold=100))
    made = Counted().shards(place)
    made.begin()
    memory, rng = sampling.ShardedReplay(made, 1000), np.random.default_rng(0)
    memory.sample(1, 5, rng)
    place.started[0].answers |= {"report": reporting(0), "sample": None}
    made.hold("pi", None)
    assert len(memory) == 0, "no draw may wait for what nobody has"
    with pytest.raises(IndexError, match="empty"):
        memory.sample(1, 5, rng)


def test_with_all_workers_dead_there_is_nothing_to_sample() -> None:
    made = Counted().shards(Scripts(alive(begun(100), cluster.Died("killed")), lambda: {}))
    made.begin()
    memory = sampling.ShardedReplay(made, 1000)
    assert len(memory) == 100
    commit_often(made)  # which the loop does between its question whether updates are due and the batch
    assert len(memory) == 0 and not memory.has_observations
    with pytest.raises(IndexError, match="empty"):
        memory.sample(1, 5, np.random.default_rng(0))


def test_a_worker_that_ended_alone_counts_as_dead_whatever_it_was_asked() -> None:
    alone = plan.Failed.of(plan.Alone("no learner has asked this worker for anything"))
    made = Counted().shards(Scripts(one_of(100, hold=alone, sample=alone), one_of(7, hold=3)))
    made.begin()
    assert sampling.ShardedReplay(made, 1000).sample(1, 5, np.random.default_rng(0)).observation.max() == 7
    made = Counted().shards(Scripts(one_of(100, hold=alone), one_of(7, hold=3)))
    made.begin()
    assert made.hold("pi", None) == 3 and made.restarts == 1


def test_transitions_of_a_dead_worker_are_not_looked_for_in_the_next_one() -> None:
    asked: list[tuple[str, list[int]]] = []

    def quarantine(life: str) -> Callable[[list[int]], list[Any]]:
        def note(ids: list[int]) -> list[Any]:
            asked.append((life, ids))
            return []

        return note

    place = Scripts(one_of(100, quarantine=quarantine("first")), one_of(100, quarantine=quarantine("second")))
    made = Counted().shards(place)
    made.begin()
    memory = sampling.ShardedReplay(made, 1000)
    ids = memory.sample(1, 3, np.random.default_rng(0)).ids.reshape(-1).tolist()
    made.quarantine(ids)
    assert [(life, sorted(found)) for life, found in asked] == [("first", [0, 1, 2])]
    place.started[0].answers["report"] = cluster.Died("killed")
    commit_often(made)
    assert made.restarts == 1
    made.quarantine(ids)
    assert len(asked) == 1, "another transition has its number there"


def test_an_older_report_is_taken_before_a_newer_one() -> None:
    pending: list[futures.Future[Any]] = []

    def ask(told: plan.Told, wait_s: float) -> Any:
        return futures.Future() if wait_s else report(fleet_examples.experience((4,)), mark=7)

    class Slow(Script):
        def ask(self, method: str, *arguments: Any) -> futures.Future[Any]:
            found = super().ask(method, *arguments)
            if found.done() and isinstance(found.result(), futures.Future):
                pending.append(found.result())
                return pending[-1]
            return found

    class Place(Scripts):
        def start_worker(self) -> cluster.Worker:
            return Slow(alive(begun(0))() | {"report": ask})

    told = Counted()
    made = told.shards(Place(alive(begun(0))))
    made.begin()
    made.commit(wait=False)
    first = fleet_examples.experience((3,))

    def answer() -> None:
        if not pending[0].done():
            pending[0].set_result(report(first, mark=3))

    made.meanwhile = answer
    made.commit(wait=True)
    assert [one.mark for one in told.received] == [3, 7]


def test_begin_ends_when_the_learner_is_told_to_end() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(gathering.Stopped):
        Counted().shards(Scripts(lambda: {})).begin(stop=stop)
