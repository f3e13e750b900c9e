"""Holds processes to a share of a core by the kernel's cgroups: v1 (cpu.cfs_quota_us) or v2 (cpu.max).

Each process gets a group of its own below the group that this process is in, or, with v2, below the nearest one above
that gives quotas away. A group is named after the process that made it, so that whoever comes later can remove what
one that was killed has left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from broker.contract import errors

_log = logging.getLogger(__name__)
PREFIX = "actorq-"
SHARE_MIN = 0.02
"""The kernel takes quotas of a millisecond or more."""
_PERIOD_US = 50_000
_REMOVAL_S = 2.0
_V1_QUOTA, _V1_PERIOD, _V2_QUOTA = "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max"


@dataclass(frozen=True, slots=True)
class Held:
    """The fate of a quota.

    Attributes:
        share: Of a core, for each process; None where the kernel could not be told.
        how: By what they were held; or `unlimited` and why.
        throttled: Share of the periods in which one had to wait for the next, over all of them; None where unknown.
    """

    share: float | None
    how: str
    throttled: float | None


class CpuQuota:
    """Groups of one process each.

    Args:
        share: Of a core, for each of them.
        proc: Where the kernel says which groups there are.
    """

    @classmethod
    def of(cls, share: float) -> CpuQuota:
        """Returns groups for this machine.

        Raises:
            ConfigError: The kernel takes no such share.
        """
        if not SHARE_MIN <= share <= (os.cpu_count() or 1):
            raise errors.ConfigError(
                f"a share of {share:g} cores cannot be given",
                where="--actor-cpu-share",
                todo=f"name one from {SHARE_MIN:g} to the number of cores",
            )
        return cls(share)

    def __init__(self, share: float, proc: Path = Path("/proc")) -> None:
        self._share, self._proc = share, proc
        self._groups: dict[str, Path] = {}
        self._refused = ""
        self._stat: dict[str, tuple[int, int]] = {}

    def hold(self, name: str, pid: int) -> None:
        """Moves a process, and what it will start, into a group of its own. Where that is refused, it stays free."""
        if self._refused:
            return
        try:
            _write((self._groups.get(name) or self._make(name)) / "cgroup.procs", str(pid))
        except OSError as error:
            self._refused = f"{error.strerror}: {error.filename}"
            _log.warning("actors are not held to a share of a core: %s", self._refused)

    def held(self) -> Held:
        """Returns what they are held by."""
        if self._refused or not self._groups:
            return Held(None, f"unlimited: {self._refused or 'nothing was held'}", None)
        for name, group in self._groups.items():
            self._stat[name] = _periods(group) or self._stat.get(name, (0, 0))
        periods, throttled = (sum(counts) for counts in zip(*self._stat.values(), strict=True))
        version = "v1" if all((group / _V1_QUOTA).exists() for group in self._groups.values()) else "v2"
        how = f"cgroup {version}, {self._quota_us} of {_PERIOD_US} us"
        return Held(self._share, how, throttled / periods if periods else None)

    def close(self) -> None:
        """Removes the groups; their processes must have ended."""
        until = time.monotonic() + _REMOVAL_S
        for group in self._groups.values():
            while not _remove(group) and time.monotonic() < until:
                time.sleep(0.01)  # the kernel tells nobody when the last process has left
        self._groups.clear()

    @property
    def _quota_us(self) -> int:
        return round(self._share * _PERIOD_US)

    def _make(self, name: str) -> Path:
        refused = OSError(0, "this kernel has no cgroups that we could see", str(self._proc))
        for parent, is_v1 in _parents(self._proc):
            try:
                group = self._make_below(parent, name, is_v1=is_v1)
            except OSError as error:
                refused = error
                continue
            self._groups[name] = group
            return group
        raise refused

    def _make_below(self, parent: Path, name: str, *, is_v1: bool) -> Path:
        remove_stale(parent, self._proc)
        control = parent / "cgroup.subtree_control"
        if not is_v1 and "cpu" not in control.read_text().split():
            _write(control, "+cpu")
        group = parent / f"{PREFIX}{os.getpid()}-{name}"
        group.mkdir(exist_ok=True)
        try:
            if is_v1:
                _write(group / _V1_PERIOD, str(_PERIOD_US))
                _write(group / _V1_QUOTA, str(self._quota_us))
            else:
                _write(group / _V2_QUOTA, f"{self._quota_us} {_PERIOD_US}")
        except OSError:
            _remove(group)
            raise
        return group


def remove_stale(parent: Path, proc: Path = Path("/proc")) -> list[str]:
    """Removes groups below `parent` whose maker is gone and in which nobody lives; returns their names."""
    removed = []
    for group in sorted(parent.glob(f"{PREFIX}*-*")):
        maker = group.name.removeprefix(PREFIX).partition("-")[0]
        if maker.isdecimal() and not (proc / maker).exists() and _remove(group):
            removed.append(group.name)
    return removed


def _write(file: Path, text: str) -> None:
    """Writes one of the kernel's files. What it refuses it refuses when written to, which names no file by itself."""
    try:
        file.write_text(text)
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def _remove(group: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        try:
            group.rmdir()
        except OSError:  # somebody lives there
            return False
    return True


def _periods(group: Path) -> tuple[int, int] | None:
    """Returns the periods in which a group had something to do, and those in which it had to wait."""
    try:
        lines = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        return int(lines["nr_periods"]), int(lines["nr_throttled"])
    except (OSError, ValueError, KeyError):
        return None


def _parents(proc: Path) -> Iterator[tuple[Path, bool]]:
    """Yields groups in which others might be made, and whether of v1: our own there, then of v2 and those above it."""
    try:
        mounts = [line.split() for line in (proc / "self/mountinfo").read_text().splitlines()]
        memberships = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except OSError:
        return
    mounted = [(fields[fields.index("-") + 1], fields[-1].split(","), fields[3], Path(fields[4])) for fields in mounts]
    for kind, options, root, top in mounted:
        if kind == "cgroup" and "cpu" in options:
            yield from ((_below(top, root, path), True) for _, names, path in memberships if "cpu" in names.split(","))
    for kind, _, root, top in mounted:
        if kind == "cgroup2":
            own = _below(top, root, next((path for number, _, path in memberships if number == "0"), "/"))
            yield from ((group, False) for group in (own, *own.parents) if group == top or top in group.parents)


def _below(top: Path, root: str, path: str) -> Path:
    """Returns the directory of a group, of whose tree `root` is mounted at `top`."""
    with contextlib.suppress(ValueError):
        return top / Path(path).relative_to(root)
    return top
