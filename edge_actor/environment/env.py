"""Environments from names, and their spec. With quick_spaces the only file that imports Gymnasium.

Observations are carried as one array. Box of uint8 stays uint8, with a channel where it is a gray [height, width];
planes of booleans [height, width, channels] become bytes of 0 and 255; any other Box becomes float32. Dict, Tuple,
Discrete, MultiDiscrete and MultiBinary are flattened to one float32 vector by Gymnasium's FlattenObservation: members
of a Dict in the order of its sorted keys (`spaces.Dict` sorts them, unless it is made of an OrderedDict, whose order
stays), of a Tuple in its order, Discrete one-hot.

Frames are stacked here: `frame_stack` of them, or as many as a FrameStackObservation around the environment says, which
is taken off for that (frame_stack.py).

Actions are one Discrete choice, one Box of floats, or several choices. MultiDiscrete, MultiBinary, a Box of integers,
and Dict and Tuple of those and of Discrete become one choice among all their combinations, the last part changing
fastest, where there are not too many; else each of their elements is a choice of its own, in their order. A Dict or
Tuple of float Boxes becomes one Box, of its parts in their order. Choices mixed with floats are not carried.

`ALE/GAME-v5` are Atari games, with what published results have in common (atari.py; setup.cfg, extra `atari`).
`dm_control/DOMAIN-TASK-v0` are DeepMind Control's, by way of shimmy (setup.cfg, extra `mujoco`).

Several copies use the environment's native vector entry point where it has one that resets on the next step, else
Gymnasium's SyncVectorEnv, told to reset on the next step.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FrameStackObservation
from gymnasium.wrappers.vector import FlattenObservation as FlattenObservations
from numpy.typing import NDArray

from broker.contract import errors, specs
from edge_actor.environment import atari, failure, frame_stack, packages, quick_spaces

_FLATTENED = (spaces.Dict, spaces.Tuple, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_OWN = "gymnasium.envs."
_STACK = "actorq_frame_stack"
"""Attribute of an environment whose own stacking was taken off: how many frames it stacked."""
_MOST_COMBINATIONS = 1024
"""The most combinations of an action's parts that are one choice: a network has an output for each."""
_GRAY_SIDE_MIN = 8
"""Bytes in two dimensions are a gray frame if neither side is shorter."""
_WRAPPED = "in a file of your own, and name that: --env FILE.py:make, where make() returns the wrapped environment"


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment, or N that step together.

    Attributes:
        name: What it was made from.
        step: Gymnasium's own method; takes what `to_env` gives.
        reset: Gymnasium's own method.
        to_env: Turns a policy's action (policy.Action) into the environment's, clipped to its bounds.
        no_action: Stands in the record where a step only reset.
        seen: What the policy sees now, [n_envs, *spec.observation.shape], where that is a stack of frames; None where
            it is the newest observation.
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
    seen: NDArray[Any] | None = None


def make(
    name: str,
    n_envs: int = 1,
    arguments: Mapping[str, Any] | None = None,
    *,
    frame_stack: int = 1,
    training: bool = False,
) -> Environment:
    """Makes `n_envs` copies of an environment.

    Args:
        name: Gymnasium id, `module:EnvId`, or `FILE.py:ClassOrEnvId`. May import code: only for names that the user of
            this machine chose; see `check_from_network` for others.
        n_envs: More than 1 makes a vector of them.
        arguments: Passed to the environment.
        frame_stack: Observations that a policy sees at once.
        training: Whether it is played to learn from, where an environment tells that from scores (atari.py).

    Raises:
        EnvironmentFailure: Unknown, not importable, or broken.
        SpecError: Its spaces cannot be carried.
    """
    try:
        return _carried(name, _make(name, n_envs, dict(arguments or {}), training), n_envs, frame_stack)
    except errors.ActorqError as error:
        error.where = error.where or name
        raise
    except gymnasium.error.UnregisteredEnv as error:
        raise _unknown(name, error) from error
    except ImportError as error:
        path = name.rpartition(":")[0]
        folder = f"{Path(path).resolve().parent} was searched too; else " if path.endswith(".py") else ""
        raise errors.EnvironmentFailure(
            f"the environment needs a package that cannot be imported: {failure.line(str(error)) or 'no message'}",
            where=name,
            todo=f"{folder}install it beside actorq-fleet in this machine's virtual environment",
        ) from error
    except (Exception, SystemExit) as error:
        raise errors.EnvironmentFailure(
            f"the environment cannot be made: {failure.text(error)}",
            where=name,
            todo="check env and env_kwargs; -v shows the traceback",
        ) from error


