"""Returns of policies by actors: processes on this machine that play them as they ship. The learner plays nothing."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs

_log = logging.getLogger(__name__)
RANDOM = "random"
"""The policy that `actorq-actor evaluate` knows by this name."""
_AT_ONCE = 2
_EPISODE_S = 60.0
"""An episode may take so long on average; some environments' never end."""


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """Returns [episodes] of a policy, and what it ran on; empty for chance, which runs on nothing."""

    episode_return: NDArray[np.float32]
    runtime: str
    delegate: str


def play(
    policies: Mapping[str, Path], env_id: str, episodes: int, seed: int, head: specs.Head | None = None
) -> dict[str, Played]:
    """Plays random actions, and then each policy greedily for the same episodes, two policies at a time.

    Args:
        policies: Files of .tflite policies by name; none is called RANDOM.
        env_id: What an actor takes as --env.
        episodes: Episodes of each.
        seed: Of the first episode; the k-th after it has `seed + k`.
        head: What the policies put out; None takes the actor's default.

    Returns:
        By name; under RANDOM what chance achieves.

    Raises:
        EnvironmentFailure: The environment cannot be made on this machine, or no actor can run here at all.
        ActorqError: A policy cannot be played.
    """

    def one(policy: Path | str) -> Played:
        command = [sys.executable, "-m", "edge_actor", "evaluate", str(policy), "--env", env_id]
        command += ["--head", head] if head else []
        command += ["--episodes", str(episodes), "--seed", str(seed), "--max-s", str(_EPISODE_S * episodes), "--json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
            kind = errors.EnvironmentFailure if policy == RANDOM else errors.ActorqError
            raise kind(said[0] if said else f"the actor ended with {done.returncode}", where=f"{policy} in {env_id}")
        answer = json.loads(done.stdout)
        values = np.array(answer["episode_return"], np.float32)
        return Played(values, answer.get("runtime", ""), answer.get("delegate", ""))

    played = {RANDOM: one(RANDOM)}
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = {pool.submit(one, policy): name for name, policy in policies.items()}
        try:
            for future in concurrent.futures.as_completed(futures):
                played[futures[future]] = future.result()
                _log.info("played %d of %d: %s", len(played) - 1, len(futures), futures[future])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return played
