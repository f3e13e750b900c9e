"""Kills launcher and actor, as a pulled plug does, just before the n-th of the steps by which they change the disk.

Laid into the path as `sitecustomize`, so that it is in every Python process of a board. Steps are counted in a file,
over all processes.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

_STEPS = ("fsync", "replace", "rename", "unlink", "symlink", "mkdir", "rmdir")
_count, _kills = os.environ.get("PLUG_COUNT", ""), {int(one) for one in os.environ.get("PLUG_AT", "").split(",") if one}


def _counted(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        descriptor = os.open(_count, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b".")
        number = os.fstat(descriptor).st_size
        os.close(descriptor)
        if number in _kills:
            os.killpg(0, signal.SIGKILL)
        return step(*args, **kwargs)

    return run


if _count:
    for _name in _STEPS:
        setattr(os, _name, _counted(getattr(os, _name)))
