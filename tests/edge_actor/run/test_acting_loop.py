"""The whole actor against a real broker and a learner that only grants and reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.contract import errors, messages
from broker.fleet import identity
from edge_actor import config
from edge_actor.acting import evaluate, pace
from edge_actor.environment import env
from edge_actor.fleet import command
from edge_actor.run import acting_loop, build
from tests import conftest
from tests.edge_actor.policies.models import files
from tests.fakes import fake_learner
from tests.fakes.environments import toys

pytestmark = pytest.mark.mosquitto
CARTPOLE = env.make("CartPole-v1").spec
MODEL = files.INT8.read_bytes()


class Running:
    """An actor in a thread."""

    def __init__(self, settings: config.ActorConfig, bundle: identity.Bundle) -> None:
        self.error: BaseException | None = None
        self.actor = build.build(settings, bundle)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.actor.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> float:
        """Seconds until it had stopped."""
        began = time.monotonic()
        self.actor.stop()
        self.join()
        return time.monotonic() - began

    def join(self) -> None:
        self._thread.join(10.0)
        assert not self._thread.is_alive()


def acting(running: Running) -> acting_loop.ActingLoop:
    """The loop of an actor whose environment was named."""
    assert running.actor.loop is not None
    return running.actor.loop


def steps(running: Running) -> int:
    return acting(running).recorder.steps


class Site:
    """A broker, a fleet, a learner, and actors that start as a test wants them."""

    def __init__(self, broker: conftest.BrokerProcess, directory: Path) -> None:
        self.broker = broker
        self.directory = directory
        self.fleet = identity.Fleet.open("lab", directory / "fleet")
        self.bundle = self.fleet.enroll("pi", [broker.address])
        self.learner = fake_learner.FakeLearner(broker.address, self.fleet, "pi")
        self.running: list[Running] = []

    def start(self, **settings: Any) -> Running:
        defaults: dict[str, Any] = {
            "env": "CartPole-v1",
            "state_dir": str(self.directory / "state"),
            "heartbeat_s": 0.1,
        }
        defaults["spool_dir"] = str(self.directory / "spool")
        self.running.append(Running(config.ActorConfig(**(defaults | settings)), self.bundle))
        return self.running[-1]

    def assign(self, **changes: Any) -> messages.Assignment:
        assigned = fake_learner.assignment(self.learner.await_birth().boot, **changes)
        self.learner.assign(assigned)
        return assigned

    def publish(self, **changes: Any) -> None:
        self.learner.publish(fake_learner.policy(MODEL, CARTPOLE.fingerprint, **changes))

    def await_vitals(self, condition: Callable[[messages.Vitals], object], what: str) -> messages.Vitals:
        state = self.learner.await_birth()
        conftest.wait_until(lambda: self.learner.state is not None and condition(self.learner.state.vitals), what, 20.0)
        state = self.learner.state or state
        return state.vitals


@pytest.fixture
def site(mosquitto: conftest.BrokerProcess, tmp_path: Path) -> Iterator[Site]:
    made = Site(mosquitto, tmp_path)
    yield made
    for one in made.running:
        one.stop()
    made.learner.close()


def check_continuity(received: list[messages.Experience]) -> None:
    """Every message follows the one before, and segments go on where they were left."""
    by_seq = {message.seq: message for message in received}
    assert sorted(by_seq) == list(range(1, len(by_seq) + 1))
    last: Any = None
    steps = length = 0
    for seq in sorted(by_seq):
        m = by_seq[seq]
        assert m.step == steps
        steps += len(m.reward)
        assert len(m.observation) == m.length.sum() + len(m.length)
        for k, start in enumerate(np.cumsum(m.length + 1) - m.length - 1):
            if m.episode_length[k] > m.length[k]:
                assert m.episode_length[k] == length + m.length[k]
                np.testing.assert_array_equal(m.observation[start], last)
            last, length = m.observation[start + m.length[k]], m.episode_length[k]
            if m.terminated[k] or m.truncated[k]:
                length = 0


def test_birth_grant_experience_and_goodbye(site: Site) -> None:
    running = site.start()
    born = site.learner.await_birth()
    assert born.birth is not None
    assert born.birth.spec == CARTPOLE
    assert born.birth.env_id == "CartPole-v1"
    assert born.boot > 1_700_000_000, "a counter that is new begins with the time"
    site.assign(steps_granted=1000)
    site.learner.await_steps(1000)
    site.await_vitals(lambda v: v.messages_held == 0, "receipts are in")
    received = site.learner.experience
    assert site.learner.steps == 1000  # not one more
    assert {(m.epoch, m.version, m.assigned_epoch) for m in received} == {(0, 0, 1)}
    assert np.concatenate([m.action for m in received]).mean() == pytest.approx(0.5, abs=0.1)
    check_continuity(received)
    assert running.stop() < 2.0
    conftest.wait_until(lambda: not site.learner.states[-1].online, "it is offline")
    assert site.learner.states[-1].session == born.session


def test_experience_goes_to_the_worker_of_its_shard_and_what_was_on_its_way_goes_again(site: Site) -> None:
    site.learner.receipts = False
    site.start()
    site.assign(steps_granted=500)
    site.learner.await_steps(500)
    before = len(site.learner.experience)
    on_its_way = {one.seq for one in site.learner.experience}
    site.assign(steps_granted=500, shard=3)
    # No receipt until all are there again: that of the first covers what the learner had of the others.
    conftest.wait_until(lambda: {one.seq for one in site.learner.experience[before:]} >= on_its_way, "all came again")
    site.learner.receipts = True
    site.assign(steps_granted=1000, shard=3)
    site.learner.await_steps(1000)
    site.await_vitals(lambda v: v.messages_held == 0, "receipts are in")
    assert set(site.learner.ways[:before]) == {"actorq/lab/actor/pi/experience"}
    assert set(site.learner.ways[before:]) == {"actorq/lab/ingest/3/pi"}
    check_continuity(site.learner.experience[before:])


def test_a_policy_acts_and_each_message_has_one_version(site: Site) -> None:
    site.start()
    site.publish(version=1)
    site.await_vitals(lambda v: v.policy_version == 1, "version 1 acts")
    site.assign(steps_granted=1 << 40)
    site.learner.await_steps(2000)
    for version in range(2, 8):
        site.publish(version=version)
        vitals = site.await_vitals(lambda v: v.policy_version == version, "the swap is told")  # noqa: B023  called at once
        assert vitals.policy_phase == "active"
        assert vitals.delegate == "XNNPACK"
    versions = [m.version for m in sorted(site.learner.experience, key=lambda m: m.seq)]
    assert versions == sorted(versions)
    assert set(versions) <= set(range(1, 8))
    site.await_vitals(lambda v: (v.return_mean or 0) > 300, "it balances")
    check_continuity(list(site.learner.experience))


def test_a_step_acts_and_so_does_the_retained_pair_for_a_late_joiner(site: Site) -> None:
    changed = bytearray(MODEL)
    changed[len(MODEL) // 5] ^= 1
    first = site.start()
    site.publish(version=1)
    site.assign(steps_granted=1 << 40)
    site.await_vitals(lambda v: v.policy_version == 1, "the whole one acts")
    one, other, spec = MODEL, bytes(changed), CARTPOLE.fingerprint
    site.learner.publish_patch(fake_learner.patch(one, other, spec, base_version=1, version=2))
    site.await_vitals(lambda v: v.policy_version == 2, "a patch on it acts")
    site.learner.publish_piece(fake_learner.step(other, one, spec, base_version=2, version=3))
    vitals = site.await_vitals(lambda v: v.policy_version == 3, "and one from the policy before")
    assert vitals.refused == {}
    assert vitals.swap_pause_ms is not None
    assert 0.0 < vitals.swap_pause_ms < 1000.0
    first.stop()
    conftest.wait_until(lambda: not site.learner.states[-1].online, "offline")
    site.start(state_dir=str(site.directory / "late"))
    vitals = site.await_vitals(lambda v: v.policy_version == 2, "what is retained is enough")
    assert vitals.refused in ({}, {"base": 1})


def test_sixteen_at_once(site: Site) -> None:
    site.start(envs=16)
    site.publish()
    site.assign(steps_granted=5000, message_steps=512)
    site.learner.await_steps(5000)
    assert 5000 <= site.learner.steps < 5000 + 16, "whole rows"
    assert set(np.concatenate([m.env_index for m in site.learner.experience])) == set(range(16))


def test_a_killed_broker_loses_nothing(site: Site) -> None:
    site.start()
    site.assign(steps_granted=3000)
    site.learner.await_steps(1000)
    site.broker.kill()
    site.broker.restart()
    site.assign(steps_granted=9000)
    site.learner.await_steps(9000)
    check_continuity(site.learner.experience)


def test_without_a_grant_it_sleeps(site: Site) -> None:
    site.start()
    site.publish()
    site.assign(steps_granted=500)
    site.learner.await_steps(500)
    idle = site.await_vitals(lambda v: v.steps_recorded == 500, "it has stopped")
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25
    assert site.await_vitals(lambda v: True, "").steps == idle.steps


def test_a_learner_that_has_nothing_yet_but_wants_it_is_no_learner_that_wants_nothing(site: Site) -> None:
    running = site.start()
    site.assign(steps_granted=500, lockstep_version=1)
    loop = acting(running)
    conftest.wait_until(lambda: loop._acts_as_wanted() is not None, "it has its assignment")
    assert loop._acts_as_wanted() and loop._has_receipt() is False, "it waits for policy 1"
    site.publish(version=1)
    conftest.wait_until(loop._has_receipt, "a receipt for its experience", 20.0)
    running.stop()
    conftest.wait_until(lambda: not site.learner.states[-1].online, "it is offline")
    running = site.start()
    site.assign(steps_granted=0)
    loop = acting(running)
    conftest.wait_until(lambda: loop._acts_as_wanted() is not None, "it has its assignment")
    assert loop._has_receipt() is None, "it wants nothing"


def test_a_control_rate_is_held_and_what_is_not_granted_is_not_recorded(site: Site) -> None:
    site.start(rate_hz=200.0)
    site.publish()
    site.assign(steps_granted=40)
    began = time.monotonic()
    first = site.await_vitals(lambda v: v.steps_unrecorded > 20, "it acts on").steps
    later = site.await_vitals(lambda v: v.steps >= first + 100, "and on")
    assert later.steps_recorded == 40 == site.learner.steps
    assert later.steps < 230 * (time.monotonic() - began) + 60


def test_looking_for_a_broker_misses_no_deadline(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines before the loop began are forgotten, not counted."""
    now_s = 100.0
    monkeypatch.setattr(pace.Metronome.__init__, "__defaults__", (lambda: now_s,))
    running = site.start(rate_hz=50.0)
    loop = acting(running)
    running.stop()
    assert loop._metronome is not None
    now_s = 200.0
    loop.run()  # it was told to stop already
    assert loop._metronome.wait(threading.Event())
    assert loop._metronome.missed == 0


