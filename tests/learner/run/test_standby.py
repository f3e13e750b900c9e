"""A standby waits for the lock as well as for silence, and knows the run of the live learner from another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest

from broker.contract import codec, errors, messages, topics
from broker.fleet import identity
from learner import __main__ as main
from learner import config
from learner.experience import ledger
from learner.files import run_directory
from learner.fleet import gathering, session
from learner.run import standby
from tests.conftest import BrokerProcess, wait_until
from tests.fakes import fleet_examples, log_reader


@pytest.fixture
def settings(mosquitto: BrokerProcess, actorq_home: Path, monkeypatch: pytest.MonkeyPatch) -> config.TrainConfig:
    monkeypatch.setattr(session, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(session, "SILENCE_S", 0.5)
    identity.Fleet.open("lab")
    return config.TrainConfig(fleet="lab", broker=(mosquitto.address,), max_env_steps=2000)


@pytest.fixture
def run(settings: config.TrainConfig, tmp_path: Path) -> run_directory.RunDirectory:
    """Open, as the live learner has it."""
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    found.describe(config.Settings(settings, config.DqnConfig(), config.GateConfig()))
    return found


@contextlib.contextmanager
def live(settings: config.TrainConfig, fingerprint: str = "") -> Iterator[session.Session]:
    """A learner that beats until the block ends, and then says goodbye."""
    made, stop = session.Session.open(settings), threading.Event()
    made.join()
    made.announce(fingerprint, 1)

    def beat() -> None:
        while not stop.wait(0.05):
            made.beat()

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        yield made
    finally:
        stop.set()
        heart.join()
        made.close()


@contextlib.contextmanager
def standing_by(
    settings: config.TrainConfig, path: Path
) -> Iterator[futures.Future[run_directory.RunDirectory | None]]:
    stop = threading.Event()
    with futures.ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(standby.wait, settings, path, stop)
        finally:
            stop.set()


def test_takes_a_run_once_its_learner_is_gone_and_its_lock_is_free(
    settings: config.TrainConfig, run: run_directory.RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_reader.LogReader(caplog, "learner")
    with live(settings) as first, standing_by(settings, run.path) as waiting:
        wait_until(lambda: any("standing by" in line for line in log.lines), "it stands by")
        first.brokers.mute()  # it lives, and nobody hears it any more
        wait_until(lambda: any("a process still has the run" in line for line in log.lines), "silence is noticed")
        assert not waiting.done()
        run._lock.close()  # as the kernel does when it is killed
        found = waiting.result(10.0)
    assert found is not None and found.path == run.path
    assert run_directory.is_used(run.path)
    with pytest.raises(run_directory.InUse):
        run_directory.RunDirectory.open(run.path, resume=True)


def test_stays_where_it_is_while_the_learner_lives_and_stops_when_asked_to(
    settings: config.TrainConfig, run: run_directory.RunDirectory
) -> None:
    with live(settings) as first, standing_by(settings, run.path) as waiting:
        began = first._heartbeat
        wait_until(lambda: first._heartbeat > began + 8, "more heartbeats than fit into the silence")
        assert not waiting.done()
    with pytest.raises(gathering.Stopped):
        waiting.result(10.0)


def test_apart_it_waits_for_silence_and_not_for_a_goodbye_alone(
    settings: config.TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    log, stop, since = log_reader.LogReader(caplog, "learner"), threading.Event(), 0.0
    with futures.ThreadPoolExecutor(1) as pool:
        try:
            with live(settings) as first:
                waiting = pool.submit(standby.wait_apart, settings, stop)
                wait_until(lambda: any("standing by" in line for line in log.lines), "it stands by")
                began = first._heartbeat
                wait_until(lambda: first._heartbeat > began + 25, "more heartbeats than fit into the silence")
                assert not waiting.done()
                since = time.monotonic()
            waiting.result(10.0)
        finally:
            stop.set()
    assert time.monotonic() - since > 2 * session.SILENCE_S
    (warned,) = [line for line in log.lines if "standing by" in line]
    assert "Lost are then replay, ledger, optimizer state" in warned
    assert any("this standby takes over, with a new run" in line for line in log.lines)


def test_what_waits_to_be_looked_at_is_bounded_and_the_newest_stays(
    settings: config.TrainConfig, run: run_directory.RunDirectory
) -> None:
    keys = identity.Fleet.open(settings.fleet)
    waiting = standby.Standby(settings, run.path, keys, None)
    topic = topics.Topics(settings.fleet).learner_state
    for beat in range(200):
        state = messages.LearnerState(True, "one", 1, beat)
        waiting._hear(topic, keys.sealer.seal(topic, codec.encode(state)), False)
    assert waiting._heard.qsize() == standby._WAITING and waiting.passed_over == 200 - standby._WAITING
    beats = [waiting._heard.get_nowait()[0].heartbeat for _ in range(standby._WAITING)]
    assert beats == list(range(200 - standby._WAITING, 200))


def test_ends_where_the_live_learner_has_another_run(
    settings: config.TrainConfig, run: run_directory.RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENCE_S", 30.0)  # three heartbeats shall come first on any machine
    run._lock.close()
    other_run = pytest.raises(errors.RunError, match="does not use this run directory")
    with live(settings), standing_by(settings, run.path) as waiting, other_run as caught:
        waiting.result(10.0)
    assert str(run.path) in caught.value.where


def test_ends_where_the_live_learner_has_another_task(
    settings: config.TrainConfig, run: run_directory.RunDirectory
) -> None:
    about = {"env_id": "CartPole-v1", "spec": json.dumps(dataclasses.asdict(fleet_examples.SPEC))}
    ledger.Ledger.open(run.path / run_directory.LEDGER, about=about).close()
    other = fleet_examples.OTHER_SPEC.fingerprint
    other_task = pytest.raises(errors.SpecError, match="another task than the live learner")
    with live(settings, other), standing_by(settings, run.path) as waiting, other_task as caught:
        waiting.result(10.0)
    assert other in caught.value.where


def test_does_not_go_on_with_a_run_that_is_done(settings: config.TrainConfig, run: run_directory.RunDirectory) -> None:
    run.save_summary({"solved": None, "env_steps": 1999})
    assert not run.ended_by_itself(2000), "it was stopped"
    run.save_summary({"solved": None, "env_steps": 2000})
    run._lock.close()
    assert standby.wait(settings, run.path, threading.Event()) is None
    run.describe(config.Settings(settings, config.DqnConfig(), config.GateConfig()))
    assert not run.ended_by_itself(2000), "it was begun again since"


def test_who_has_lost_the_lock_to_another_knows(run: run_directory.RunDirectory) -> None:
    assert run.is_ours()
    with pytest.raises(run_directory.InUse):
        run_directory.RunDirectory.open(run.path, resume=True)
    assert run.is_ours(), "one that was turned away changes nothing"
    (run.path / ".lock").unlink()  # shared storage does as much to one that it hears nothing of
    other = run_directory.RunDirectory.open(run.path, resume=True)
    assert other.is_ours() and not run.is_ours()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--take-over"], errors.ConfigError.exit_code, "leave one of them out"),
        (["--run-dir", "RUN"], errors.RunError.exit_code, "holds a run already"),
        (["--resume", "RUN", "--take-over"], errors.ConfigError.exit_code, "leave one of them out"),
        (["--resume", "nowhere"], errors.RunError.exit_code, "no run to resume"),
        (["--resume", "RUN", "--fleet", "other"], errors.RunError.exit_code, "the run is of fleet 'lab'"),
    ],
)
def test_flags_that_cannot_be_have_a_clear_error(
    flags: list[str], code: int, words: str, run: run_directory.RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    filled = [str(run.path) if word == "RUN" else word for word in flags]
    assert main.main(["train", "--standby", *filled]) == code
    assert words in capfd.readouterr().err
