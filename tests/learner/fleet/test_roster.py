"""Who counts as live, whose spec rules, and how the pace is shared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from broker.contract import errors, messages
from learner import config
from learner.fleet import actors, budget, roster
from tests.fakes import fleet_examples, log_reader

SETTINGS = config.TrainConfig(seed=3)
EXPLORATION = config.DqnConfig(epsilon_decay_steps=1000)


def make(env_id: str = "") -> roster.Roster:
    return roster.Roster("session", 4, env_id)


def test_a_retained_birth_alone_makes_nobody_live() -> None:
    found = make()
    found.observe("a", fleet_examples.state(), retained=True, now_s=0.0)
    assert found.working() == []
    with pytest.raises(errors.SpecError, match="no actor"):
        _ = found.the_spec
    found.observe("a", fleet_examples.state(heartbeat=2), retained=False, now_s=1.0)
    assert [actor.actor_id for actor in found.working()] == ["a"]
    assert found.the_spec == fleet_examples.SPEC
    assert found.env_id == "CartPole-v1"


def test_a_second_spec_is_refused_with_both_named(log: log_reader.LogReader) -> None:
    found = make()
    found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    other = fleet_examples.state(birth=fleet_examples.birth("Acrobot-v1", fleet_examples.OTHER_SPEC))
    actor = found.observe("b", other, retained=False, now_s=0.0)
    assert [a.actor_id for a in found.working()] == ["a"]
    assert "float32[4] -> 2 actions" in actor.refused
    assert "Acrobot-v1 has obs float32[6] -> 3 actions" in actor.refused
    assert any("refused" in line for line in log.lines)
    assignment = found.assign(
        actor, steps_left=10, env_steps=0, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=0.0
    )
    assert assignment is not None
    assert assignment.refused == actor.refused


def test_an_actor_that_is_paused_leaves_its_grants_to_the_others() -> None:
    found, paused = make(), messages.Vitals(paused=True)
    for name in ("a", "b"):
        found.observe(name, fleet_examples.state(session=name), retained=False, now_s=0.0)
    found.observe("a", fleet_examples.state(session="a", heartbeat=2, vitals=paused), retained=False, now_s=1.0)
    assert [actor.actor_id for actor in found.working()] == ["b"]
    assert found.actors["a"].live, "it is there all the same"
    found.observe("a", fleet_examples.state(session="a", heartbeat=3), retained=False, now_s=2.0)
    assert [actor.actor_id for actor in found.working()] == ["a", "b"]


def test_silence_and_goodbye_end_an_actor(log: log_reader.LogReader) -> None:
    found = make()
    found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    found.observe("b", fleet_examples.state(session="b"), retained=False, now_s=5.0)
    found.expire(roster.SILENCE_S + 1.0)
    assert [actor.actor_id for actor in found.working()] == ["b"]
    found.observe("b", fleet_examples.state(session="b", heartbeat=2, online=False), retained=False, now_s=6.0)
    assert found.working() == []
    assert log.lines[-2:] == ["actor a fell silent", "actor b went offline"]


def test_what_is_late_changes_nothing() -> None:
    found = make()
    found.observe("a", fleet_examples.state(boot=2, heartbeat=9), retained=False, now_s=0.0)
    late = [
        fleet_examples.state(boot=1, heartbeat=99, online=False),  # the will of a process that is gone
        fleet_examples.state(boot=2, heartbeat=5, online=False),  # of a connection that has been replaced
        fleet_examples.state(boot=2, heartbeat=8),
    ]
    for state in late:
        found.observe("a", state, retained=False, now_s=roster.SILENCE_S)
    assert len(found.working()) == 1
    found.expire(roster.SILENCE_S + 1.0)
    assert found.working() == [], "nor is it a sign of life"
    found.observe("a", fleet_examples.state(boot=2, heartbeat=10, online=False), retained=False, now_s=0.0)
    found.observe("a", fleet_examples.state(boot=2, heartbeat=7), retained=False, now_s=0.0)
    assert found.working() == []


def test_the_pace_is_shared_equally_and_never_taken_back() -> None:
    found = make()
    a = found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    found.observe("b", fleet_examples.state(session="b"), retained=False, now_s=0.0)
    first = found.assign(
        a, steps_left=1001, env_steps=600, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=0.0
    )
    assert first is not None
    assert (first.steps_granted, first.epsilon_offset, first.epsilon_decay_steps) == (501, 300, 500)
    a.recorded = 400
    later = found.assign(
        a, steps_left=600, env_steps=1000, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=1.0
    )
    assert later is not None
    assert later.steps_granted == 700
    assert later.epsilon_offset == 300, "the schedule of a boot is fixed by its first assignment"
    assert (
        found.assign(
            a, steps_left=0, env_steps=1000, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=2.0
        )
        is None
    )


def test_assignments_that_differ_in_pace_alone_are_spaced() -> None:
    found = make()
    a = found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    found.assign(
        a, steps_left=10, env_steps=0, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=1.0
    )
    soon = 1.0 + roster.ASSIGN_PERIOD_S / 2
    assert (
        found.assign(
            a, steps_left=20, env_steps=0, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=soon
        )
        is None
    )
    assert (
        found.assign(
            a, steps_left=20, env_steps=0, lockstep_version=1, settings=SETTINGS, exploration=EXPLORATION, now_s=soon
        )
        is not None
    )


def test_a_new_boot_starts_a_new_account() -> None:
    found = make()
    a = found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    a.recorded = 100
    found.assign(
        a, steps_left=10, env_steps=100, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=0.0
    )
    found.observe("a", fleet_examples.state(session="two", boot=2), retained=False, now_s=1.0)
    again = found.assign(
        a, steps_left=10, env_steps=100, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=1.0
    )
    assert again is not None
    assert (again.boot, again.steps_granted) == (2, 10)


def test_a_process_that_is_replaced_unnoticed_is_checked_anew() -> None:
    found = make()
    found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    found.observe("b", fleet_examples.state(session="b"), retained=False, now_s=0.0)
    other = fleet_examples.birth("Acrobot-v1", fleet_examples.OTHER_SPEC)
    found.observe("b", fleet_examples.state(session="b2", boot=2, birth=other), retained=False, now_s=0.1)
    assert [actor.actor_id for actor in found.working()] == ["a"], "no goodbye came in between"


def test_in_a_large_fleet_everybody_speaks_less_often() -> None:
    """A message a quarter of a second from each of 1000 actors would leave the learner no time to learn."""
    found = make()
    n = int(budget.MESSAGES_PER_S * 5)
    actors = [found.observe(f"a{i}", fleet_examples.state(session=str(i)), retained=False, now_s=0.0) for i in range(n)]
    assert found.period_s == 5.0 and found.policy_s == n / roster.POLICIES_PER_S and found.gather_s == roster.GATHER_S
    given = found.assign(
        actors[0], steps_left=n, env_steps=0, lockstep_version=0, settings=SETTINGS, exploration=EXPLORATION, now_s=1.0
    )
    assert given is not None and given.message_period_s == 5.0
    assert given.message_steps == roster.LONGER * SETTINGS.message_steps, "or it would be full before that"
    assert found.may_assign(1.0) and not found.may_assign(1.09) and found.may_assign(1.11)
    assert found.receipt_s == roster.LOOK_PERIOD_S
    found.observe("late", fleet_examples.state(session="late"), retained=False, now_s=2.3)
    assert found.may_assign(1.12), "who has just come waits for nothing"
    found.expire(roster.SILENCE_S + 9.0)
    assert len(found.working()) == n + 1, "nor is anybody taken for dead who was told to speak seldom"
    found.expire(roster.SILENCE_S + 11.0)
    assert [actor.actor_id for actor in found.working()] == ["late"]
    assert found.period_s == 1 / budget.MESSAGES_PER_S and found.gather_s == found.receipt_s == 0.0


def told(n: int, every_s: float, looks: int) -> list[set[str]]:
    """Who of n actors is given an assignment at each of a loop's looks, while the pace goes on rising."""
    found = make()
    for i in range(n):
        found.observe(f"a{i}", fleet_examples.state(session=str(i)), retained=False, now_s=0.0)
    given = []
    for look in range(looks):
        now_s = look * every_s
        assert found.may_assign(now_s)
        assignments = found.assign_due(
            steps_left=n * (look + 1),
            env_steps=0,
            lockstep_version=0,
            settings=SETTINGS,
            exploration=EXPLORATION,
            now_s=now_s,
        )
        given.append({actor_id for actor_id, _ in assignments})
    return given


