"""`actorq-actor bench`: what it measures, what it calls what it measured, and what it draws of it."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from broker.contract import errors
from edge_actor.bench import cell, chart, child, command, latency, models, page, records, verdict, windows
from edge_actor.bench.config import BenchConfig
from edge_actor.board import board, energy_meter
from tests import conftest, runtimes
from tests.edge_actor.board.boards import trees

COMMAND = [
    sys.executable,
    "-m",
    "edge_actor",
    "bench",
    "--quick",
    "--widths",
    "64,256",
    "--no-cnn",
    "--seconds",
    "0.02",
]
COMMAND += ["--rates-hz", "100", "--control-s", "0.3", "--window-s", "1", "--windows", "2"]


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    whole = [*COMMAND, *arguments, "-o", str(directory)]
    return subprocess.run(whole, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.system
def test_it_measures_everything_and_needs_nothing(tmp_path: Path) -> None:
    runtimes.python("ai-edge-litert")
    done = run(directory=tmp_path)
    assert done.returncode == 0, done.stderr
    found = command.read([tmp_path / command.ROWS])
    latencies = [row for row in found if row["kind"] == "latency"]
    assert {(row["policy"], row["precision"], row["kernels"]) for row in latencies} == {
        (policy, precision, kernels) for policy in ("64x2", "256x2") for precision, kernels in verdict.KEYS
    }
    for row in latencies:
        assert row["runtime"].startswith("numpy" if row["kernels"] == "numpy" else "ai-edge-litert")
        assert 0 < row["invoke_us_p50"] <= row["invoke_us_p99"]
        assert row["load_ms"] > 0 and row["first_invoke_us"] > 0
        assert len(row["sha256"]) == (0 if row["kernels"] == "numpy" else 64)
        assert {"board", "processor", "governor", "temperature_c", "throttled", "load_1m", "python"} <= row.keys()
    controls = [row for row in found if row["kind"] == "control"]
    assert {(row["precision"], row["rate_hz"], row["busy"]) for row in controls} == {
        ("int8", 100.0, 1),
        ("float32", 100.0, 1),
    }
    assert all(row["inferences"] and row["late_us_p50"] <= row["late_us_p99"] <= row["late_us_max"] for row in controls)
    assert re.search(r"256x2 .*int8 (pays|does not pay): \d", done.stdout)
    assert "latency: policy 1 of 2" in done.stderr and "control: " in done.stderr
    drawn = (tmp_path / command.PAGE).read_text()
    assert "http" not in drawn.replace("http://www.w3.org", "")  # self-contained
    assert drawn.count("<svg") == 1 and "Control at a rate" in drawn


@pytest.mark.system
def test_energy_by_an_external_meter(tmp_path: Path) -> None:
    meter = tmp_path / "meter.csv"
    log = "import time\nprint('time_s,power_w', flush=True)\n"
    log += "while True:\n    print(f'{time.time()},4.0', flush=True)\n    time.sleep(0.1)\n"
    with open(meter, "w") as out, subprocess.Popen([sys.executable, "-c", log], stdout=out) as measuring:
        try:
            done = run("--parts", "energy", "--precisions", "int8,float32", "--meter", str(meter), directory=tmp_path)
        finally:
            measuring.kill()
    assert done.returncode == 0, done.stderr
    found = command.read([tmp_path / command.ROWS])
    energies = {(row["precision"], row["rate_hz"]): row for row in found if row["kind"] == "energy"}
    assert set(energies) == {(p, rate) for p in ("int8", "float32") for rate in (0.0, 100.0)}
    for row in energies.values():
        assert (row["windows"], row["windows_dropped"]) == (2, 0)
        assert row["power_w"] == pytest.approx(4.0) and row["idle_w"] == pytest.approx(4.0)
        assert row["net_uj"] == pytest.approx(0.0, abs=0.01 * row["gross_uj"])
        assert row["power_source"] == "meter meter.csv" and row["power_modelled"] is False
    for row in found:
        if row["kind"] == "window":
            assert row["held_s"] >= 1.0 and row["joules"] == pytest.approx(4.0 * row["held_s"])
            assert not row["rate_hz"] or row["inferences"] <= row["rate_hz"] * row["held_s"] + 1
    order = [row["policy"] + row["precision"] for row in found if row["kind"] == "window" and not row["rate_hz"]]
    assert order == ["idle", "256x2int8", "256x2float32"] * 2  # precisions take turns
    assert "uJ per inference" in done.stdout


@pytest.mark.system
def test_an_interrupted_benchmark_keeps_its_rows_and_leaves_no_process(tmp_path: Path) -> None:
    whole = [*COMMAND, "--control-s", "60", "-o", str(tmp_path)]
    bench = subprocess.Popen(
        whole,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # What a shell starts in the background ignores Ctrl-C, and so do its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert bench.stderr is not None
    try:
        assert next(line for line in bench.stderr if "control" in line)
        conftest.wait_until(
            lambda: len(psutil.Process(bench.pid).children()) == 3, "int8, float32 and a busy core", 90.0
        )
        children = psutil.Process(bench.pid).children()
        bench.send_signal(signal.SIGINT)
        assert bench.wait(60.0) == errors.EXIT_INTERRUPTED
        assert not any(map(conftest.runs, children))
    finally:
        bench.kill()
        bench.stderr.close()
    assert (tmp_path / command.PAGE).exists()
    assert len(command.read([tmp_path / command.ROWS])) == 14


@pytest.mark.system
def test_children_do_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [*COMMAND, "--parts", "control", "--control-s", "60", "-o", str(tmp_path)], stderr=subprocess.DEVNULL
    )
    conftest.wait_until(lambda: len(psutil.Process(bench.pid).children()) == 3, "all run", 90.0)
    children = psutil.Process(bench.pid).children()
    bench.kill()
    bench.wait()
    conftest.wait_until(lambda: not any(map(conftest.runs, children)), "they are gone", 30.0)


def test_a_row_is_called_by_what_ran_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BenchConfig(widths=(64,), layers=(2,), cnn=False, repeats=1, seconds=0.01, batches=(1,), threads=(1,))
    real = child.Child.ask

    def unseen(self: child.Child, request: dict[str, Any]) -> dict[str, Any]:
        told = real(self, request)
        return told | ({"delegate": "built-in"} if told.get("delegate") == "XNNPACK" else {})

    monkeypatch.setattr(child.Child, "ask", unseen)  # as in a chroot without /sys
    found: list[records.Row] = []
    latency.run(settings, tmp_path, found.append, lambda doing: None)
    assert {row["kernels"] for row in found} == {"built-in", "numpy"}
    assert all(row["kernels_wanted"] == row["kernels"] for row in verdict.latency(found)["64x2"].values())


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "memory_available_bytes", lambda: 1_000_000)
    settings = BenchConfig(widths=(64, 256), layers=(2,), cnn=False, repeats=1, seconds=0.01, threads=(1,))
    found: list[records.Row] = []
    latency.run(settings, tmp_path, found.append, lambda doing: None)
    skipped = [row for row in found if row["kind"] == "skipped"]
    assert [row["policy"] for row in skipped] == ["256x2"] and "are available" in skipped[0]["why"]
    assert any(row["kind"] == "latency" and row["policy"] == "64x2" for row in found)


def test_a_policy_that_kills_its_process_is_named(tmp_path: Path) -> None:
    junk = tmp_path / "junk.tflite"
    junk.write_bytes(b"\0\0\0\0TFL3" + b"\xff" * 100)
    shape = models.Shape(64, 2)
    with pytest.raises(errors.PolicyError, match="the measured process ended with"):
        child.Child.start(shape, junk, runtime="auto", delegated=True, threads=1, log=tmp_path / "log")


def test_a_late_step_is_late_by_all_it_missed() -> None:
    slow = iter([True])

    def act(row: object) -> None:
        if next(slow, False):
            time.sleep(0.025)  # work that takes two periods and a half

    told = cell._at_rate(act, itertools.repeat(None), 0.05, 100.0)
    assert told["missed"] >= 1
    assert told["late_us_max"] >= 15_000


# -- energy, by hand --------------------------------------------------------------------------------------------------


def window(policy: str, joules: float | None, inferences: int, dropped: str = "") -> records.Row:
    precision = "" if policy == windows.IDLE else "int8"
    return {
        "kind": "window", "policy": policy, "precision": precision, "kernels": "XNNPACK", "runtime": "r",
        "rate_hz": 0.0, "window_s": 10.0, "held_s": 10.0, "joules": joules,
        "inferences": inferences, "dropped": dropped,
    }  # fmt: skip


def test_energy_per_inference_gross_and_above_idle() -> None:
    idle = [window(windows.IDLE, joules, 0) for joules in (20.0, 21.0, 19.0)]
    work = [window("256x2", 30.0, 1000), window("256x2", 34.0, 1000), window("256x2", 32.0, 1000)]
    dropped = window("256x2", 900.0, 10, "throttle bits changed")
    (row,) = windows.summarize([*idle, *work, dropped, window("256x2", None, 1000, "readings are missing")])
    assert row["idle_w"] == pytest.approx(2.0)
    assert row["gross_uj"] == pytest.approx(32_000) and row["net_uj"] == pytest.approx(12_000)
    assert (row["net_uj_low"], row["net_uj_high"]) == (pytest.approx(10_000), pytest.approx(14_000))
    assert (row["windows"], row["windows_dropped"]) == (3, 2)
    assert verdict.above_idle(row) == "12,000 (10,000 to 14,000)"
    (near,) = windows.summarize([*idle, *(window("256x2", joules, 1000) for joules in (19.5, 20.5))])
    assert verdict.above_idle(near) == "lost in the noise of idle"


def test_windows_that_are_all_dropped_tell_nothing() -> None:
    (row,) = windows.summarize([window("256x2", None, 10, "readings are missing")])
    assert (row["gross_uj"], row["net_uj"], row["windows"], row["windows_dropped"]) == (None, None, 0, 1)
    assert verdict.above_idle(row) == "-"


def test_a_window_whose_throttle_bits_changed_is_dropped() -> None:
    held = windows.Window({}, energy_meter.Mark(0.0, None), energy_meter.Mark(1.0, None), 1.0, 1.0, (0, 0x50005))
    meter = energy_meter.Gauge(None, trees.HERE / "none.csv")
    meter.joules = lambda start, end: 1.0  # type: ignore[method-assign]
    assert held.measured(meter)["dropped"] == "throttle bits changed"


# -- what is drawn ----------------------------------------------------------------------------------------------------


def latency_row(policy: str, precision: str, kernels: str, us: float) -> records.Row:
    return {
        "kind": "latency", "host": "pi", "board": "<Pi>", "policy": policy, "width": 64, "layers": 2, "cnn": False,
        "precision": precision, "kernels": kernels, "kernels_wanted": kernels, "batch": 1, "threads": 1,
        "invoke_us_p50": us, "invoke_us_p99": us, "observation_to_action_us_p50": 2 * us, "model_bytes": 1,
        "load_ms": 1.0,
        "observation_to_action_us_p99": us, "memory_bytes": 1, "first_invoke_us": 1.0, "publishable": True, "at_s": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("int8", "says"), [(1.0, "int8 pays: 2.00x"), (1.95, "int8 does not pay: 1.03x")])
def test_the_table_says_where_int8_pays(int8: float, says: str) -> None:
    found = [latency_row("64x2", "int8", "XNNPACK", int8), latency_row("64x2", "float32", "XNNPACK", 2.0)]
    found.append(latency_row("64x2", "float32", "numpy", 0.1))
    assert says in verdict.table(found) and says in page.render(found)


def test_boards_are_told_apart_and_text_is_escaped() -> None:
    found = [latency_row("64x2", "int8", "XNNPACK", 1.0) | {"host": host} for host in ("a", "b<script>")]
    drawn = page.render(found)
    assert "All boards" in drawn and "<script>" not in drawn and "b&lt;script&gt;" in drawn
    for svg in re.findall(r"<svg.*?</svg>", drawn):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "drawing", [lambda: chart.lines("t", "x", "y", {"a": [(64, 1.0)]}), lambda: chart.bars("t", "uJ", {"a<b": 0.0})]
)
def test_charts_of_next_to_nothing(drawing: Callable[[], str]) -> None:
    assert ElementTree.fromstring(drawing()).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nonsense"])
def test_rows_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(errors.ConfigError, match="rows"):
        command.read([tmp_path / "rows.jsonl"])


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        BenchConfig(parts=("speed",), widths=(0,), shapes=("256",), threads=(-1,), kernels=("cuda",))
    for part in ("'speed'", "widths", "'256'", "threads", "'cuda'"):
        assert part in str(caught.value)
    assert json.dumps(caught.value.todo)
