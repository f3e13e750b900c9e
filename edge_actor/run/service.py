"""One process of an actor as a program: it acts, and starts again when it was ordered to or ordered settings failed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import subprocess
import threading

from broker.contract import errors
from broker.fleet import identity
from broker.program import cli
from edge_actor import config
from edge_actor.board import watchdog
from edge_actor.environment import failure
from edge_actor.orders import log_lines, order_log, release_trial, trial
from edge_actor.run import build
from edge_actor.updates import release_directory

_log = logging.getLogger(__name__)
_REBOOT_S = 120.0


def run(settings: config.ActorConfig, bundle: identity.Bundle) -> int:
    """Acts until a signal ends it; returns the exit code.

    Raises:
        ActorqError: As `build.build` and `Actor.run` do, unless it is ordered settings that fail: these are undone.
    """
    lines = log_lines.LogLines.attached()
    log = order_log.OrderLog.open(build.state_directory(settings, bundle), bundle.learner_key)
    releases = release_directory.ReleaseDirectory.of_this_process()
    proving = release_trial.resume(log, releases)
    # As it was before the watchdog takes systemd's variables out of it: who starts again is supervised too
    again = functools.partial(trial.start_again, dict(os.environ))
    dog, stopped, trying = watchdog.Watchdog.open(), threading.Event(), trial.Trial(log, again)
    trying.start(settings.trial_s)
    follows = ""
    try:
        actor = build.build(
            settings,
            bundle,
            on_alive=dog.alive,
            patient=dog.supervised,
            log=log,
            lines=lines,
            releases=releases,
            trial=proving,
        )

        def stop() -> None:
            stopped.set()
            actor.stop()

        cli.on_stop_signal(stop)
        trying.stops_by(actor.stop)
        actor.run()
        follows = actor.follows
    except (Exception, SystemExit) as error:  # whatever an environment with other arguments raises
        if stopped.is_set() or not trying.failed(failure.text(error)):
            raise
    trying.end()
    if stopped.is_set():
        return errors.EXIT_OK
    if follows == "update":
        _log.info("ends, to be started again as the new release")
        return errors.EXIT_AGAIN
    if follows == "reboot":
        why = _reboot(settings.reboot_command)
        # As a service it ends, and systemd goes on (firmware_notes/setup_pi.sh)
        if not why and (dog.supervised or stopped.wait(_REBOOT_S)):
            return errors.EXIT_OK
        with contextlib.suppress(OSError):  # then it stays unanswered
            log.give_up(why or f"the board still runs {_REBOOT_S:g} s after {settings.reboot_command!r}")
    if follows or trying.is_undone:
        again()
    return errors.EXIT_OK


def _reboot(command: str) -> str:
    """Has the board boot; returns why it will not, or nothing."""
    _log.warning("ordered to reboot: %s", command)
    try:
        done = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_REBOOT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"{command!r} failed: {error}"
    return f"{command!r} ended with {done.returncode} {done.stderr.strip()}".strip() if done.returncode else ""
