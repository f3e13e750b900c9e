"""The last hour of actors: written off the loop, bounded at any size, and read by the page of a run that has ended."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from broker.contract import messages
from learner.files import records, run_directory
from learner.fleet import actors
from learner.operate.watch import history, run_files
from learner.run.reports import actor_hours
from tests.fakes import fleet_examples


class Fleet:
    """Live actors, and a clock."""

    def __init__(self, directory: Path, *names: str, limit_bytes: int = actor_hours.LIMIT_BYTES) -> None:
        self.now_s, self.kept = 1e9, records.Records()
        self.actors = [actors.Actor(name, slot, live=True) for slot, name in enumerate(names)]
        self.hours = actor_hours.ActorHours(directory, self.kept, limit_bytes, lambda: self.now_s)

    def look(self, steps: int, *, after_s: float = 10.0) -> None:
        self.now_s += after_s
        vitals = messages.Vitals(steps=steps, temperature_c=61.23456789, policy_lag=2)
        for one in self.actors:
            one.state = fleet_examples.state(vitals=vitals)
        self.hours.note(self.actors)
        if self.hours._writing is not None:
            self.hours._writing.result(10.0)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"{run_directory.ACTOR_HOURS}*"))


def test_an_hour_is_written_and_read(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "pi", "arm")
    for look in range(3):
        fleet.look(100 * look)
        fleet.look(9999, after_s=1.0)  # too soon
        fleet.now_s -= 1.0
    fleet.actors[1].live = False
    fleet.look(300)
    fleet.hours.close()
    run = run_files.RunFiles(tmp_path)
    found = run.history("pi")
    assert found is not None and found.keys() == {"at_s", *history.KEYS}
    assert found["at_s"] == [1e9 + 10 * n for n in range(1, 5)]
    assert found["steps_per_s"] == [None, 10.0, 10.0, 10.0]
    assert found["temperature_c"] == [61.235] * 4 and found["power_w"] == [None] * 4
    gone = run.history("arm")
    assert gone is not None and len(gone["at_s"]) == 3
    assert run.history("nobody") is None
    assert run.actors() == [{"actor_id": "arm"}, {"actor_id": "pi"}], "a run that was killed has names"


def test_the_files_are_bounded_and_hold_an_hour_of_a_large_fleet(tmp_path: Path) -> None:
    names = [f"actor-{number:04}" for number in range(2000)]
    fleet = Fleet(tmp_path, *names)
    fleet.look(0)
    line = files(tmp_path)[0].stat().st_size
    fleet.look(10, after_s=49.0)
    assert files(tmp_path)[0].stat().st_size == line, "2000 actors every 50 s"
    fleet.look(20, after_s=1.0)
    assert files(tmp_path)[0].stat().st_size > line
    assert 72 * 2 * line < actor_hours.LIMIT_BYTES / 2, "an hour, and with twice the figures, in either file"
    fleet.hours.close()
    (tmp_path / "small").mkdir()
    small = Fleet(tmp_path / "small", "pi", limit_bytes=2000)
    for look in range(40):
        small.look(look)
    small.hours.close()
    assert sum(file.stat().st_size for file in files(tmp_path / "small")) <= 2000
    found = run_files.RunFiles(tmp_path / "small").history("pi")
    assert found is not None and found["at_s"][-1] == small.now_s and len(found["at_s"]) >= 4, "the newest stay"


def test_only_the_hour_before_the_end_is_shown_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    def line(at_s: float, **rows: object) -> str:
        return json.dumps({"at_s": at_s, "keys": ["return_mean", "of another release"], "actors": rows})

    odd = ["[1]", "{", '{"at_s": "x"}', json.dumps({"at_s": 1, "keys": [], "actors": []}), line(5000.0, pi=3)]
    text = "\n".join([line(1000.0, pi=[1.0, 2.0]), *odd, line(4999.0, pi=["x", 1]), line(5000.0, pi=[7.0])])
    (tmp_path / run_directory.ACTOR_HOURS).write_text(text + '\n{"at_s": 50')
    found = run_files.RunFiles(tmp_path).history("pi")
    assert found is not None and found["at_s"] == [4999.0, 5000.0] and found["return_mean"] == [None, 7.0]


def test_a_disk_that_takes_nothing_is_counted_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Fleet(tmp_path / "nowhere", "pi")
    missing.look(1)
    assert sum(missing.kept.failed.values()) == 1
    missing.hours.close()
    stuck, release = Fleet(tmp_path, "pi"), threading.Event()
    monkeypatch.setattr(stuck.hours, "_append", lambda line: release.wait(10.0))
    stuck.actors[0].state = fleet_examples.state()
    stuck.hours.note(stuck.actors)
    stuck.now_s += 10.0
    stuck.hours.note(stuck.actors)  # at once
    assert sum(stuck.kept.failed.values()) == 1
    release.set()
    stuck.hours.close()
