"""A learner that is killed before its first checkpoint: its run goes on, whatever it had written by then."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from broker.contract import errors
from learner import __main__ as main
from learner.experience import ledger
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest as brokers
from tests.fakes import log_reader
from tests.learner.files import test_run_directory as examples
from tests.system.conftest import QUICK

pytestmark = [pytest.mark.fault(9), pytest.mark.system]


def held(run: Path) -> int:
    """Steps in the ledger, if it is made."""
    try:
        with closing(sqlite3.connect(f"file:{run / run_directory.LEDGER}?mode=ro", uri=True)) as book:
            row = book.execute("SELECT coalesce(sum(steps), 0) FROM messages WHERE verdict = 'ok'").fetchone()
    except sqlite3.Error:
        return 0
    return int(row[0])


def test_killed_before_its_first_checkpoint_a_run_goes_on_with_what_its_ledger_holds(
    start_fleet: Callable[..., local_fleet.LocalFleet], run_root: Path
) -> None:
    fleet, run = start_fleet(), run_root / "run"
    fleet.start_actor("pi", ["--env", "CartPole-v1", "--heartbeat-s", "0.3"])
    limits = ["--run-dir", str(run), "--max-env-steps", "2000", "--evaluate-episodes", "0"]
    limits += ["--solved-return", "inf", "--json"]
    learner = fleet.start_learner([*QUICK, *limits, "--checkpoint-period-s", "1000"])
    brokers.wait_until(lambda: held(run) > 0, "experience is in the ledger", 60.0)
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    assert not list((run / "checkpoints").iterdir())
    before, book = held(run), ledger.about(run / run_directory.LEDGER)["id"]

    with pytest.raises(errors.RunError, match="holds a run already"):
        run_directory.RunDirectory.open(run, resume=False)
    again = fleet.start_learner(["--resume", str(run), "--json"])
    output, _ = again.communicate(timeout=240.0)
    assert again.returncode == errors.EXIT_OK
    summary = json.loads(output)
    assert ledger.about(run / run_directory.LEDGER)["id"] == book, "actors need not send again what it has"
    assert summary["env_steps"] == held(run) >= 2000 > before > 0
    assert summary["updates"] > 0
    assert list((run / "checkpoints").glob("*.npz"))


def test_killed_before_it_had_settings_it_can_be_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run_directory.RunDirectory.open(run, resume=False)  # and then the power went
    (run / ".config.toml.123").write_text("hid")
    assert main.main(["train", "--resume", str(run)]) == errors.RunError.exit_code
    assert f"start it again as it was started, with --run-dir {run}" in capsys.readouterr().err


def test_what_a_broken_disk_left_of_the_list_of_starts_stops_no_run(tmp_path: Path) -> None:
    found = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    for left in ("", "[", "{}", '{"starts": 3}'):
        (found.path / "run.json").write_text(left)
        found.describe(examples.SETTINGS)
        assert len(json.loads((found.path / "run.json").read_text())["starts"]) == 1


def test_a_ledger_without_its_settings_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ledger.Ledger.open(tmp_path / "run" / run_directory.LEDGER).close()
    with pytest.raises(errors.RunError, match="holds a run already"):
        run_directory.RunDirectory.open(tmp_path / "run", resume=False)


@pytest.mark.parametrize("left", ["nothing", "a header"])
def test_a_ledger_that_was_not_made_yet_is_made(tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / run_directory.LEDGER
    path.write_bytes(b"")
    if left == "a header":
        with closing(sqlite3.connect(path)) as book:
            book.execute("PRAGMA journal_mode = WAL")
    log = log_reader.LogReader(caplog, "learner")
    made = ledger.resume(path, keep=False, before=(0, 0), about={"env_id": "x"})
    assert made.totals() == (0, 0)
    assert ledger.about(path)["env_id"] == "x"
    assert "a new ledger begins" in log.lines[-1]
    made.close()