def test_at_a_control_rate_it_acts_on_when_the_broker_is_gone_and_starts_without_one(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    first = site.start(rate_hz=100.0)
    site.publish()
    site.await_vitals(lambda v: v.steps > 10, "it acts without an assignment")
    site.broker.kill()
    before = steps(first)
    conftest.wait_until(lambda: steps(first) > before + 100, "it acts on")
    first.stop()

    second = site.start(rate_hz=100.0, connect_timeout_s=0.5)
    conftest.wait_until(lambda: steps(second) > 50, "it acts")
    assert acting(second).recorder.order == (1, 1)
    assert "acting with the stored policy" in caplog.text


def test_lock_step_repeats_bit_for_bit(site: Site) -> None:
    def play(name: str) -> list[messages.Experience]:
        site.learner.experience.clear()
        state, epoch = site.directory / name, {"first": 10, "second": 20}[name]
        state.mkdir()
        (state / "boot").write_text(f"{epoch}")  # the first one's assignment is still retained, for its boot
        running = site.start(state_dir=str(state))
        born = running.actor.connection.boot
        conftest.wait_until(lambda: site.learner.state is not None and site.learner.state.online, "born")
        for version in (1, 2, 3):
            site.publish(epoch=epoch, version=version)
            site.learner.assign(
                fake_learner.assignment(
                    born,
                    session=name,
                    epoch=epoch,
                    steps_granted=700 * version,
                    lockstep_version=version,
                    epsilon_start=1.0,
                    epsilon_end=0.1,
                    epsilon_decay_steps=1000,
                    seed=4,
                    message_steps=300,
                )
            )
            site.learner.await_steps(700 * version)
        running.stop()
        return sorted(site.learner.experience, key=lambda m: m.seq)

    first = play("first")
    conftest.wait_until(lambda: not site.learner.states[-1].online, "offline")
    second = play("second")
    assert [m.version for m in first] == [m.version for m in second]
    for a, b in zip(first, second, strict=True):
        for field in ("length", "observation", "action", "reward", "terminated", "episode_return"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_the_learner_s_task_is_taken_if_it_is_gymnasium_s(site: Site) -> None:
    site.learner.say(
        site.learner.topics.learner_state, messages.LearnerState(True, "s", 1, 1, env_id="Acrobot-v1", version=0)
    )
    site.start(env="")
    born = site.learner.await_birth()
    assert born.birth is not None
    assert born.birth.env_id == "Acrobot-v1"


@pytest.mark.parametrize("task", ["os:system", "tests.fakes.environments.toys:Countdown-v0", "Countdown-v0"])
def test_a_task_that_would_import_code_is_refused(site: Site, task: str) -> None:
    site.learner.say(site.learner.topics.learner_state, messages.LearnerState(True, "s", 1, 1, env_id=task))
    running = site.start(env="")
    running.join()
    assert isinstance(running.error, errors.EnvironmentFailure)


@pytest.mark.fault(3)
def test_a_task_that_does_not_fit_here_is_not_final(site: Site) -> None:
    """The next one may: a service that ends with the code of a setting is not started again."""
    site.learner.say(site.learner.topics.learner_state, messages.LearnerState(True, "s", 1, 1, env_id="CartPole-v1"))
    running = site.start(env="", rate_hz=50.0, safe_action="[0.5, 0.5]")
    running.join()
    assert isinstance(running.error, errors.EnvironmentFailure)
    assert "CartPole-v1" in running.error.where


def test_no_task_and_no_broker_are_named_errors(site: Site) -> None:
    running = site.start(env="", connect_timeout_s=0.5)
    running.join()
    assert isinstance(running.error, errors.EnvironmentFailure)
    site.broker.kill()
    running = site.start(connect_timeout_s=0.5)
    running.join()
    assert isinstance(running.error, errors.BrokerUnreachable)


def test_a_refused_actor_ends(site: Site) -> None:
    running = site.start()
    site.assign(refused="another spec")
    running.join()
    assert isinstance(running.error, errors.ActorRefused)
    conftest.wait_until(lambda: not site.learner.states[-1].online, "it said goodbye")


@pytest.mark.fault(4)
def test_a_refused_actor_hands_over_what_it_holds(site: Site) -> None:
    site.learner.receipts = False
    running = site.start()
    site.assign(steps_granted=500, message_steps=50)
    site.learner.await_steps(500)
    boot, last = site.learner.experience[-1].boot, site.learner.experience[-1].seq
    site.assign(steps_granted=500, message_steps=50, refused="another machine goes by that name")
    site.learner.say(site.learner.topics.receipt("pi"), messages.Receipt("ledger-1", boot, last))
    running.join()
    assert isinstance(running.error, errors.ActorRefused)
    assert not list((site.directory / "spool").glob("*"))


def test_an_assignment_of_another_boot_is_ignored(site: Site) -> None:
    site.start()
    site.learner.assign(fake_learner.assignment(site.learner.await_birth().boot + 1, steps_granted=100, refused="you"))
    site.assign(steps_granted=50)
    site.learner.await_steps(50)


def test_a_broken_environment_is_made_anew_and_counted(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    toys.Flaky.taken = 0
    site.start(env=f"{toys.__file__}:Flaky", env_kwargs='{"period": 100}')
    site.assign(steps_granted=250, message_steps=50)
    site.learner.await_steps(250)
    vitals = site.await_vitals(lambda v: v.steps_recorded == 250, "all is told")
    assert vitals.env_failures == 2
    assert "the wheel came off" in caplog.text
    cut = [m for m in site.learner.experience if m.truncated.any()]
    assert len(cut) == 2


def test_evaluate_on_command_while_it_acts(site: Site) -> None:
    running = site.start()
    site.publish()
    site.assign(steps_granted=1 << 40)
    site.learner.await_steps(1000)
    manifest = fake_learner.manifest(MODEL, CARTPOLE.fingerprint, version=9)
    order = messages.Command(
        "c", "evaluate", running.actor.connection.boot, 4, 0, manifest, np.frombuffer(MODEL, np.uint8)
    )
    site.learner.command(order)
    report = site.learner.reports.get(timeout=20.0)
    assert report.error == ""
    assert len(report.episode_return) == 4
    assert report.labels["sha256"] == manifest.sha256
    before = site.learner.steps
    site.learner.await_steps(before + 1000)
    check_continuity(list(site.learner.experience))


def test_evaluating_on_the_only_environment_ends_the_episode(site: Site) -> None:
    running = site.start(one_env=True, rate_hz=2000.0)
    site.publish()
    site.assign(steps_granted=1 << 40, message_steps=1 << 14, message_period_s=100.0)
    site.await_vitals(lambda v: v.policy_version == 1, "it acts")
    # It acts before it is assigned, and then nothing is recorded that could be cut
    conftest.wait_until(lambda: acting(running).recorder.trajectory.recorded > 20, "it records")
    manifest = fake_learner.manifest(MODEL, CARTPOLE.fingerprint)
    site.learner.command(
        messages.Command("c", "evaluate", running.actor.connection.boot, 1, 0, manifest, np.frombuffer(MODEL, np.uint8))
    )
    assert site.learner.reports.get(timeout=20.0).error == ""

    def ended() -> bool:
        """The one message ends with its episode: cut, or at its own end, which may have been the step before."""
        return any(m.truncated[-1] or m.terminated[-1] for m in list(site.learner.experience))

    # Experience and report are two messages, and either may come first
    conftest.wait_until(ended, "the episode's end")


@pytest.mark.fault(2)
@pytest.mark.parametrize("settings", [{}, {"rate_hz": 500.0}, {"rate_hz": 500.0, "one_env": True}])
@pytest.mark.parametrize("limits", [{"max_s": 0.2}, {"max_steps": 50}, {}])
def test_an_evaluation_that_never_ends_is_given_up(
    site: Site, settings: dict[str, Any], limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(command, "_OWN_LIMITS"):
        monkeypatch.setattr(command, "_OWN_LIMITS", evaluate.Limits(max_s=0.3))
    running = site.start(env=f"{toys.__file__}:Endless", **settings)
    site.publish()
    site.assign(steps_granted=1 << 40, message_steps=64)
    site.await_vitals(lambda v: v.policy_version == 1, "it acts")
    manifest, model = fake_learner.manifest(MODEL, CARTPOLE.fingerprint), np.frombuffer(MODEL, np.uint8)
    boot = running.actor.connection.boot
    site.learner.command(messages.Command("c", "evaluate", boot, 3, 0, manifest, model, **limits))
    report = site.learner.reports.get(timeout=20.0)
    assert "gave up after" in report.error
    assert "in episode 1 of 3" in report.error
    site.learner.await_steps(site.learner.steps + 100)


@pytest.mark.fault(24)
def test_its_state_says_how_the_environment_fails(site: Site) -> None:
    site.start(env=f"{toys.__file__}:Flaky")
    site.assign(steps_granted=1 << 40)
    vitals = site.await_vitals(lambda v: v.env_failures > 0, "it fails")
    assert vitals.env_failure.endswith("OSError: the wheel came off")


def test_unsound_messages_are_counted_and_change_nothing(site: Site) -> None:
    running = site.start()
    site.learner.await_birth()
    link, topics = site.learner.link, site.learner.topics
    stranger = identity.Fleet.open("lab", site.directory / "stranger")
    for topic in (topics.assignment("pi"), topics.policy("main"), topics.learner_state, topics.receipt("pi")):
        link.retain(topic, b"junk")
        link.retain(topic, stranger.sealer.seal(topic, b"junk"))
        link.retain(topic, site.fleet.sealer.seal(topic, b"junk"))
    vitals = site.await_vitals(lambda v: sum(v.refused.values()) >= 12, "all are counted")
    assert vitals.refused["signature"] == 8
    assert running.error is None
    site.assign(steps_granted=10)
    site.learner.await_steps(10)


def test_the_safe_action_is_taken_when_the_policy_is_too_old(site: Site) -> None:
    running = site.start(env=f"{toys.__file__}:Robot", rate_hz=100.0, max_policy_age_s=0.3, safe_action="[0.5, 0.25]")
    site.assign(steps_granted=1 << 40)
    conftest.wait_until(lambda: acting(running).environment.running, "it acts")
    robot: Any = acting(running).environment.environment.step.__self__.unwrapped  # type: ignore[attr-defined]
    conftest.wait_until(lambda: robot.taken and robot.taken[-1].tolist() == [0.5, 0.25], "it is safe")
    recorded = acting(running).recorder.recorded
    count = len(robot.taken)
    conftest.wait_until(lambda: len(robot.taken) > count + 20, "it stays safe")
    assert acting(running).recorder.recorded == recorded
    assert {tuple(a) for a in robot.taken[-20:]} == {(0.5, 0.25)}
    assert all(-1 <= a[0] <= 2 and 0 <= a[1] <= 1 for a in robot.taken)
    running.stop()
    assert robot.taken[-1].tolist() == [0.5, 0.25]


def test_a_bundle_of_another_fleet(site: Site) -> None:
    with pytest.raises(errors.ConfigError, match="fleet 'lab', not 'attic'"):
        site.start(fleet="attic")
