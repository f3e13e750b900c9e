"""Bounded, readable, and the newest are there."""

from __future__ import annotations

import json
from pathlib import Path

from learner.experience import dead_letters


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
            letters.add("topic", f"reason {index % 5}", str(index), b"x")
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) <= 2000
    assert json.loads(file.read_text().splitlines()[-1])["what"] == "99"


def test_a_flood_pushes_no_other_reason_out_and_says_how_many_there_were(tmp_path: Path) -> None:
    file, now_s = tmp_path / "letters.jsonl", 0.0
    letters = dead_letters.DeadLetters(file, now_s=lambda: now_s)
    letters.add("topic", "shape", "genuine", b"x")
    for _ in range(6 * 3600):
        now_s += 1.0
        for _ in range(20):
            letters.add("topic", "signature", "forged", bytes(1000))
    letters.add("topic", "epoch", "genuine too", b"x")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (rows[0]["reason"], rows[-1]["reason"]) == ("shape", "epoch")
    forged = rows[1:-1]
    assert 100 < len(forged) < 1000
    left_out = 20 * 6 * 3600 - sum(1 + row["left_out"] for row in forged)
    assert 0 <= left_out < 20 * 31, "the next one would say so"
    assert [row["left_out"] for row in (*rows[:101], rows[-1])] == [0] * 102
