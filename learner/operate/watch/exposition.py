"""The fleet in Prometheus' text format: a name for each figure, units as Prometheus wants them.

Figures that a board cannot tell are left out, not 0. What each actor has is written here, line by line: a fleet has
thousands of lines, and prometheus_client takes many times as long for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import registry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from learner.operate.watch import alarms, fleet_view, run_files


class Figure(NamedTuple):
    """One figure of a row, as Prometheus has it."""

    key: str
    name: str
    about: str
    scale: float = 1.0
    counts: bool = False


_ACTOR = (
    Figure("live", "up", "1 if the actor was heard lately, else 0"),
    Figure("heard_s", "last_heard_timestamp_seconds", "when the actor was last heard, Unix time"),
    Figure("steps", "steps", "environment steps of this process", counts=True),
    Figure("steps_per_s", "steps_per_second", "environment steps a second, between its last two heartbeats"),
    Figure("episodes", "episodes", "episodes of this process", counts=True),
    Figure("return_mean", "return_mean", "mean return of its newest episodes"),
    Figure("policy_lag", "policy_lag_versions", "versions between the newest policy it knows of and the acting one"),
    Figure("latency_p50_us", "action_latency_p50_seconds", "observation to action, median of timed calls", 1e-6),
    Figure("latency_p99_us", "action_latency_p99_seconds", "observation to action, 99th percentile", 1e-6),
    Figure("deadlines_missed", "deadlines_missed", "steps that came too late for the control rate", counts=True),
    Figure("temperature_c", "temperature_celsius", "of the board's processor"),
    Figure("throttled", "throttled_bits", "get_throttled of a Raspberry Pi"),
    Figure("power_w", "power_watts", "of the whole board, by power_source"),
    Figure("step_energy_j", "step_energy_joules", "of the whole board, for each step of this actor"),
    Figure("cpu_percent", "cpu_ratio", "of one core, by the actor's process", 0.01),
    Figure("spool_share", "spool_ratio", "how full the spool is"),
    Figure("messages_held", "spool_messages", "experience messages without a receipt"),
    Figure("steps_dropped", "steps_dropped", "steps that a full spool dropped", counts=True),
    Figure("env_failures", "environment_failures", "times that its environment failed", counts=True),
)
_LEARNER = (
    Figure("env_steps", "env_steps", "environment steps that reached replay, whole run", counts=True),
    Figure("updates", "updates", "gradient steps, whole run", counts=True),
    Figure("episodes", "episodes", "episodes that ended, whole run", counts=True),
    Figure("return_mean", "return_mean", "mean return of the last 100 training episodes"),
    Figure("published_return_mean", "published_return_mean", "greedy return of the policy scored last"),
    Figure("updates_per_s", "updates_per_second", "gradient steps a second"),
    Figure("env_steps_per_s", "env_steps_per_second", "environment steps a second"),
    Figure("policy_lag_mean", "policy_lag_mean_versions", "of the steps of this session, when they arrived"),
    Figure("publish_to_acting_ms", "publish_to_acting_seconds", "from an update to an actor's acting on it", 1e-3),
    Figure("messages", "messages", "experience messages taken in", counts=True),
    Figure("messages_refused", "messages_refused", "messages refused", counts=True),
    Figure("steps_missed", "steps_missed", "steps that actors dropped before they could be sent", counts=True),
    Figure("writes_failed", "writes_failed", "files of the run that the disk did not take", counts=True),
    Figure("observations_outside", "observations_outside_ratio", "steps outside calibration, worst feature and actor"),
    Figure("actions_at_bound", "actions_at_bound_ratio", "steps with an action at one bound, worst element and actor"),
    Figure("actors_drifting", "actors_drifting", "actors that left what their policy was made for"),
    Figure("canary_actors", "canary_actors", "actors that try a policy before all get it"),
    Figure("canary_promoted", "policies_promoted", "policies that went to all after a trial", counts=True),
    Figure("canary_withdrawn", "policies_withdrawn", "policies that a trial found worse", counts=True),
    Figure("message_budget_per_s", "message_budget_per_second", "messages of each kind that all actors may send"),
    Figure("ingest_capacity_per_s", "ingest_capacity_per_second", "messages that the loop could take in at most"),
    Figure("backlog_s", "backlog_seconds", "that taking in what has arrived would take"),
    Figure("broker_delay_s", "broker_delay_seconds", "through the slowest broker and back"),
    Figure("bytes_received", "received_bytes", "MQTT payloads", counts=True),
    Figure("bytes_sent", "sent_bytes", "MQTT payloads", counts=True),
)
_INFO = ("board", "release", "python", "runtime", "kernels", "env_id", "policy", "power_source")


class Exposition:
    """Writes what a view and, where there is one, a run know.

    Args:
        view: The fleet.
        run: Returns the run's files; None if there are none.
    """

    def __init__(self, view: fleet_view.FleetView, run: Callable[[], run_files.RunFiles | None]) -> None:
        self._view = view
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_FleetCollector(view, run))

    def text(self) -> bytes:
        """Returns the answer to a scrape: a family for each figure that somebody has."""
        _, rows, _ = self._view.rows()
        return "".join(_actor_lines(rows)).encode() + prometheus_client.generate_latest(self._registry)


def _actor_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    labels = [f'{{actor="{_escaped(row["actor"])}"' for row in rows]  # each open, for further ones
    for one in _ACTOR:
        name = f"actorq_actor_{one.name}" + ("_total" if one.counts else "")
        lines = [
            f"{name}{label}}} {float(value * one.scale)!r}\n"
            for label, row in zip(labels, rows, strict=True)
            if (value := row.get(one.key)) is not None
        ]
        if lines:
            yield _head(name, one.about, "counter" if one.counts else "gauge")
            yield from lines
    yield _head("actorq_actor_info", "who the actor is", "gauge")
    for label, row in zip(labels, rows, strict=True):
        known = "".join(f',{key}="{_escaped(str(row.get(key, "")))}"' for key in _INFO)
        yield f"actorq_actor_info{label}{known}}} 1.0\n"
    yield _head("actorq_actor_alarm", "1 while the actor has this alarm", "gauge")
    for label, row in zip(labels, rows, strict=True):
        for kind in row["alarms"]:
            yield f'actorq_actor_alarm{label},alarm="{kind}"}} 1.0\n'
    yield _head("actorq_actor_messages_refused_total", "messages that the actor refused", "counter")
    for label, row in zip(labels, rows, strict=True):
        for reason, count in row.get("refused", {}).items():
            yield f'actorq_actor_messages_refused_total{label},reason="{_escaped(reason)}"}} {float(count)}\n'


def _head(name: str, about: str, kind: str) -> str:
    return f"# HELP {name} {about}\n# TYPE {name} {kind}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class _FleetCollector(registry.Collector):
    """Collects what is not of single actors; arguments as Exposition's."""

    def __init__(self, view: fleet_view.FleetView, run: Callable[[], run_files.RunFiles | None]) -> None:
        self._view, self._run = view, run

    def collect(self) -> Iterator[Metric]:
        """Yields a family for each figure that somebody has."""
        fleet = self._view.fleet()
        total = GaugeMetricFamily("actorq_fleet_alarms", "actors that have this alarm", labels=["alarm"])
        for kind in alarms.KINDS:
            total.add_metric([kind], fleet["alarms"].get(kind, 0))
        yield total
        yield GaugeMetricFamily("actorq_fleet_actors", "actors that are enrolled and were ever heard", fleet["actors"])
        yield GaugeMetricFamily("actorq_fleet_actors_live", "actors that were heard lately", fleet["live"])
        learner = fleet["learner"]
        if learner:
            yield GaugeMetricFamily("actorq_learner_up", "1 if the learner was heard lately", float(learner["live"]))
            yield GaugeMetricFamily("actorq_learner_policy_version", "newest published", learner["version"])
            yield GaugeMetricFamily("actorq_learner_epoch", "of the learner's session", learner["epoch"])
        watch = CounterMetricFamily("actorq_watch_messages_refused", "messages not shown", labels=["reason"])
        for reason, count in fleet["refused"].items():
            watch.add_metric([reason], count)
        yield watch
        run = self._run()
        newest = run.newest if run is not None else {}
        for one in _LEARNER:
            if (value := newest.get(one.key)) is not None:
                family = CounterMetricFamily if one.counts else GaugeMetricFamily
                yield family(f"actorq_learner_{one.name}", one.about, value=value * one.scale)
