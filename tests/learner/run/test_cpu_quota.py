"""A process is held to a share of a core, by this machine's cgroups where they may be written, and by files else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import errors
from learner.run import cpu_quota

BUSY = "import time\nuntil = time.monotonic() + 1.0\nwhile time.monotonic() < until: pass\nprint(time.process_time())"
V1 = "31 23 0:28 / {top} rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "30 23 0:27 / {top} rw - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / str(os.getpid())).mkdir()
    return tmp_path / "proc"


def mount(proc: Path, line: str, membership: str, top: Path) -> None:
    (proc / "self" / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + line.format(top=top))
    (proc / "self" / "cgroup").write_text(membership)


@pytest.fixture
def quota() -> Iterator[cpu_quota.CpuQuota]:
    made = cpu_quota.CpuQuota.of(0.1)
    yield made
    made.close()


def test_a_busy_process_gets_its_share_and_no_more(quota: cpu_quota.CpuQuota) -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    quota.hold("busy", child.pid)
    output, _ = child.communicate(timeout=60.0)
    held = quota.held()
    if held.share is None:
        assert held.how.startswith("unlimited: ")
        pytest.skip(f"cgroups cannot be written here: {held.how}")
    assert float(output) < 0.6  # 0.1 of the second, and what it took before it was held
    assert held.share == 0.1
    assert "5000 of 50000 us" in held.how
    assert held.throttled is not None
    assert held.throttled > 0.5


def test_groups_are_removed_and_left_ones_too(quota: cpu_quota.CpuQuota) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        quota.hold("asleep", child.pid)
        if quota.held().share is None:
            pytest.skip(f"cgroups cannot be written here: {quota.held().how}")
        group = quota._groups["asleep"]
        assert str(child.pid) in (group / "cgroup.procs").read_text().split()
        gone = subprocess.Popen(["true"])
        gone.wait()
        left = group.parent / f"{cpu_quota.PREFIX}{gone.pid}-actor-0"
        left.mkdir()  # as after kill -9 of who made it
        assert cpu_quota.remove_stale(group.parent) == [left.name]
        assert group.exists()  # its maker lives
    finally:
        child.kill()
        child.wait()
    quota.close()
    assert not group.exists()


def test_v1_is_written_below_our_own_group(proc: Path, tmp_path: Path) -> None:
    top = tmp_path / "cpu"
    (top / "docker" / "abc").mkdir(parents=True)
    mount(proc, V1, "4:memory:/\n2:cpu,cpuacct:/docker/abc\n0::/\n", top)
    quota = cpu_quota.CpuQuota(0.25, proc)
    quota.hold("actor-0", 1234)
    group = top / "docker" / "abc" / f"actorq-{os.getpid()}-actor-0"
    assert (group / "cpu.cfs_quota_us").read_text() == "12500"
    assert (group / "cpu.cfs_period_us").read_text() == "50000"
    assert (group / "cgroup.procs").read_text() == "1234"
    assert quota.held() == cpu_quota.Held(0.25, "cgroup v1, 12500 of 50000 us", None)


def test_v2_is_written_where_quotas_may_be_given_away(proc: Path, tmp_path: Path) -> None:
    top = tmp_path / "unified"
    own = top / "user.slice" / "app.slice" / "terminal.scope"
    own.mkdir(parents=True)  # it has no subtree_control, as a file that must not be written
    (own.parent / "cgroup.subtree_control").write_text("cpu memory")
    (own.parent / "actorq-999999999-actor-0").mkdir()
    mount(proc, V2, "0::/user.slice/app.slice/terminal.scope\n", top)
    quota = cpu_quota.CpuQuota(0.5, proc)
    quota.hold("actor-0", 1234)
    quota.hold("actor-1", 1235)
    group = own.parent / f"actorq-{os.getpid()}-actor-1"
    assert (group / "cpu.max").read_text() == "25000 50000"
    assert (group / "cgroup.procs").read_text() == "1235"
    (group / "cpu.stat").write_text("usage_usec 5\nnr_periods 40\nnr_throttled 10\n")
    assert quota.held() == cpu_quota.Held(0.5, "cgroup v2, 25000 of 50000 us", 0.25)
    assert not (own.parent / "actorq-999999999-actor-0").exists()  # nobody lives there, and its maker is gone


def test_what_may_not_be_written_leaves_actors_free_and_says_why(
    proc: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cpu").write_text("no directory")
    mount(proc, V1, "2:cpu,cpuacct:/\n", tmp_path / "cpu")
    quota = cpu_quota.CpuQuota(0.25, proc)
    quota.hold("actor-0", os.getpid())
    quota.hold("actor-1", os.getpid())
    assert quota.held().share is None
    assert quota.held().how.startswith("unlimited: Not a directory: ")
    assert len(caplog.records) == 1
    none = cpu_quota.CpuQuota(0.25, tmp_path / "no-proc")
    none.hold("actor-0", os.getpid())
    assert "this kernel has no cgroups that we could see" in none.held().how


def test_what_the_kernel_refuses_when_written_names_its_file(proc: Path, tmp_path: Path) -> None:
    top = tmp_path / "cpu"
    group = top / f"actorq-{os.getpid()}-actor-0"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").symlink_to("/dev/full")  # takes what is opened, and no byte
    mount(proc, V1, "2:cpu,cpuacct:/\n", top)
    quota = cpu_quota.CpuQuota(0.25, proc)
    quota.hold("actor-0", os.getpid())
    assert quota.held().how == f"unlimited: No space left on device: {group}/cpu.cfs_quota_us"


@pytest.mark.parametrize("share", [0.0, 0.001, -1.0, 1e6, float("nan")])
def test_a_share_that_cannot_be_given_is_refused(share: float) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be given"):
        cpu_quota.CpuQuota.of(share)
