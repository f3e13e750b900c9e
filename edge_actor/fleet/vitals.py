"""How the actor and its board are doing, for the heartbeat."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import platform
import time
from typing import Any

import psutil

from broker.contract import messages
from edge_actor.acting import pace, supervised_env
from edge_actor.board import board, power
from edge_actor.environment import env
from edge_actor.experience import recorder, spool
from edge_actor.fleet import inbox
from edge_actor.policies import receiver

_ENERGY_WINDOW_S = _LOAD_WINDOW_S = 0.5


class Energy:
    """The board's power, and its energy per step of this actor, between the last two heartbeats.

    All the board draws is counted, so of two actors on one board each tells the whole.
    """

    def __init__(self, meter: power.Meter | None) -> None:
        self._meter = meter
        self._steps = 0
        self._total = meter.read() if meter else None
        self.power_w: float | None = None
        self.step_energy_j: float | None = None

    @property
    def source(self) -> str:
        """Who says so; empty where nobody does."""
        return self._meter.source.name if self._meter else ""

    @property
    def modelled(self) -> bool:
        return self._meter is not None and self._meter.source.modelled

    def take(self, steps: int) -> None:
        """Brings the figures up to date, `steps` into this boot. Beats in quick succession share one reading."""
        if self._meter is None or self._total is None:
            return
        now = self._meter.read()
        length_s = now.at_s - self._total.at_s
        if length_s < _ENERGY_WINDOW_S:
            return
        joules, done = now.since(self._total), steps - self._steps
        self._total, self._steps = now, steps
        self.power_w = None if joules is None else joules / length_s
        self.step_energy_j = None if joules is None or done <= 0 else joules / done

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


class Load:
    """Processor, memory, temperature and power. Asked in quick succession it looks once: that takes half a millisecond.

    Args:
        period_s: How often it will be asked.

    Attributes:
        cpu_percent: Of one core, by this process, between the last two looks.
    """

    def __init__(self, period_s: float) -> None:
        source = power.find(period_s=period_s).source
        self.energy = Energy(power.Meter.of_board(source, period_s) if source else None)
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._look()

    def look(self) -> None:
        """Brings all but the energy up to date, if that is due."""
        if time.monotonic() - self._looked_at > _LOAD_WINDOW_S:
            self._look()

    def close(self) -> None:
        self.energy.close()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        self.cpu_percent = float(self._process.cpu_percent())
        self.rss_bytes = int(self._process.memory_info().rss)
        self.memory_available_bytes = int(psutil.virtual_memory().available)
        self.temperature_c = board.temperature_c()


def birth(environment: env.Environment, runtime: str, delegate: str, rate_hz: float) -> messages.Birth:
    """Who this actor is."""
    return messages.Birth(
        env_id=environment.name,
        spec=environment.spec,
        n_envs=environment.n_envs,
        board=_board(),
        python=platform.python_version(),
        runtime=runtime,
        delegate=delegate,
        rate_hz=rate_hz,
    )


@functools.cache
def _board() -> str:
    return (board.model() or f"{platform.system()} {platform.machine()}")[: messages.MAX_NAME_CHARS]


def take(
    record: recorder.Recorder,
    outbox: spool.Spool,
    policies: receiver.PolicyReceiver,
    acted_on: supervised_env.Plant,
    metronome: pace.Metronome | None,
    said: inbox.Inbox,
    load: Load,
    delegate: str,
) -> messages.Vitals:
    """Every counter there is, and the kernels that the acting policy runs on. A figure that is not finite is none."""
    load.look()
    energy = load.energy
    energy.take(record.steps)
    epoch, version = record.order
    newest_epoch, newest_version = policies.announced
    told = messages.Vitals(
        policy_epoch=epoch,
        policy_version=version,
        policy_lag=max(0, newest_version - (version if epoch == newest_epoch else 0)),
        policy_phase=policies.phase.value,
        delegate=delegate,
        steps=record.steps,
        episodes=record.episodes,
        steps_recorded=outbox.steps,
        steps_unrecorded=max(0, record.steps - outbox.steps),
        messages_held=len(outbox),
        steps_dropped=outbox.steps_dropped,
        deadlines_missed=metronome.missed if metronome else 0,
        env_failures=acted_on.failures,
        env_failure=acted_on.failure,
        return_mean=record.return_mean,
        swap_pause_ms=policies.pause_ms,
        cpu_percent=load.cpu_percent,
        rss_bytes=load.rss_bytes,
        memory_available_bytes=load.memory_available_bytes,
        temperature_c=load.temperature_c,
        power_w=energy.power_w,
        step_energy_j=energy.step_energy_j,
        power_source=energy.source,
        power_modelled=energy.modelled,
        refused=dict(collections.Counter(said.refused) + collections.Counter(policies.refused)),
    )
    figures: dict[str, Any] = {field.name: getattr(told, field.name) for field in dataclasses.fields(told)}
    for name, value in figures.items():
        if isinstance(value, float) and not math.isfinite(value):
            figures[name] = None
    return messages.Vitals(**figures)
