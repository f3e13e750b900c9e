"""Power: which source each board has, what it says, and that a broken one says nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.contract import errors
from edge_actor.board import power, power_log, power_model, power_sensors
from edge_actor.fleet import vitals
from tests import conftest
from tests.edge_actor.board.boards import trees

RAILS_W = 2.0457
"""Volts times amperes of 5.pmic.txt, added up by hand; without EXT5V and BATT, whose current it does not tell."""
RAPL = "sys/class/powercap/intel-rapl:0/energy_uj"


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Says:
    """A source that answers what the test wants."""

    name, note, modelled = "test", "", False

    def __init__(self) -> None:
        self.watts: float | None = 3.0

    def read_w(self) -> float | None:
        return self.watts

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose programs come first."""
    directory = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory


def root_of(board: str, tmp_path: Path) -> Path:
    return trees.plant(board, tmp_path / "root")


# -- which source -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("board", "name", "modelled", "watts"),
    [
        ("zero2w", "INA219 hwmon1", False, 0.172 * 5.12),
        ("3b", "model PowerJoular 3b", True, None),
        ("3b+", "model PowerJoular 3b+", True, None),
        ("4b", "INA226 hwmon2", False, 3.475),
        ("x86", "RAPL package-0", False, None),
    ],
)
def test_each_board_has_its_source(tmp_path: Path, board: str, name: str, modelled: bool, watts: float | None) -> None:
    source = power.find(root_of(board, tmp_path)).source
    assert source is not None
    assert (source.name, source.modelled) == (name, modelled)
    assert source.read_w() == (None if watts is None else pytest.approx(watts))


def test_a_pi_5_asks_its_pmic_in_one_loop_that_ends_with_us(tmp_path: Path, programs: Path) -> None:
    trees.program(
        programs,
        "vcgencmd",
        f"cat {trees.HERE}/5.pmic.txt; echo $PPID > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/loop",
    )
    source = power.find(root_of("5", tmp_path), period_s=0.1).source
    assert isinstance(source, power_sensors.Pmic)
    assert "lower bound" in source.note
    meter = power.Meter.start(source, 1.0)
    conftest.wait_until(lambda: meter.read().covered_s, "the first answer", 30.0)
    total = meter.read()
    assert total.joules / total.covered_s == pytest.approx(RAILS_W, rel=1e-3)
    source.close()
    conftest.wait_until(lambda: not alive(int((tmp_path / "loop").read_text())), "the loop has ended", 30.0)


def test_the_pmic_loop_does_not_outlive_a_killed_actor(tmp_path: Path, programs: Path) -> None:
    trees.program(
        programs,
        "vcgencmd",
        f"cat {trees.HERE}/5.pmic.txt; echo $PPID > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/loop",
    )
    code = "from edge_actor.board import power_sensors as p; import os, signal, sys, time\n"
    code += "s = p.pmic(None, '5', 0.1)\nwhile s.read_w() is None: time.sleep(0.01)\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    conftest.wait_until(lambda: not alive(int((tmp_path / "loop").read_text())), "the loop has ended", 30.0)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes between opening and reading
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo VCHI initialization failed; exit 255", "VCHI initialization failed"),
        ("echo 'error=1 error_msg=\"Command not registered\"'", "Command not registered"),
        ("exit 0", "no answer"),
    ],
)
def test_a_pmic_that_does_not_answer_is_replaced_by_the_model(
    tmp_path: Path, programs: Path, script: str, why: str
) -> None:
    trees.program(programs, "vcgencmd", script)
    found = power.find(root_of("5", tmp_path))
    assert found.source is not None and found.source.modelled
    assert len(found.passed_over) == 1 and why in found.passed_over[0] and "group video" in found.passed_over[0]


