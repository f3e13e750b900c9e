"""One directory per run that explains itself: settings, command line, versions, metrics, checkpoints, policies.

config.toml  run.json  metrics.jsonl  tensorboard/  checkpoints/  policies/vNNNNNN.PRECISION.tflite + .json
actors.jsonl (the last hour of each actor)  owed.json (what actors may hold of grants)  ledger.sqlite
dead_letters.jsonl (when something was refused)
summary.json and details.json (at the end)
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import io
import json
import math
import platform
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from broker.contract import errors, messages
from broker.program import settings, storage
from learner import config

LEDGER = "ledger.sqlite"
"""The file in which a run keeps its accepted experience, if the learner takes it in by itself."""
_SHARD = re.compile(r"ledger-(\d+)-of-(\d+)\.sqlite")
DETAILS = "details.json"
"""The file in which a run keeps what its report draws and its summary has no room for: fleet, and distributions."""
DRIFT = "drift.json"
"""The file that says which actors drift, and how, while the run goes on."""
CANARY = "canary.json"
"""The file that says which policy a run has proven last, and how its trials ended; that lies beside it."""
ACTOR_HOURS = "actors.jsonl"
"""The file that has the last hour of each actor; an older part is `.1` behind that name."""
_LOCK = ".lock"
_NAME_CHARS = 100
"""Characters of the environment's name in that of its run: file systems take 255 in all."""


class InUse(errors.RunError):
    """Another process has the run directory open."""


class RunDirectory:
    """An open run directory, locked against a second process, as `open` gives it.

    Args:
        path: Of the directory.
        lock: Locked for as long as it is open.
        holder: What stands in it meanwhile.
    """

    def __init__(self, path: Path, lock: io.BufferedWriter, holder: bytes) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.policies = path / "policies"
        self._lock, self._holder = lock, holder  # until the process ends

    @classmethod
    def open(cls, path: Path, *, resume: bool) -> RunDirectory:
        """Opens a run directory, or makes one.

        Args:
            path: Made if missing.
            resume: Whether it must exist already (true) or must not (false).

        Raises:
            RunError: It exists and should not, or the reverse; or another process uses it.
        """
        if resume and not (path / "config.toml").exists():
            raise no_run(path)
        if not resume and ((path / "config.toml").exists() or workers_of(path) is not None):
            raise errors.RunError(
                "the run directory holds a run already", where=str(path), todo=f"--resume {path}, or another --run-dir"
            )
        path.mkdir(parents=True, exist_ok=True)
        # Held, and thereby locked, until the process ends. What another one wrote into it stays
        lock = open(path / _LOCK, "ab")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise InUse(
                "another process is using the run directory",
                where=str(path),
                todo="stop it, or choose another --run-dir",
            ) from None
        holder = secrets.token_hex(8).encode()
        with storage.naming(path / _LOCK):
            lock.truncate(0)
            lock.write(holder)
            lock.flush()
        opened = cls(path, lock, holder)
        for directory in (opened.checkpoints, opened.policies):
            directory.mkdir(exist_ok=True)
        return opened

    def is_ours(self) -> bool:
        """Returns whether no other process has opened it since: shared storage gives up the locks of who is cut off."""
        try:
            return (self.path / _LOCK).read_bytes() == self._holder
        except OSError:  # nobody opens it without making one; and where nothing can be read, who writes will say so
            return True

    def ended_by_itself(self, max_env_steps: int) -> bool:
        """Returns whether the newest session solved the task, or took so many steps: killed or stopped it did neither.

        Args:
            max_env_steps: The budget of the run.
        """
        file = self.path / "summary.json"
        try:
            if file.stat().st_mtime_ns < (self.path / "run.json").stat().st_mtime_ns:
                return False  # of a session before
            summary = json.loads(file.read_text())
            return bool(summary["solved"]) or summary["env_steps"] >= max_env_steps
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def describe(self, effective: config.Settings) -> None:
        """Writes the effective settings, and who ran what with which versions; a resumed run adds to the latter."""
        storage.write_atomic(self.path / "config.toml", settings.dump(*effective).encode(), mode=0o644)
        file = self.path / "run.json"
        starts = _starts(file)
        starts.append(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "command": sys.argv,
                "git": _git_state(),
                "python": platform.python_version(),
                "platform": platform.platform(),
                "versions": versions(),
            }
        )
        storage.write_atomic(file, (json.dumps({"starts": starts}, indent=2) + "\n").encode(), mode=0o644)

    def owed_steps(self) -> float:
        """Returns the most steps that an actor may hold of what this run granted before; infinite if nobody knows."""
        try:
            steps = json.loads((self.path / "owed.json").read_text())["steps"]
            return float(steps) if steps is not None else math.inf
        except (OSError, ValueError, KeyError, TypeError):
            return math.inf

    def note_owed_steps(self, steps: float) -> None:
        """Keeps that number, so that it outlives a learner that is killed."""
        text = json.dumps({"steps": steps if math.isfinite(steps) else None}) + "\n"
        storage.write_atomic(self.path / "owed.json", text.encode(), mode=0o644)

    def save_policy(self, manifest: messages.Manifest, model: bytes) -> Path:
        """Keeps a published policy as a plain .tflite with its manifest beside it; returns the model's path.

        Of older ones it keeps ever fewer: the last hundred versions, of the last thousand every tenth, and so on.
        """
        stem = policy_name(manifest)
        path = self.policies / f"{stem}.tflite"
        storage.write_atomic(path, model, mode=0o644, sync=False)  # a record; the loop shall not wait for the disk
        text = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
        storage.write_atomic(self.policies / f"{stem}.json", text.encode(), mode=0o644, sync=False)
        step = 1
        while (old := manifest.version - 100 * step) > 0:
            if old % step == 0 and old % (10 * step):
                for kind in ("tflite", "json"):
                    (self.policies / f"v{old:06d}.{manifest.precision}.{kind}").unlink(missing_ok=True)
            step *= 10
        return path

    def stored_policy(self, order: messages.Order) -> bytes | None:
        """Returns a published policy that is kept here; None if it is not, or no longer."""
        for file in self.policies.glob(f"v{order.version:06d}.*.json"):
            try:
                manifest = messages.Manifest(**json.loads(file.read_text()))
                model = file.with_suffix(".tflite").read_bytes()
            except (OSError, ValueError, TypeError):
                continue
            if manifest.order == order and manifest.sha256 == hashlib.sha256(model).hexdigest():
                return model
        return None

    def save_summary(self, summary: dict[str, Any]) -> None:
        """Writes summary.json."""
        text = json.dumps(summary, indent=2) + "\n"
        storage.write_atomic(self.path / "summary.json", text.encode(), mode=0o644)

    def save_details(self, details: dict[str, Any]) -> None:
        """Writes details.json."""
        storage.write_atomic(self.path / DETAILS, (json.dumps(details) + "\n").encode(), mode=0o644)