def test_in_a_large_fleet_assignments_are_spread_over_time() -> None:
    """All actors told at once would all send at once, and updates would stand still while they are told."""
    n = int(budget.MESSAGES_PER_S * 2)
    looks = round(1.1 * roster.GRANT_PERIODS * 2.0 / roster.LOOK_PERIOD_S)  # in that many periods, and a tenth more
    given = told(n, every_s=1.01 * roster.LOOK_PERIOD_S, looks=4 * looks)
    assert len(given[0]) == n, "each needs one to begin with"
    assert max(map(len, given[looks:])) <= 8
    for begin in (looks, 2 * looks, 3 * looks):
        assert len(set[str]().union(*given[begin : begin + looks])) == n, "everybody once while a grant lasts"


@pytest.mark.parametrize("n", [2, 5, 40])
def test_a_loop_that_seldom_looks_passes_nobody_over(n: int) -> None:
    given = told(n, every_s=1.0, looks=13)
    for begin in (1, 7):
        assert len(set[str]().union(*given[begin : begin + 6])) == n


def test_who_can_be_granted_no_more_is_not_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that falls behind grants nothing to anybody for a while, and has better things to do."""
    found = make()
    n = int(budget.MESSAGES_PER_S * 2)
    for i in range(n):
        found.observe(f"a{i}", fleet_examples.state(session=str(i)), retained=False, now_s=0.0)
    looked: list[float] = []
    assign = found.assign

    def counted(*args: Any, now_s: float, **kwargs: Any) -> messages.Assignment | None:
        looked.append(now_s)
        return assign(*args, now_s=now_s, **kwargs)

    monkeypatch.setattr(found, "assign", counted)

    def given(now_s: float, steps_left: int) -> set[str]:
        found.may_assign(now_s)
        rest: dict[str, Any] = {"env_steps": 0, "lockstep_version": 0, "settings": SETTINGS, "exploration": EXPLORATION}
        return {actor_id for actor_id, _ in found.assign_due(steps_left=steps_left, now_s=now_s, **rest)}

    assert len(given(0.0, n)) == n
    looked.clear()
    begin_s = roster.GRANT_PERIODS * found.period_s + 1.0
    looks = [begin_s + i * roster.LOOK_PERIOD_S for i in range(100)]
    assert not set[str]().union(*(given(now_s, 0) for now_s in looks))
    assert n <= len(looked) <= 1.1 * n * (looks[-1] - looks[0]) / (roster.AGAIN * found.period_s) + n
    later = [looks[-1] + i * roster.LOOK_PERIOD_S for i in range(1, 110 * roster.GRANT_PERIODS)]
    assert len(set[str]().union(*(given(now_s, 2 * n) for now_s in later))) == n, "once there is more, all get it"


def test_who_is_not_due_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand times ten looks a second would be all that a learner does."""
    found = make()
    n = int(budget.MESSAGES_PER_S * 5)
    rest: dict[str, Any] = {"env_steps": 0, "lockstep_version": 0, "settings": SETTINGS, "exploration": EXPLORATION}
    for i in range(n):
        found.observe(f"a{i}", fleet_examples.state(session=str(i)), retained=False, now_s=0.0)
    assert found.may_assign(0.0) and len(list(found.assign_due(steps_left=n, now_s=0.0, **rest))) == n
    looked: list[str] = []
    is_early = found._is_early

    def counted(actor: actors.Actor, *about: Any) -> bool:
        looked.append(actor.actor_id)
        return is_early(actor, *about)

    monkeypatch.setattr(found, "_is_early", counted)
    assert found.may_assign(1.0) and not list(found.assign_due(steps_left=2 * n, now_s=1.0, **rest))
    assert len(looked) == 1, "the one that is due next"
    for beat in range(2, 50):  # whoever comes and goes has one place in the queue
        state = fleet_examples.state(session="7", heartbeat=beat, online=beat % 2 == 0)
        found.observe("a7", state, retained=False, now_s=1.0)
    assert len(found._queue) <= n + 2
    due_s = roster.GRANT_PERIODS * found.period_s + 0.1
    assert found.may_assign(due_s) and list(found.assign_due(steps_left=2 * n, now_s=due_s, **rest))