def test_none_is_none(tmp_path: Path) -> None:
    assert power.find(tmp_path) == power.Found(None, ())
    zero = root_of("zero2w", tmp_path)
    (zero / "sys/class/hwmon/hwmon1/curr1_input").unlink()
    found = power.find(zero)
    assert found.source is None  # nobody measured a model of it, and another board's would be a guess
    assert found.passed_over == (
        "INA219 hwmon1 answers neither power1_input nor curr1_input and in1_input",
        "no model of a zero2w's power is known",
    )


def test_rapl_that_only_root_may_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of("x86", tmp_path)
    read_text = Path.read_text

    def deny(path: Path, *args: str, **kwargs: str) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", deny)  # tests may run as root, whom no mode stops
    found = power.find(root)
    assert found.source is None
    assert "only root may read" in found.passed_over[0]


# -- what they say ----------------------------------------------------------------------------------------------------


def test_rapl_over_its_wraparound(tmp_path: Path) -> None:
    root = root_of("x86", tmp_path)
    found, clock = power_sensors.rapl(root, "", 1.0), Clock()
    assert isinstance(found, power_sensors.Rapl)
    found.clock = clock
    assert found.read_w() is None  # a counter alone is no power
    for count, watts in ((262_130_000_000, 13.0), (262_143_000_000, 1.3), (16_671_150, 1.7)):
        clock.now_s += 10.0
        trees.put(root, RAPL, str(count))
        assert found.read_w() == pytest.approx(watts)
    (root / RAPL).unlink()
    assert found.read_w() is None


def test_the_model_follows_the_load(tmp_path: Path) -> None:
    root = root_of("4b", tmp_path)
    model = power_model.by_load(root, "4b", 1.0)
    assert isinstance(model, power_model.ByLoad)
    assert model.read_w() is None
    for busy, idle, watts in ((0, 400, 2.29), (400, 0, 2.29 + 4.53), (100, 300, 2.29 + 4.53 / 4)):
        values = [int(word) for word in (root / "proc/stat").read_text().split("\n")[0].split()[1:]]
        values[0] += busy
        values[3] += idle
        trees.put(root, "proc/stat", "cpu  " + " ".join(map(str, values)) + "\n")
        assert model.read_w() == pytest.approx(watts)
    assert "ratio of times" in model.note and "PowerJoular" in model.note
    trees.put(root, "proc/stat", "")
    assert model.read_w() is None


@pytest.mark.parametrize("answer", ["", "VDD_CORE_A current(7)=1.2A", "EXT5V_V volt(24)=5.1V", "VDD_CORE_V volt(15)=x"])
def test_rails_that_tell_no_power(answer: str) -> None:
    assert power_sensors.rails_w(answer) is None


# -- the meter --------------------------------------------------------------------------------------------------------


@pytest.fixture
def says() -> Says:
    return Says()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(says: Says, clock: Clock) -> power.Meter:
    return power.Meter(says, (0.5, 30.0), 1.0, clock)


def run(meter: power.Meter, says: Says, clock: Clock, *watts: float | None) -> power.Total:
    for value in watts:
        clock.now_s += 1.0
        says.watts = value
        total = meter.read()
    return total


def test_energy_is_power_times_time(meter: power.Meter, says: Says, clock: Clock) -> None:
    start = meter.read()
    assert run(meter, says, clock, 3.0, 4.0, 5.0).since(start) == pytest.approx(12.0)


def test_a_sensor_that_goes_missing_leaves_a_gap_not_a_guess(meter: power.Meter, says: Says, clock: Clock) -> None:
    start = meter.read()
    assert run(meter, says, clock, 3.0, None, 3.5).since(start) == pytest.approx(3.0 + 7.0)  # one is bridged
    middle = meter.read()
    assert run(meter, says, clock, *[None] * 9, 3.0).since(middle) is None
    assert meter.faults["missing"] == 10
    after = meter.read()
    assert run(meter, says, clock, 3.1, 3.2).since(after) == pytest.approx(6.3)