def ledgers(path: Path, workers: int | None = None) -> list[Path]:
    """Returns the files in which a run keeps its accepted experience: one, or one for each of its ingest workers.

    Args:
        path: Of the run.
        workers: So many; None: as many as it has.
    """
    workers = workers_of(path) if workers is None else workers
    return [path / f"ledger-{shard}-of-{workers}.sqlite" for shard in range(workers or 0)] or [path / LEDGER]


def workers_of(path: Path) -> int | None:
    """Returns how many ingest workers a run was begun with, by its ledgers; None if it has none yet.

    Raises:
        RunError: Its ledgers are of several numbers.
    """
    found = {int(name[2]) for file in path.glob("ledger-*.sqlite") if (name := _SHARD.fullmatch(file.name))}
    if (path / LEDGER).exists():
        found.add(0)
    if len(found) > 1:
        raise errors.RunError(
            f"the run has ledgers of {' and of '.join(map(str, sorted(found)))} ingest workers",
            where=str(path),
            todo="move those that are not the run's elsewhere; its config.toml says ingest_workers",
        )
    return next(iter(found), None)


def check_workers(path: Path, workers: int) -> None:
    """Checks that a run goes on with as many ingest workers as it has ledgers: an actor's messages are all in one.

    Raises:
        RunError: It would not.
    """
    begun = workers_of(path)
    if begun is not None and begun != workers:
        raise errors.RunError(
            f"the run was begun with {begun} ingest workers, and would go on with {workers}",
            where=str(path),
            todo=f"go on with --ingest-workers {begun}, or begin a new run",
        )


def is_used(path: Path) -> bool:
    """Returns whether a process has a run directory open."""
    try:
        with open(path / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def no_run(path: Path) -> errors.RunError:
    """Returns the error for a directory in which nothing was begun: what a run writes first is its settings."""
    if (path / "checkpoints").is_dir():  # killed before it could
        return errors.RunError(
            "there is no run to resume: it ended before it had settings",
            where=str(path),
            todo=f"start it again as it was started, with --run-dir {path}",
        )
    return errors.RunError("there is no run to resume", where=str(path), todo="name a run directory, as in runs/")


def _starts(file: Path) -> list[Any]:
    """Returns the starts before this one; none where a broken disk has spoilt the file, which ends nothing."""
    try:
        starts = json.loads(file.read_text())["starts"] if file.exists() else []
    except (ValueError, KeyError, TypeError):
        return []
    return starts if isinstance(starts, list) else []


def policy_name(manifest: messages.Manifest) -> str:
    """Returns the name of a policy's files, without their suffix."""
    return f"v{manifest.version:06d}.{manifest.precision}"


def new_path(train: config.TrainConfig, env_id: str) -> Path:
    """Returns the directory of a new run: the one that was asked for, or runs/ENV-ALGORITHM-TIME."""
    if train.run_dir:
        return Path(train.run_dir)
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in env_id)
    return Path("runs") / f"{name[:_NAME_CHARS]}-{train.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"


def _git_state() -> str:
    """Returns the commit of the source tree, `+` if it was changed, or empty outside a checkout."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def versions() -> dict[str, str]:
    """Returns the versions of ourselves and of what results depend on; empty where something is not installed."""
    names = ("actorq-fleet", "tensorflow", "keras", "numpy", "ai-edge-litert", "paho-mqtt", "codecarbon")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found