def test_who_was_told_to_send_seldom_is_not_taken_for_silent() -> None:
    found = make()
    actor = found.observe("a", fleet_examples.state(), retained=False, now_s=0.0)
    seldom = dataclasses.replace(SETTINGS, message_period_s=20.0)
    found.assign(
        actor, steps_left=1, env_steps=0, lockstep_version=0, settings=seldom, exploration=EXPLORATION, now_s=0.0
    )
    found.expire(roster.SILENCE_S + 39.0)
    assert found.working()
    found.expire(roster.SILENCE_S + 41.0)
    assert not found.working()


class Clock:
    """Tells a roster of two processes of one name, each of which counts its own heartbeats."""

    def __init__(self) -> None:
        self.roster = make()
        self.now_s = 0.0
        self._beats: dict[int, int] = {}

    def beat(self, *boots: int, online: bool = True, after_s: float = 0.4) -> None:
        for boot in boots:
            self.now_s += after_s
            self._beats[boot] = self._beats.get(boot, 0) + 1
            said = fleet_examples.state(session=f"s{boot}", boot=boot, heartbeat=self._beats[boot], online=online)
            self.roster.observe("a", said, retained=False, now_s=self.now_s)
            self.roster.expire(self.now_s)

    @property
    def actor(self) -> actors.Actor:
        return self.roster.actors["a"]

    def assigned(self) -> messages.Assignment | None:
        return self.roster.assign(
            self.actor,
            steps_left=10,
            env_steps=0,
            lockstep_version=0,
            settings=SETTINGS,
            exploration=EXPLORATION,
            now_s=self.now_s,
        )