@pytest.mark.parametrize("wrong", [-3.0, 0.0, 1e6, float("nan"), float("inf")])
def test_a_reading_that_no_board_can_draw_does_not_count(
    meter: power.Meter, says: Says, clock: Clock, wrong: float
) -> None:
    start = meter.read()
    total = run(meter, says, clock, *[3.0, 3.1] * 9, wrong, 3.0, 3.1)
    assert total.since(start) == pytest.approx(9 * 6.1 + 6.0 + 3.1)
    assert meter.faults.total() == 1
    begin = meter.read()
    assert run(meter, says, clock, *[wrong] * 5).since(begin) is None


def test_a_stuck_sensor_is_found_out_and_taken_back(meter: power.Meter, says: Says, clock: Clock) -> None:
    start = meter.read()
    assert run(meter, says, clock, *[3.0] * 10).since(start) == pytest.approx(30.0)
    stuck = run(meter, says, clock, *[3.0] * 10)
    assert stuck.since(start) is None
    assert stuck.covered_s == 0.0 and meter.faults["stuck"] > 0
    again = run(meter, says, clock, 3.1)
    assert run(meter, says, clock, 3.0, 3.2).since(again) == pytest.approx(6.2)


def test_a_model_may_stand_still(meter: power.Meter, says: Says, clock: Clock) -> None:
    says.modelled = True  # an idle board's load is 0 for hours
    start = meter.read()
    assert run(meter, says, clock, *[2.29] * 60).since(start) == pytest.approx(2.29 * 60)


# -- the heartbeat ----------------------------------------------------------------------------------------------------


def test_energy_per_step_of_the_heartbeat(meter: power.Meter, says: Says, clock: Clock) -> None:
    energy = vitals.Energy.start(meter)
    clock.now_s += 1.0
    energy.update(1000)
    assert energy.power_w == pytest.approx(3.0)
    assert energy.step_energy_j == pytest.approx(0.003)
    assert [energy.joules, energy.read_s] == pytest.approx([3.0, 1.0])
    clock.now_s += 0.1  # a beat out of turn
    energy.update(1001)
    assert energy.step_energy_j == pytest.approx(0.003)
    clock.now_s += 0.9
    energy.update(1000)
    assert energy.power_w == pytest.approx(3.0)
    assert energy.step_energy_j is None  # it stood still
    assert (energy.source, energy.modelled) == ("test", False)
    assert [energy.joules, energy.read_s] == pytest.approx([6.0, 2.0]), "all since the start"


def test_without_a_source_there_is_no_energy() -> None:
    energy = vitals.Energy.start(None)
    energy.update(1000)
    assert (energy.power_w, energy.step_energy_j, energy.source, energy.modelled) == (None, None, "", False)
    assert (energy.joules, energy.read_s) == (None, 0.0)


# -- an external meter ------------------------------------------------------------------------------------------------


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_log_of_a_meter(tmp_path: Path) -> None:
    watts = written(tmp_path / "a.csv", "time_s, power_w\n" + "".join(f"{t},{2 + t % 2}\n" for t in range(1000, 1011)))
    assert power_log.read(watts).joules(1000, 1010) == pytest.approx(25.0)
    assert power_log.read(watts).joules(1000.5, 1001.5) == pytest.approx(2.75)
    assert power_log.read(watts, offset_s=500).joules(1500, 1510) == pytest.approx(25.0)
    assert power_log.read(watts).joules(1005, 1020) is None
    rows = "".join(f"2026-11-21T05:00:0{s}Z,ignored,5.0,0.5\n" for s in range(5))
    volts = written(tmp_path / "b.csv", f"time,what,voltage_v,current_a\n{rows}")
    assert power_log.read(volts).joules(1795237200, 1795237204) == pytest.approx(10.0)
    gap = written(tmp_path / "c.csv", "time_s,power_w\n0,2\n1,2\n9,2\n10,2\n")
    assert power_log.read(gap).joules(0, 10) is None


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "time_s,power_w\n1,x\n", "time_s,power_w\n1\n", "time,power_w\nnoon,2\n"]
)
def test_a_log_that_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(errors.ConfigError, match="the meter's log cannot be read"):
        power_log.read(written(tmp_path / "log.csv", text))
