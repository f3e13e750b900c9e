"""Child processes that the kernel ends when their parent is gone, even after kill -9. On Linux; elsewhere they stay."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGTERM) -> Callable[[], None] | None:
    """Returns the `preexec_fn` of a child of this process; None where the kernel has no such thing.

    It is made before the fork, because after it only calls are safe that wait for no other thread.

    Args:
        signum: What the child is sent.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()
    return lambda: _die_with(parent, signum, libc)


def die_with(parent: int) -> None:
    """Has this very process killed when its parent is gone.

    Args:
        parent: Its process id, which is 1 where it is all that runs in a container.
    """
    if sys.platform.startswith("linux"):
        _die_with(parent, signal.SIGKILL, ctypes.CDLL(None))


def _die_with(parent: int, signum: int, libc: ctypes.CDLL) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
