"""The documents tell the truth where a test can check it: the worked example, topics, exit codes, and every link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from broker.contract import errors, messages, topics
from tests.broker.contract.payloads import examples

ROOT = Path(__file__).parents[2]
README = ROOT / "broker" / "README.md"
if not README.exists():
    pytest.skip("an installed package has no README beside it", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_worked_example_is_the_golden_message() -> None:
    block = re.search(r"```\n(41 51.*?)\{(.*?)\n```", PROTOCOL, re.DOTALL)
    assert block is not None
    numbers = re.findall(r"^((?:[0-9a-f]{2} ?)+)", block[1], re.MULTILINE)
    assert bytes.fromhex("".join(numbers)) + b"{" + block[2].encode() == examples.golden("sealed_by_learner")


def test_every_topic_and_message_is_listed() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+)[^|]* \| `(\w+)` \| (yes|no) \|", TEXT, re.MULTILINE)
    assert {row[2] for row in rows} == {cls.__name__ for cls in messages.KINDS.values()}
    names = topics.Topics("f")
    main = "<channel>"
    built = {names.learner_state, names.policy(main), names.policy_patch(main), names.policy_piece(main)} | {
        names.actor("<id>", leaf)
        for leaf in ("state", "assignment", "experience", "receipt", "command", "report", "orders", "answer")
    }
    assert {f"actorq/f/{row[0]}" for row in rows} == built


def test_every_exit_code_is_listed() -> None:
    listed = dict(re.findall(r"^\| (\d+) \| `?(\w*)`? ?\|", TEXT, re.MULTILINE))
    named: list[type[errors.ActorqError]] = [errors.ActorqError, *errors.ActorqError.__subclasses__()]
    for cls in named:
        assert listed[str(cls.exit_code)] == cls.__name__
    for code in (errors.EXIT_OK, errors.EXIT_USAGE, errors.EXIT_UNEXPECTED, errors.EXIT_INTERRUPTED, errors.EXIT_AGAIN):
        assert listed[str(code)] == ""


def _anchors(text: str) -> set[str]:
    """Returns the anchors of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", sorted(ROOT.glob("[!.]*/**/*.md")) + sorted(ROOT.glob("*.md")), ids=str)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("heading", ["The way of a policy", "The way of an observation"])
def test_the_ways_are_short_and_exist(heading: str) -> None:
    section = PROTOCOL.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if ".py:" in line]
    places = re.findall(r"^\| (\d*) ?\| `(\w+/\w+)/[^|]*\| (over the wire)?", section, re.MULTILINE)
    assert len(places) == len(rows)
    numbers = [int(number) for number, _, _ in places if number]
    assert numbers == list(range(1, len(numbers) + 1)) and 8 <= len(numbers) <= 12
    before = ""
    for number, stage, wire in places:  # whatever leaves a stage has a number, and nothing else has
        assert bool(number) == (stage != before or bool(wire)), (number, stage)
        before = stage
    for row in rows:
        for path, names in re.findall(r"`([\w/]+\.py):(\w+(?:`, `\w+)*)`", row):
            source = (ROOT / path).read_text(encoding="utf-8")
            for name in names.split("`, `"):
                assert re.search(rf"(def|class) {name}\b", source), f"{path} has no {name}"
