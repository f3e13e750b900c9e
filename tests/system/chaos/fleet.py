"""The victim of chaos: a whole fleet of processes on one machine, in which anything may be killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from broker.fleet import identity
from broker.program import children
from tests import conftest
from tests.system import books, network

FLEET = "chaos"
ACTORS = ("pi-0", "pi-1", "pi-2")
PACE = ("--message-steps", "100", "--samples-per-insert", "32", "--max-env-steps", "1000000000")
LEARNING = ("--learning-starts", "200", "--epsilon-decay-steps", "1000", "--hidden", "32", "--no-energy")


AHEAD = 10_000_000_000
"""A boot counter that no clock has reached, as on boards that do not know the time: a lost one begins below it."""


def spool(root: Path, actor: str) -> Path:
    """Directory of an actor's spool, or of a copied card's."""
    return root / f"spool-{actor}"


class Fleet:
    """Brokers, a network before them, actors and a learner; a context that ends them all.

    Args:
        root: Directory of all that they write.
        kinds: Of the brokers.
        spool_bytes: Of each actor.
    """

    def __init__(self, root: Path, kinds: Sequence[str], spool_bytes: int) -> None:
        self.root, self.run = root, root / "run"
        self._spool_bytes = spool_bytes
        temporary = root / "temporary"  # TFLiteConverter leaves a directory there when it is killed
        temporary.mkdir()
        self._environment = os.environ | {"ACTORQ_HOME": str(root / "home"), "TMPDIR": str(temporary)}
        self._keys = identity.Fleet.open(FLEET, root / "home" / "fleets" / FLEET)
        self.brokers = [conftest.BrokerProcess(kind, str(root)) for kind in kinds]
        self.children: dict[str, subprocess.Popen[str]] = {}
        self.cards: dict[str, str] = {}  # copies, and whose
        self._network = network.Network()
        self.links = {
            name: [self._network.relay(broker.port) for broker in self.brokers] for name in (*ACTORS, "learner")
        }
        for name in ACTORS:
            self._keys.enroll(name, self._addresses(name)).write(root / f"{name}.json")
            self.counter(name).parent.mkdir(parents=True)
            self.counter(name).write_text(f"{AHEAD}\n")
        self.epoch = self._keys.directory / "epoch"
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
        """Starts an actor, or a copied card, in the place of the one before."""
        actor = self.cards.get(name, name)
        command = ["edge_actor", "run", "--bundle", str(self.root / f"{actor}.json")]
        command += [*self.books.environment(actor), "--spool-dir", str(spool(self.root, name))]
        command += ["--state-dir", str(self.root / "home" / name), "--connect-timeout-s", "60"]
        self._spawn(name, [*command, "--spool-bytes", str(self._spool_bytes)])

    def counter(self, name: str) -> Path:
        """Returns the file in which an actor or a card counts its boots."""
        return self.root / "home" / name / "boot"

    def copy_card(self, actor: str) -> str:
        """Copies all that an actor keeps, as it is now; names the copy."""
        card = f"{actor}+{len(self.cards)}"
        self.cards[card] = actor
        for source, copy in (
            (self.root / "home" / actor, self.root / "home" / card),
            (spool(self.root, actor), spool(self.root, card)),
        ):
            copy.mkdir(mode=0o700)
            for file in [*source.glob("boot"), *source.glob("*.json"), *source.glob("*.segment")]:
                with contextlib.suppress(FileNotFoundError):  # what the spool held has a receipt meanwhile
                    shutil.copy(file, copy)
        return card

    def start_learner(self) -> None:
        """Starts the learner, on the run that there is."""
        brokers = ["--broker", ",".join(self._addresses("learner"))]
        command = ["learner", "train", "--fleet", FLEET, *brokers, "--keep-experience", "--evaluate-episodes", "0"]
        command += ["--checkpoint-period-s", "0.5", "--json"]
        started = (self.run / "config.toml").exists()
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

    def revive(self, *, cards: bool = False) -> list[str]:
        """Starts whatever is down; names it. What ended by itself is the supervisor's (systemd's) to start again.

        Args:
            cards: Copies too, which are refused sooner or later.
        """
        down = [name for name, child in self.children.items() if child.poll() is not None]
        down = [name for name in down if cards or name not in self.cards]
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
                preexec_fn=children.die_with_parent(),  # noqa: PLW1509  the proxies' threads hold no lock it needs
            )
