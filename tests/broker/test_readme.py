"""broker/README.md tells the truth where a test can check it: the worked example, topics, and exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker import errors, messages, topics
from tests.broker import examples

README = Path(__file__).parents[2] / "broker" / "README.md"
if not README.exists():
    pytest.skip("an installed package has no README beside it", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")


def test_the_worked_example_is_the_golden_message() -> None:
    block = re.search(r"```\n(41 51.*?)\{(.*?)\n```", TEXT, re.DOTALL)
    assert block is not None
    numbers = re.findall(r"^((?:[0-9a-f]{2} ?)+)", block[1], re.MULTILINE)
    assert bytes.fromhex("".join(numbers)) + b"{" + block[2].encode() == examples.golden("sealed_by_learner")


def test_every_topic_and_message_is_listed() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+)[^|]* \| `(\w+)` \| (yes|no) \|", TEXT, re.MULTILINE)
    assert {row[2] for row in rows} == {cls.__name__ for cls in messages.KINDS.values()}
    names = topics.Topics("f")
    main = "<channel>"
    built = {names.learner_state, names.keyframe(main), names.delta(main), names.part(main)} | {
        names.actor("<id>", leaf) for leaf in ("state", "assignment", "experience", "receipt", "command", "report")
    }
    assert {f"actorq/f/{row[0]}" for row in rows} == built


def test_every_exit_code_is_listed() -> None:
    listed = dict(re.findall(r"^\| (\d+) \| `?(\w*)`? ?\|", TEXT, re.MULTILINE))
    named: list[type[errors.ActorqError]] = [errors.ActorqError, *errors.ActorqError.__subclasses__()]
    for cls in named:
        assert listed[str(cls.exit_code)] == cls.__name__
    for code in (errors.EXIT_OK, errors.EXIT_USAGE, errors.EXIT_UNEXPECTED, errors.EXIT_INTERRUPTED):
        assert listed[str(code)] == ""
