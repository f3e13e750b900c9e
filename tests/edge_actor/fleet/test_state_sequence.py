"""The order of an actor's states over its connections."""

from __future__ import annotations

from broker.contract import messages
from edge_actor.fleet import state_sequence
from tests.fakes import fleet_examples


def test_a_will_ends_its_own_connection_and_no_later_one() -> None:
    said: list[messages.ActorState] = []

    def seal(state: messages.ActorState) -> bytes:
        said.append(state)
        return b""

    made = state_sequence.StateSequence(7, seal)
    made.will()
    for _ in range(3):
        made.online(fleet_examples.birth(), messages.Vitals())
    made.will()
    made.online(fleet_examples.birth(), messages.Vitals())
    made.farewell()
    first_will, *beats, second_will, birth, farewell = said
    assert [state.heartbeat for state in said] != sorted(state.heartbeat for state in said), "wills are made ahead"
    assert beats[-1].heartbeat < first_will.heartbeat < birth.heartbeat < farewell.heartbeat < second_will.heartbeat
    assert {state.boot for state in said} == {7} and len({state.session for state in said}) == 1
    assert [state.online for state in said] == [False, True, True, True, False, True, False]
