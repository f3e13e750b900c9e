"""`actorq-learner bench`: every actor of a fleet measures its board, and one page compares them.

Actors are asked over MQTT, `at_once` at a time: those that share a machine would disturb each other. They go on acting
only where they hold a control rate. An actor is waited for as long as its heartbeat goes on.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.contract import errors, messages
from learner import config
from learner.fleet import roster, session

_log = logging.getLogger(__name__)
ROWS = "rows.jsonl"
_ROW = "row"
_ROLL_CALL_S = 5.0
"""How long actors are looked for after the last one that was new: some heartbeats."""


@dataclass(slots=True)
class _Actor:
    boot: int
    heard_s: float
    acting_hz: float
    command_id: str = ""
    ended: str | None = None  # how: empty when all went well
    rows: list[dict[str, Any]] = field(default_factory=list)


def run(
    settings: config.TrainConfig,
    options: Mapping[str, str],
    directory: Path,
    *,
    at_once: int,
) -> str:
    """Measures the whole fleet into `directory`: rows.jsonl as it goes, page.html at the end.

    Args:
        settings: Fleet, brokers, how many actors to wait for, and how long.
        options: Settings of `actorq-actor bench` by name, and `quick`.
        directory: Made if need be.
        at_once: Actors that measure at the same time.

    Returns:
        The table, as text.

    Raises:
        EnvironmentFailure: Too few actors came, or none could measure.
    """
    directory.mkdir(parents=True, exist_ok=True)
    held = session.Session.open(settings)
    try:
        with open(directory / ROWS, "w", encoding="utf-8") as file:
            collector = _Collector(held, settings, options, file.write)
            collector.call_roll()
            collector.collect(at_once)
            file.flush()
    finally:
        held.close()
    if not any(actor.rows for actor in collector.actors.values()):
        ended = "; ".join(f"{name}: {actor.ended}" for name, actor in collector.actors.items())
        raise errors.EnvironmentFailure("no actor could measure", where=ended, todo="run `actorq-actor bench` there")
    return draw(directory)


def draw(directory: Path) -> str:
    """The page of the rows in a directory, by the actor's own command; returns its table."""
    command = [sys.executable, "-m", "edge_actor", "bench", "--draw", str(directory / ROWS), "-o", str(directory)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise errors.ActorqError(
            f"the page cannot be drawn: {done.stderr.strip()}",
            where=str(directory / ROWS),
            todo="install 'actorq-fleet[actor]' beside the learner",
        )
    return done.stdout


class _Collector:
    """Asks, and takes in what is answered.

    Attributes:
        actors: Whoever is alive, by id.
    """

    def __init__(
        self,
        held: session.Session,
        settings: config.TrainConfig,
        options: Mapping[str, str],
        write: Callable[[str], object],
    ) -> None:
        self._session = held
        self._settings = settings
        self._options = dict(options)
        self._write = write
        self.actors: dict[str, _Actor] = {}

    def call_roll(self) -> None:
        """Waits for actors until no new one comes any more.

        Raises:
            EnvironmentFailure: Too few came in time.
        """
        for arrival in self._session.join():
            self._take(arrival)
        began = last = time.monotonic()
        while len(self.actors) < self._settings.actors or time.monotonic() - last < _ROLL_CALL_S:
            before = len(self.actors)
            self._turn()
            if len(self.actors) > before:
                last = time.monotonic()
            if len(self.actors) < self._settings.actors and 0 < self._settings.wait_s < time.monotonic() - began:
                raise errors.EnvironmentFailure(
                    f"{len(self.actors)} of {self._settings.actors} actors came within {self._settings.wait_s:g} s",
                    where=f"fleet {self._settings.fleet!r}",
                    todo="start actors with `actorq-actor run`",
                )

    def collect(self, at_once: int) -> None:
        """Until every actor has answered or is gone."""
        while waiting := [name for name, actor in self.actors.items() if actor.ended is None]:
            asked = [name for name in waiting if self.actors[name].command_id]
            for name in [name for name in waiting if name not in asked][: max(0, at_once - len(asked))]:
                self._ask(name, self.actors[name])
            self._turn()
            for name in asked:
                actor = self.actors[name]
                if actor.ended is None and time.monotonic() - actor.heard_s > roster.SILENCE_S:
                    self._end(name, actor, "it fell silent")

    def _ask(self, name: str, actor: _Actor) -> None:
        order = messages.Command(f"{self._session.id}-bench-{name}", "bench", actor.boot, options=self._options)
        if self._session.command(name, order):
            actor.command_id = order.command_id
            _log.info("%s measures", name)

    def _turn(self) -> None:
        self._session.beat()
        for arrival in self._session.drain(0.1):
            self._take(arrival)

    def _take(self, arrival: session.Arrival) -> None:
        name, message = arrival.actor_id, arrival.message
        if isinstance(message, messages.ActorState) and not arrival.retained:
            self._hear(name, message)
        elif isinstance(message, messages.Report) and name in self.actors:
            actor = self.actors[name]
            if message.command_id != actor.command_id or actor.ended is not None:
                return
            if _ROW not in message.labels:
                self._end(name, actor, message.error)
                return
            try:
                row = {**json.loads(message.labels[_ROW]), "actor": name, "acting_hz": actor.acting_hz}
            except (ValueError, TypeError) as error:
                _log.warning("%s sent a row that is none: %s", name, error)
                return
            actor.rows.append(row)
            self._write(json.dumps(row) + "\n")
            _log.info("%s: %d rows", name, len(actor.rows))

    def _hear(self, name: str, state: messages.ActorState) -> None:
        actor = self.actors.get(name)
        if actor is None:
            if state.online:
                rate_hz = state.birth.rate_hz if state.birth else 0.0
                self.actors[name] = _Actor(state.boot, time.monotonic(), rate_hz)
                _log.info("%s is here: %s", name, state.birth.board if state.birth else "board unknown")
            return
        actor.heard_s = time.monotonic()
        if actor.ended is None and actor.command_id and (state.boot != actor.boot or not state.online):
            self._end(name, actor, "it ended meanwhile")

    def _end(self, name: str, actor: _Actor, how: str) -> None:
        actor.ended = how
        _log.info("%s: %s, %d rows", name, how or "done", len(actor.rows))