def _carried(name: str, made: Any, n_envs: int, stack: int) -> Environment:
    if isinstance(made, VectorEnv):
        quick_spaces.quicken(made)
        first = made.envs[0] if isinstance(made, SyncVectorEnv) else made
        return _adapt(name, made, made.single_observation_space, made.single_action_space, n_envs, _stack(first, stack))
    return _adapt(name, made, made.observation_space, made.action_space, 0, _stack(made, stack))


def _stack(made: Any, asked: int) -> int:
    """Returns how many frames the policy sees.

    Raises:
        ConfigError: Stacks of frames are to be stacked.
    """
    own: int = getattr(made, _STACK, 1)
    if own > 1 and asked > 1:
        raise errors.ConfigError(
            f"the environment stacks {own} frames itself", where="frame_stack", todo="leave --frame-stack out"
        )
    return max(own, asked)


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


def _make(
    name: str, n_envs: int, arguments: dict[str, Any], training: bool
) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    if name.startswith("ALE/"):
        name = f"ale_py:{name}"
    if name.startswith("MinAtar/") and name not in gymnasium.registry:
        importlib.import_module("minatar.gym").register_envs()
    if name.startswith("dm_control/"):
        os.environ.setdefault("MUJOCO_GL", "disable")  # it would look for a display, and nothing is drawn here
        name = f"shimmy:{name}"
    path, _, leaf = name.rpartition(":")
    if not path.endswith(".py"):
        return _make_registered(name, n_envs, arguments, training)
    member = getattr(_load(Path(path)), leaf, None)
    if member is None and leaf in gymnasium.registry:
        return _make_registered(leaf, n_envs, arguments, training)
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
    name: str, n_envs: int, arguments: dict[str, Any], training: bool
) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    module, _, env_id = name.rpartition(":")
    if module:
        importlib.import_module(module)

    def one() -> gymnasium.Env[Any, Any]:
        if atari.is_game(env_id):
            return _flat(atari.make(env_id, arguments, training=training))
        return _flat(gymnasium.make(env_id, **arguments))

    if n_envs == 1:
        return one()
    if atari.is_game(env_id):
        return _sync([one] * n_envs)
    if gymnasium.spec(env_id).vector_entry_point is not None:
        native = gymnasium.make_vec(
            env_id, num_envs=n_envs, vectorization_mode=gymnasium.VectorizeMode.VECTOR_ENTRY_POINT, **arguments
        )
        if native.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP:
            _check_members(native.single_observation_space)
            is_flat = not isinstance(native.single_observation_space, _FLATTENED)
            return native if is_flat else FlattenObservations(native)
        native.close()
    return _sync([one] * n_envs)


def _sync(makers: list[Callable[[], gymnasium.Env[Any, Any]]]) -> SyncVectorEnv:
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


