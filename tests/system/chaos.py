"""Everything dies, again and again, and nothing that was accepted is lost: kill -9, cut links, a full disk.

A real fleet of processes under random faults; at the end the books that each environment kept, apart from its actor,
must agree with the learner's ledger. The last line says so in figures, and the exit code is the verdict.

    python -m tests.system.chaos --duration-s 900       or: make chaos DURATION_S=900
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from broker import identity
from broker.mosquitto import process
from tests import conftest
from tests.system import books, network

FLEET = "chaos"
SCENARIOS = {"mosquitto": ("mosquitto",), "two-mosquittos": ("mosquitto", "mosquitto"), "embedded": ("embedded",)}
ACTORS = ("pi-0", "pi-1", "pi-2")
PACE = ("--message-steps", "100", "--samples-per-insert", "32", "--max-env-steps", "1000000000")
LEARNING = ("--learning-starts", "200", "--epsilon-decay-steps", "1000", "--hidden", "32", "--no-energy")
SMALL_DISK_MB = 2
SETTLE_S = 120.0
PROGRESS_S = 60.0


class Fleet:
    """Brokers, a network before them, actors and a learner; a context that ends them all."""

    def __init__(self, root: Path, kinds: Sequence[str], say: Callable[[str], None]) -> None:
        self.root, self.run = root, root / "run"
        self._say = say
        self._environment = os.environ | {"ACTORQ_HOME": str(root / "home")}
        self._keys = identity.Fleet.open(FLEET, root / "home" / "fleets" / FLEET)
        self.brokers = [conftest.BrokerProcess(kind, str(root)) for kind in kinds]
        self.children: dict[str, subprocess.Popen[str]] = {}
        self._network = network.Network()
        self.links = {
            name: [self._network.relay(broker.port) for broker in self.brokers] for name in (*ACTORS, "learner")
        }
        for name in ACTORS:
            self._keys.enroll(name, self._addresses(name)).write(root / f"{name}.json")
        self.books = books.Books(root / "books", self.run)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (*self.children,):
            self.stop(name)
        self._network.close()
        for broker in self.brokers:
            if broker.process.returncode is None:
                broker.stop()

    def start_actor(self, name: str) -> None:
        """Starts an actor in the place of the one before."""
        spool = self.root / f"spool-{name}"
        command = ["edge_actor", "run", "--bundle", str(self.root / f"{name}.json")]
        command += [*self.books.environment(name), "--spool-dir", str(spool)]
        command += ["--state-dir", str(self.root / "home" / name), "--connect-timeout-s", "60"]
        self._spawn(name, [*command, "--spool-bytes", str(SMALL_DISK_MB << 19)])

    def start_learner(self) -> None:
        """Starts the learner, on the run that there is."""
        brokers = ["--broker", ",".join(self._addresses("learner"))]
        command = ["learner", "train", "--fleet", FLEET, *brokers, "--keep-experience", "--evaluate-episodes", "0"]
        command += ["--checkpoint-period-s", "0.5", "--json"]
        started = self.run.exists()
        command += ["--resume", str(self.run)] if started else ["--run-dir", str(self.run), *LEARNING, *PACE]
        self._spawn("learner", command)

    def stop(self, name: str) -> int:
        """SIGTERM, and what became of it."""
        child = self.children.pop(name)
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        try:
            return child.wait(20.0)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.children[name].kill()
        self.children[name].wait()

    def revive(self) -> list[str]:
        """Starts whatever is down; names it. What ended by itself is the supervisor's (systemd's) to start again."""
        down = [name for name, child in self.children.items() if child.poll() is not None]
        for broker in self.brokers:
            if broker.process.poll() is not None:
                broker.restart()
        for name in down:
            if name == "learner":
                self.start_learner()
            else:
                self.start_actor(name)
        return down

    def log_tail(self, name: str) -> str:
        """The last words of a process."""
        return "\n".join((self.root / f"{name}.log").read_text(errors="replace").splitlines()[-12:])

    def _addresses(self, name: str) -> list[str]:
        return [f"127.0.0.1:{link.port}" for link in self.links[name]]

    def _spawn(self, name: str, module: list[str]) -> None:
        with open(self.root / f"{name}.log", "a") as log:
            self.children[name] = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env=self._environment,
                preexec_fn=process.die_with_parent(),  # noqa: PLW1509  the proxies' threads hold no lock it needs
            )


class Chaos:
    """Random faults on a fleet."""

    def __init__(self, fleet: Fleet, rng: random.Random, say: Callable[[str], None]) -> None:
        self._fleet, self._rng, self._say = fleet, rng, say
        self.events: Counter[str] = Counter()
        self.rss_mb: Counter[str] = Counter()
        self._faults: list[tuple[int, Callable[[], str]]] = [
            (6, self._kill_actor),
            (3, self._kill_learner),
            (3, self._kill_broker),
            (2, self._kill_all),
            (4, self._cut_link),
            (4, self._stall_link),
        ]

    def run(self, duration_s: float) -> None:
        """Does harm for so long, then makes everything whole again."""
        end = time.monotonic() + duration_s
        full_at = time.monotonic() + 0.5 * duration_s
        while time.monotonic() < end:
            if full_at is not None and time.monotonic() > full_at:
                full_at = float("inf")
                what = self._fill_disk()
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
            time.sleep(0.1)

    def _heal(self) -> None:
        for link in (link for links in self._fleet.links.values() for link in links):
            link.mend()
        self._fleet.revive()

    def _pause(self, low: float, high: float) -> None:
        time.sleep(self._rng.uniform(low, high))

    def _measure(self) -> None:
        """The most memory that each kind of process held, MB."""
        pids = {name: child.pid for name, child in self._fleet.children.items()}
        pids |= {f"broker {i}": broker.pid for i, broker in enumerate(self._fleet.brokers)}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                kind = name.split("-")[0].split(" ")[0]
                self.rss_mb[kind] = max(self.rss_mb[kind], psutil.Process(pid).memory_info().rss >> 20)

    def _kill_actor(self) -> str:
        name = self._rng.choice(ACTORS)
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
        name = self._rng.choice((*ACTORS, "learner"))
        for link in self._fleet.links[name]:
            link.block()
        return f"link cut: {name}"

    def _stall_link(self) -> str:
        name = self._rng.choice((*ACTORS, "learner"))
        for link in self._fleet.links[name]:
            link.stall()
        return f"link stalled: {name}"

    def _fill_disk(self) -> str:
        """Leaves no byte to the spool of the first actor, while the learner takes nothing."""
        name = ACTORS[0]
        ballast = self._fleet.root / f"spool-{name}" / "ballast"
        for link in self._fleet.links[name]:
            link.block()
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self._pause(4.0, 6.0)
        ballast.unlink()
        return f"disk full: {name}"


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[bool]:
    """A file system of its own there; false where that is not allowed."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m", "chaos", str(directory)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(directory)], check=True)


