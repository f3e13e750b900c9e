"""Loads what training left in a run directory: policies of the newest checkpoint, and observations of its replay."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import codec, errors, frames, messages, specs
from learner import config
from learner.experience import ledger, validate
from learner.files import checkpoint, run_directory
from learner.networks import actor_critic, layers, networks, policy_value, soft_actor_critic

State = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained policy and the observations in its replay.

    Attributes:
        env_id: What the actors played.
        updates: Gradient steps behind the weights.
        action: What the policy's outputs are about.
        head: What they mean.
        whole: The policy from raw observations to all that its network says: action values, or actions.
        needed: What is enough to act as it does: without the value stream, where there is one.
        dueling: Whether there is one.
        observations: Those that replay would be rebuilt from [N, *shape], oldest first, in their stored dtype.
        published: The model of these weights that actors were sent last; None where training went on after it.
    """

    env_id: str
    updates: int
    action: specs.ActionSpec
    head: specs.Head
    whole: layers.PolicyLayers
    needed: layers.PolicyLayers
    dueling: bool
    observations: NDArray[Any]
    published: bytes | None


def load(run: Path) -> Trained:
    """Reads the newest checkpoint of a run.

    Args:
        run: Run directory.

    Raises:
        RunError: There is no run, none of its checkpoints can be read, or its ledger is missing or empty.
    """
    settings = _settings(run)
    found = checkpoint.load_newest(run / "checkpoints")
    if found is None:
        raise errors.RunError(
            "the run has no checkpoint yet", where=str(run), todo="let it train on, or name another run"
        )
    state = found.parts["algorithm"]
    capacity = settings.get("replay_capacity", settings.get("kept_steps", config.OffPolicyConfig().capacity))
    files = run_directory.ledgers(run)
    held = itertools.chain.from_iterable(ledger.bodies(file, newest_steps=capacity // len(files)) for file in files)
    spec = _spec(run)
    seen = [_observations(codec.decode(messages.Experience, body), spec) for _, body in held]
    if not seen:
        raise errors.RunError(
            "the run's ledger holds no experience, so there are no states to compare policies on",
            where=str(run),
            todo=f"go on for a while with it: actorq-learner train --resume {run}",
        )
    if spec.fingerprint != found.meta["fingerprint"]:
        raise errors.RunError(
            "the checkpoint does not fit the run's ledger: it is of another network", where=str(run), todo=_ANOTHER
        )
    try:
        normalizer = networks.Normalizer(state["normalizer/gain"], state["normalizer/offset"])
        head = config.ALGORITHMS.get(settings.get("algorithm", ""), config.OffPolicyConfig)().head(spec.action)
        whole, needed = _BY_HEAD[head](spec, settings, state, normalizer)
    except KeyError as error:
        raise errors.RunError(
            f"the checkpoint does not fit the run's settings: {error} is missing", where=str(run), todo=_ANOTHER
        ) from error
    except _Misfit as error:
        raise errors.RunError(
            "the checkpoint does not fit the run's settings: it is of another network", where=str(run), todo=_ANOTHER
        ) from error
    dueling, env_id = bool(settings.get("dueling")), found.meta["env_id"]
    published = _published(run, found.meta.get("published", ""))
    updates = int(state["updates"])
    return Trained(env_id, updates, spec.action, head, whole, needed, dueling, np.concatenate(seen), published)


def _published(run: Path, name: str) -> bytes | None:
    path = run / "policies" / f"{name}.tflite"
    try:
        return path.read_bytes() if name else None
    except OSError as error:
        raise errors.RunError(
            f"the policy that the run published cannot be read: {error}",
            where=str(path),
            todo="name a run whose policies were not removed",
        ) from error


class _Misfit(Exception):
    """Weights have other shapes than the network of the settings."""


def _policies(
    spec: specs.EnvSpec, settings: dict[str, Any], state: State, normalizer: networks.Normalizer
) -> tuple[layers.PolicyLayers, layers.PolicyLayers]:
    network = networks.QNetwork.build(
        spec, settings["hidden"], settings["dueling"], np.random.default_rng(0), settings.get("network", "auto")
    )
    weights = _weights(state, network.initial())
    return network.q_layers(weights, normalizer), network.advantage_layers(weights, normalizer)


def _actor(
    spec: specs.EnvSpec, settings: dict[str, Any], state: State, normalizer: networks.Normalizer
) -> tuple[layers.PolicyLayers, layers.PolicyLayers]:
    network = actor_critic.ActorCritic.build(
        spec,
        settings["hidden"],
        settings["critic_hidden"],
        settings.get("atoms", 1),
        np.random.default_rng(0),
        settings.get("network", "auto"),
    )
    policy = network.policy_layers(_weights(state, network.initial()), normalizer)
    return policy, policy


def _soft_actor(
    spec: specs.EnvSpec, settings: dict[str, Any], state: State, normalizer: networks.Normalizer
) -> tuple[layers.PolicyLayers, layers.PolicyLayers]:
    network = soft_actor_critic.SoftActorCritic.build(
        spec,
        settings["hidden"],
        settings["critic_hidden"],
        settings.get("atoms", 1),
        np.random.default_rng(0),
        settings.get("network", "auto"),
    )
    policy = network.policy_layers(_weights(state, network.initial_actor()), normalizer)
    return policy, policy


def _sampled(
    spec: specs.EnvSpec, settings: dict[str, Any], state: State, normalizer: networks.Normalizer
) -> tuple[layers.PolicyLayers, layers.PolicyLayers]:
    network = policy_value.PolicyValue.build(
        spec,
        settings["hidden"],
        settings["value_hidden"],
        settings["initial_std"],
        np.random.default_rng(0),
        settings.get("network", "auto"),
        settings.get("activation", "relu"),
    )
    policy = network.policy_layers(_weights(state, network.initial()), normalizer)
    return policy, policy


_BY_HEAD: dict[
    specs.Head,
    Callable[
        [specs.EnvSpec, dict[str, Any], State, networks.Normalizer], tuple[layers.PolicyLayers, layers.PolicyLayers]
    ],
] = {
    "q_values": _policies,
    "deterministic": _actor,
    "categorical": _sampled,
    "gaussian": _sampled,
    "squashed_gaussian": _soft_actor,
}


def _weights(state: State, initial: dict[str, NDArray[np.float32]]) -> list[NDArray[Any]]:
    weights = [state[f"weights/{name}"] for name in initial]
    if any(w.shape != array.shape for w, array in zip(weights, initial.values(), strict=True)):
        raise _Misfit
    return weights


def _spec(run: Path) -> specs.EnvSpec:
    return specs.from_dict(json.loads(ledger.about(run_directory.ledgers(run)[0])["spec"]))


def _observations(experience: messages.Experience, spec: specs.EnvSpec) -> NDArray[Any]:
    """Returns all that policies saw [N, *shape]."""
    seen, stack = validate.unpacked(experience, spec).observation, spec.observation.stack
    ends = np.cumsum(experience.length + stack).tolist()
    return np.concatenate([frames.stacked(seen[start:end], stack) for start, end in pairwise([0, *ends])])


_ANOTHER = "name a run whose config.toml was not edited"


def _settings(run: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((run / "config.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise errors.RunError(
            f"there is no run: {error}", where=str(run), todo="name a run directory, as in runs/"
        ) from error
