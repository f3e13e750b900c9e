"""Environments from names, and their spec. With quick_spaces the only file that imports Gymnasium.

Observations are carried as one array. Box of uint8 stays uint8; any other Box becomes float32. Dict, Tuple, Discrete,
MultiDiscrete and MultiBinary are flattened to one float32 vector by Gymnasium's FlattenObservation: members of a Dict
in the order of its sorted keys (`spaces.Dict` sorts them, unless it is made of an OrderedDict, whose order stays), of a
Tuple in its order, Discrete one-hot.

`dm_control/DOMAIN-TASK-v0` are DeepMind Control's, by way of shimmy (setup.cfg, extra `mujoco`).

Several copies use the environment's native vector entry point where it has one that resets on the next step, else
Gymnasium's SyncVectorEnv, told to reset on the next step.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import FlattenObservation as FlattenObservations

from broker import errors, specs
from edge_actor import quick_spaces

_FLATTENED = (spaces.Dict, spaces.Tuple, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_OWN = "gymnasium.envs."


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment, or N that step together.

    Attributes:
        name: What it was made from.
        step: Gymnasium's own method; takes what `to_env` gives.
        reset: Gymnasium's own method.
        to_env: Turns a policy's action (policy.Action) into the environment's, clipped to its bounds.
        no_action: Stands in the record where a step only reset.
        vectorized: True if all of the above take and give arrays with a first dimension `n_envs`.
    """

    name: str
    spec: specs.EnvSpec
    n_envs: int
    vectorized: bool
    step: Callable[[Any], tuple[Any, Any, Any, Any, Any]]
    reset: Callable[..., tuple[Any, Any]]
    close: Callable[[], None]
    to_env: Callable[[Any], Any]
    no_action: Any


def make(name: str, n_envs: int = 1, arguments: Mapping[str, Any] | None = None) -> Environment:
    """Makes `n_envs` copies of an environment.

    Args:
        name: Gymnasium id, `module:EnvId`, or `FILE.py:ClassOrEnvId`. May import code: only for names that the user of
            this machine chose; see `check_from_network` for others.
        n_envs: More than 1 makes a vector of them.
        arguments: Passed to the environment.

    Raises:
        EnvironmentFailure: Unknown, not importable, or broken.
        SpecError: Its spaces cannot be carried.
    """
    try:
        made = _make(name, n_envs, dict(arguments or {}))
    except errors.ActorqError:
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise _unknown(name, error) from error
    except ImportError as error:
        raise errors.EnvironmentFailure(
            f"the environment needs a package that cannot be imported: {error}",
            where=name,
            todo="install it beside actorq-fleet in this machine's virtual environment",
        ) from error
    except Exception as error:
        raise errors.EnvironmentFailure(
            f"the environment cannot be made: {type(error).__name__}: {error}",
            where=name,
            todo="check env and env_kwargs; -v shows the traceback",
        ) from error
    if isinstance(made, VectorEnv):
        quick_spaces.quicken(made)
        return _adapt(name, made, made.single_observation_space, made.single_action_space, n_envs)
    return _adapt(name, made, made.observation_space, made.action_space, 0)


def check_from_network(name: str) -> None:
    """Accepts ids whose code is Gymnasium's own; nothing else may follow from a message.

    Raises:
        EnvironmentFailure: Any other name.
    """
    known = None if ":" in name else gymnasium.registry.get(name)
    entry_points = (known.entry_point, known.vector_entry_point or _OWN) if known else ("",)
    if not all(isinstance(point, str) and point.startswith(_OWN) for point in entry_points):
        raise errors.EnvironmentFailure(
            f"the learner's task {name[:80]!r} is not one of Gymnasium's own environments",
            where="learner/state",
            todo="name the environment on this machine: --env",
        )


