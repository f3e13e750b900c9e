"""Bounded, readable, and the newest are there."""

from __future__ import annotations

import json
from pathlib import Path

from learner import dead_letters


def test_says_why_and_how_it_began(tmp_path: Path) -> None:
    file = tmp_path / "letters.jsonl"
    dead_letters.DeadLetters(file).add(
        "actorq/lab/actor/pi/experience", "size", "shorter than a header", b"AQ\xff" * 99
    )
    row = json.loads(file.read_text())
    assert (row["topic"], row["reason"], row["bytes"]) == ("actorq/lab/actor/pi/experience", "size", 297)
    assert row["what"] == "shorter than a header"
    assert bytes.fromhex(row["begins"]) == (b"AQ\xff" * 99)[:96]


def test_is_bounded_over_restarts_and_keeps_the_newest(tmp_path: Path) -> None:
    file = tmp_path / "letters.jsonl"
    for _ in range(2):
        letters = dead_letters.DeadLetters(file, limit_bytes=2000)
        for index in range(100):
            letters.add("topic", "reason", str(index), b"x")
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) <= 2000
    assert json.loads(file.read_text().splitlines()[-1])["what"] == "99"
