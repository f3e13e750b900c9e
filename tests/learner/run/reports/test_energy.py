"""The energy of a run: what is added, what is named, and what is left out and said."""

from __future__ import annotations

from typing import Any

import pytest

from broker.contract import messages
from broker.program import machine
from learner.fleet import energy as fleet_energy
from learner.run.reports import energy
from tests.fakes import fleet_examples

LEARNER = energy.Used(360.0, True, False, "codecarbon: CPU 360.0 J modelled", 400.0, "codecarbon, its figure for DEU")


def fleet(joules: float, **changes: Any) -> fleet_energy.Energy:
    made = fleet_energy.Energy()
    values: dict[str, Any] = {"power_source": "INA226 hwmon3", "board_id": "pi's"} | changes
    for at_s, total in ((0.0, 0.0), (10.0, joules)):
        vitals = messages.Vitals(energy_j=total, energy_s=at_s, created_s=1e9 + at_s, **values)
        made.note("pi", fleet_examples.state(vitals=vitals), at_s)
    return made


def test_the_sum_says_what_is_measured_and_what_modelled() -> None:
    told = energy.summary(LEARNER, "", fleet(3240.0), 500_000)
    assert told["kwh"] == pytest.approx(0.001) and told["kgco2e"] == pytest.approx(0.0004)
    assert told["joules_per_million_steps"] == pytest.approx(7200.0)
    assert told["carbon_g_per_kwh"] == 400.0 and told["carbon_source"] == "codecarbon, its figure for DEU"
    assert told["note"] == "learner 360.0 J modelled, at least in part + actors 3240.0 J measured"
    assert told["actors"] == {
        "joules": 3240.0,
        "modelled": False,
        "source": "INA226 hwmon3 measured 3240.0 J of 1 board",
        "coverage": 1.0,
    }


def test_what_nobody_tells_is_null_and_said() -> None:
    told = energy.summary(None, "switched off", fleet_energy.Energy(), 1000)
    assert told["kwh"] is told["kgco2e"] is told["joules_per_million_steps"] is told["learner"]["joules"] is None
    assert "switched off" in told["note"] and "no actor's board tells its power" in told["note"]
    alone = energy.summary(LEARNER, "", fleet_energy.Energy(), 1000)
    assert alone["kwh"] == pytest.approx(0.0001) and "actors are not in it" in alone["note"]


def test_a_machine_that_is_measured_as_a_whole_counts_once() -> None:
    here = {"board_id": machine.identity(), "power_source": "RAPL package-0"}
    assert here["board_id"]
    measured = energy.Used(360.0, False, True, "codecarbon: CPU 360.0 J measured (RAPL)", 400.0, "")
    told = energy.summary(measured, "", fleet(3240.0, **here), 1000)
    assert told["kwh"] == pytest.approx(0.0001) and "in the learner's figure" in told["note"]
    assert told["actors"]["joules"] == 3240.0
    told = energy.summary(LEARNER, "", fleet(3240.0, **here), 1000)
    assert told["kwh"] == pytest.approx(0.0009) and "learner is in the figure of the actors" in told["note"]


def test_the_table_has_every_source() -> None:
    text = dict(energy.rows(energy.summary(LEARNER, "", fleet(3240.0), 500_000)))
    assert text["actors' energy"] == "3.24e+03 J measured; INA226 hwmon3 measured 3240.0 J of 1 board"
    assert text["learner's energy"].startswith("360 J modelled; codecarbon")
