"""The energy of the fleet's boards, by what their actors say with each heartbeat.

An actor says how much its whole board has drawn, so of two actors on one board only one may count at a time. Each names
its board (`Vitals.board_id`, which all processes of one kernel share), and the clock of both is the board's: what an
actor tells of a time that another one has told of already is left out. Actors that name none count as a board each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.contract import messages

POWER_MAX_W = 5000.0
"""The most that a board draws; who says more says nothing."""
_LATE_S = 30.0
"""The most by which two heartbeats may be further apart by their actor's clock, which may jump, than their arrivals."""
_SHARED_S = 1.0
"""The most by which a reading may be of more than the time between two heartbeats: quick ones share a reading."""
_BOARDS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Drawn:
    """Energy of one board by one source, as far as readings tell it."""

    board: str
    source: str
    modelled: bool
    joules: float


@dataclass(slots=True)
class _Meter:
    """The words of one actor: of its process, and since the session began."""

    process: tuple[int, str]
    vitals: messages.Vitals
    arrived_s: float
    lived_s: float = 0.0
    read_s: float = 0.0
    joules: float = 0.0


class Energy:
    """Adds up."""

    def __init__(self) -> None:
        self._meters: dict[str, _Meter] = {}
        self._told_to_s: dict[str, float] = {}  # by board and its clock
        self._drawn: dict[tuple[str, str, bool], float] = {}

    def note(self, actor_id: str, state: messages.ActorState, now_s: float) -> None:
        """Takes note of a fresh state; one without vitals, such as a goodbye, says nothing.

        Args:
            actor_id: Whose.
            state: Of a process, which counts from its start: the first one heard is where counting begins.
            now_s: Monotonic time.
        """
        vitals, process = state.vitals, (state.boot, state.session)
        if vitals.created_s <= 0.0:
            return
        meter = self._meters.get(actor_id)
        if meter is None or meter.process != process:
            known = meter or _Meter(process, vitals, now_s)
            self._meters[actor_id] = _Meter(process, vitals, now_s, known.lived_s, known.read_s, known.joules)
            return
        before, length_s = meter.vitals, vitals.created_s - meter.vitals.created_s
        longest_s = now_s - meter.arrived_s + _LATE_S
        if length_s <= 0.0 and now_s - meter.arrived_s < _LATE_S:
            return  # of two that came together, or a clock that was put back by little
        meter.vitals, meter.arrived_s = vitals, now_s
        board = vitals.board_id or f"of {actor_id}"
        if length_s <= 0.0 and board in self._told_to_s:  # the clock was put back: of its new time nobody has told
            self._told_to_s[board] = min(self._told_to_s[board], vitals.created_s)
        if not 0.0 < length_s <= longest_s:
            return
        meter.lived_s += length_s
        if vitals.energy_j is None or before.energy_j is None or vitals.board_id != before.board_id:
            return
        joules, read_s = vitals.energy_j - before.energy_j, vitals.energy_s - before.energy_s
        if not 0.0 < read_s <= length_s + _SHARED_S or not 0.0 <= joules <= POWER_MAX_W * read_s:
            return
        meter.read_s = min(meter.read_s + read_s, meter.lived_s)
        meter.joules += joules
        self._add(board, before.created_s, vitals, joules)

    def _add(self, board: str, since_s: float, vitals: messages.Vitals, joules: float) -> None:
        """Adds what nobody has told yet of the time since `since_s`, by the board's clock."""
        told_to_s = self._told_to_s.get(board, since_s)
        if vitals.created_s <= told_to_s or (board not in self._told_to_s and len(self._told_to_s) >= _BOARDS_MAX):
            return
        share = (vitals.created_s - max(since_s, told_to_s)) / (vitals.created_s - since_s)
        key = board, vitals.power_source, vitals.power_modelled
        self._told_to_s[board] = vitals.created_s
        self._drawn[key] = self._drawn.get(key, 0.0) + share * joules

    @property
    def drawn(self) -> list[Drawn]:
        """The energy that each board drew, by what told it."""
        return [Drawn(*key, joules) for key, joules in self._drawn.items()]

    @property
    def coverage(self) -> float:
        """The share of the actors' time for which readings tell the power of their boards; 0 without actors."""
        lived_s = sum(meter.lived_s for meter in self._meters.values())
        return sum(meter.read_s for meter in self._meters.values()) / lived_s if lived_s > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """Returns the joules so far, measured and modelled apart, for a row of metrics; those that there are."""
        names = {False: "actors_measured_j", True: "actors_modelled_j"}
        row: dict[str, float] = {}
        for one in self.drawn:
            row[names[one.modelled]] = row.get(names[one.modelled], 0.0) + one.joules
        return row

    def of_actor(self, actor_id: str) -> dict[str, Any]:
        """Returns what an actor told of its board, for a table: joules (None without any), and the share covered."""
        meter = self._meters.get(actor_id)
        if meter is None or not meter.lived_s:
            return {"joules": None, "coverage": None}
        return {"joules": meter.joules if meter.read_s else None, "coverage": meter.read_s / meter.lived_s}
