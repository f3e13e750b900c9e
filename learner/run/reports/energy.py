"""The energy of a run and its CO2: the learner's by codecarbon's offline tracker, the actors' by their heartbeats.

A desktop with RAPL is measured; anywhere else codecarbon models the processor from its name and load, and always the
memory from its size. Each joule keeps its source, and the sum says what it is made of.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from broker.program import machine
from learner.fleet import energy

_J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Used:
    """The energy that the learner used, and the CO2 of a kWh.

    Attributes:
        joules: Of its process, or where the processor is measured, of its machine's processor.
        modelled: Whether any part of that is modelled.
        whole_machine: Whether it holds what other processes of the machine used.
        source: Who says so, with the joules of each part.
        carbon_g_per_kwh: CO2-equivalent; None where nothing says.
        carbon_source: Who says that.
    """

    joules: float
    modelled: bool
    whole_machine: bool
    source: str
    carbon_g_per_kwh: float | None
    carbon_source: str


class Tracker:
    """Runs codecarbon beside training; it starts in a thread because probing the machine takes seconds.

    Args:
        country: ISO code, which tells how much CO2 a kWh costs.
    """

    def __init__(self, country: str) -> None:
        self._country = country
        self._tracker: Any = None
        self._error = ""
        self._thread = threading.Thread(target=self._probe, name="energy", daemon=True)

    def start(self) -> None:
        """Begins to measure."""
        self._thread.start()

    def _probe(self) -> None:
        try:
            import codecarbon

            logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
            tracker = codecarbon.OfflineEmissionsTracker(
                country_iso_code=self._country,
                measure_power_secs=5,
                save_to_file=False,
                log_level="critical",
                tracking_mode="process",
                allow_multiple_runs=True,
            )
            tracker.start()
            self._tracker = tracker
        except Exception as error:  # an estimate that fails must never end a training run; it is reported instead
            self._error = f"{type(error).__name__}: {error}"

    def stop(self) -> Used | None:
        """Ends measuring; returns the figures, or None if codecarbon could not run (see `error`)."""
        self._thread.join(5.0)
        if self._tracker is None:
            return None
        try:
            self._tracker.stop()
            data = self._tracker.final_emissions_data
            parts = {"CPU": data.cpu_energy, "GPU": data.gpu_energy, "memory": data.ram_energy}
            kwh = {name: float(value or 0.0) for name, value in parts.items()}
            emitted_kg, used_kwh = float(data.emissions or 0.0), float(data.energy_consumed or 0.0)
        except Exception as error:  # as above
            self._error = f"{type(error).__name__}: {error}"
            return None
        is_measured, how = _method(self._tracker)
        version = f"codecarbon {importlib.metadata.version('codecarbon')} offline"
        told = [
            f"{name} {_J_PER_KWH * part:.1f} J {_how(name, how)}" for name, part in kwh.items() if part or name == "CPU"
        ]
        return Used(
            joules=_J_PER_KWH * used_kwh,
            modelled=not is_measured or kwh["memory"] > 0,
            whole_machine=is_measured,
            source=f"{version}: {', '.join(told)}",
            carbon_g_per_kwh=1e3 * emitted_kg / used_kwh if used_kwh > 0 else None,
            carbon_source=f"{version}, its figure for {self._country}",
        )

    def metrics(self) -> dict[str, float]:
        """Returns the joules so far, as measured or modelled, for a row of metrics; nothing before they are known."""
        used = getattr(getattr(self._tracker, "_total_energy", None), "kWh", None)
        if not used:
            return {}
        measured = _method(self._tracker)[0] and not _kwh(self._tracker, "_total_ram_energy")
        return {f"learner_{'measured' if measured else 'modelled'}_j": _J_PER_KWH * float(used)}

    @property
    def error(self) -> str:
        """The reason that there are no figures; empty if there are."""
        return self._error or ("codecarbon did not start in time" if self._tracker is None else "")


def summary(used: Used | None, error: str, fleet: energy.Energy, steps: int) -> dict[str, Any]:
    """Returns the energy of a session, for its summary: learner, actors, and their sum with what it is made of.

    Args:
        used: By the learner, where that is known.
        error: Why it is not.
        fleet: What the actors' boards drew.
        steps: Environment steps of the session.
    """
    own_board = machine.identity()
    drawn, notes = fleet.drawn, []
    learner_j = used.joules if used else None
    local = [one for one in drawn if own_board and one.board == own_board]
    counted = drawn
    if local and used and used.whole_machine:
        counted = [one for one in drawn if one not in local]
        notes.append("actors on the learner's machine are in the learner's figure, which counts the whole processor")
    elif learner_j is not None and any(not one.modelled for one in local):
        learner_j = None
        notes.append("the learner is in the figure of the actors on its machine, which counts the whole processor")
    actors_j = sum(one.joules for one in drawn) if drawn else None
    modelled_j = sum(one.joules for one in counted if one.modelled)
    measured_j = sum(one.joules for one in counted if not one.modelled)
    parts = []
    if learner_j is not None and used:
        parts.append(f"learner {learner_j:.1f} J {'modelled, at least in part' if used.modelled else 'measured'}")
    parts += [f"actors {modelled_j:.1f} J modelled"] if any(one.modelled for one in counted) else []
    parts += [f"actors {measured_j:.1f} J measured"] if any(not one.modelled for one in counted) else []
    if not drawn:
        notes.append("no actor's board tells its power, so actors are not in it")
    elif fleet.coverage < 1.0:
        notes.append(f"readings cover {100 * fleet.coverage:.0f} % of the actors' time; the rest is not in it")
    if used is None:
        notes.append(f"the learner is not in it: {error}")
    total_j = (learner_j or 0.0) + modelled_j + measured_j if parts else None
    carbon = used.carbon_g_per_kwh if used else None
    kwh = total_j / _J_PER_KWH if total_j is not None else None
    return {
        "learner": {
            "joules": used.joules if used else None,
            "modelled": used.modelled if used else False,
            "source": used.source if used else f"none: {error}",
        },
        "actors": {
            "joules": actors_j,
            "modelled": any(one.modelled for one in drawn),
            "source": _sources(drawn),
            "coverage": fleet.coverage,
        },
        "kwh": kwh,
        "kgco2e": kwh * carbon / 1e3 if kwh is not None and carbon is not None else None,
        "joules_per_million_steps": 1e6 * total_j / steps if total_j is not None and steps > 0 else None,
        "carbon_g_per_kwh": carbon,
        "carbon_source": used.carbon_source if used else f"none: {error}",
        "note": "; ".join([" + ".join(parts), *notes] if parts else notes),
    }


def rows(told: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns lines of the summary's table."""
    learner, actors = told["learner"], told["actors"]
    return [
        ("learner's energy", f"{_joules(learner)}; {learner['source']}"),
        ("actors' energy", f"{_joules(actors)}; {actors['source']}"),
        (
            "energy in all, CO2",
            f"{_number(told['kwh'], 1e3)} Wh, {_number(told['kgco2e'], 1e3)} g CO2e: {told['note']}",
        ),
        ("  CO2 of a kWh", f"{_number(told['carbon_g_per_kwh'], 1.0)} g; {told['carbon_source']}"),
    ]


