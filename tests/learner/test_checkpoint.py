"""Written whole or not at all; the newest readable one wins, and a broken one is never passed over in silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from broker import errors
from learner import checkpoint


def save(directory: Path, updates: int) -> Path:
    state = {"w": np.full((2, 3), updates, np.float32), "n": np.array(updates)}
    return checkpoint.save(directory, updates, {"updates": updates, "big": 2**100}, {"algorithm": state, "replay": {}})


def test_restores_what_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 7)
    found = checkpoint.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.meta == {"updates": 7, "big": 2**100}
    np.testing.assert_array_equal(found.parts["algorithm"]["w"], np.full((2, 3), 7, np.float32))
    assert found.parts["algorithm"]["w"].dtype == np.float32


def test_keeps_the_newest_few(tmp_path: Path) -> None:
    for updates in range(5, 105, 10):
        save(tmp_path, updates)
    found = checkpoint.load_newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.meta["updates"] == 95
    assert len(list(tmp_path.iterdir())) == checkpoint.KEEP


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_falls_back_loudly(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    data = bytearray(newest.read_bytes())
    if damage == "flip":
        data[data.index(np.full(6, 2, np.float32).tobytes())] ^= 1
    newest.write_bytes({"cut": bytes(data[:-40]), "flip": bytes(data), "empty": b""}[damage])
    said: list[str] = []
    found = checkpoint.load_newest(tmp_path, said.append)
    assert found is not None
    assert found.meta["updates"] == 1
    assert len(said) == 1
    assert newest.name in said[0]


def test_says_so_when_all_are_broken(tmp_path: Path) -> None:
    save(tmp_path, 1).write_bytes(b"junk")
    with pytest.raises(errors.RunError, match="no checkpoint"):
        checkpoint.load_newest(tmp_path, lambda line: None)


def test_a_checkpoint_of_another_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    """Before format 2 kernels lay the other way: between layers of one width they would fit, and say nothing."""
    save(tmp_path, 1)
    np.savez(tmp_path / "0000000002.npz", __meta__=np.frombuffer(b'{"updates": 2}', np.uint8))
    with pytest.raises(errors.RunError, match="format 2 or less, and this release of actorq-fleet reads format 3"):
        checkpoint.load_newest(tmp_path, pytest.fail)


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path, pytest.fail) is None


def test_never_unpickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "0000000001.npz", __meta__=np.array([{"a": 1}], dtype=object))
    with pytest.raises(errors.RunError):
        checkpoint.load_newest(tmp_path, lambda line: None)
