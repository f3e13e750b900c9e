"""Topics: builders, the parser, and the names that can be part of one."""

from __future__ import annotations

import pytest

from broker.contract import errors, topics

LAB = topics.Topics("lab")


def test_builders() -> None:
    assert LAB.learner_state == "actorq/lab/learner/state"
    assert LAB.policy("main") == "actorq/lab/policy/main/whole"
    assert LAB.policy_patch("main") == "actorq/lab/policy/main/patch"
    assert LAB.policy_piece("main") == "actorq/lab/policy/main/piece"
    assert LAB.policies("main") == (LAB.policy("main"), LAB.policy_piece("main"), LAB.policy_patch("main"))
    assert LAB.actor_state("pi") == "actorq/lab/actor/pi/state"
    assert LAB.assignment("pi") == "actorq/lab/actor/pi/assignment"
    assert LAB.experience("pi") == "actorq/lab/actor/pi/experience"
    assert LAB.receipt("pi") == "actorq/lab/actor/pi/receipt"
    assert LAB.command("pi") == "actorq/lab/actor/pi/command"
    assert LAB.report("pi") == "actorq/lab/actor/pi/report"
    assert LAB.every_actor("state") == "actorq/lab/actor/+/state"


@pytest.mark.parametrize("leaf", ["state", "assignment", "experience", "receipt", "command", "report"])
def test_the_parser_inverts_the_builder(leaf: str) -> None:
    assert LAB.actor_id(LAB.actor("pi-kitchen", leaf)) == "pi-kitchen"


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "actorq/lab/learner/state",
        "actorq/other/actor/pi/state",
        "actorq/lab/actor/pi",
        "actorq/lab/actor/pi/state/more",
        "actorq/lab/actor//state",
        "actorq/lab/actor/+/state",
        "actorq/lab/actor/Pi/state",
        "actorq/lab/actor/pi\n/state",
        "/actorq/lab/actor/pi",
    ],
)
def test_topics_that_are_no_actors(topic: str) -> None:
    with pytest.raises(errors.DecodeError, match="not an actor's topic") as caught:
        LAB.actor_id(topic)
    assert caught.value.reason == "topic" and caught.value.where == topic


@pytest.mark.parametrize("name", ["a", "0", "pi-4_b", "x" * 63])
def test_names_that_fit(name: str) -> None:
    assert topics.check_name(name, "actor") == name
    assert topics.Topics(name).fleet == name


@pytest.mark.parametrize(
    "name", ["", "A", "-a", "_a", "a/b", "a+", "#", "a b", "ä", "a\n", "x" * 64, "$sys", "..", "\u0661"]
)
def test_names_that_do_not_fit(name: str) -> None:
    with pytest.raises(errors.ConfigError, match="is not a valid name"):
        topics.Topics(name)
