"""People are shown what is logged: where, in which words, and how often."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.program import logs

_SAYS = """
import logging
from broker.program import logs
log = logging.getLogger("edge_actor.some.module")
log.warning("before anybody listens")
logs.configure()
log.info("good to know")
log.warning("look\\nat this")
log.debug("nobody asked")
logging.getLogger("tensorflow").info("another library")
"""


@pytest.fixture
def shown() -> io.StringIO:
    """Returns what our packages show."""
    stream = io.StringIO()
    logs.configure(logging.StreamHandler(stream))
    return stream


def test_lines_go_to_stderr_as_they_are() -> None:
    run = subprocess.run([sys.executable, "-c", _SAYS], capture_output=True, text=True, check=True)
    assert run.stderr.splitlines()[1:] == ["good to know", "look", "at this"] and not run.stdout


def test_a_library_that_sets_up_logging_has_nothing_said_twice() -> None:
    """Some libraries call `logging.warning`, and so set it up, in the middle of a run."""
    program = f"import logging; logging.basicConfig(); {_SAYS}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr.count("good to know") == 1


def test_the_journal_is_told_priorities(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w+") as journal:
        about = os.fstat(journal.fileno())
        env = os.environ | {"JOURNAL_STREAM": f"{about.st_dev}:{about.st_ino}"}
        subprocess.run([sys.executable, "-c", _SAYS], stderr=journal, env=env, check=True)
        journal.seek(0)
        assert journal.read().splitlines()[1:] == ["<6>good to know", "<4>look", "<4>at this"]


def test_a_line_is_said_once(shown: io.StringIO) -> None:
    log = logging.getLogger("learner.here")
    for _ in range(3):
        log.warning("whole line %d", 1, extra=logs.once())
        log.warning("whole line %d", 2, extra=logs.once())
        log.warning("always")
    for cause in ("signature", "size", "signature"):
        log.warning("refused: %s", cause, extra=logs.once(cause))
    logging.getLogger("learner.there").warning("of another: %s", "size", extra=logs.once("size"))
    lines = shown.getvalue().splitlines()
    assert lines.count("always") == 3
    assert [line for line in lines if line != "always"] == [
        "whole line 1",
        "whole line 2",
        "refused: signature",
        "refused: size",
        "of another: size",
    ]


def test_a_line_may_come_again_later() -> None:
    now = [0.0]
    filter_ = logs.Once(lambda: now[0])
    passed = []
    for at in (0.0, 9.0, 11.0, 20.0, 21.5):
        now[0] = at
        record = logging.makeLogRecord({"name": "learner.x", "msg": "line", **logs.once("key", again_s=10.0)})
        passed.append(filter_.filter(record))
    assert passed == [True, False, True, False, True]


def test_what_is_remembered_has_a_bound() -> None:
    filter_ = logs.Once()
    for i in range(10_000):
        filter_.filter(logging.makeLogRecord({"name": "learner.x", "msg": "line", **logs.once(i)}))
    assert len(filter_._said_at) <= 4096
