"""A worker knows by assignments what each boot may send, and goes on from what the learner has counted."""

from __future__ import annotations

import dataclasses

from learner.run.workers import grants
from tests.fakes import fake_learner, fleet_examples


def test_a_grant_counts_for_its_boot_and_session_and_is_rounded_up_to_rows() -> None:
    found = grants.Grants(4, {}, {}, 0, {})
    assert not found.may_send("pi", 7, 4, 1), "nothing was granted"
    birth = dataclasses.replace(fleet_examples.birth(), n_envs=8)
    found.hear_state("pi", fleet_examples.state(boot=7, birth=birth))
    found.hear_assignment("pi", fake_learner.assignment(7, epoch=3, steps_granted=900))
    assert not found.may_send("pi", 7, 4, 1), "an earlier session's"
    found.hear_assignment("pi", fake_learner.assignment(7, epoch=4, steps_granted=100))
    assert found.may_send("pi", 7, 4, 107) and not found.may_send("pi", 7, 4, 108)
    assert not found.may_send("pi", 8, 4, 1) and not found.may_send("other", 7, 4, 1)
    found.count_received("pi", 7, 4, 60)
    assert found.may_send("pi", 7, 4, 47) and not found.may_send("pi", 7, 4, 48)
    found.count_received("pi", 7, 4, 48)
    assert found.may_send("pi", 7, 4, 47), "what was refused as more than granted is none"
    found.hear_assignment("pi", fake_learner.assignment(7, epoch=4, steps_granted=50))
    assert found.may_send("pi", 7, 4, 47), "an older one, sent late"


def test_of_sessions_before_each_actor_may_send_what_is_left() -> None:
    found = grants.Grants(4, {}, {}, 100, {"pi": 30})
    assert found.may_send("pi", 1, 3, 30) and not found.may_send("pi", 1, 3, 31)
    assert found.may_send("other", 1, 3, 100)
    found.count_received("other", 1, 3, 60)
    assert not found.may_send("other", 2, 2, 41)


def test_a_worker_that_takes_another_s_place_counts_on() -> None:
    found = grants.Grants(4, {("pi", 7): 100}, {("pi", 7): 90}, 0, {})
    assert found.may_send("pi", 7, 4, 10) and not found.may_send("pi", 7, 4, 11)
