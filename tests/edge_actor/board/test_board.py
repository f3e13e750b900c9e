"""Boards tell of themselves, on recorded trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_actor.board import board
from tests.edge_actor.board.boards import trees


@pytest.mark.parametrize(
    ("name", "kind", "processor", "dot_product", "temperature_c", "mhz", "throttled"),
    [
        ("zero2w", "zero2w", "Cortex-A53", False, 44.008, 600.0, 0),
        ("3b", "3b", "Cortex-A53", False, 55.306, 1200.0, 0x50005),
        ("3b+", "3b+", "Cortex-A53", False, 61.778, 1400.0, 0x80008),
        ("4b", "4b", "Cortex-A72", False, 41.868, 1500.0, 0),
        ("5", "5", "Cortex-A76", True, 50.7, 2400.0, 0),
        ("x86", "", "12th Gen Intel(R) Core(TM) i7-1260P", True, 47.0, 2100.0, None),
    ],
)
def test_each_board(
    tmp_path: Path,
    name: str,
    kind: str,
    processor: str,
    dot_product: bool,
    temperature_c: float,
    mhz: float,
    throttled: int | None,
) -> None:
    root = trees.plant(name, tmp_path)
    facts = board.facts(root)
    assert (facts.kind, facts.processor, facts.dot_product) == (kind, processor, dot_product)
    assert facts.governor in ("ondemand", "powersave")
    assert board.state(root) == board.State(temperature_c, mhz, throttled)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert board.state(tmp_path) == board.State(None, None, None)
    assert board.model(tmp_path) == board.facts(tmp_path).kind == board.facts(tmp_path).governor == ""


def test_nonsense_is_no_reading(tmp_path: Path) -> None:
    root = trees.plant("5", tmp_path)
    trees.put(root, "sys/class/thermal/thermal_zone0/temp", "")
    trees.put(root, "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled", "error")
    assert board.state(root) == board.State(None, 2400.0, None)


def test_memory_is_what_the_board_and_the_control_group_leave(tmp_path: Path) -> None:
    assert board.memory_available_bytes(tmp_path) is None
    trees.put(tmp_path, "proc/meminfo", "MemTotal: 500000 kB\nMemAvailable:   300000 kB\n")
    assert board.memory_available_bytes(tmp_path) == 307_200_000
    trees.put(tmp_path, "proc/self/cgroup", "0::/system.slice/actorq-actor.service\n")
    group = "sys/fs/cgroup/system.slice/actorq-actor.service"
    trees.put(tmp_path, f"{group}/memory.current", "60000000\n")
    trees.put(tmp_path, f"{group}/memory.max", "max\n")
    assert board.memory_available_bytes(tmp_path) == 307_200_000
    trees.put(tmp_path, f"{group}/memory.max", "160000000\n")
    assert board.memory_available_bytes(tmp_path) == 100_000_000


def test_throttle_bits_in_words() -> None:
    assert board.throttle_words(0x50005, since_boot=False) == ["under-voltage", "throttled"]
    assert board.throttle_words(0x80008, since_boot=True) == ["soft temperature limit"]
    assert board.throttle_words(0x50000, since_boot=False) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Raspberry Pi Compute Module 4 Rev 1.0", "4b"),
        ("Raspberry Pi 400 Rev 1.0", "4b"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3", "3b+"),
        ("Raspberry Pi Model B Rev 2", ""),
        ("Radxa ROCK 4 Model B", ""),
    ],
)
def test_other_names(name: str, kind: str) -> None:
    assert board.kind(name) == kind
