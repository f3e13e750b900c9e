"""Mosquitto's log is counted line by line, and nobody is shut out for another."""

from __future__ import annotations

import pytest

from broker.serve.mosquitto import watch


def excesses(*lines: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    counts = watch.Watch(lambda user, what: found.append((user, what)))
    for line in lines:
        counts.count(line[:999])
    return found


def connected(client: str, user: str, session: str = "p2, c1") -> str:
    return f"New client connected from 10.0.0.7:40001 as {client} ({session}, k60, u'{user}')."


@pytest.mark.parametrize("session", ["p2, c0", "p5, c1", "p5, c0"])
def test_a_session_that_would_outlive_its_connection(session: str) -> None:
    assert excesses(connected("x", "hog", session)) == [("hog", "asks for a session that outlives its connection")]


def test_too_many_connections_of_one_user() -> None:
    lines = [connected(f"x{n}", "hog") for n in range(watch.MAX_CONNECTIONS)]
    assert excesses(*lines, *[connected(f"y{n}", "pi") for n in range(watch.MAX_CONNECTIONS)]) == []
    assert [user for user, _ in excesses(*lines, connected("y", "hog"), connected("z", "hog"))] == ["hog"]


def test_subscriptions_are_summed_over_connections_and_forgotten_with_them() -> None:
    half = watch.MAX_SUBSCRIPTIONS // 2
    a, b = ([f"{client} 1 t/{n}" for n in range(half)] for client in "ab")
    both = connected("a", "hog"), *a, connected("b", "hog"), *b
    assert excesses(*both, *a) == [], "the same ones again"
    assert len(excesses(*both, "a 1 one/more")) == 1
    assert excesses(*both, "Client a closed its connection.", connected("c", "hog"), *[f"c{x[1:]}" for x in a]) == []


def test_the_learner_is_not_counted() -> None:
    assert excesses(connected("l", "learner", "p5, c0"), *[f"l 1 t/{n}" for n in range(1000)]) == []


@pytest.mark.parametrize(
    "client_id", ["x (p5, c0, k60, u'pi').", "pi-1 1 a/b", "", "x" * 128 + " (p2, c1, k60, u'pi')."]
)
def test_nobody_is_shut_out_for_another(client_id: str) -> None:
    assert [user for user, _ in excesses(connected(client_id, "hog"))] == ["hog"]


def test_a_line_that_was_cut_off_names_nobody() -> None:
    tail = " (p5, c0, k60, u'pi')."
    start = "New client connected from 10.0.0.7:40001 as "
    forged = "x" * (999 - len(start) - len(tail)) + tail
    assert excesses(connected(forged, "hog")) == [
        ("", "came from 10.0.0.7:40001 under a client id of a thousand characters")
    ]
    assert [user for user, _ in excesses(connected("a", "hog"), "a 1 " + "x/" * 2000)] == ["hog"]


def test_what_people_are_to_read_is_left() -> None:
    counts = watch.Watch(lambda user, what: None)
    assert counts.count(connected("a", "pi")) and counts.count("a 1 t/x")
    assert not counts.count("Error: Unable to load CA certificates.") and not counts.count("b 1 t/x")
