"""Returns of policies by actors: processes on this machine that play them as they ship. The learner plays nothing."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs
from broker.program import children, cli

_log = logging.getLogger(__name__)
RANDOM = "random"
"""The policy that `actorq-actor evaluate` knows by this name."""
_PROGRESS = "played "
"""Lines of `actorq-actor evaluate` on stderr that say how far it is begin so."""
_AT_ONCE = 2
_EPISODE_S = 60.0
"""An episode may take so long on average; some environments' never end."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Returns [episodes] of a policy, and what it ran on; empty for chance, which runs on nothing."""

    episode_return: NDArray[np.float32]
    runtime: str
    delegate: str


@dataclass(frozen=True, slots=True)
class Task:
    """What actors take as --env, --env-kwargs and --frame-stack."""

    env_id: str
    arguments: str = "{}"
    frame_stack: int = 1

    def spec(self) -> specs.EnvSpec:
        """Returns what the environment observes and takes.

        Raises:
            EnvironmentFailure: It cannot be made on this machine.
        """
        said = _actor("spec", self, failure=errors.EnvironmentFailure)
        return specs.from_dict({key: said[key] for key in ("observation", "action")})


def score(
    policy: Path | str,
    task: Task,
    episodes: int,
    seed: int,
    head: specs.Head | None = None,
    observations: Path | None = None,
    name: str = "",
) -> Played:
    """Plays one policy greedily, or random actions.

    Args:
        policy: A .tflite file, or RANDOM.
        task: What to play.
        episodes: Episodes.
        seed: Of the first episode; the k-th after it has `seed + k`.
        head: What the policy puts out; None takes what `actorq-actor evaluate` does.
        observations: File that gets what it saw.
        name: What people know the policy by; empty: its file's name.

    Raises:
        EnvironmentFailure: Random actions cannot be played: the environment cannot be made, or no actor can run here.
        ActorqError: The policy cannot be played.
    """
    options = ["--episodes", str(episodes), "--seed", str(seed), "--max-s", str(_EPISODE_S * episodes), "--json"]
    options += ["--head", head] if head else []
    options += ["--observations", str(observations)] if observations else []
    failure = errors.EnvironmentFailure if policy == RANDOM else errors.ActorqError
    answer = _actor("evaluate", task, str(policy), *options, failure=failure, name=name or Path(policy).stem)
    values = np.array(answer["episode_return"], np.float32)
    return Played(values, answer.get("runtime", ""), answer.get("delegate", ""))


def _actor(what: str, task: Task, *options: str, failure: type[errors.ActorqError], name: str = "") -> Any:
    command = [sys.executable, "-m", "edge_actor", what, *options, "--env", task.env_id]
    command += ["--env-kwargs", task.arguments, "--frame-stack", str(task.frame_stack)]
    answer, said, code = _run(command, name)
    if code:
        where = f"{options[0]} in {task.env_id}" if options else task.env_id
        raise cli.as_said("\n".join(said), code, failure, where)
    return json.loads(answer)


def _run(command: Sequence[str], name: str) -> tuple[str, list[str], int]:
    """Returns what an actor prints, its lines on stderr and its exit code; says by that name how far it is."""
    said: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as answer,  # a pipe might be full before stderr ends
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=children.die_with_parent(),  # noqa: PLW1509  no thread holds a lock that it needs
        ) as actor,
    ):
        assert actor.stderr is not None
        try:
            for line in map(str.rstrip, actor.stderr):
                said.append(line)
                if line.startswith(_PROGRESS):
                    _log.info("%s: %s", name, line)
        except BaseException:
            actor.terminate()
            raise
        code = actor.wait()
        answer.seek(0)
        return answer.read(), said, code


def play(
    policies: Mapping[str, Path], env_id: str, episodes: int, seed: int, head: specs.Head | None = None
) -> dict[str, Played]:
    """Plays random actions, and then each policy greedily for the same episodes, two policies at a time.

    Args:
        policies: Files of .tflite policies by name; none is called RANDOM.
        env_id: What an actor takes as --env.
        episodes: Episodes of each.
        seed: Of the first episode; the k-th after it has `seed + k`.
        head: As for `score`.

    Returns:
        By name; under RANDOM what chance achieves.

    Raises:
        EnvironmentFailure: As `score`.
        ActorqError: As `score`.
    """
    task = Task(env_id)
    return {RANDOM: score(RANDOM, task, episodes, seed), **at_once(policies, task, episodes, seed, head)}


def at_once(
    policies: Mapping[str, Path], task: Task, episodes: int, seed: int, head: specs.Head | None = None
) -> dict[str, Played]:
    """Plays each policy for the same episodes, two at a time. Raises as `score`."""
    played: dict[str, Played] = {}
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = {
            pool.submit(score, policy, task, episodes, seed, head, name=name): name for name, policy in policies.items()
        }
        try:
            for future in concurrent.futures.as_completed(futures):
                played[futures[future]] = future.result()
                _log.info("played %d of %d: %s", len(played), len(futures), futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return played
