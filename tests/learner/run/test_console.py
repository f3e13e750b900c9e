"""Lines for people, of which actors write a part."""

from __future__ import annotations

import io
import logging

from learner.run import console


def test_what_an_actor_says_cannot_steer_a_terminal() -> None:
    stream = io.StringIO()
    line = "actor pi joined: \x1b[2J\x1b]0;owned\x07\nlearner: solved, Größe 3 µs\r\u202e\x9b1m"
    console.Console(stream).handle(logging.makeLogRecord({"msg": line}))
    shown = stream.getvalue()
    assert shown.endswith("\n") and shown.count("\n") == 1
    assert all(letter.isprintable() for letter in shown[:-1])
    assert "Größe 3 µs" in shown