@pytest.mark.fault(5)
@pytest.mark.parametrize("goodbye", [True, False])
def test_a_counter_that_was_reset_is_recognised(goodbye: bool) -> None:
    clock = Clock()
    clock.beat(9)
    if goodbye:
        clock.beat(9, online=False)
        clock.beat(2)
        assert not clock.roster.working(), "it may be late"
    for _ in range(50):
        clock.beat(2)
    assert [(actor.boot, actor.live) for actor in clock.roster.working()] == [(2, True)]
    assignment = clock.assigned()
    assert assignment is not None and assignment.boot == 2


def test_what_a_socket_held_back_is_no_proof_of_life() -> None:
    clock = Clock()
    clock.beat(9, after_s=0.0)
    clock.beat(9, online=False)
    clock.beat(*[2] * 50, after_s=0.0)
    assert not clock.roster.working()
    clock.beat(2, online=False)
    clock.beat(9)
    assert [actor.boot for actor in clock.roster.working()] == [9]


@pytest.mark.fault(4)
@pytest.mark.parametrize("second", [1, 9])
def test_of_two_that_live_the_later_is_refused_whatever_its_number(second: int, log: log_reader.LogReader) -> None:
    clock = Clock()
    clock.beat(5)
    first = clock.assigned()
    assert first is not None
    clock.actor.recorded = 77
    for _ in range(6):
        clock.beat(second, 5)
    assert clock.actor.boot == 5 and clock.actor.live and clock.actor.recorded == 77
    told = list(clock.roster.rejections())
    assert [(actor_id, refusal.boot) for actor_id, refusal in told] == [("a", second)]
    assert "another machine goes by the name 'a'" in told[0][1].refused and "actorq-broker enroll" in told[0][1].refused
    assert sum("two machines" in line for line in log.lines) == 1, "said once"
    clock.beat(second, 5)
    assert list(clock.roster.rejections()), "told again, as long as it speaks"
    later = clock.assigned()
    assert later is None or (later.boot == 5 and later.steps_granted >= first.steps_granted)
    clock.beat(11, 5, 11)
    assert clock.actor.boot == 5, "nor does it get the name by starting again"
    for _ in range(40):
        clock.beat(11)
    assert clock.actor.boot == 11, "until the first is gone"


