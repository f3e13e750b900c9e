"""People hear of environments that fail: at once, then seldom; all of it is counted, whatever an actor says."""

from __future__ import annotations

from broker.contract import messages
from learner.run.reports import notices
from tests.fakes import fleet_examples, log_reader


def failing(count: int, message: str = "OSError: stuck", boot: int = 1) -> messages.ActorState:
    return fleet_examples.state(boot=boot, vitals=messages.Vitals(env_failures=count, env_failure=message))


def test_it_is_said_when_it_is_news(log: log_reader.LogReader) -> None:
    told = notices.Notices()
    for second in range(100):
        told.observe("pi", failing(1 + second), float(second))
    assert log.lines[0] == "the environment of actor pi failed once: OSError: stuck"
    assert 3 <= len(log.lines) <= 8
    told.observe("pi", failing(100), 1000.0)
    assert len(log.lines) <= 8, "nothing new"
    told.observe("pi", failing(101, "ValueError: worse"), 1010.0)
    assert log.lines[-1] == "the environment of actor pi failed 101 times: ValueError: worse"


def test_failures_of_an_actor_s_earlier_boots_count_on() -> None:
    told = notices.Notices()
    told.observe("pi", failing(5), 0.0)
    told.observe("pi", failing(2, boot=2), 1.0)
    told.observe("pi", failing(3, boot=2), 2.0)
    told.observe("other", failing(1), 3.0)
    assert told.env_failures == 9


def test_whatever_an_actor_says_is_bounded(log: log_reader.LogReader) -> None:
    told = notices.Notices()
    told.observe("pi", failing(10**400, "x" * 100_000), 0.0)
    told.observe("other", failing(-1), 0.0)
    assert float(told.env_failures) == 2.0**53
    assert len(log.lines[0]) < 500


def test_times_are_said_as_people_say_them() -> None:
    assert [notices.duration(s) for s in (5.0, 119.0, 660.0, 7300.0, float("inf"))] == [
        "about 5 s",
        "about 119 s",
        "about 11 min",
        "about 2 h",
        "an unknown time",
    ]
