"""Messages stitched to episodes again, in the layout that Minari reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from broker.contract import codec, errors, messages, specs
from learner import __main__ as main
from learner.experience import ledger
from learner.files import run_directory
from learner.study import export
from tests.fakes import fleet_examples

ABOUT = {"env_id": "CartPole-v1", "spec": json.dumps(dataclasses.asdict(fleet_examples.SPEC))}


def message(*parts: tuple[int, int, str], boot: int = 1, env: Sequence[int] = ()) -> bytes:
    """Segments as (first step of the episode, last step, how it ends: T, t or -); observation of step n is n."""
    lengths = [last - first + 1 for first, last, _ in parts]
    observation = np.concatenate([np.arange(first - 1, last + 1) for first, last, _ in parts])
    made: messages.Experience = fleet_examples.experience(
        lengths,
        boot=boot,
        env_index=np.array(env or [0] * len(parts), np.int32),
        terminated=np.array([end == "T" for _, _, end in parts], np.uint8),
        truncated=np.array([end == "t" for _, _, end in parts], np.uint8),
        episode_length=np.array([last for _, last, _ in parts], np.int32),
        observation=np.repeat(observation[:, None], 4, axis=1).astype(np.float32),
        reward=np.concatenate([np.arange(first, last + 1) for first, last, _ in parts]).astype(np.float32),
    )
    return codec.encode(made)


def stitched(*bodies: bytes) -> list[tuple[list[int], bool, bool]]:
    """Rewards, terminated, and complete, of each episode; observations are checked on the way."""
    found = []
    for episode in export.stitch((("pi", body) for body in bodies), fleet_examples.SPEC):
        rewards = np.concatenate(episode.rewards).astype(int).tolist()
        observations = np.concatenate(episode.observations)[:, 0].astype(int).tolist()
        assert observations == [rewards[0] - 1, *rewards]
        assert len(np.concatenate(episode.actions)) == len(rewards)
        found.append((rewards, episode.terminated, episode.complete))
    return found


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([message((1, 3, "T"), (1, 2, "t"))], [([1, 2, 3], True, True), ([1, 2], False, True)]),
        ([message((1, 2, "-")), message((3, 5, "-")), message((6, 6, "T"))], [([1, 2, 3, 4, 5, 6], True, True)]),
        ([message((1, 2, "-"), (1, 1, "-"), env=[0, 1]), message((2, 3, "T"), (3, 4, "T"), env=[1, 0])],
         [([1, 2, 3], True, True), ([1, 2, 3, 4], True, True)]),
        ([message((1, 2, "-")), message((5, 6, "T"))], [([1, 2], False, False), ([5, 6], True, False)]),
        ([message((1, 2, "-")), message((1, 2, "T"), boot=2)], [([1, 2], True, True), ([1, 2], False, False)]),
        ([message((1, 2, "-"))], [([1, 2], False, False)]),
    ],
    ids=["ended", "over messages", "two environments", "a gap", "another boot", "unfinished"],
)  # fmt: skip
def test_stitches(bodies: list[bytes], expected: list[tuple[list[int], bool, bool]]) -> None:
    assert stitched(*bodies) == expected


def test_an_age_that_fits_by_chance_is_no_continuation() -> None:
    other = codec.decode(messages.Experience, message((3, 4, "T")))
    moved = codec.encode(dataclasses.replace(other, observation=other.observation.astype(np.float32) + 0.5))
    episodes = list(export.stitch([("pi", message((1, 2, "-"))), ("pi", moved)], fleet_examples.SPEC))
    assert [len(episode.rewards[0]) for episode in episodes] == [2, 2]
    assert not any(episode.complete for episode in episodes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a ledger: an episode over two messages, one that was truncated, one that goes on."""
    directory = tmp_path / "my run.1"
    directory.mkdir()
    book = ledger.Ledger.open(directory / run_directory.LEDGER, about=ABOUT)
    bodies = [message((1, 3, "-")), message((4, 5, "T"), (1, 4, "t"), (1, 2, "-"))]
    book.begin(
        [ledger.Entry("pi", 1, seq, 0, 3, 0, len(b), ledger.OK, b) for seq, b in enumerate(bodies, 1)], forget_before=0
    )
    book.wait()
    book.close()
    return directory


def test_writes_the_documented_layout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["export", str(run), "--json"]) == errors.EXIT_OK
    told = json.loads(capsys.readouterr().out)
    assert (told["episodes"], told["episodes_complete"], told["steps"]) == (3, 2, 11)
    assert told["dataset_id"] == "actorq/my_run_1-v0"
    data = run / "minari" / "actorq" / "my_run_1-v0" / "data"
    metadata: dict[str, Any] = json.loads((data / "metadata.json").read_text())
    assert (metadata["total_episodes"], metadata["total_steps"]) == (3, 11)
    assert json.loads(metadata["action_space"]) == {"type": "Discrete", "dtype": "int64", "start": 0, "n": 2}
    with h5py.File(data / "main_data.hdf5") as file:
        first, second = file["episode_0"], file["episode_1"]
        assert dict(first.attrs) == {"id": 0, "total_steps": 5, "actor": "pi", "boot": 1, "complete": True}
        np.testing.assert_array_equal(first["observations"][:, 0], np.arange(6))
        np.testing.assert_array_equal(first["rewards"][:], np.arange(1, 6))
        assert first["actions"].dtype == np.int64
        assert first["terminations"][:].tolist() == [False] * 4 + [True]
        assert not first["truncations"][:].any()
        assert second["truncations"][:].tolist() == [False] * 3 + [True]
        assert file["episode_2"]["truncations"][:].tolist() == [False, True], "cut where the data ends"


def test_minari_reads_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import minari

    main.main(["export", str(run), "--dataset-id", "toy-v3"])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(run / "minari"))
    dataset = minari.load_dataset("toy-v3")
    assert (dataset.total_episodes, dataset.total_steps) == (3, 11)
    episodes = list(dataset.iterate_episodes())
    assert [len(episode.actions) for episode in episodes] == [5, 4, 2]
    assert episodes[0].observations.shape == (6, 4)
    assert dataset.action_space.n == 2
    assert dataset.observation_space.contains(episodes[0].observations[0])


def test_what_cannot_be_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["export", str(run), "--dataset-id", "no version"]) == errors.ConfigError.exit_code
    assert main.main(["export", str(run)]) == errors.EXIT_OK
    assert main.main(["export", str(run)]) == errors.ConfigError.exit_code
    assert "is there already" in capsys.readouterr().err
    assert main.main(["export", str(tmp_path)]) == errors.RunError.exit_code
    assert "no ledger" in capsys.readouterr().err


def test_bounds_of_continuous_actions_and_of_frames() -> None:
    spec = specs.EnvSpec(
        specs.ObservationSpec((2, 3), "uint8", stack=3),
        specs.ActionSpec("continuous", shape=(2,), low=(-1.0, -2.0), high=(1.0, 2.0)),
    )
    spaces = {name: json.loads(text) for name, text in export._spaces(spec).items()}
    assert spaces["observation_space"] == {
        "type": "Box", "dtype": "uint8", "shape": [2, 1], "low": [[0], [0]], "high": [[255], [255]]
    }  # fmt: skip
    assert (spaces["action_space"]["low"], spaces["action_space"]["high"]) == ([-1.0, -2.0], [1.0, 2.0])
