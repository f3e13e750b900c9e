"""Disks that are full or fail: what ends, ends with its reason and code; what can go on, goes on, and says so."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from broker.contract import errors
from broker.fleet import identity
from broker.program import cli, logs, storage
from learner.algorithms import Update
from learner.experience import dead_letters
from learner.experience.buffers import replay
from learner.files import checkpoint, records
from learner.run.reports import console, metrics
from tests.conftest import BrokerProcess
from tests.fakes import log_reader
from tests.learner.run.loop import test_training_loop as loops

pytestmark = pytest.mark.fault(19)


def without_room() -> None:
    """Runs in a child, in which no file may grow, as on a disk that has no byte left."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize(
    "command",
    [
        ["broker", "init"],
        ["broker", "enroll", "pi", "--fleet", "lab", "-o", "{there}/bundle.json"],
        ["learner", "train", "--fleet", "lab", "--no-energy", "--run-dir", "{there}/run"],
    ],
    ids=["init", "enroll", "learner"],  # an actor says what it cannot keep, and acts on
)
def test_a_command_that_cannot_write_says_where_and_why(tmp_path: Path, actorq_home: Path, command: list[str]) -> None:
    identity.Fleet.open("lab").enroll("pi").write(tmp_path / "pi.json")
    done = subprocess.run(
        [sys.executable, "-m", *[part.format(there=tmp_path) for part in command]],
        capture_output=True,
        text=True,
        timeout=60.0,
        preexec_fn=without_room,
        check=False,
    )
    assert done.returncode == 22, done.stderr
    assert "largest size" in done.stderr and f"where: {tmp_path}" in done.stderr and "MB free" in done.stderr
    assert "to do:" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (errno.ENOSPC, "full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "does not read or write"),
        (errno.EACCES, "denied"),
    ],
)
def test_each_kind_of_trouble_has_its_sentence(code: int, what: str, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(argv: object) -> int:
        raise OSError(code, os.strerror(code), "/somewhere/file")

    assert cli.run(fail, []) == 22
    said = capfd.readouterr().err
    assert what in said and "/somewhere/file" in said and "please report" not in said


def test_a_socket_that_is_denied_is_no_matter_of_the_disk(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(argv: object) -> int:
        raise PermissionError(errno.EACCES, "a port below 1024")

    assert cli.run(fail, []) == errors.EXIT_UNEXPECTED


def test_records_are_not_worth_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """/dev/full gives the very error that a full disk gives."""
    for name in ("metrics.jsonl", dead_letters.NAME):
        (tmp_path / name).symlink_to("/dev/full")
    log, once = log_reader.LogReader(caplog, "learner"), logs.Once()
    caplog.handler.addFilter(once)
    kept = records.Records()
    letters = dead_letters.DeadLetters(tmp_path / dead_letters.NAME, kept=kept)
    found = metrics.Metrics.open(tmp_path, console.Console(io.StringIO()), 0.0, kept)
    for step in range(3):
        found.write({"env_steps": float(step)})
        letters.add("topic", "shape", "does not fit", b"x")
    found.close()
    assert kept.failed == {"metrics": 3, "dead letters": 3}
    caplog.handler.removeFilter(once)
    assert len(log.lines) == 2 and "No space left on device" in log.lines[0], "once a minute of each kind"
    (tmp_path / dead_letters.NAME).unlink()
    letters.add("topic", "shape", "there is room again", b"x")
    assert json.loads((tmp_path / dead_letters.NAME).read_text())["left_out"] == 3


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(path, "ab", buffering=0) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # the second one fits by half
        try:
            storage.append(file, b"twelve bytes", path)
            with pytest.raises(OSError, match="too large") as caught:
                storage.append(file, b"twelve bytes", path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.filename == str(path)
        storage.append(file, b"!", path)
    assert path.read_bytes() == b"twelve bytes!"


@pytest.mark.mosquitto
def test_training_goes_on_without_checkpoints_and_says_at_the_end_that_the_last_is_missing(
    mosquitto: BrokerProcess, actorq_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has room, a checkpoint has not; what was there before stays as it was."""
    stop, before = threading.Event(), resource.getrlimit(resource.RLIMIT_FSIZE)
    with loops.training(mosquitto.port, tmp_path, stop, evaluate_episodes=0, checkpoint_period_s=0.0) as (loop, _, _):
        update, steps = loop.parts.algorithm.update, [0]
        save = checkpoint.save

        def watched(batch: replay.Batch) -> Update:
            if loop.parts.records.failed["checkpoints"] > 2 and not steps[0]:
                steps[0] = loop.parts.pace.env_steps
            if steps[0] and loop.parts.pace.env_steps > steps[0]:  # it takes in what comes all the same
                stop.set()
            return update(batch)

        def without_room(*args: object) -> Path:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
            try:
                return save(*args)  # type: ignore[arg-type]
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        loop.save()
        (whole,) = (tmp_path / "run" / "checkpoints").iterdir()
        content = whole.read_bytes()
        monkeypatch.setattr(checkpoint, "save", without_room)
        monkeypatch.setattr(loop.parts.algorithm, "update", watched)
        with pytest.raises(OSError, match="too large") as caught:
            loop.train()
    assert steps[0], "it goes on after the first one that could not be written"
    assert storage.of_disk(caught.value)
    assert str(tmp_path / "run" / "checkpoints") in str(storage.explained(caught.value))
    assert [path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()] == [content]
