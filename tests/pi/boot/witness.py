"""What is known of a board elsewhere: its heartbeats, as the broker passes them on, and the learner's ledger."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from pathlib import Path
from typing import Any

from broker.contract import codec, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes.connections import plain_client

BOOT_S = 2400.0
"""From power to experience, set-up included: a bound, not a figure."""
_RSS_BYTES = 90_000_000
"""Seen: 75.0, 78.3 and 80.4 MB, the latter on a busy machine. On x86 test_process holds the actor to 80."""


class Witness(plain_client.PlainClient):
    """Hears all that an actor says of itself, and reads what the learner holds of it.

    Attributes:
        release: The release that it acts as, in its own words.
        acted: Steps that it took as each release, in its own words.
    """

    def __init__(self, fleet: local_fleet.LocalFleet, actor: str, run_dir: Path) -> None:
        keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
        super().__init__(int(fleet.broker["port"]), "listener", identity.LEARNER_USER, keys.password, keys.tls())
        self._mac = signing.ActorMac(keys.bundle(actor).mac_key)
        self._states: list[messages.ActorState] = []
        self._ledger = run_dir / "ledger.sqlite"
        self.release = ""
        self.acted: dict[str, int] = {}
        self.subscribe(topics.Topics(fleet.name).actor_state(actor))

    @property
    def states(self) -> list[messages.ActorState]:
        """What it has said until now."""
        for _ in range(self.received.qsize()):
            topic, sealed, _ = self.next()
            state = codec.decode(messages.ActorState, self._mac.open(topic, sealed))
            self._states.append(state)
            if state.birth is not None:
                self.release = state.birth.release
            if state.online:
                self.acted[self.release] = max(self.acted.get(self.release, 0), state.vitals.steps)
        return self._states

    @property
    def is_online(self) -> bool:
        """Returns whether the broker has it."""
        return self.states[-1].online

    @property
    def boot(self) -> int:
        """The newest boot that it has said anything of."""
        return max(state.boot for state in self.states[-10:])

    # -- what is awaited ----------------------------------------------------------------------------------------------

    def await_new_boot(self) -> None:
        """Waits for messages of a boot that the learner has not heard of."""
        known = self._newest_boot()
        conftest.wait_until(lambda: self._newest_boot() > known, "experience of a new boot", BOOT_S)

    def await_acting(self, boot: int, timeout_s: float) -> str:
        """Waits for fresh experience of the process that is online, of this boot or a later one; says its release."""
        before = self._newest_message()

        def acts() -> bool:
            return self.is_online and self.boot >= boot and self._newest_message(self.boot) > before

        conftest.wait_until(acts, "experience", timeout_s)
        return self.release

    # -- what is held against each other ------------------------------------------------------------------------------

    def check(self) -> None:
        """Little memory, and every policy on XNNPACK."""
        said = [state.vitals for state in self.states]
        rss_bytes = max(vitals.rss_bytes or 0 for vitals in said)
        kernels = {vitals.delegate for vitals in said} - {""}
        print(f"boot: {len(said)} heartbeats: {rss_bytes / 1e6:.1f} MB RSS at most, {kernels}", file=sys.stderr)
        assert 0 < rss_bytes <= _RSS_BYTES
        assert kernels == {"XNNPACK"}

    def assert_no_gap(self) -> str:
        """The learner holds every message up to the newest of each boot, and all that earlier boots said they had.

        Returns:
            How much that is.
        """
        # Of what was heard of each boot the last; read first, since the ledger goes on
        recorded = {state.boot: state.vitals.steps_recorded for state in self.states if state.online}
        held = {row[0]: row for row in self._rows(_BOOTS)}
        for boot, first, last, count, _ in held.values():
            assert (first, last) == (1, count), f"boot {boot}: messages {first} to {last} are here, but only {count}"
        earlier = [boot for boot, steps in recorded.items() if steps and boot < max(held)]
        assert earlier, recorded
        for boot in earlier:  # what they left went out before anything of the newest
            assert boot in held, f"boot {boot} had accepted {recorded[boot]} steps, none are here"
            steps = held[boot][4]
            assert steps >= recorded[boot], f"boot {boot} had accepted {recorded[boot]} steps, {steps} are here"
        messages_held, steps_held = (sum(row[column] for row in held.values()) for column in (3, 4))
        return f"{messages_held} messages of {len(held)} boots, {steps_held} steps"

    def _newest_boot(self) -> int:
        return self._number("SELECT max(boot) FROM messages")

    def _newest_message(self, boot: int = 0) -> int:
        return self._number("SELECT max(id) FROM messages WHERE boot = ? OR NOT ?", boot, boot)

    def _number(self, query: str, *values: int) -> int:
        rows = self._rows(query, *values)
        return int(rows[0][0] or 0) if rows else 0

    def _rows(self, query: str, *values: int) -> list[Any]:
        if not self._ledger.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{self._ledger}?mode=ro", uri=True)) as opened:
            if not opened.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone():
                return []  # the learner has only just made the file
            return opened.execute(query, values).fetchall()


_BOOTS = "SELECT boot, min(seq), max(seq), count(*), max(step + steps) FROM messages GROUP BY boot"