def _flat(made: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    quick_spaces.quicken(made)
    stack = 1
    if isinstance(made, FrameStackObservation) and made.padding_type == "reset":
        stack = made.stack_size
        made = made.env
    space = made.observation_space
    _check_members(space)
    if isinstance(space, _FLATTENED) or (isinstance(space, spaces.Box) and space.shape == ()):
        made = gymnasium.wrappers.FlattenObservation(made)
    elif isinstance(space, spaces.Box) and len(space.shape) == 3 and space.dtype == bool:
        bytes_ = spaces.Box(0, 255, space.shape, np.uint8)
        made = gymnasium.wrappers.TransformObservation(made, lambda planes: np.asarray(planes, np.uint8) * 255, bytes_)
    elif len(space.shape or ()) == 2 and space.dtype == np.uint8 and min(space.shape or ()) >= _GRAY_SIDE_MIN:
        made = gymnasium.wrappers.ReshapeObservation(made, (*(space.shape or ()), 1))
    setattr(made, _STACK, stack)
    return made


def _load(path: Path) -> Any:
    if not path.is_file():
        raise errors.EnvironmentFailure(
            "there is no such file", where=str(path), todo="check the path before the colon"
        )
    name, path = f"actorq_env_{path.stem}", path.resolve()
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known  # once in a process, as any module: episodes that are scored have an environment of their own
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look their module up there
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for its neighbours; last, so that no file there takes the place of a package
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _unknown(name: str, error: Exception) -> errors.EnvironmentFailure:
    env_id = name.rpartition(":")[2]
    todo = "" if ":" in name else packages.registering(env_id)
    if not todo:
        close = difflib.get_close_matches(env_id, gymnasium.registry, n=3, cutoff=0.5)
        todo = (
            f"did you mean {' or '.join(close)}? " if close else ""
        ) + "Environments of your own: module:EnvId or FILE.py:Class"
    return errors.EnvironmentFailure(f"unknown environment {name!r}: {error}", where="env", todo=todo)


def _adapt(
    name: str, made: Any, observation: spaces.Space[Any], action: spaces.Space[Any], n_envs: int, stack: int
) -> Environment:
    to_env, spec = _action(action, n_envs)
    nothing = 0 if spec.kind == "discrete" else np.zeros(spec.shape, spec.dtype)
    observed = _observation(observation, stack)
    stacked = frame_stack.FrameStack(observed, n_envs, made.step, made.reset) if stack > 1 else None
    return Environment(
        name=name,
        spec=specs.EnvSpec(observed, spec),
        n_envs=max(1, n_envs),
        vectorized=n_envs > 0,
        step=(stacked or made).step,
        reset=(stacked or made).reset,
        close=made.close,
        to_env=to_env,
        no_action=nothing,
        seen=stacked.seen if stacked else None,
    )


def _check_members(space: spaces.Space[Any], path: str = "") -> None:
    """Raises SpecError where a Dict or Tuple has a member that cannot be flattened, and names it."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        if not space.spaces:
            raise errors.SpecError(
                f"the observation{path and f' has a member {path} that'} is a {_kind(space)} without members",
                todo=f"observe something: a policy has to see it; else leave the empty member out, {_WRAPPED}",
            )
        members = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, member in members:
            _check_members(member, f"{path}[{key!r}]")
    elif path and not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        kind = type(space)
        wrapper = (
            "minigrid.wrappers.ImgObsWrapper, which leaves the image,"
            if kind.__module__.partition(".")[0] == "minigrid"
            else "gymnasium.wrappers.FilterObservation with the keys that shall stay"
        )
        raise errors.SpecError(
            f"the observation's member {path} is a {kind.__name__}, which is not carried",
            todo=f"leave it out: wrap the environment with {wrapper} {_WRAPPED}",
        )


def _observation(space: spaces.Space[Any], stack: int) -> specs.ObservationSpec:
    if not isinstance(space, spaces.Box):
        raise errors.SpecError(
            f"observation space {type(space).__name__} is not carried",
            where=str(space),
            todo=f"wrap the environment so that it observes a Box, Dict, Tuple or Discrete space, {_WRAPPED}",
        )
    if 0 in space.shape:
        raise errors.SpecError("the observation has no elements", where=str(space))
    shape = (*space.shape[:-1], space.shape[-1] * stack)
    return specs.ObservationSpec(shape, "uint8" if space.dtype == np.uint8 else "float32", stack)


def _action(space: spaces.Space[Any], n_envs: int) -> tuple[Callable[[Any], Any], specs.ActionSpec]:
    if isinstance(space, spaces.Discrete):
        spec = specs.ActionSpec("discrete", n=int(space.n))
        if n_envs:
            start = space.start
            return (lambda chosen: start + chosen) if start else (lambda chosen: chosen), spec
        # Gymnasium checks numpy integers faster than Python's: 0.4 us of CartPole's 7
        return list(np.arange(space.start, space.start + space.n, dtype=space.dtype)).__getitem__, spec
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.shape:
        low, high, dtype = space.low, space.high, space.dtype
        spec = specs.ActionSpec(
            "continuous", shape=tuple(space.shape), low=tuple(low.ravel().tolist()), high=tuple(high.ravel().tolist())
        )
        minimum, maximum = np.minimum, np.maximum  # half the time of np.clip
        return lambda chosen: minimum(maximum(chosen, low), high).astype(dtype, copy=False), spec
    leaves = _leaves(space)
    if leaves and all(_is_float(leaf) for _, leaf in leaves):
        return _joined(space, [leaf for _, leaf in leaves])
    for path, leaf in leaves:
        if _is_float(leaf) or _choices(leaf) == 0:
            raise errors.SpecError(
                f"action space {_named(space, path, leaf)} is not carried"
                + (" beside parts that are choices" if _is_float(leaf) else ""),
                where=str(space),
                todo="wrap the environment so that it takes choices alone, or floats with bounds alone, " + _WRAPPED,
            )
    combinations = math.prod(_choices(leaf) for _, leaf in leaves)
    if not leaves:
        raise errors.SpecError(
            f"action space {_kind(space)} has no parts", where=str(space), todo=f"wrap it, {_WRAPPED}"
        )
    if combinations > _MOST_COMBINATIONS:
        return _choice_by_choice(space, [leaf for _, leaf in leaves])
    table = _values(space, np.arange(combinations))
    return functools.partial(_looked_up, table), specs.ActionSpec("discrete", n=combinations)


def _choice_by_choice(space: spaces.Space[Any], leaves: list[Any]) -> tuple[Callable[[Any], Any], specs.ActionSpec]:
    """Carries each element of each part as a choice of its own, and returns how to put them together."""
    each = [_each(leaf) for leaf in leaves]
    counts = [values.stop - values.start for part in each for values in part]  # len() ends at 2**63
    if len(counts) > specs.MAX_ACTION_ELEMENTS or sum(counts) > specs.MAX_CHOICES:
        raise errors.SpecError(
            f"action space {_kind(space)} has {len(counts)} parts of "
            f"{sum(counts) if sum(counts) < 10**9 else 'more than 1e9'} choices together, "
            f"{specs.MAX_ACTION_ELEMENTS} and {specs.MAX_CHOICES} at most are carried",
            where=str(space),
            todo=f"wrap the environment so that it takes fewer, {_WRAPPED}",
        )
    spec = specs.ActionSpec(
        "multi_discrete", shape=(len(counts),), low=(0.0,) * len(counts), high=tuple(float(n - 1) for n in counts)
    )
    first = np.array([values.start for part in each for values in part], np.int64)
    ends = np.cumsum([len(part) for part in each])[:-1].tolist()

    def to_env(chosen: Any) -> Any:
        lead = chosen.shape[:-1]
        parts = np.split(first + chosen, ends, axis=-1)
        arrays = [
            # [()] makes a number of an array without dimensions, as environments know it from Discrete
            part.reshape((*lead, *(leaf.shape or ()))).astype(leaf.dtype)[()]
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return _put_together(space, iter(arrays))

    return to_env, spec


def _leaves(space: spaces.Space[Any], path: str = "") -> list[tuple[str, spaces.Space[Any]]]:
    """The parts of a Dict or Tuple with where they are, in order; another space is its only part."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in _leaves(part, f"{path}[{key!r}]")]
    if isinstance(space, spaces.Tuple):
        return [leaf for key, part in enumerate(space.spaces) for leaf in _leaves(part, f"{path}[{key}]")]
    return [(path, space)]


def _named(space: spaces.Space[Any], path: str, leaf: spaces.Space[Any]) -> str:
    return f"{_kind(space)} with the part {path}, a {leaf}," if path else _kind(leaf)


def _kind(space: spaces.Space[Any]) -> str:
    return type(space).__name__.removeprefix("Quick")  # quick_spaces.py


def _is_float(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def _choices(space: spaces.Space[Any]) -> int:
    """Returns how many values a part has; 0 if they cannot be counted."""
    return math.prod(values.stop - values.start for values in _each(space))  # len() ends at 2**63


def _each(space: spaces.Space[Any]) -> list[range]:
    """The values of each element of a part; one that is empty stands for a space that has no such list."""
    if isinstance(space, spaces.Discrete):
        return [range(int(space.start), int(space.start + space.n))]
    if isinstance(space, spaces.MultiDiscrete):
        starts = space.start.ravel().tolist()
        return [range(start, start + n) for start, n in zip(starts, space.nvec.ravel().tolist(), strict=True)]
    if isinstance(space, spaces.MultiBinary):
        return [range(2)] * math.prod(space.shape)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        bounds = zip(space.low.ravel().tolist(), space.high.ravel().tolist(), strict=True)
        return [range(low, high + 1) for low, high in bounds]
    return [range(0)]


def _values(space: spaces.Space[Any], index: NDArray[np.intp]) -> Any:
    """The actions with these numbers [P]: arrays [P, *shape], in a dict or tuple where the space is one."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = list(space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces)
        sizes = [math.prod(_choices(leaf) for _, leaf in _leaves(part)) for part in parts]
        values = [_values(*pair) for pair in zip(parts, _digits(index, sizes), strict=True)]
        return dict(zip(space.spaces, values, strict=True)) if isinstance(space, spaces.Dict) else tuple(values)
    each = _each(space)
    digits = _digits(index, [len(values) for values in each])
    columns = [np.array(values, space.dtype)[digit] for values, digit in zip(each, digits, strict=True)]
    return np.stack(columns, 1).reshape(len(index), *(space.shape or ()))


def _digits(index: NDArray[np.intp], sizes: list[int]) -> list[NDArray[np.intp]]:
    """`index` [P] as numbers whose digits have these many values each, the last one changing fastest."""
    digits = []
    for size in reversed(sizes):
        index, digit = np.divmod(index, size)
        digits.append(digit)
    return digits[::-1]


def _looked_up(table: Any, chosen: Any) -> Any:
    """Returns copies of the actions of a table that were chosen: the environment may keep and change them."""
    if isinstance(table, dict):
        return {key: _looked_up(part, chosen) for key, part in table.items()}
    if isinstance(table, tuple):
        return tuple(_looked_up(part, chosen) for part in table)
    return table[chosen].copy()


def _joined(space: spaces.Space[Any], leaves: list[Any]) -> tuple[Callable[[Any], Any], specs.ActionSpec]:
    """Joins all parts to one Box of floats, and returns how to split it; several environments have a dimension more."""
    low = np.concatenate([leaf.low.ravel() for leaf in leaves]).astype(np.float64)
    high = np.concatenate([leaf.high.ravel() for leaf in leaves]).astype(np.float64)
    spec = specs.ActionSpec("continuous", shape=low.shape, low=tuple(low.tolist()), high=tuple(high.tolist()))
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1].tolist()

    def to_env(chosen: Any) -> Any:
        parts = np.split(np.minimum(np.maximum(chosen, low), high), ends, axis=-1)
        lead = chosen.shape[:-1]
        arrays = [
            part.reshape((*lead, *leaf.shape)).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)
        ]
        return _put_together(space, iter(arrays))

    return to_env, spec


def _put_together(space: spaces.Space[Any], parts: Iterator[Any]) -> Any:
    """Makes a Dict or Tuple of its parts in their order."""
    if isinstance(space, spaces.Dict):
        return {key: _put_together(part, parts) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_put_together(part, parts) for part in space.spaces)
    return next(parts)
