"""Joins the fleet, and waits for its actors."""

from __future__ import annotations

import logging
import math
import threading
import time

from broker.contract import errors, messages
from learner import config
from learner.fleet import roster, session

_log = logging.getLogger(__name__)
_WAITING_S = 15.0  # between two lines that tell people what is waited for


class Stopped(Exception):
    """The session was asked to stop before training began."""


def gather(
    settings: config.TrainConfig,
    joining: session.Session,
    actors: roster.Roster,
    stop: threading.Event,
    until_s: float = math.inf,
) -> None:
    """Joins, and waits until enough actors with one spec are alive, which becomes the fleet's.

    Args:
        settings: How many actors, and how long to wait.
        joining: The session, which joins.
        actors: Takes them in.
        stop: Ends the wait.
        until_s: Monotonic time at which the session must end.

    Raises:
        EnvironmentFailure: They did not come in time.
        NothingLearned: Nor did they before the session had to end.
        BrokerUnreachable: No broker answered.
        FleetBusy: Another learner is alive on the fleet.
        Stopped: `stop` was set meanwhile.
    """
    arrivals = joining.join()
    actors.epoch = joining.epoch
    _log.info(
        "learner on %s, fleet %r: waiting for %d actor(s); enrolled: %s",
        joining.brokers.address,
        settings.fleet,
        settings.actors,
        ", ".join(joining.macs) or "none; run `actorq-broker enroll NAME`",
    )
    deadline, log_at = time.monotonic() + (settings.wait_s or math.inf), time.monotonic() + _WAITING_S
    while True:
        for arrival in arrivals:
            if isinstance(arrival.message, messages.ActorState):
                joining.compare_epochs(arrival.actor_id, arrival.message.vitals.policy_epoch)
                actors.observe(arrival.actor_id, arrival.message, retained=arrival.retained, now_s=time.monotonic())
        working = len(actors.working())
        if actors.decided and working >= settings.actors:
            return
        if stop.is_set():
            raise Stopped
        if time.monotonic() > deadline:
            raise errors.EnvironmentFailure(
                f"{working} of {settings.actors} actors came within {settings.wait_s:g} s",
                where=f"fleet {settings.fleet!r} at {joining.brokers.address}{actors.refusals}",
                todo="start actors with `actorq-actor run`, and look at what they say",
            )
        if time.monotonic() > until_s:
            raise errors.NothingLearned(
                f"nothing was learned: {working} of {settings.actors} actors came before the time was up",
                where=f"max_wall_s {settings.max_wall_s:g}; fleet {settings.fleet!r} at {joining.brokers.address}",
                todo="start actors with `actorq-actor run`, and look at what they say",
            )
        if time.monotonic() > log_at:
            log_at += _WAITING_S
            _log.info("still waiting: %d of %d actor(s) are here", working, settings.actors)
        joining.beat()
        arrivals = list(joining.drain(0.1))
