"""One scenario of chaos, in a process and with mounts of its own: random faults on a fleet, and the balance at the end.

    python -m tests.system.chaos.scenario NAME DURATION_S SEED

tells on stderr what it does, and prints one JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.system import books
from tests.system.chaos import fleet as chaos_fleet

SCENARIOS = {"mosquitto": ("mosquitto",), "two-mosquittos": ("mosquitto", "mosquitto"), "embedded": ("embedded",)}
SMALL_DISK_MB = 2
SETTLE_S = 120.0
PROGRESS_S = 60.0
CARDS = 3
"""Copies in all: each is one machine more that has something to hand over at the end."""
YOUNG_S = 10.0
_CLONE_NEWNS = 0x20000
_signals: list[int] = []
"""Signals that told this process to end. An exception may come where Python drops it (a hook of fork), or between
a child's start and the note that there is one."""


def rest(seconds: float) -> None:
    """Sleeps; ends this process in order if it was told to."""
    until = time.monotonic() + seconds
    while not _signals and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
    if _signals:
        sys.exit(128 + _signals[0])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Waits as in conftest, but for `rest`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        rest(0.01)


class Chaos:
    """Random faults on a fleet.

    Args:
        fleet: Whole.
        small_disk: Whether the first actor's spool is on a disk that may be filled.
        rng: Chooses.
        say: Is told each fault.
    """

    def __init__(
        self, fleet: chaos_fleet.Fleet, rng: random.Random, say: Callable[[str], None], *, small_disk: bool
    ) -> None:
        self._fleet, self._rng, self._say = fleet, rng, say
        self._small_disk = small_disk
        self.events: Counter[str] = Counter()
        self.rss_mb: Counter[str] = Counter()
        self._faults: list[tuple[int, Callable[[], str]]] = [
            (6, self._kill_actor),
            (3, self._kill_learner),
            (3, self._kill_broker),
            (2, self._kill_all),
            (4, self._cut_link),
            (4, self._stall_link),
            (2, self._insert_copy),
            (2, self._reset_counter),
            (1, self._kill_young_learner),
            (1, self._lose_epoch),
        ]
        self._first = [self._insert_copy, self._reset_counter, self._kill_young_learner]  # even if time is short

    def begin(self) -> None:
        """Starts the learner, and kills it once its run has begun: it must go on, whether anything was saved or not."""
        fleet = self._fleet
        fleet.start_learner()
        wait_until((fleet.run / "config.toml").exists, "a run", 90.0)
        self._pause(0.0, 2.0)
        fleet.kill("learner")
        self.events["newborn learner killed"] += 1
        self._say("newborn learner killed")
        fleet.start_learner()
        wait_until(lambda: list(fleet.run.glob("checkpoints/*.npz")), "a checkpoint", 90.0)

    def run(self, duration_s: float) -> None:
        """Does harm for so long, then makes everything whole again."""
        end = time.monotonic() + duration_s
        full_at = time.monotonic() + 0.5 * duration_s if self._small_disk else end
        while time.monotonic() < end:
            if time.monotonic() > full_at:
                full_at = end
                what = self._fill_disk()
            elif self._first:
                what = self._first.pop(0)()
            else:
                (fault,) = self._rng.choices([f for _, f in self._faults], [w for w, _ in self._faults])
                what = fault()
            self.events[what.split(":")[0]] += 1
            self._say(f"{what}; {self._fleet.books.rows()} messages in the ledger")
            self._pause(0.3, 5.0)
            self._heal()
            self._pause(0.5, 6.0)
            if self._rng.random() < 0.7:  # else the next fault meets what has not recovered from this one
                self._await_progress()
            self._measure()
        self._heal()

    def _await_progress(self) -> None:
        """Faults on a fleet that has never got going again would test nothing."""
        before, deadline = self._fleet.books.rows(), time.monotonic() + PROGRESS_S
        while self._fleet.books.rows() == before and time.monotonic() < deadline:
            self._fleet.revive()
            rest(0.1)

    def _heal(self) -> None:
        for link in (link for links in self._fleet.links.values() for link in links):
            link.mend()
        self._fleet.revive()

    def _pause(self, low: float, high: float) -> None:
        rest(self._rng.uniform(low, high))

    def _measure(self) -> None:
        """The most memory that each kind of process held, MB."""
        pids = {name: child.pid for name, child in self._fleet.children.items()}
        pids |= {f"broker {i}": broker.pid for i, broker in enumerate(self._fleet.brokers)}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                kind = name.split("-")[0].split(" ")[0]
                self.rss_mb[kind] = max(self.rss_mb[kind], psutil.Process(pid).memory_info().rss >> 20)

    def _kill_actor(self) -> str:
        name = self._rng.choice(chaos_fleet.ACTORS)
        self._fleet.kill(name)
        return f"actor killed: {name}"

    def _kill_learner(self) -> str:
        self._fleet.kill("learner")
        return "learner killed"

    def _kill_broker(self) -> str:
        index = self._rng.randrange(len(self._fleet.brokers))
        if self._fleet.brokers[index].process.poll() is None:
            self._fleet.brokers[index].kill()
        return f"broker killed: {index}"

    def _kill_all(self) -> str:
        for name in self._fleet.children:
            self._fleet.kill(name)
        self._kill_broker()
        return "all killed"

    def _cut_link(self) -> str:
        name = self._rng.choice((*chaos_fleet.ACTORS, "learner"))
        for link in self._fleet.links[name]:
            link.block()
        return f"link cut: {name}"

    def _stall_link(self) -> str:
        name = self._rng.choice((*chaos_fleet.ACTORS, "learner"))
        for link in self._fleet.links[name]:
            link.stall()
        return f"link stalled: {name}"

    def _insert_copy(self) -> str:
        """A copy of a card is put into another machine, and starts beside the first: same name, bundle and counter."""
        fleet = self._fleet
        if len(fleet.cards) < CARDS:
            card = fleet.copy_card(self._rng.choice(chaos_fleet.ACTORS))
        else:
            card = self._rng.choice([*fleet.cards])
        if card in fleet.children:
            fleet.kill(card)
        fleet.start_actor(card)
        return f"card copied: {card}"

    def _reset_counter(self) -> str:
        """A boot counter is lost, emptied, set back by one, or ahead of all clocks."""
        name = self._rng.choice(chaos_fleet.ACTORS)
        self._fleet.kill(name)
        counter = self._fleet.counter(name)
        count = int(counter.read_text()) if counter.exists() else chaos_fleet.AHEAD
        what = self._rng.choice(["lost", "emptied", "set back", "ahead"])
        if what == "lost":
            counter.unlink(missing_ok=True)
        else:
            counter.write_text({"emptied": "", "set back": f"{count - 1}", "ahead": f"{chaos_fleet.AHEAD}"}[what])
        return f"counter reset: {name}, {what}"

    def _kill_young_learner(self) -> str:
        """Twice: of what was there before, and within its first seconds."""
        fleet = self._fleet
        fleet.kill("learner")
        fleet.start_learner()
        self._pause(0.5, YOUNG_S)
        fleet.kill("learner")
        return "young learner killed"

    def _lose_epoch(self) -> str:
        """The file is gone when the next learner starts; what the brokers retain tells it."""
        fleet = self._fleet
        self._await_progress()
        before = int(fleet.epoch.read_text())
        fleet.kill("learner")
        fleet.epoch.unlink()
        fleet.start_learner()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: _number(fleet.epoch) > before, "a higher epoch", PROGRESS_S)
        return "epoch lost"

    def _fill_disk(self) -> str:
        """Leaves no byte to the spool of the first actor, while the learner takes nothing."""
        name = chaos_fleet.ACTORS[0]
        ballast = chaos_fleet.spool(self._fleet.root, name) / "ballast"
        for link in self._fleet.links[name]:
            link.block()
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self._pause(4.0, 6.0)
        ballast.unlink()
        return f"disk full: {name}"


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """A file system of its own there; false where that is not allowed.

    Only this process and what it starts see it, so that it ends with them, however they end.
    """
    directory.mkdir()
    root = os.geteuid() == 0
    private = root and ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0 and _mount("--make-rprivate", "/")
    mounted = private and _mount("-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m", "chaos", str(directory))
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(directory)], check=True)


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def scenario(name: str, duration_s: float, seed: int) -> dict[str, Any]:
    """Runs one scenario; returns its figures."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="actorq-chaos-") as temporary:
        root = Path(temporary)
        root.chmod(0o755)  # Mosquitto runs as another user when we are root
        disk = chaos_fleet.spool(root, chaos_fleet.ACTORS[0])
        with small_disk(disk) as mounted, chaos_fleet.Fleet(root, SCENARIOS[name], SMALL_DISK_MB << 19) as fleet:
            for actor in chaos_fleet.ACTORS:
                fleet.start_actor(actor)
            chaos = Chaos(fleet, random.Random(seed), say, small_disk=mounted)
            chaos.begin()
            if not mounted:
                say("no small disk (that takes root): the spool's disk is not filled")
            chaos.run(duration_s)
            balance, settled_s = _wait_for_balance(fleet)
            code = fleet.stop("learner")
            if not balance.holds:
                for who in (*chaos_fleet.ACTORS, *fleet.cards, "learner"):
                    say(f"--- {who}\n{fleet.log_tail(who)}")
            return {
                "scenario": name,
                "duration_s": duration_s,
                "seed": seed,
                "faults": dict(chaos.events),
                **dataclasses.asdict(balance),
                "settled_s": round(settled_s, 1),
                "rss_max_mb": dict(chaos.rss_mb),
                "learner_exit_code": code,
                "holds": balance.holds,
            }


def _wait_for_balance(fleet: chaos_fleet.Fleet) -> tuple[books.Balance, float]:
    """Waits until all that the dead lives left behind has reached the ledger; the balance, and how long it took."""
    began = time.monotonic()
    names = (*chaos_fleet.ACTORS, *fleet.cards)
    for name in names:
        if name in fleet.children:
            fleet.stop(name)
    lives = [life for actor in chaos_fleet.ACTORS for life in fleet.books.lives(actor)]
    for name in names:
        fleet.start_actor(name)  # its later lives do not count, but it sends what the earlier ones left
    while True:
        balance = fleet.books.balance(*lives)
        if balance.lost == 0 or time.monotonic() - began > SETTLE_S:
            return balance, time.monotonic() - began
        fleet.revive(cards=True)
        rest(1.0)


def main(name: str, duration_s: str, seed: str) -> None:
    """Runs a scenario; SIGTERM ends it in order."""
    signal.signal(signal.SIGTERM, lambda signum, _: _signals.append(signum))
    print(json.dumps(scenario(name, float(duration_s), int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
