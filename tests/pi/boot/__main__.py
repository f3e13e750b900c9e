"""Boots the card that flash.sh wrote, in qemu, until the actor's experience arrives.

On Bookworm the plug is pulled twice, while the actor swaps policies and spools to disk. On Trixie the login is tried,
and the board takes releases of its program over the broker: one that works, and one that crashes, before whose trial
the plug is pulled. The kernel is a real one, so what the actor says of its memory there holds for a board too.

`image SUITE.img ROOT` makes a disk image with the layout of that suite's; `run SUITE.img KERNEL WHEELS` does the rest.
With UPDATE_PLUGS in the environment this is a long run, of more releases and many pulled plugs (run.sh).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from learner.run import local_fleet
from tests import conftest
from tests.pi import images
from tests.pi.boot import machine, updates, witness
from tests.system.conftest import QUICK

_HOST = "10.0.2.2"
"""The address by which a machine in qemu's user network calls the host's loopback."""
_BOOT_BYTES = 256 << 20
_ROOT_BYTES = 2 << 30
_UPDATE_S = 120.0
"""From the start of `fleet update` until it says that the board acts as the new release: a bound, not a figure."""
_ACTOR = "pi-boot"
_RATE_HZ = 50
"""In the long run, where whoever acts flat out leaves the one core to nobody."""


def image(path: Path, root: Path) -> None:
    """A disk image of a Debian root, with the boot partition of the suite that the file is named after."""
    images.SUITES[path.stem](path, boot_bytes=_BOOT_BYTES, root_bytes=_ROOT_BYTES)
    start = images.OFFSET + _BOOT_BYTES
    options = ["-q", "-F", "-t", "ext4", "-d", str(root), "-E", f"offset={start}", str(path), f"{_ROOT_BYTES >> 10}k"]
    subprocess.run(["mke2fs", *options], check=True)


def run(fresh: Path, kernel: Path, wheels: Path) -> None:
    directory, key = fresh.parent, fresh.with_name("key")
    card, home, run_dir = directory / "card.img", directory / "fleet" / "home", directory / "run"
    is_long = "UPDATE_PLUGS" in os.environ
    init = [sys.executable, "-m", "broker", "init", "local", "--address", _HOST]
    subprocess.run(init, check=True, env=os.environ | {"ACTORQ_HOME": str(home)}, stderr=subprocess.DEVNULL)
    updates.make_key(directory, "local", home)
    with local_fleet.LocalFleet.start(directory / "fleet", tls=True) as fleet:
        fleet.start_actor(_ACTOR, ["--dump-config"]).wait()  # enrols it
        bundle = json.loads((home / f"{_ACTOR}.json").read_text())
        bundle["brokers"] = [f"{_HOST}:{fleet.broker['port']}"]
        (directory / "pi.bundle").write_text(json.dumps(bundle))
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        flash = ["firmware_notes/flash.sh", str(fresh), str(card), "--wheels", str(wheels)]
        flash += ["--bundle", str(directory / "pi.bundle"), "--ssh-key", f"{key}.pub"]
        flash += ["--set", "ACTORQ_ACTOR_ENV=CartPole-v1", "--set", "ACTORQ_ACTOR_SPOOL_DIR=disk"]
        flash += ["--set", "ACTORQ_ACTOR_ALLOW=update"] if fresh.stem == "trixie" else []
        flash += ["--set", f"ACTORQ_ACTOR_RATE_HZ={_RATE_HZ}"] if is_long else []
        python = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(flash, check=True, env=python)
        learner = ["--publish-period-updates", "50", "--solved-return", "inf", "--max-env-steps", "10000000"]
        learner += ["--keep-experience"]  # it runs for long, and the ledger is looked at as a whole
        fleet.start_learner([*QUICK, *learner, "--run-dir", str(run_dir)])
        board = machine.Machine(card, kernel, directory, cores=1 if is_long else 2)
        board.power_on()
        try:
            with witness.Witness(fleet, _ACTOR, run_dir) as seen:
                if fresh.stem == "bookworm":
                    board.await_reboot()  # after firstrun.sh
                    board.power_on()
                seen.await_new_boot()
                board.say("experience arrives")
                if fresh.stem == "trixie":
                    said = _on_board(board, key, "hostname && sudo -n cloud-init status --wait --long")
                    assert said.startswith(f"{_ACTOR}\n")
                    assert "status: done" in said
                    assert "errors: []\nrecoverable_errors: {}" in said, (
                        "cloud-init finds fault with what flash.sh wrote"
                    )
                    given = updates.Updates(fleet, _ACTOR, directory, board, seen)
                    given.take_one_that_works(math.inf if is_long else _UPDATE_S)
                    given.give_up_one_that_crashes()
                    if is_long:
                        board.words += ["cloud-init=disabled"]  # it has done its work, and takes long
                        plugs, seed = int(os.environ["UPDATE_PLUGS"]), int(os.environ.get("UPDATE_SEED", "0"))
                        given.take_many(plugs, seed, lambda command: _on_board(board, key, command))
                else:
                    for _ in range(2):
                        _pull_the_plug(board, seen, run_dir)
                board.say(f"no gap in {seen.assert_no_gap()},")
                seen.check()
            _assert_scrubbed(card, directory, (bundle["mac_key"], key.with_suffix(".pub").read_text().strip()))
        finally:
            board.pull_the_plug()
            print("\n".join(board.log.read_text(errors="replace").splitlines()[-100:]), file=sys.stderr)


def _assert_scrubbed(card: Path, directory: Path, secrets: Sequence[str]) -> None:
    """Nothing that flash.sh wrote for the first boot is left where everyone reads who holds the card."""
    left = directory / "left"
    left.mkdir()
    subprocess.run(["mcopy", "-s", "-Q", "-i", f"{card}@@{images.OFFSET}", "::*", str(left)], check=True)
    assert not (left / "actorq").exists()
    for path in left.rglob("*"):
        assert path.is_dir() or not any(secret in path.read_text(errors="replace") for secret in secrets), path


def _on_board(board: machine.Machine, key: Path, command: str) -> str:
    """What a command says to the user that flash.sh makes, who logs in by key, and becomes root without a password."""
    ssh = ["ssh", "-i", str(key), "-p", str(board.ssh_port), "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    ssh += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=300"]
    ssh += ["pi@127.0.0.1", command]
    said = subprocess.run(ssh, capture_output=True, text=True, check=False, timeout=witness.BOOT_S)
    print(f"boot: {said.stdout}{said.stderr}", file=sys.stderr)
    return said.stdout


def _pull_the_plug(board: machine.Machine, seen: witness.Witness, run_dir: Path) -> None:
    """At a swap, and it comes back."""
    _await_new_policy(run_dir)  # on its way to the card, where the spool is written too
    board.pull_the_plug()
    board.power_on()
    seen.await_new_boot()
    board.say("experience arrives again")


def _await_new_policy(run_dir: Path) -> None:
    known = _policies(run_dir)
    conftest.wait_until(lambda: _policies(run_dir) - known, "a new policy", witness.BOOT_S)


def _policies(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.glob("policies/*.tflite")}


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    if verb == "image":
        image(*map(Path, paths))
    else:
        run(*map(Path, paths))
