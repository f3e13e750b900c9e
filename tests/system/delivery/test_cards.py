"""Memory cards that are copies of each other: two machines with one name, counter and bundle. Nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract import errors
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.system import books
from tests.system.conftest import QUICK

pytestmark = pytest.mark.system
FLAGS = [
    *QUICK,
    "--keep-experience",
    "--evaluate-episodes",
    "0",
    "--message-steps",
    "50",
    "--max-env-steps",
    "10000000",
]
AHEAD = 9_999_999_999
"""A counter that no clock has reached: as on boards that do not know the time, it alone decides."""


class Site:
    """A fleet with a learner, on which cards of one image are put into one machine after the other."""

    def __init__(self, root: Path) -> None:
        self.fleet = local_fleet.LocalFleet.start(root / "fleet")
        self.root, self.books = root, books.Books(root / "books", root / "run")
        self._keys = identity.Fleet.open(self.fleet.name, self.fleet.directory / "home" / "fleets" / self.fleet.name)

    def enroll(self, name: str) -> None:
        self._keys.enroll(name, self.fleet.addresses).write(self.root / f"{name}.json")

    def start(self, name: str, card: str, counter: int = 0) -> subprocess.Popen[str]:
        """Starts the actor from a card; `counter` is what the image says of its last boot, 0 for what the card does."""
        state = self.root / f"{name}-{card}"
        if counter:
            state.mkdir()
            (state / "boot").write_text(f"{counter}\n")
        command = ["edge_actor", "run", "--bundle", str(self.root / f"{name}.json"), *self.books.environment(name)]
        command += ["--state-dir", str(state), "--spool-dir", str(state / "spool"), "--heartbeat-s", "0.3"]
        return self.fleet._spawn(f"{name}-{card}", command)

    def count(self, name: str) -> int:
        """Messages of an actor in the ledger."""
        return self.books._count(f"SELECT count(*) FROM messages WHERE actor = '{name}'")

    def await_more(self, name: str) -> None:
        wanted = self.count(name) + 5
        conftest.wait_until(lambda: self.count(name) >= wanted, f"{name} is heard of", 20.0)

    def leave(self, child: subprocess.Popen[str]) -> None:
        child.send_signal(signal.SIGTERM)
        assert child.wait(120.0) in (errors.EXIT_OK, -signal.SIGTERM), "the latter before it could say hello"

    def await_balance(self, *lives: books.Life) -> None:
        """All that these lives accepted reaches the ledger, once."""
        conftest.wait_until(lambda: not self.books.missing(self.books.accepted(*lives)), "nothing is missing", 20.0)
        assert self.books.balance(*lives).holds


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        made = Site(root)
        with made.fleet:
            command = ["learner", "train", "--fleet", made.fleet.name, "--broker", made.fleet.address, *FLAGS]
            made.fleet._spawn("learner", [*command, "--run-dir", str(root / "run")])
            yield made


@pytest.mark.fault(4)
def test_of_two_machines_with_one_card_the_later_is_refused_and_nothing_is_lost(site: Site) -> None:
    site.enroll("pi")
    first = site.start("pi", "one", AHEAD)
    site.await_more("pi")
    second = site.start("pi", "two", AHEAD)
    assert second.wait(120.0) == errors.ActorRefused.exit_code
    assert "another machine goes by the name 'pi'" in site.fleet.log_tail("pi-two")
    assert "two machines go by this name" in site.fleet.log_tail("learner")
    assert first.poll() is None, "the one that was there goes on"
    site.await_more("pi")
    lives = site.books.lives("pi")
    assert len(lives) == 2
    site.leave(first)
    first = site.start("pi", "one")  # it sends what it left
    site.await_balance(*lives)
    site.leave(first)


@pytest.mark.fault(5)
def test_cards_of_one_image_one_after_the_other_and_a_lost_counter(site: Site) -> None:
    site.enroll("po")
    for card in ("one", "two"):
        child = site.start("po", card, AHEAD)
        site.await_more("po")
        site.leave(child)
    (site.root / "po-one" / "boot").unlink()
    child = site.start("po", "one")
    site.await_more("po")
    site.leave(child)
    lives = site.books.lives("po")
    leftovers = [site.start("po", "one"), site.start("po", "two")]  # one of them may be refused, and hands over its own
    site.await_balance(*lives)
    for child in leftovers:
        child.kill()
