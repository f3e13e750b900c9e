"""What becomes of releases of the program that a booted board is given over the broker."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest
from tests.fakes import releases
from tests.pi.boot import machine, witness
from tests.system.conftest import started

_ENDS_S = 900.0
"""For a board that was booted, tries a release and goes back, emulated beside others: a bound, not a figure."""
_SAYS_S = 120.0
_TRIAL_S = 90
_WAIT = ("--wait-s", "420")
"""For a board that boots, or tries a release, to answer."""
_AFTER_S = 10.0
"""So long after the answer of an update that no plug disturbs the last moments lie."""
_BAD = 4
"""Each so-many-th release crashes."""
_RELEASES = "/var/lib/actorq/releases"
_RESCUE = (
    f"sudo -n sh -c 'systemctl status --no-pager actorq-actor; df /; ls -la {_RELEASES} /var/lib/actorq/actors/*; "
    f"rm -f {_RELEASES}/*/taken; systemctl restart actorq-actor'"
)
"""What one wants to know of a board that does not come back, and what lets the next trial begin."""


class Updates:
    """Orders given to one board.

    Args:
        fleet: Its fleet.
        actor: Its name.
        directory: For releases, and with the fleet's release key.
        board: The machine.
        seen: What is known of it.
    """

    def __init__(
        self,
        fleet: local_fleet.LocalFleet,
        actor: str,
        directory: Path,
        board: machine.Machine,
        seen: witness.Witness,
    ) -> None:
        self._fleet, self._actor, self._directory = fleet, actor, directory
        self._board, self._seen = board, seen
        self._wheel = releases.built(directory / "wheel")
        self._took_s = self._trial_s = 0.0
        self._log_from = 0

    # -- in CI --------------------------------------------------------------------------------------------------------

    def take_one_that_works(self, within_s: float) -> None:
        """The board acts as a release, so many seconds after the command's start at most."""
        began_s = time.monotonic()
        with self._ordered(self._release("9.1")) as command:
            given_s = self._await_given(command)
            trial_s = self._await_trial(command)
            told = _answer(command, errors.EXIT_OK)
        ended_s = time.monotonic()
        self._took_s, self._trial_s, took_s = ended_s - given_s, ended_s - trial_s, ended_s - began_s
        self._board.say(f"it acts as the new release, {took_s:.0f} s after the command began,")
        assert told["outcome"] == "done", told
        assert took_s <= within_s
        conftest.wait_until(lambda: self._seen.states and self._seen.release == "9.1", "a heartbeat of it", _SAYS_S)

    def give_up_one_that_crashes(self) -> None:
        """... and comes back from one that ends when it is to act; the plug is pulled just before its trial."""
        with self._ordered(self._release("9.2", releases.CRASHES)) as command:
            self._await_trial(command)
            assert command.poll() is None, "the board has taken that release"
            assert not self._gave_up, "its trial is yet to come"
            self._board.pull_the_plug()
            self._board.power_on()
            self._seen.await_new_boot()
            self._board.say("experience arrives again")
            told = _answer(command, errors.OrderRefused.exit_code)
        assert told["outcome"] == "undone" and "it ended with 10 before" in told["text"], told
        conftest.wait_until(lambda: self._seen.is_online, "a heartbeat", _SAYS_S)
        assert self._seen.release == "9.1"

    # -- the long run -------------------------------------------------------------------------------------------------

    def take_many(self, plugs: int, seed: int, on_board: Callable[[str], str]) -> None:
        """The board takes a release of each kind that is no good, and so many of which the plug is pulled.

        Each is told as a line of JSON. One that does not end as it should does not end the run, unless the board stays
        away for good.

        Args:
            plugs: Updates within which the plug is pulled once, at a moment drawn over the whole of one and over the
                trial of the next.
            seed: Draws the moments.
            on_board: Runs a command on the board, and says what it says.
        """
        trials: dict[str, Callable[[], dict[str, Any]]] = {
            "signed by another key": self._refuse_what_another_key_signed,
            "not heard by the learner": self._give_up_one_that_is_not_heard,
            "fills the disk": self._give_up_one_that_fills,
        }
        drawn = random.Random(seed)
        failed: list[str] = []
        for number in range(1, plugs + 1):
            trials[f"plug {number} of seed {seed}"] = functools.partial(self._pull, number, drawn.random())
        for name, trial in trials.items():
            boot = self._seen.boot
            try:
                print(json.dumps({"release": name} | trial()), flush=True)
            except Exception as error:  # whatever it is, the trials after it tell something too
                failed.append(name)
                print(json.dumps({"failed": name, "why": str(error)[:2000]}), flush=True)
                print(self._log[-20_000:], file=sys.stderr, flush=True)
                on_board(_RESCUE)
                self._seen.await_acting(boot, _ENDS_S)
        current = on_board(f"sudo -n readlink {_RELEASES}/current")
        assert current.startswith(f"{self._seen.release}-"), f"{self._seen.release} is what it said, {current} is kept"
        self._board.say(f"{current.strip()} is what acts, and what it says,")
        assert not failed

    def _refuse_what_another_key_signed(self) -> dict[str, Any]:
        """The board refuses it, and the process that acted acts on."""
        home = self._fleet.directory / "home"
        public = home / "fleets" / self._fleet.name / "release.pub"
        before, boot, kept = self._seen.release, self._seen.boot, public.read_bytes()
        other = make_key(self._directory, self._fleet.name, home, "other.pem", "--force")
        try:
            with self._ordered(self._release("9.3"), key=other) as command:
                told = _answer(command, errors.OrderRefused.exit_code)
        finally:
            public.write_bytes(kept)
        assert told["outcome"] == "refused" and "is not signed by this fleet's release key" in told["text"], told
        assert self._seen.await_acting(boot, _ENDS_S) == before
        assert self._seen.boot == boot, "it was started again"
        conftest.wait_until(
            lambda: self._seen.states[-1].vitals.refused.get("release_signature") == 1, "that it counts it", _SAYS_S
        )
        return {"told": told["text"], "acts": before}

    def _give_up_one_that_is_not_heard(self) -> dict[str, Any]:
        """The board goes back from a release that acts, and whose experience no learner understands."""
        told = self._give_up("9.4", releases.UNHEARD)
        assert told["outcome"] == "undone" and f"within {_TRIAL_S} s it did not say" in told["text"], told
        assert self._seen.acted["9.4"] > 0, "it did act"
        return {"told": told["text"], "acts": self._seen.release}

    def _give_up_one_that_fills(self) -> dict[str, Any]:
        """The board goes back from a release that leaves no room on the disk, and takes the next one all the same."""
        told = self._give_up("9.5", releases.FILLS)
        why = [line.partition("release ")[2] for line in self._log.splitlines() if "is given up" in line]
        assert told["outcome"] in ("undone", "failed"), told
        about = {"told": f"{told['outcome']}: {told['text']}", "logged": why[0], "acts": self._seen.release}
        with self._ordered(self._release("9.6")) as command:
            assert _answer(command, errors.EXIT_OK)["outcome"] == "done"
        assert self._seen.await_acting(self._seen.boot, _ENDS_S) == "9.6"
        return about | {"and_then": "9.6"}

    def _pull(self, number: int, share: float) -> dict[str, Any]:
        """The plug is pulled; once the board has booted a release that works acts, and the right one.

        It is after this share of the time from the order, or from the end of the process before, until a while after
        the answer to the newest whole update.
        """
        before, version, works = self._seen.release, f"9.{100 + number}", number % _BAD != 0
        of_trial = number % 2 == 0
        with self._ordered(self._release(version, {} if works else releases.CRASHES), *_WAIT) as command:
            from_s, of_s = self._await_given(command), self._took_s
            if of_trial:
                from_s, of_s = self._await_trial(command), self._trial_s
            at_s = share * (of_s + _AFTER_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(max(0.0, from_s + at_s - time.monotonic()))
                self._ended(works, of_trial, time.monotonic() - from_s)
            while (left_s := from_s + at_s - time.monotonic()) > 0:
                time.sleep(left_s)  # the moment is drawn, and no event
            then, boot = self._moment(command, version), self._seen.boot
            self._board.pull_the_plug()
            self._board.power_on()
            on_s = time.monotonic()
            told = _answer(command)
            acts = self._seen.await_acting(boot + 1, _ENDS_S)
        about: dict[str, Any] = {"from": before, "to": version, "works": works}
        about |= {"over": "the trial" if of_trial else "the update", "at_s": round(at_s, 1), "of_s": round(of_s, 1)}
        about |= {"then": then, "told": f"{told['outcome']}: {told['text']}"}
        about |= {"acts": acts, "acts_s": round(time.monotonic() - on_s)}
        expected = {"done": [version], "undone": [before], "failed": [before], "refused": [before]}
        assert acts in (expected.get(told["outcome"], [before, version]) if works else [before]), about
        return about

    def _ended(self, works: bool, of_trial: bool, took_s: float) -> None:
        """Notes how long a whole one took, from its order or from the end of the process before."""
        if works and of_trial:
            self._trial_s = took_s
        elif works:
            self._took_s = took_s

    def _moment(self, command: subprocess.Popen[str], version: str) -> str:
        """What goes on, as far as it is known here."""
        if command.poll() is not None:
            return "the update has ended"
        if not self._seen.is_online:
            return "no process acts"
        return f"{self._seen.release} acts{' on trial' if self._seen.release == version else ''}"

    # -- orders -------------------------------------------------------------------------------------------------------

    def _give_up(self, version: str, edits: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        before, boot = self._seen.release, self._seen.boot
        with self._ordered(self._release(version, edits), "--trial-s", str(_TRIAL_S), *_WAIT) as command:
            told = _answer(command, errors.OrderRefused.exit_code)
        assert self._seen.await_acting(boot + 1, _ENDS_S) == before
        assert self._gave_up
        return told

    def _release(self, version: str, edits: Mapping[str, tuple[str, str]] = {}) -> Path:
        return releases.changed(self._wheel, self._directory / version, version, edits)

    @contextlib.contextmanager
    def _ordered(self, wheel: Path, *options: str, key: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """`fleet update` of the board, under way."""
        words = [sys.executable, "-m", "learner", "fleet", "update", str(wheel), self._actor, *options]
        words += ["--fleet", self._fleet.name, "--broker", self._fleet.address, "--json"]
        words += ["--key", str(key or self._directory / "release.pem")]
        home = os.environ | {"ACTORQ_HOME": str(self._fleet.directory / "home")}
        self._log_from = self._board.log.stat().st_size
        with (
            self._said.open("w") as said,
            started(words, env=home, stdout=subprocess.PIPE, stderr=said) as command,
        ):
            yield command

    @property
    def _said(self) -> Path:
        """What the last command said on stderr."""
        return self._directory / "said"

    def _await_given(self, command: subprocess.Popen[str]) -> float:
        """Waits until the order of a command goes out; returns when that was."""

        def is_given() -> bool:
            return "stage 1 of 1: " in self._said.read_text()

        conftest.wait_until(lambda: is_given() or command.poll() is not None, "the order", _SAYS_S)
        assert is_given(), self._said.read_text()
        return time.monotonic()

    def _await_trial(self, command: subprocess.Popen[str]) -> float:
        """Waits until the process that acted has ended, for the new release to be tried; returns when that was."""
        conftest.wait_until(
            lambda: command.poll() is not None or not self._seen.is_online, "the end of the process", _ENDS_S
        )
        return time.monotonic()

    @property
    def _log(self) -> str:
        """What the board said on its console since the last command began."""
        return self._board.log.read_bytes()[self._log_from :].decode(errors="replace")

    @property
    def _gave_up(self) -> bool:
        return "is given up" in self._log


def make_key(directory: Path, fleet: str, home: Path, name: str = "release.pem", *options: str) -> Path:
    """Makes a release key for a fleet; the public half is in bundles that are made from then on."""
    path = directory / name
    words = [sys.executable, "-m", "broker", "release-key", "--fleet", fleet, "-o", str(path), *options]
    subprocess.run(words, check=True, env=os.environ | {"ACTORQ_HOME": str(home)}, stderr=subprocess.DEVNULL)
    return path


def _answer(command: subprocess.Popen[str], *codes: int) -> dict[str, Any]:
    """What became of the order in the end."""
    output, _ = command.communicate(timeout=_ENDS_S)
    assert not codes or command.returncode in codes, output
    answer: dict[str, Any] = json.loads(output.splitlines()[0])
    return answer
