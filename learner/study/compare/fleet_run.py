"""Runs one fleet to its end, as a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import children, cli
from learner.study.compare import headroom, peers, plan

_POLL_S = 0.2
_STOP_S = 20.0
"""A fleet ends its learner first, which may be in the middle of a long call of updates, and then its actors."""
_FOREVER_S = "1000000"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a fleet.

    Attributes:
        summary: What it printed; empty if nothing.
        failed: Why it counts for nothing; empty if it does.
        stopped: Whether it was ended from outside.
        wall_s: From its start to its end.
    """

    summary: dict[str, Any]
    failed: str
    stopped: bool
    wall_s: float


def command(request: plan.Request, arm: plan.Arm, seed: int, directory: Path) -> list[str]:
    """Returns the command of a run's fleet, without what decides when it ends."""
    where = ["demo"]
    if request.fleet:
        where = ["train", "--fleet", request.fleet, "--wait-s", str(request.wait_s)]
        where += ["--broker", request.broker] if request.broker else []
    elif arm.regime == plan.ACTOR_BOUND:
        where += ["--actor-cpu-share", str(request.actor_cpu_share)]
    if arm.peer:
        where += ["--actor-python", str(peers.python()), "--actor-runtime", peers.known()[arm.peer]]
    words = [*where, "--env", request.env, "--actors", str(request.actors), "--seed", str(seed), "--json"]
    words += ["--precision", arm.precision, "--hidden", ",".join(map(str, arm.hidden)), "--run-dir", str(directory)]
    return [sys.executable, "-m", "learner", *words, *settings(request)]


def settings(request: plan.Request) -> list[str]:
    """Returns the further settings that were asked for, as flags."""
    found = []
    for pair in request.settings:
        name, _, value = pair.partition("=")
        flag = name.strip().replace("_", "-")
        found += [{"true": f"--{flag}", "false": f"--no-{flag}"}.get(value, f"--{flag}={value}")]
    return found


def until_steps(pace: headroom.Pace, tuned: Mapping[str, Any], max_s: float) -> list[str]:
    """Returns flags of a run of so many steps.

    No score stops it or takes actors' time. Exploration is from the start what it is at the end: a random action takes
    no inference.
    """
    end = str(tuned.get("epsilon_end", ""))  # what samples its actions has none
    return [
        *("--solved-return", "inf", "--evaluate-episodes", "0", "--max-env-steps", str(pace.steps or 10**9)),
        *(("--epsilon-start", end, "--epsilon-end", end) if end else ()),
        *("--max-wall-s", str(max_s), "--checkpoint-period-s", _FOREVER_S, *pace.flags()),
    ]


def until_threshold(request: plan.Request, pace: headroom.Pace, tuned: Mapping[str, Any]) -> list[str]:
    """Returns flags of a run towards the task's threshold.

    Its limit allows as many updates as the task's: where steps are sampled less often than is tuned, more steps; unless
    the limit was asked for.
    """
    flags = ["--max-wall-s", str(request.max_s), "--checkpoint-period-s", _FOREVER_S, *pace.flags()]
    is_asked = any(flag.startswith("--max-env-steps=") for flag in settings(request))
    if not is_asked and pace.samples_per_insert and pace.samples_per_insert < tuned["samples_per_insert"]:
        most = tuned["max_env_steps"] * tuned["samples_per_insert"] / pace.samples_per_insert
        flags += ["--max-env-steps", str(math.ceil(most))]
    return flags


def tuned(request: plan.Request) -> dict[str, Any]:
    """Returns the settings that are in force for the task, as `--dump-config` prints them.

    Raises:
        ActorqError: A setting is wrong, or there is no such environment.
    """
    import tomllib

    verb = "train" if request.fleet else "demo"
    words = [sys.executable, "-m", "learner", verb, "--env", request.env, *settings(request), "--dump-config"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise cli.as_said(done.stderr, done.returncode)
    found = tomllib.loads(done.stdout)
    if "hidden" not in found:
        raise errors.ConfigError(
            f"which algorithm learns {request.env} is not known", todo="name it, as in --set algorithm=dqn"
        )
    return found


def run(
    words: Sequence[str],
    log: Path,
    stop: threading.Event,
    enough: Callable[[], bool] = lambda: False,
    max_s: float = float("inf"),
) -> Outcome:
    """Runs a fleet until it ends, `stop` is set, there is `enough` of it, or it takes longer than `max_s`.

    In a session of its own: Ctrl-C reaches only this process, which ends it in order.
    """
    began = time.monotonic()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(peers.ROOT), os.environ.get("PYTHONPATH"))))
    }
    with open(log, "ab") as said:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=children.die_with_parent(),  # noqa: PLW1509  no thread holds a lock that it needs
        )
    answers: list[str] = []
    reader = threading.Thread(target=lambda: answers.append(child.stdout.read() if child.stdout else ""))
    reader.start()
    ended = True
    try:
        while child.poll() is None and ended:
            ended = not (stop.wait(_POLL_S) or enough() or time.monotonic() - began > max_s)
    finally:
        if child.poll() is None:
            _end(child)
        reader.join()
    summary, failed = _summary(answers[0]), ""
    if ended and child.returncode not in (errors.EXIT_OK, errors.NotSolved.exit_code):
        failed = _said(log.read_text(errors="replace")) or f"it ended with code {child.returncode}"
    elif ended and not summary:
        failed = "it printed no summary"
    elif not ended and time.monotonic() - began > max_s:
        failed = f"it did not end within {max_s:.0f} s"
    return Outcome(summary, failed, not ended, time.monotonic() - began)


def _end(child: subprocess.Popen[str]) -> None:
    child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()  # and its children with it
        child.wait()


def _summary(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _said(stderr: str) -> str:
    """Returns what one of our commands, or argparse, said last is wrong, in one line."""
    _, found, text = stderr.rpartition("error: ")
    return " ".join(line.strip() for line in text.splitlines()[:3]) if found else ""