def _joules(side: dict[str, Any]) -> str:
    if side["joules"] is None:
        return "-"
    return f"{side['joules']:.3g} J {'modelled' if side['modelled'] else 'measured'}"


def _number(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{factor * value:.3g}"


def _sources(drawn: Sequence[energy.Drawn]) -> str:
    """Returns the joules of each source, and of how many boards."""
    found: dict[tuple[str, bool], list[energy.Drawn]] = {}
    for one in drawn:
        found.setdefault((one.source, one.modelled), []).append(one)
    told = [
        f"{source or 'unnamed'} {'modelled' if modelled else 'measured'} {sum(one.joules for one in of):.1f} J of "
        f"{len(of)} board{'' if len(of) == 1 else 's'}"
        for (source, modelled), of in found.items()
    ]
    return ", ".join(told) or "none: no actor's board tells its power"


def _how(part: str, cpu: str) -> str:
    return {"CPU": cpu, "GPU": "measured (its driver)"}.get(part, "modelled (its size)")


def _kwh(tracker: Any, name: str) -> float:
    return float(getattr(getattr(tracker, name, None), "kWh", 0.0))


def _method(tracker: Any) -> tuple[bool, str]:
    """Returns whether the processor is measured, and how, from what the tracker chose."""
    modes = {str(getattr(h, "_mode", "")) for h in getattr(tracker, "_hardware", []) if type(h).__name__ == "CPU"}
    if any("rapl" in mode or "power_gadget" in mode for mode in modes):
        return True, "measured (RAPL)"
    return False, f"modelled ({', '.join(sorted(modes)) or 'constant'})"