def _make(name: str, n_envs: int, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    if name.startswith("dm_control/"):
        os.environ.setdefault("MUJOCO_GL", "disable")  # it would look for a display, and nothing is drawn here
        name = f"shimmy:{name}"
    path, _, leaf = name.rpartition(":")
    if not path.endswith(".py"):
        return _make_registered(name, n_envs, arguments)
    member = getattr(_load(Path(path)), leaf, None)
    if member is None and leaf in gymnasium.registry:
        return _make_registered(leaf, n_envs, arguments)
    if not callable(member):
        raise errors.EnvironmentFailure(f"the file has no class and no environment id {leaf!r}", where=path)

    def one() -> gymnasium.Env[Any, Any]:
        made = member(**arguments)
        if not isinstance(made, gymnasium.Env):
            raise errors.EnvironmentFailure(
                f"{leaf} makes a {type(made).__name__}, not a gymnasium.Env",
                where=path,
                todo="derive from gymnasium.Env",
            )
        return made

    return _flat(one()) if n_envs == 1 else _sync([lambda: _flat(one())] * n_envs)


def _make_registered(
    name: str, n_envs: int, arguments: dict[str, Any]
) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    if n_envs == 1:
        return _flat(gymnasium.make(name, **arguments))
    module, _, env_id = name.rpartition(":")
    if module:
        importlib.import_module(module)
    if gymnasium.spec(env_id).vector_entry_point is not None:
        native = gymnasium.make_vec(
            env_id, num_envs=n_envs, vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT, **arguments
        )
        if native.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP:
            is_flat = not isinstance(native.single_observation_space, _FLATTENED)
            return native if is_flat else FlattenObservations(native)
        native.close()
    return _sync([lambda: _flat(gymnasium.make(env_id, **arguments))] * n_envs)


def _sync(makers: list[Callable[[], gymnasium.Env[Any, Any]]]) -> SyncVectorEnv:
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


def _flat(made: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    quick_spaces.quicken(made)
    space = made.observation_space
    if isinstance(space, _FLATTENED) or (isinstance(space, spaces.Box) and space.shape == ()):
        return gymnasium.wrappers.FlattenObservation(made)
    return made


def _load(path: Path) -> Any:
    if not path.is_file():
        raise errors.EnvironmentFailure(
            "there is no such file", where=str(path), todo="check the path before the colon"
        )
    name = f"actorq_env_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look their module up there
    spec.loader.exec_module(module)
    return module


def _unknown(name: str, error: Exception) -> errors.EnvironmentFailure:
    close = difflib.get_close_matches(name.rpartition(":")[2], gymnasium.registry, n=3, cutoff=0.5)
    return errors.EnvironmentFailure(
        f"unknown environment {name!r}: {error}",
        where="env",
        todo=(f"did you mean {' or '.join(close)}? " if close else "")
        + "Environments of your own: module:EnvId or FILE.py:Class",
    )


def _adapt(name: str, made: Any, observation: spaces.Space[Any], action: spaces.Space[Any], n_envs: int) -> Environment:
    to_env, spec = _action(action, n_envs)
    nothing = 0 if spec.kind == "discrete" else np.zeros(spec.shape, np.float32)
    return Environment(
        name=name,
        spec=specs.EnvSpec(_observation(observation), spec),
        n_envs=max(1, n_envs),
        vectorized=n_envs > 0,
        step=made.step,
        reset=made.reset,
        close=made.close,
        to_env=to_env,
        no_action=nothing,
    )


def _observation(space: spaces.Space[Any]) -> specs.ObservationSpec:
    if not isinstance(space, spaces.Box):
        raise errors.SpecError(
            f"observation space {type(space).__name__} is not carried",
            where=str(space),
            todo="wrap the environment so that it observes a Box, Dict, Tuple or Discrete space",
        )
    return specs.ObservationSpec(tuple(space.shape), "uint8" if space.dtype == np.uint8 else "float32")


def _action(space: spaces.Space[Any], n_envs: int) -> tuple[Callable[[Any], Any], specs.ActionSpec]:
    if isinstance(space, spaces.Discrete):
        spec = specs.ActionSpec("discrete", n=int(space.n))
        if n_envs:
            start = space.start
            return (lambda chosen: start + chosen) if start else (lambda chosen: chosen), spec
        # Gymnasium checks numpy integers faster than Python's: 0.4 us of CartPole's 7
        return list(np.arange(space.start, space.start + space.n, dtype=space.dtype)).__getitem__, spec
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high, dtype = space.low, space.high, space.dtype
        spec = specs.ActionSpec(
            "continuous", shape=tuple(space.shape), low=tuple(low.ravel().tolist()), high=tuple(high.ravel().tolist())
        )
        minimum, maximum = np.minimum, np.maximum  # half the time of np.clip
        return lambda chosen: minimum(maximum(chosen, low), high).astype(dtype, copy=False), spec
    raise errors.SpecError(
        f"action space {type(space).__name__} is not carried",
        where=str(space),
        todo="wrap the environment so that it takes a Discrete or a float Box action",
    )
