"""What Prometheus is told: names that the dashboard asks for, and none for what nobody knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser

from broker.contract import messages
from learner.operate.watch import exposition, fleet_view, run_files
from tests.fakes import simulated_actor

DASHBOARD = Path(__file__).parents[4] / "docs" / "fleet" / "watch" / "grafana.json"
NUMBERS: dict[str, Any] = dict.fromkeys(
    ("latency_p50_us", "latency_p99_us", "temperature_c", "power_w", "step_energy_j"), 1.0
)


def text(view: fleet_view.FleetView, run: run_files.RunFiles | None = None) -> str:
    return exposition.Exposition(view, lambda: run).text().decode()


@pytest.fixture
def view() -> fleet_view.FleetView:
    birth = messages.Birth("Arm-v0", simulated_actor.SPEC, 1, 'a "board"\\n\n', "3.11", "litert", "", 50.0)
    vitals = messages.Vitals(steps=5, spool_share=0.25, refused={"signature": 2}, **NUMBERS)
    made = fleet_view.FleetView()
    made.hear_actor("pi", messages.ActorState(True, "s", 1, 1, birth, messages.Vitals()), retained=False)
    made.hear_actor("pi", messages.ActorState(True, "s", 1, 2, birth, vitals), retained=False)
    return made


def test_units_are_the_base_ones_and_the_unknown_is_left_out(view: fleet_view.FleetView) -> None:
    found = text(view)
    assert 'actorq_actor_action_latency_p99_seconds{actor="pi"} 1e-06' in found
    assert 'actorq_actor_messages_refused_total{actor="pi",reason="signature"} 2.0' in found
    assert 'actorq_actor_alarm{actor="pi",alarm="refusals"} 1.0' in found
    assert "throttled_bits" not in found and "actorq_learner" not in found


def test_the_dashboard_asks_for_what_there_is(view: fleet_view.FleetView, tmp_path: Path) -> None:
    row = {"wall_s": 1.0, "env_steps": 9, "return_mean": 1.0, "published_return_mean": 2.0, "updates_per_s": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = text(view, run_files.open_run(tmp_path))
    asked = set(re.findall(r"actorq_(?:actor|learner|fleet)_\w+", DASHBOARD.read_text()))
    assert asked and not {name for name in asked if f"\n{name}" not in found}


def test_what_is_told_can_be_read(view: fleet_view.FleetView) -> None:
    families = {one.name: one for one in parser.text_string_to_metric_families(text(view))}
    assert families["actorq_actor_steps"].type == "counter"
    assert families["actorq_actor_info"].samples[0].labels["board"] == 'a "board"\\n\n', (
        "whatever an actor calls its board"
    )
