"""The short form of `make chaos`, and proof that its books would notice."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from broker.contract import codec, messages
from learner.experience import ledger
from learner.files import run_directory
from tests import conftest as brokers
from tests.broker.contract.payloads import examples
from tests.system import books
from tests.system.chaos import __main__, scenario

DURATION_S = 40.0


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("name", scenario.SCENARIOS)
def test_nothing_is_lost_in_chaos(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    for kind in scenario.SCENARIOS[name]:
        brokers.require(kind)
    result = __main__.run(name, DURATION_S, seed=1)
    assert result["holds"], f"{capfd.readouterr().err}\n{__main__.sentence(result)}"
    assert result["accepted"] > 1000 and sum(result["faults"].values()) >= 3


@pytest.mark.system
@pytest.mark.parametrize("also_the_scenario", [False, True])
def test_a_killed_run_leaves_nothing(open_tmpdir: str, also_the_scenario: bool) -> None:
    """No process, no mount, and no file either unless the scenario, which cleans up, was killed as well."""
    command = [sys.executable, "-m", __main__.__name__, "--scenario", "embedded", "--duration-s", "600"]
    started = subprocess.Popen(command, env=os.environ | {"TMPDIR": open_tmpdir}, start_new_session=True)
    brokers.wait_until(lambda: [*Path(open_tmpdir).glob("*/run/checkpoints/*.npz")], "the fleet works", 90.0)
    (scenario,) = psutil.Process(started.pid).children()
    children = [scenario, *scenario.children(recursive=True)]
    mounted = open_tmpdir in Path(f"/proc/{scenario.pid}/mounts").read_text()
    here = Path("/proc/self/mounts").read_text()
    started.kill()
    started.wait()
    if also_the_scenario:
        scenario.kill()
    brokers.wait_until(lambda: not any(map(brokers.runs, children)), "all have ended", 60.0)
    assert mounted == (os.geteuid() == 0) and open_tmpdir not in here
    assert len(os.listdir(open_tmpdir)) == also_the_scenario


def fill(directory: Path, in_ledger: list[list[int]]) -> books.Balance:
    """The balance of an actor that took ten steps, had 8 accepted and dropped 2, and of a ledger."""
    logs = directory / "books"
    (logs / "pi").mkdir(parents=True)
    (logs / "pi" / "life-0").write_bytes(b"." * 10)
    (logs / "pi" / "accepted-0").write_bytes(np.arange(1, 9, dtype=np.int32).tobytes())
    (logs / "pi" / "dropped-0").write_bytes(np.array([4, 9], np.int32).tobytes())
    book = ledger.Ledger.open(directory / run_directory.LEDGER, keep=True)
    example = examples.EXAMPLES["experience"]
    assert isinstance(example, messages.Experience)
    entries = []
    for seq, numbers in enumerate(in_ledger, 1):
        n = len(numbers)
        message = dataclasses.replace(
            example,
            boot=1,
            seq=seq,
            reward=np.array(numbers, np.float32),
            observation=np.zeros((n + 1, 2), np.float32),
        )
        entries.append(ledger.Entry("pi", 1, seq, 0, n, 0, 0, ledger.OK, codec.encode(message)))
    book.begin(entries, 0)
    book.wait()
    book.close()
    return books.Books(logs, directory).balance(("pi", 0))


def test_books_that_agree(tmp_path: Path) -> None:
    balance = fill(tmp_path, [[1, 2, 3], [4, 5, 6, 7, 8, 9]])
    assert balance == books.Balance(accepted=8, lost=0, twice=0, dropped=0, invented=0) and balance.holds


def test_what_was_dropped_and_counted_may_be_missing(tmp_path: Path) -> None:
    balance = fill(tmp_path, [[1, 2, 3], [5, 6, 7, 8]])
    assert balance == books.Balance(accepted=8, lost=0, twice=0, dropped=2, invented=0) and balance.holds


@pytest.mark.parametrize(
    ("in_ledger", "name"),
    [([[1, 2, 3], [4, 6, 7, 8]], "lost"), ([[1, 2, 3], [3, 4, 5, 6, 7, 8]], "twice"), ([[*range(1, 12)]], "invented")],
)
def test_books_that_do_not_agree(tmp_path: Path, in_ledger: list[list[int]], name: str) -> None:
    balance = fill(tmp_path, in_ledger)
    assert getattr(balance, name) > 0 and not balance.holds
