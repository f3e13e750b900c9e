"""The time of all actors of a fleet together, by stage: added up from what each says with its heartbeat.

A process counts from its start. What it says first is where counting begins, because it may have idled for days before
this session; an actor that reboots is another process, and begins anew. What it spent after its newest heartbeat is not
known yet.
"""

from __future__ import annotations

from broker.contract import messages
from broker.program import stopwatch

_PROCESSES = 4
"""Processes of one actor that are remembered: several may take turns, while it is settled whose the name is."""


class Work:
    """Adds up.

    Attributes:
        times: What each stage of all actors took.
        cpu_s: CPU seconds of all actors; None as long as none has told any.
    """

    def __init__(self) -> None:
        self._newest: dict[str, dict[tuple[int, str], messages.Vitals]] = {}  # by actor and process
        self.times = stopwatch.Stopwatch(*messages.ACTOR_STAGES)
        self.cpu_s: float | None = None

    def note(self, actor_id: str, state: messages.ActorState) -> None:
        """Takes note of a state; one without vitals, such as a goodbye, says nothing."""
        vitals = state.vitals
        if vitals.created_s <= 0.0:
            return
        processes, process = self._newest.setdefault(actor_id, {}), (state.boot, state.session)
        before = processes.pop(process, vitals)
        processes[process] = vitals
        if len(processes) > _PROCESSES:
            del processes[next(iter(processes))]
        for name, (count, seconds) in vitals.stages.items():
            count_before, seconds_before = before.stages.get(name, (0, 0.0))
            if count >= count_before and seconds >= seconds_before:  # else it tells nonsense
                self.times.add(name, seconds - seconds_before, int(count - count_before))
        if vitals.cpu_s is not None:
            self.cpu_s = (self.cpu_s or 0.0) + max(0.0, vitals.cpu_s - (before.cpu_s or 0.0))
