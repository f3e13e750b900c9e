"""The program of tiny releases: an actor without environment and fleet, by the very library that real ones have.

It proves itself at once, or does whatever WAY says. When it acts as the program that was set up, it takes the release
that `wanted.json` describes, as an order would have it do; but not one that was given up.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edge_actor.updates import launcher, release_directory

WAY = "good"
directory = release_directory.ReleaseDirectory(Path(os.environ[launcher.ROOT]), os.environ[launcher.NAME])
wanted = json.loads((directory.root.parent / "wanted.json").read_text())
log = directory.root.parent / "log"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # the log is the test's


def say(*words: str) -> None:
    with open(log, "a") as lines:
        lines.write(" ".join(words) + "\n")


was_tried = log.exists() and f"starts {wanted['name']}\n" in log.read_text()
say("starts", directory.running or "base")
if WAY == "fills":  # no file of the launcher can grow from now on, as on a disk that has no byte left
    resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    sys.exit(10)
if WAY == "crashes":
    sys.exit(10)  # with which systemd would never start it again
if WAY == "hangs":
    time.sleep(60.0)
if directory.trial:
    if not directory.confirm():
        time.sleep(60.0)
    directory.forget_trial()
if failed := directory.failed:
    say("gave_up", failed["name"], failed["why"].replace(" ", "_"))
elif directory.running != wanted["name"] and not was_tried:
    listed: Any = SimpleNamespace(**wanted["listed"])
    listed.wheels = [SimpleNamespace(**one) for one in listed.wheels]
    directory.root.mkdir(exist_ok=True)
    directory.clear(keep=wanted["name"])
    directory.partial(wanted["name"]).mkdir(exist_ok=True)
    directory.unpack(listed, wanted["name"], Path(wanted["wheel"]))
    directory.forget_partial(wanted["name"])
    directory.begin_trial(wanted["name"], wanted["serial"], 7, wanted["limit_s"])
    sys.exit(75)
say("acts", directory.running or "base")
time.sleep(60.0)