def test_a_crashed_process_is_replaced_at_once_and_its_last_words_change_nothing() -> None:
    clock = Clock()
    clock.beat(5)
    clock.beat(6)
    assert clock.actor.boot == 6
    clock.beat(5, after_s=0.0)
    clock.beat(5, after_s=0.0)
    clock.beat(6)
    clock.beat(5, online=False)
    for _ in range(5):
        clock.beat(6)
    assert clock.actor.boot == 6 and not list(clock.roster.rejections())


def test_experience_counts_for_the_process_that_sent_it() -> None:
    clock = Clock()
    clock.beat(5, 9)
    mine, before = clock.actor.process(9), clock.actor.process(5)
    assert mine is clock.actor and before is not None and before.boot == 5
    assert clock.actor.process(7) is None


def grant(found: roster.Roster, actor_id: str, steps_left: int, now_s: float) -> int:
    """Returns what this actor has been granted in its boot after another look."""
    assign = found.assign(
        found.actors[actor_id],
        steps_left=steps_left,
        env_steps=0,
        lockstep_version=0,
        settings=SETTINGS,
        exploration=EXPLORATION,
        now_s=now_s,
    )
    assignment = assign or found.actors[actor_id].assignment
    return assignment.steps_granted if assignment else 0


@pytest.mark.fault(13)
def test_a_grant_is_used_once_and_by_the_boot_that_got_it(log: log_reader.LogReader) -> None:
    found = make()
    found.observe("a", fleet_examples.state(birth=dataclasses.replace(fleet_examples.birth(), n_envs=16)), **NOW)
    assert not found.may_send("a", 1, 4, 1), "it was granted nothing"
    assert grant(found, "a", 1000, 0.0) == 1000
    assert found.may_send("a", 1, 4, 1015), "whole rows of 16 environments"
    assert not found.may_send("a", 1, 4, 1016) and not found.may_send("a", 2, 4, 1)
    assert not found.may_send("stranger", 1, 4, 1)
    found.count_received("a", 1, 4, 600)
    assert found.actors["a"].recorded == 600
    assert found.may_send("a", 1, 4, 415) and not found.may_send("a", 1, 4, 416)
    found.count_received("a", 1, 4, 416)
    assert found.actors["a"].recorded == 600, "what goes beyond a grant brings no new one"
    assert sum("more than it was granted" in line for line in log.lines) == 1, "said once"


@pytest.mark.fault(13)
def test_what_boots_before_were_granted_may_still_come() -> None:
    found = make()
    for boot in range(1, roster.BOOTS_AT_ONCE + 1):
        found.observe("a", fleet_examples.state(boot=boot), **NOW)
        assert grant(found, "a", 500, 0.0) == 500, "as if each began after a crash"
    for boot in range(1, roster.BOOTS_AT_ONCE + 1):
        for _ in range(5):
            assert found.may_send("a", boot, 4, 100), "oldest first, as spools do"
            found.count_received("a", boot, 4, 100)
        assert not found.may_send("a", boot, 4, 1)


