"""Confines Mosquitto by the kernel (Landlock, Linux 5.13): it reads programs, /etc and its own files, and no others.

Started by a normal user Mosquitto runs as that user, who can read the fleet's keys; whoever takes it over must not. It
writes no file, traces and signals nobody, and connects to nobody over TCP, each as far as the kernel knows the rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_ASK_VERSION, _PATH_BENEATH, _PR_SET_NO_NEW_PRIVS = 1, 1, 38
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
"""All rights on files that there are, by Landlock's version; what came after the third concerns devices."""
_EXECUTE_READ_LIST, _READ = 0b1101, 0b0100
_CONNECT_TCP, _ABSTRACT_SOCKETS_AND_SIGNALS = 0b10, 0b11
_READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/dev/urandom"),
    *("/opt", "/nix/store", "/snap", "/home/linuxbrew/.linuxbrew"),  # where other packagers put programs
)


@contextlib.contextmanager
def confine(program: Path, directory: Path) -> Iterator[Callable[[], None]]:
    """Makes the rules; yields what puts the calling process under them for good, where the kernel has Landlock.

    Args:
        program: What will be executed; its libraries may lie in `../lib`.
        directory: What it reads besides.

    Yields:
        For a child between fork and exec: two system calls, or none.
    """
    libc = ctypes.CDLL(None)
    version = libc.syscall(_CREATE_RULESET, None, 0, _ASK_VERSION) if sys.platform.startswith("linux") else -1
    handled = (
        _FILE_RIGHTS.get(version, _FILE_RIGHTS[3]),
        _CONNECT_TCP if version >= 4 else 0,
        _ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0,
    )
    attributes = struct.pack("=QQQ", *handled)  # longer than an old kernel's is fine where it ends in zeros
    rules = -1 if version < 1 else libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        yield lambda: None
        return
    prefix = program.resolve().parent.parent
    for path in (*_READABLE, program.resolve().parent, prefix / "lib", prefix / "ssl", directory):
        with contextlib.suppress(FileNotFoundError):
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = _EXECUTE_READ_LIST if os.path.isdir(path) else _READ
            libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
            os.close(beneath)

    def in_child() -> None:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(_RESTRICT_SELF, rules, 0) != 0:
            os._exit(1)

    try:
        yield in_child
    finally:
        os.close(rules)
