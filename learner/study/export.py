"""A run's experience as a Minari dataset, so that the wider ecosystem can read what the fleet collected.

Layout of Minari 0.5 (https://minari.farama.org/content/dataset_standards/), written with h5py alone, since Minari would
bring Gymnasium:

    DIR/NAMESPACE/NAME-vN/data/main_data.hdf5   episode_K: observations [T + 1, ...], actions, rewards, terminations,
                                                truncations [T]; attributes id, total_steps, actor, boot, complete
                               metadata.json    spaces, counts

Segments are stitched to episodes again. What lacks its beginning or its end, because it was dropped, never finished or
has left the ledger, is an episode too, truncated where it breaks off, and its `complete` is false. Where policies saw
stacks of frames, an observation is one frame.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from broker.contract import codec, errors, messages, specs
from broker.program import storage
from learner.experience import ledger, validate
from learner.files import run_directory

ROOM_BYTES = 64_000_000
"""Bytes that must be free before each episode. On a full disk HDF5 crashes (2.0), and may hold back so much."""
MINARI_VERSION = "0.5.0"
"""The format; later releases read it."""
_NAME = re.compile(r"[-\w]+(/[-\w]+)*-v\d+")


@dataclass(slots=True)
class Episode:
    """Consecutive steps of one environment of one actor: T actions, T + 1 observations.

    `age` counts the episode's steps from its start, those before this part of it included.
    """

    actor_id: str
    boot: int
    from_start: bool
    age: int
    observations: list[NDArray[Any]] = field(default_factory=list)  # each with its last one, but for the last all cut
    actions: list[NDArray[Any]] = field(default_factory=list)
    rewards: list[NDArray[np.float32]] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False

    @property
    def last(self) -> NDArray[Any]:
        return self.observations[-1][-1]  # type: ignore[no-any-return]

    @property
    def complete(self) -> bool:
        return self.from_start and (self.terminated or self.truncated)


def run(directory: Path, output: Path, name: str) -> dict[str, Any]:
    """Writes the dataset; returns what it holds.

    Args:
        directory: Of the run.
        output: Minari's root directory of datasets, or what shall be one.
        name: Id of the dataset, `[namespace/]name-vN`.

    Raises:
        ConfigError: The name is no id of a dataset, or is taken.
        RunError: There is no ledger, or nothing in it.
        StorageError: The disk is nearly full.
    """
    if not _NAME.fullmatch(name):
        raise errors.ConfigError(f"{name!r} is no id of a dataset", todo="name it like actorq/cartpole-v0")
    data = output / name / "data"
    if data.exists():
        raise errors.ConfigError(
            "the dataset is there already", where=str(data), todo="remove it, or choose another --dataset-id"
        )
    files = run_directory.ledgers(directory)  # an actor's messages are all in one of them
    about = ledger.about(files[0])
    spec = json.loads(about["spec"])
    partial = data.with_name("data.partial")
    partial.mkdir(parents=True, exist_ok=True)
    spec, episodes, steps, complete = specs.from_dict(json.loads(about["spec"])), 0, 0, 0
    with h5py.File(partial / "main_data.hdf5", "w", track_order=True) as file:
        for episode in stitch(itertools.chain.from_iterable(map(ledger.bodies, files)), spec):
            if shutil.disk_usage(partial).free < ROOM_BYTES:
                raise storage.at(f"less than {ROOM_BYTES / 1e6:.0f} MB are free for the dataset", str(partial))
            steps += _write(file, episodes, episode, spec.action)
            complete += episode.complete
            episodes += 1
    if not episodes:
        raise errors.RunError("the run's ledger holds no experience", where=str(directory), todo="let it train on")
    size_mb = (partial / "main_data.hdf5").stat().st_size / 1e6
    metadata = {
        "dataset_id": name,
        "total_episodes": episodes,
        "total_steps": steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "minari_version": MINARI_VERSION,
        "dataset_size": round(size_mb, 1),
        **_spaces(spec),
        "description": f"Experience of {about['env_id']}, collected by a fleet of int8 actors with exploration",
    }
    (partial / "metadata.json").write_text(json.dumps(metadata))
    partial.rename(data)
    return {
        "dataset_id": name,
        "episodes": episodes,
        "episodes_complete": complete,
        "steps": steps,
        "size_mb": round(size_mb, 3),
        "datasets_path": str(output),
    }


def stitch(bodies: Iterable[tuple[str, bytes]], spec: specs.EnvSpec) -> Iterator[Episode]:
    """Yields episodes from encoded messages with their actors, in the order of the ledger; as they end."""
    stack = spec.observation.stack
    under_way: dict[tuple[str, int, int], Episode] = {}
    for actor_id, body in bodies:
        m = validate.unpacked(codec.decode(messages.Experience, body), spec)
        step = 0
        for k, length in enumerate(m.length.tolist()):
            key = actor_id, m.boot, int(m.env_index[k])
            end = step + length + (k + 1) * stack
            observation = m.observation[end - length - 1 : end]
            before = int(m.episode_length[k]) - length
            episode = under_way.pop(key, None)
            if episode is not None and (episode.age != before or not np.array_equal(episode.last, observation[0])):
                yield episode  # something between them is missing
                episode = None
            if episode is None:
                episode = Episode(actor_id, m.boot, before == 0, before)
            else:
                episode.observations[-1] = episode.observations[-1][:-1]
            episode.observations.append(observation)
            episode.actions.append(m.action[step : step + length])
            episode.rewards.append(m.reward[step : step + length])
            episode.age += length
            episode.terminated, episode.truncated = bool(m.terminated[k]), bool(m.truncated[k])
            step += length
            if episode.terminated or episode.truncated:
                yield episode
            else:
                under_way[key] = episode
    yield from under_way.values()


def _write(file: h5py.File, index: int, episode: Episode, action: specs.ActionSpec) -> int:
    """Adds an episode, with its actions as the environment took them; returns its steps."""
    actions = np.concatenate(episode.actions)
    if action.kind == "continuous":  # a Gaussian's are kept as they were sampled
        low, high = (np.array(ends, np.float32).reshape(action.shape) for ends in (action.low, action.high))
        actions = np.clip(actions, low, high)
    steps = len(actions)
    group = file.create_group(f"episode_{index}")
    group.attrs.update(
        id=index, total_steps=steps, actor=episode.actor_id, boot=episode.boot, complete=episode.complete
    )
    ends = np.zeros((2, steps), bool)
    ends[:, -1] = episode.terminated, not episode.terminated
    arrays = {
        "observations": np.concatenate(episode.observations),
        "actions": actions.astype(np.int64) if actions.dtype == np.int32 else actions,
        "rewards": np.concatenate(episode.rewards),
        "terminations": ends[0],
        "truncations": ends[1],
    }
    for name, array in arrays.items():
        group.create_dataset(name, data=array, chunks=True, maxshape=(None, *array.shape[1:]))
    return steps


def _spaces(spec: specs.EnvSpec) -> dict[str, str]:
    """Returns both spaces as Minari writes them: JSON in a string."""
    shape, dtype, action = spec.observation.frame_shape, spec.observation.dtype, spec.action
    low, high = (0, 255) if dtype == "uint8" else (-math.inf, math.inf)
    box = _box(dtype, shape, np.full(shape, low), np.full(shape, high))
    if action.kind == "discrete":
        acts: dict[str, Any] = {"type": "Discrete", "dtype": "int64", "start": 0, "n": action.n}
    elif action.kind == "multi_discrete":
        acts = {"type": "MultiDiscrete", "dtype": "int64", "nvec": list(action.choices)}
    else:
        acts = _box(
            "float32", action.shape, np.reshape(action.low, action.shape), np.reshape(action.high, action.shape)
        )
    return {"observation_space": json.dumps(box), "action_space": json.dumps(acts)}


def _box(dtype: str, shape: tuple[int, ...], low: NDArray[Any], high: NDArray[Any]) -> dict[str, Any]:
    return {"type": "Box", "dtype": dtype, "shape": shape, "low": low.tolist(), "high": high.tolist()}
