"""How the actor and its board are doing, for the heartbeat."""

from __future__ import annotations

import collections
import platform
from pathlib import Path

import psutil

from broker import messages
from edge_actor import env, inbox, pace, plant, recorder, spool, swap

_MODEL = Path("/proc/device-tree/model")  # a Raspberry Pi's name of itself
_TEMPERATURE = Path("/sys/class/thermal/thermal_zone0/temp")


def board() -> str:
    """Name of the machine: a Pi's model, else processor and architecture."""
    try:
        return _MODEL.read_text().strip("\0\n ")
    except OSError:
        return f"{platform.system()} {platform.machine()}"


def temperature_c() -> float | None:
    """Temperature of the processor, where the board gives one."""
    try:
        return int(_TEMPERATURE.read_text()) / 1000.0
    except (OSError, ValueError):
        return None


class Load:
    """Processor and memory. The processor's share is that of the time since the last call."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def cpu_percent(self) -> float:
        """Of one core, by this process."""
        return float(self._process.cpu_percent())

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def memory_available_bytes(self) -> int:
        return int(psutil.virtual_memory().available)


def birth(environment: env.Environment, runtime: str, delegate: str, rate_hz: float) -> messages.Birth:
    """Who this actor is."""
    return messages.Birth(
        env_id=environment.name,
        spec=environment.spec,
        n_envs=environment.n_envs,
        board=board(),
        python=platform.python_version(),
        runtime=runtime,
        delegate=delegate,
        rate_hz=rate_hz,
    )


def take(
    record: recorder.Recorder,
    outbox: spool.Spool,
    policies: swap.Swap,
    acted_on: plant.Plant,
    metronome: pace.Metronome | None,
    said: inbox.Inbox,
    load: Load,
    delegate: str,
) -> messages.Vitals:
    """Every counter there is, and the kernels that the acting policy runs on."""
    epoch, version = record.order
    newest_epoch, newest_version = policies.announced
    return messages.Vitals(
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
        return_mean=record.return_mean,
        swap_pause_ms=policies.pause_ms,
        cpu_percent=load.cpu_percent(),
        rss_bytes=load.rss_bytes(),
        memory_available_bytes=load.memory_available_bytes(),
        temperature_c=temperature_c(),
        refused=dict(collections.Counter(said.refused) + collections.Counter(policies.refused)),
    )
