"""The learner's energy and CO2, by codecarbon's offline tracker.

A desktop with RAPL is measured; anywhere else codecarbon models the processor from its name and load, and the memory
from its size. Which of the two it was is part of the result.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy in Wh and CO2-equivalent in grams of the learner process's machine; `source` says how they came about."""

    energy_wh: float
    co2_g: float
    source: str


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

    def stop(self) -> Energy | None:
        """Ends measuring; returns the figures, or None if codecarbon could not run (see `error`)."""
        self._thread.join(5.0)
        if self._tracker is None:
            return None
        try:
            co2_kg = self._tracker.stop()
            data = self._tracker.final_emissions_data
            energy_kwh = float(data.energy_consumed)
        except Exception as error:  # as above
            self._error = f"{type(error).__name__}: {error}"
            return None
        version = importlib.metadata.version("codecarbon")
        return Energy(
            energy_wh=energy_kwh * 1e3,
            co2_g=float(co2_kg or 0.0) * 1e3,
            source=f"codecarbon {version} offline, {_method(self._tracker)}, {self._country}",
        )

    @property
    def error(self) -> str:
        """The reason that there are no figures; empty if there are."""
        return self._error or ("codecarbon did not start in time" if self._tracker is None else "")


def _method(tracker: Any) -> str:
    """Returns `measured (RAPL)` or `modelled (...)`, from what the tracker chose."""
    modes = {str(getattr(h, "_mode", "")) for h in getattr(tracker, "_hardware", []) if type(h).__name__ == "CPU"}
    if any("rapl" in mode or "power_gadget" in mode for mode in modes):
        return "CPU measured"
    return f"modelled ({', '.join(sorted(modes)) or 'constant'})"
