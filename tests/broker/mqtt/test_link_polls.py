"""A link whose caller serves the socket itself: who handles what, and that the network thread is there when needed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from tests import conftest
from tests.broker.mqtt import conftest as links


def test_a_caller_that_takes_turns_handles_messages_in_its_own_thread(
    mosquitto: conftest.BrokerProcess, make_link: links.MakeLink
) -> None:
    threads: queue.Queue[threading.Thread] = queue.Queue()
    made = make_link(mosquitto.address)
    made.subscribe("x/#", lambda *_: threads.put(threading.current_thread()))
    other = make_link(mosquitto.address, name="other")

    def handled(act: Callable[[], object]) -> threading.Thread:
        """The thread in which the next message is handled, `act` being called all the while."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            other.publish("x/1", b"")  # or not, where its network thread has the lock
            act()
            try:
                return threads.get(timeout=0.01)
            except queue.Empty:
                continue
        raise AssertionError(f"nothing comes; {other.in_flight} in flight, connected {other.connected, made.connected}")

    me = threading.current_thread()
    assert handled(made.rest) is not me
    # The network thread may have been waiting on the socket still
    assert any(handled(made.poll) is me for _ in range(1000))
    # Where this process stands still for TURN_PERIOD_S, as on a busy machine, the network thread rightly steps in
    assert sum(handled(made.poll) is me for _ in range(50)) >= 40
    made.rest()
    assert any(handled(lambda: None) is not me for _ in range(1000))


def test_a_caller_that_stops_taking_turns_is_not_waited_for(
    mosquitto: conftest.BrokerProcess, make_link: links.MakeLink
) -> None:
    received: queue.Queue[object] = queue.Queue()
    made = make_link(mosquitto.address)
    made.subscribe("x/#", lambda *message: received.put(message))
    made.poll()  # and never again, as when an environment's step takes long
    other = make_link(mosquitto.address, name="other")
    conftest.wait_until(lambda: other.publish("x/1", b"") and not received.empty(), "the network thread takes over")


def test_a_connection_lost_while_the_caller_takes_turns_comes_back(
    mosquitto: conftest.BrokerProcess, make_link: links.MakeLink
) -> None:
    made = make_link(mosquitto.address)

    def turned(condition: Callable[[], bool]) -> Callable[[], bool]:
        def poll() -> bool:
            made.poll()
            return condition()

        return poll

    mosquitto.kill()
    conftest.wait_until(turned(lambda: not made.connected), "the loss is noticed")
    mosquitto.start()
    conftest.wait_until(turned(lambda: made.connected), "it is back")
    assert made.connections == 2
