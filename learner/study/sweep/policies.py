"""Finds the policies of a study, and what each is called, was trained by and plays."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from broker.contract import errors
from learner.study.user_models import reading

FILES = (".zip", ".keras", ".onnx")
RUN, SAVED_MODEL = "run", "SavedModel"
_NAMED = re.compile(r"([A-Za-z0-9]+)-(.+-v\d+)")
_BARE = re.compile(r".+-v\d+")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A policy of a study.

    Attributes:
        name: Its path below the directory that was named; no two are alike.
        path: Absolute.
        kind: A suffix of FILES, RUN or SAVED_MODEL.
        algorithm: That trained it, lower case; empty where neither name nor settings tell.
        env: What it plays; empty if its name does not tell. A run knows by itself.
        sha256: Of all that it is read from.
    """

    name: str
    path: str
    kind: str
    algorithm: str
    env: str
    sha256: str


def find(paths: Sequence[str], env: str) -> list[Entry]:
    """Finds policies in files and directories.

    Args:
        paths: Of policies, runs, or directories of these, at any depth.
        env: What all of them play; empty takes what their names tell.

    Raises:
        ConfigError: A path is missing, or there is no policy.
    """
    found: dict[str, Entry] = {}
    for root in map(Path, paths):
        if not root.exists():
            raise errors.ConfigError("there is no such file or directory", where=str(root), todo="name what is there")
        for path, kind in _walk(root):
            name = path.name if path == root else path.relative_to(root).as_posix()
            if name in found and found[name].path != str(path):
                name = str(path)
            algorithm, of_name = _told(path, kind)
            found[name] = Entry(name, str(path), kind, algorithm, env or of_name, digest(path, kind))
    if not found:
        raise errors.ConfigError(
            "there is no policy",
            where=", ".join(paths),
            todo=f"name files ({', '.join(FILES)}), SavedModels, run directories, or directories of such",
        )
    return list(found.values())


def digest(path: Path, kind: str) -> str:
    """Returns the SHA-256 of a policy's file, its normaliser's beside it; or of a run's checkpoints.

    Raises:
        ConfigError: It is gone, or cannot be read.
    """
    if kind in FILES:
        normaliser = reading.beside(path) if kind == ".zip" else None
        files = [path, *([normaliser] if normaliser else [])]
    else:
        files = sorted(one for one in (path / "checkpoints" if kind == RUN else path).rglob("*") if one.is_file())
    whole = hashlib.sha256()
    try:
        for file in files:
            whole.update(f"{file.name}\0".encode())
            with open(file, "rb") as stream:
                while piece := stream.read(1 << 20):
                    whole.update(piece)
    except OSError as error:
        raise errors.ConfigError(
            f"a policy cannot be read: {error.strerror}", where=str(path), todo="put it back, or begin another study"
        ) from error
    return whole.hexdigest()


def _walk(path: Path) -> Iterator[tuple[Path, str]]:
    if kind := _kind(path):
        yield path, kind
    elif path.is_dir():
        for child in sorted(path.iterdir()):
            if not child.name.startswith(".") and not (child.is_symlink() and child.is_dir()):
                yield from _walk(child)


def _kind(path: Path) -> str:
    if path.is_file():
        return path.suffix if path.suffix in FILES else ""
    if (path / "saved_model.pb").is_file():
        return SAVED_MODEL
    return RUN if (path / "config.toml").is_file() and (path / "checkpoints").is_dir() else ""


def _told(path: Path, kind: str) -> tuple[str, str]:
    """Returns algorithm and environment, as ALGO-ENV names them, or rl-baselines3-zoo: ALGO/ENV_1/ENV.zip."""
    if kind == RUN:
        try:
            return str(tomllib.loads((path / "config.toml").read_text()).get("algorithm", "")), ""
        except (OSError, ValueError):
            return "", ""
    stem = path.name if kind == SAVED_MODEL else path.stem
    if named := _NAMED.fullmatch(stem):
        return named[1].lower(), named[2]
    if _BARE.fullmatch(stem):
        is_zoo = re.fullmatch(rf"{re.escape(stem)}_\d+", path.parent.name)
        return (path.parent.parent.name.lower() if is_zoo else ""), stem
    return "", ""
