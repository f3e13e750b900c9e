"""A machine's name: the same for all its processes, and telling nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from broker.program import machine


def test_all_processes_of_a_machine_have_one_name() -> None:
    code = "from broker.program import machine; print(machine.identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == machine.identity()
    assert re.fullmatch("[0-9a-f]{16}", other)
    drawn = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert other not in drawn.replace("-", "")


def test_without_one_it_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "missing")
    assert machine.identity.__wrapped__() == ""