def scenario(name: str, duration_s: float, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs one scenario; returns its figures."""
    with tempfile.TemporaryDirectory(prefix="actorq-chaos-") as temporary:
        root = Path(temporary)
        root.chmod(0o755)  # Mosquitto runs as another user when we are root
        with small_disk(root / f"spool-{ACTORS[0]}") as mounted, Fleet(root, SCENARIOS[name], say) as fleet:
            for actor in ACTORS:
                fleet.start_actor(actor)
            fleet.start_learner()
            conftest.wait_until(lambda: list(fleet.run.glob("checkpoints/*.npz")), "a checkpoint", 90.0)
            chaos = Chaos(fleet, random.Random(seed), say)
            if not mounted:
                say("no small disk (that takes root): the spool's disk is not filled")
            chaos.run(duration_s)
            balance, settled_s = _settle(fleet)
            code = fleet.stop("learner")
            if not balance.holds:
                for who in (*ACTORS, "learner"):
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


def _settle(fleet: Fleet) -> tuple[books.Balance, float]:
    """Waits until all that the dead lives left behind has reached the ledger; the balance, and how long it took."""
    began = time.monotonic()
    for actor in ACTORS:
        fleet.stop(actor)
    lives = [life for actor in ACTORS for life in fleet.books.lives(actor)]
    for actor in ACTORS:
        fleet.start_actor(actor)  # its later lives do not count, but it sends what the earlier ones left
    while True:
        balance = fleet.books.balance(*lives)
        if balance.lost == 0 or time.monotonic() - began > SETTLE_S:
            return balance, time.monotonic() - began
        fleet.revive()
        time.sleep(1.0)


def main() -> int:
    """Runs the scenarios one after the other; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=900.0, help="of all scenarios together")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="one or more of them; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", action="store_true", help="one JSON object per scenario on stdout")
    args = parser.parse_args()
    names = args.scenario or list(SCENARIOS)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    results = []
    for name in names:
        say(f"scenario {name}, {args.duration_s / len(names):.0f} s")
        results.append(scenario(name, args.duration_s / len(names), args.seed, say))
        if args.json:
            print(json.dumps(results[-1]), flush=True)
    held = all(result["holds"] for result in results)
    for result in results:
        if not args.json:
            print(sentence(result))
    return 0 if held else 1


def sentence(result: dict[str, Any]) -> str:
    """The verdict for people."""
    faults = ", ".join(f"{count} x {what}" for what, count in sorted(result["faults"].items()))
    return (
        f"{result['scenario']}: {result['accepted']:,} steps accepted, {result['lost']:,} lost "
        f"({result['dropped']:,} dropped and counted), {result['twice']} in replay twice, {result['invented']} "
        f"invented; {result['duration_s']:.0f} s of faults ({faults}); settled in {result['settled_s']:.0f} s: "
        f"{'holds' if result['holds'] else 'BROKEN'}"
    )


if __name__ == "__main__":
    sys.exit(main())
