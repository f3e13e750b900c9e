"""What training left in a run directory: the newest checkpoint as a Q-network with its weights, and what it saw."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker import codec, errors, messages, specs
from learner import checkpoint, config, ledger, networks

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained network and the observations in its replay.

    Attributes:
        env_id: What the actors played.
        updates: Gradient steps behind the weights.
        observations: Those that replay would be rebuilt from [N, *shape], oldest first, in their stored dtype.
    """

    env_id: str
    updates: int
    network: networks.QNetwork
    weights: Sequence[FloatArray]
    normalizer: networks.Normalizer
    observations: NDArray[Any]


def load(run: Path, log: Callable[[str], None]) -> Trained:
    """Reads the newest checkpoint of a DQN run.

    Args:
        run: Run directory.
        log: Told about broken checkpoints that are passed over.

    Raises:
        RunError: There is no run, none of its checkpoints can be read, or its ledger is missing or empty.
    """
    settings = _settings(run)
    found = checkpoint.load_newest(run / "checkpoints", log)
    if found is None:
        raise errors.RunError(
            "the run has no checkpoint yet", where=str(run), todo="let it train on, or name another run"
        )
    state = found.parts["algorithm"]
    capacity = settings.get("replay_capacity", config.DqnConfig().replay_capacity)
    held = ledger.bodies(run / ledger.NAME, newest_steps=capacity)
    seen = [codec.decode(messages.Experience, body).observation for _, body in held]
    if not seen:
        raise errors.RunError(
            "the run's ledger holds no experience, so there are no states to compare policies on",
            where=str(run),
            todo=f"go on for a while with it: actorq-learner train --resume {run}",
        )
    observations = np.concatenate(seen)
    try:
        actions = [a.size for name, a in state.items() if name.startswith("weights/advantage/") and a.ndim == 1][-1]
        spec = specs.EnvSpec(
            specs.ObservationSpec(observations.shape[1:], str(observations.dtype)),
            specs.ActionSpec("discrete", n=actions),
        )
        network = networks.QNetwork.build(spec, settings["hidden"], settings["dueling"], np.random.default_rng(0))
        initial = network.initial()
        weights = [state[f"weights/{name}"] for name in initial]
        normalizer = networks.Normalizer(state["normalizer/gain"], state["normalizer/offset"])
    except (KeyError, IndexError) as error:
        raise errors.RunError(
            f"the checkpoint does not fit the run's settings: {error} is missing", where=str(run), todo=_ANOTHER
        ) from error
    alike = all(w.shape == initial[name].shape for name, w in zip(initial, weights, strict=True))
    if not alike or spec.fingerprint != found.meta["fingerprint"]:
        raise errors.RunError(
            "the checkpoint does not fit the run's settings: it is of another network", where=str(run), todo=_ANOTHER
        )
    return Trained(found.meta["env_id"], int(state["updates"]), network, weights, normalizer, observations)


_ANOTHER = "name a run whose config.toml was not edited"


def _settings(run: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((run / "config.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise errors.RunError(
            f"there is no run: {error}", where=str(run), todo="name a run directory, as in runs/"
        ) from error
