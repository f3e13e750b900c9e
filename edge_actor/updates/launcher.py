"""Starts the newest release of the actor that works: `actorq-launch run ...` in the place of `actorq-actor run ...`.

It belongs to the program that was set up on the board, and no update changes it. It imports nothing but Python's own
library, so that no release can break it. The directory of releases ($ACTORQ_RELEASES, else ~/.actorq/releases) has

    NAME/site   a release, unpacked; it acts with the packages of the program set up here behind its own
    NAME/base   the program beside which it was laid; beside another one it does not count
    current     a link to the release that is known to work; without one the program set up here acts
    trial       one that has yet to prove itself: {"name", "number", "limit_s", "starts"}
    failed      one that did not, and "why", until the actor has told it; the release itself is gone then

Each is replaced in one step and synced, so the plug may be pulled at any moment. A release on trial is `current` once
it says so itself (`confirm`), and not before: whatever happens to it until then, the release before it acts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTS = 2
"""Starts of a release on trial that may end with the launcher, by a pulled plug; by itself it may end none."""
STOP_S = 10.0
LOOK_S = 0.1
ROOT, NAME = "ACTORQ_RELEASES", "ACTORQ_RELEASE"
"""What tells the actor that it was launched, and as which release (empty: the program set up here)."""


def main() -> int:
    """Runs the actor; returns its exit code, unless the actor takes this process over."""
    home = Path(os.environ.get("ACTORQ_HOME") or Path.home() / ".actorq")
    root = Path(os.environ.get(ROOT) or home / "releases").absolute()
    try:
        code = try_release(root) if sys.argv[1:2] == ["run"] else None  # all else is a person's, who looks
    except OSError as error:  # a disk that is full or failing must not keep the board from acting
        warn(f"a release on trial has to wait: {error}")
        code = None
    if code is not None:
        return code
    command, environment = as_release(root, current(root))
    os.execve(command[0], command, environment)


def try_release(root: Path) -> int | None:
    """Tries a release, if one is to be; returns the exit code of one that proved itself or was told to stop."""
    for _ in range(STARTS + 1):  # and not for ever, where its note cannot be taken away
        trial = read(root / "trial")
        if not trial or trial["name"] == current(root):
            break  # it proved itself; the actor takes the note away when it has told so
        if not usable(root, trial["name"]):
            give_up(root, "it is not there as a whole, or the program beneath it was replaced")
        elif trial["starts"] >= STARTS:
            why = f"it was started {STARTS} times, and did not come so far as to say that it acts"
            abandon(root, trial["name"], why)
        elif (code := try_out(root, trial)) is not None:
            return code
    return None


def try_out(root: Path, trial: dict[str, Any]) -> int | None:
    """Runs a release on trial; returns the exit code of one that proved itself, or was told to stop, else None."""
    name, stopped, why = trial["name"], False, ""
    write(root / "trial", trial | {"starts": trial["starts"] + 1})
    command, environment = as_release(root, name)
    environment.pop("WATCHDOG_PID", None)  # systemd means this process by it; the unit lets its child speak
    child = subprocess.Popen(command, env=environment)
    for asks in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asks, stop)
    try:
        until = time.monotonic() + trial["limit_s"]
        while child.poll() is None and time.monotonic() < until and current(root) != name:
            time.sleep(LOOK_S)
        if child.poll() is None:
            why = f"within {trial['limit_s']:g} s it did not say that it acts and reaches the learner"
            give_up(root, why)
        while child.poll() is None and current(root) == name:
            child.wait()
        code = end(child)
    except Stopped:
        stopped, code = True, end(child)
    finally:
        child.kill()
        child.wait()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if current(root) == name or stopped:
        return code if code >= 0 else 128 - code
    abandon(root, name, why or f"it ended with {code} before it said that it acts and reaches the learner")
    return None


class Stopped(Exception):
    """Somebody asks this process to end."""


def stop(signum: int, frame: object) -> None:
    """Is called at SIGTERM and Ctrl-C; a second one must not keep the child from ending in order."""
    for asks in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asks, signal.SIG_IGN)
    raise Stopped


def end(child: subprocess.Popen[bytes]) -> int:
    """Ends a process, in order if it can; returns its exit code."""
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def as_release(root: Path, name: str) -> tuple[list[str], dict[str, str]]:
    """Returns command and environment of the actor; of the program set up here, if `name` is empty."""
    environment = os.environ | {ROOT: str(root), NAME: name}
    if name:
        before = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root / name / "site"), before)))
    return [sys.executable, "-P", "-m", "edge_actor", *sys.argv[1:]], environment


def base() -> str:
    """Returns what the program set up here is told from others by."""
    return f"{os.path.realpath(sys.prefix)} {sys.version_info.major}.{sys.version_info.minor}"


def usable(root: Path, name: str) -> bool:
    """Returns whether a release is there as a whole (it gets its name last), for this program."""
    try:
        return bool(name) and (root / name / "base").read_text() == base()
    except (OSError, ValueError):
        return False


def current(root: Path) -> str:
    """Returns the name of the release that is known to work; empty: the program set up here."""
    try:
        name = os.readlink(root / "current")
    except OSError:
        return ""
    return name if usable(root, name) else ""


def confirm(root: Path, name: str) -> bool:
    """Makes a release on trial the one that is known to work; returns false if it was given up before."""
    with locked(root):
        if current(root) == name:
            return True
        if read(root / "trial").get("name") != name:
            return False
        link = root / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(root / "current")
        sync(root)
        return True


def give_up(root: Path, why: str) -> None:
    """Ends a trial, unless the release has proved itself or the trial has ended."""
    with locked(root):
        trial = read(root / "trial")
        if not trial or trial["name"] == current(root):
            return
        try:
            write(root / "failed", trial | {"why": why})
            (root / "trial").unlink()
        except OSError:  # a full disk has room for another name
            (root / "trial").replace(root / "failed")
        sync(root)
    warn(f"release {trial['name']} is given up: {why}")


def abandon(root: Path, name: str, why: str) -> None:
    """Gives a release up that no process is any longer, and frees what it took: that may be all of the disk."""
    give_up(root, why)
    if current(root) == name:
        return
    discard(root / name)
    failed = read(root / "failed")
    if failed.get("name") == name and not failed["why"]:
        with contextlib.suppress(OSError):  # that nobody will hear why is the smaller evil
            write(root / "failed", failed | {"why": why})


def discard(release: Path) -> None:
    """Removes a release; what says that it is whole first, for the plug may be pulled before the rest is gone."""
    with contextlib.suppress(FileNotFoundError):
        (release / "base").unlink()
        sync(release)
    shutil.rmtree(release, ignore_errors=True)


def warn(text: str) -> None:
    """Tells people on stderr; where that is systemd's journal, as a warning (systemd.exec(5))."""
    priority = ""
    with contextlib.suppress(OSError):
        about = os.fstat(2)
        priority = "<4>" if os.environ.get("JOURNAL_STREAM") == f"{about.st_dev}:{about.st_ino}" else ""
    print(f"{priority}actorq-launch: {text}", file=sys.stderr, flush=True)


def read(path: Path) -> dict[str, Any]:
    """Returns a note; empty if there is none. One that is damaged names no release."""
    try:
        found = json.loads(path.read_bytes())
        return {"name": str(found["name"]), "number": int(found["number"]), "limit_s": float(found["limit_s"])} | {
            "starts": int(found["starts"]),
            "why": str(found.get("why", "")),
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {"name": "", "number": 0, "limit_s": 0.0, "starts": STARTS, "why": "its note is damaged"}


def write(path: Path, note: dict[str, Any]) -> None:
    """Replaces a note: whoever reads it finds the old or the new one, also after a pulled plug."""
    fresh = path.with_name(f".{path.name}")
    with open(fresh, "w") as file:
        json.dump(note, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync(path.parent)


def sync(directory: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lets one process at a time decide what becomes of a trial."""
    with open(root / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