@pytest.mark.fault(13)
def test_a_liar_that_begins_anew_for_ever_gathers_no_grants() -> None:
    """Each boot is granted a share; what earlier ones did not use must not add up."""
    found = make()
    seconds = 600
    for tick in range(10 * seconds):  # a new boot ten times a second
        found.observe("a", fleet_examples.state(boot=tick + 1), retained=False, now_s=tick / 10)
        grant(found, "a", 100_000, tick / 10)
    assert found.owed_steps("a") <= (roster.BOOTS_AT_ONCE + 1) * 100_000 + 60 * SETTINGS.message_steps
    newest = found.actors["a"].boot
    for _ in range(50):
        newest += 1
        found.observe("a", fleet_examples.state(boot=newest), retained=False, now_s=1e6 + newest * 1e3)
        grant(found, "a", 100_000, 1e6 + newest * 1e3)
        found.count_received("a", newest, 4, 1)
    assert len(found.actors["a"].credits) <= roster.BOOTS_AT_ONCE + 1
    assert found.owed_steps("a") <= (roster.BOOTS_AT_ONCE + 1) * 100_000


@pytest.mark.fault(13)
def test_of_sessions_before_this_one_only_what_they_granted_may_come() -> None:
    found = make()
    found.set_earlier_steps(1000)
    for _ in range(10):
        assert found.may_send("a", 7, 3, 100), "before its state was heard, too"
        found.count_received("a", 7, 3, 100)
    assert not found.may_send("a", 8, 2, 1)
    assert found.may_send("b", 7, 3, 1000), "each for itself"


NOW: dict[str, Any] = {"retained": False, "now_s": 0.0}
OTHER = fleet_examples.birth("Acrobot-v1", fleet_examples.OTHER_SPEC)


@pytest.mark.fault(14)
def test_one_actor_alone_does_not_decide_the_spec_of_two() -> None:
    found = roster.Roster("session", 4, "", quorum=2)
    found.observe("liar", fleet_examples.state(birth=OTHER), **NOW)
    found.observe("a", fleet_examples.state(), **NOW)
    assert not found.decided and len(found.working()) == 1
    found.observe("b", fleet_examples.state(), **NOW)
    assert found.the_spec == fleet_examples.SPEC and found.env_id == "CartPole-v1"
    assert [actor.actor_id for actor in found.working()] == ["a", "b"]
    assert "the fleet trains on" in found.actors["liar"].refused


@pytest.mark.fault(14)
def test_where_the_task_is_named_only_who_runs_it_decides(log: log_reader.LogReader) -> None:
    found = make("CartPole-v1")
    found.observe("liar", fleet_examples.state(birth=OTHER), **NOW)
    assert not found.decided and found.working() == [] and "has to wait" in log.lines[-1]
    found.observe("a", fleet_examples.state(), **NOW)
    assert [actor.actor_id for actor in found.working()] == ["a"]
    assert found.actors["liar"].refused


@pytest.mark.fault(14)
def test_nobody_decides_what_the_learner_cannot_train_on_or_the_run_was_not_made_for() -> None:
    too_large = lambda birth: "too large" if birth.spec == fleet_examples.OTHER_SPEC else ""  # noqa: E731
    for options in ({"unfit": too_large}, {"fingerprint": fleet_examples.SPEC.fingerprint}):
        found = roster.Roster("session", 4, "", **options)
        found.observe("liar", fleet_examples.state(birth=OTHER), **NOW)
        assert not found.decided and found.actors["liar"].refused and "liar" in found.refusals
        found.observe("a", fleet_examples.state(), **NOW)
        assert found.the_spec == fleet_examples.SPEC
