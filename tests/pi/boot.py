"""Boots the card that flash.sh wrote, in qemu, until the actor's experience arrives.

On Bookworm the plug is pulled twice, while the actor swaps policies and spools to disk. On Trixie the login is tried,
and the board takes releases of its program over the broker: one that works, and one that crashes, before whose trial
the plug is pulled. The kernel is a real one, so what the actor says of its memory there holds for a board too.

`image SUITE.img ROOT` makes a disk image with the layout of that suite's; `run SUITE.img KERNEL WHEELS` does the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.run import local_fleet
from tests import conftest
from tests.fakes import plain_client, releases
from tests.pi import images
from tests.system.conftest import QUICK, started

_HOST = "10.0.2.2"
"""The address by which a machine in qemu's user network calls the host's loopback."""
_BOOT_BYTES = 256 << 20
_ROOT_BYTES = 2 << 30
_SET_UP_S = 2400.0
_UPDATE_S = 120.0
"""From the start of `fleet update` until it says that the board acts as the new release: a bound, not a figure."""
_ACTOR = "pi-boot"
_RSS_BYTES = 90_000_000
"""Seen: 75.0, 78.3 and 80.4 MB, the latter on a busy machine. On x86 test_process holds the actor to 80."""
_WORDS = ("console=ttyAMA0", "panic=-1", "net.ifnames=0", "systemd.journald.forward_to_console=1")
"""Kernel arguments of every boot: eth0 has its name as on a board, and what services say is in the console's log."""


def image(path: Path, root: Path) -> None:
    """A disk image of a Debian root, with the boot partition of the suite that the file is named after."""
    images.SUITES[path.stem](path, boot_bytes=_BOOT_BYTES, root_bytes=_ROOT_BYTES)
    start = images.OFFSET + _BOOT_BYTES
    options = ["-q", "-F", "-t", "ext4", "-d", str(root), "-E", f"offset={start}", str(path), f"{_ROOT_BYTES >> 10}k"]
    subprocess.run(["mke2fs", *options], check=True)


class Machine:
    """An emulated board with that card in it.

    Attributes:
        log: What it says on its console.
        ssh_port: Of this machine; leads to the board's.
    """

    def __init__(self, card: Path, kernel: Path, directory: Path) -> None:
        self._card, self._kernel, self._initrd = card, kernel, directory / "initrd"
        self.log = directory / "console.log"
        self._began = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.ssh_port: int = found.getsockname()[1]

    def power_on(self) -> None:
        read = ["mtype", "-i", f"{self._card}@@{images.OFFSET}", "::cmdline.txt"]
        cmdline = subprocess.run(read, capture_output=True, text=True, check=True).stdout
        words = [word for word in cmdline.split() if not word.startswith(("console=", "root=", "init="))]
        command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", "1024", "-nographic"]
        command += ["-kernel", str(self._kernel / "vmlinuz"), "-initrd", str(self._initrd), "-no-reboot"]
        # unsafe: what this machine has cached is not lost with the board, whose own cache is
        command += ["-drive", f"file={self._card},if=none,format=raw,cache=unsafe,id=card"]
        command += ["-device", "virtio-blk-pci,drive=card", "-device", "virtio-net-pci,netdev=net,romfile="]
        command += ["-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.ssh_port}-:22"]
        command += ["-append", " ".join([*_WORDS, *words])]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.say("powered on")

    def await_reboot(self) -> None:
        assert self._process.wait(_SET_UP_S) == 0
        self.say("it rebooted")

    def pull_the_plug(self) -> None:
        self._process.kill()
        self._process.wait()
        self.say("plug pulled")

    def say(self, what: str) -> None:
        print(f"boot: {what} after {time.monotonic() - self._began:.0f} s", file=sys.stderr, flush=True)


class Heartbeats(plain_client.PlainClient):
    """All that the actor says of itself, as the fleet's broker passes it on."""

    def __init__(self, fleet: local_fleet.LocalFleet) -> None:
        keys = identity.Fleet.open(fleet.name, fleet.directory / "home" / "fleets" / fleet.name)
        super().__init__(int(fleet.broker["port"]), "listener", identity.LEARNER_USER, keys.password, keys.tls())
        self._mac = signing.ActorMac(keys.bundle(_ACTOR).mac_key)
        self._states: list[messages.ActorState] = []
        self.subscribe(topics.Topics(fleet.name).actor_state(_ACTOR))

    @property
    def states(self) -> list[messages.ActorState]:
        """What it has said until now."""
        for _ in range(self.received.qsize()):
            topic, sealed, _ = self.next()
            self._states.append(codec.decode(messages.ActorState, self._mac.open(topic, sealed)))
        return self._states

    @property
    def release(self) -> str:
        """The release that it acts as, in its own words."""
        births = [state.birth.release for state in self.states if state.birth is not None]
        return births[-1] if births else ""

    @property
    def recorded(self) -> dict[int, int]:
        """Steps that it had accepted for delivery in each boot when it last said so."""
        return {state.boot: state.vitals.steps_recorded for state in self.states if state.online}

    def check(self) -> None:
        """Little memory, and every policy on XNNPACK."""
        said = [state.vitals for state in self.states]
        rss_bytes = max(vitals.rss_bytes or 0 for vitals in said)
        kernels = {vitals.delegate for vitals in said} - {""}
        print(f"boot: {len(said)} heartbeats: {rss_bytes / 1e6:.1f} MB RSS at most, {kernels}", file=sys.stderr)
        assert 0 < rss_bytes <= _RSS_BYTES
        assert kernels == {"XNNPACK"}


def run(fresh: Path, kernel: Path, wheels: Path) -> None:
    directory, key = fresh.parent, fresh.with_name("key")
    card, home = directory / "card.img", directory / "fleet" / "home"
    release_key = ["release-key", "--fleet", "local", "-o", str(_release_key(directory))]
    for words in (["init", "local", "--address", _HOST], release_key):
        make = [sys.executable, "-m", "broker", *words]
        subprocess.run(make, check=True, env=os.environ | {"ACTORQ_HOME": str(home)}, stderr=subprocess.DEVNULL)
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
        python = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(flash, check=True, env=python)
        learner = ["--publish-period-updates", "50", "--solved-return", "inf", "--max-env-steps", "10000000"]
        learner += ["--keep-experience"]  # it runs for long, and the ledger is looked at as a whole
        fleet.start_learner([*QUICK, *learner, "--run-dir", str(directory / "run")])
        machine = Machine(card, kernel, directory)
        machine.power_on()
        try:
            heard = Heartbeats(fleet)
            with heard:
                if fresh.stem == "bookworm":
                    machine.await_reboot()  # after firstrun.sh
                    machine.power_on()
                _await_new_boot(directory / "run")
                machine.say("experience arrives")
                if fresh.stem == "trixie":
                    _log_in(machine, key)
                    _update(fleet, directory, machine, heard)
                else:
                    for _ in range(2):
                        _pull_the_plug(machine, directory / "run")
                _assert_no_gap(directory / "run", heard.recorded)
                heard.check()
            _assert_scrubbed(card, directory, (bundle["mac_key"], key.with_suffix(".pub").read_text().strip()))
        finally:
            machine.pull_the_plug()
            print(
                "\n".join((directory / "console.log").read_text(errors="replace").splitlines()[-30:]), file=sys.stderr
            )


def _assert_scrubbed(card: Path, directory: Path, secrets: Sequence[str]) -> None:
    """Nothing that flash.sh wrote for the first boot is left where everyone reads who holds the card."""
    left = directory / "left"
    left.mkdir()
    subprocess.run(["mcopy", "-s", "-Q", "-i", f"{card}@@{images.OFFSET}", "::*", str(left)], check=True)
    assert not (left / "actorq").exists()
    for path in left.rglob("*"):
        assert path.is_dir() or not any(secret in path.read_text(errors="replace") for secret in secrets), path


def _log_in(machine: Machine, key: Path) -> None:
    """Logs in as the user that flash.sh makes, by key alone, and as root from there, without a password."""
    command = ["ssh", "-i", str(key), "-p", str(machine.ssh_port), "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    command += ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "pi@127.0.0.1"]
    command += ["hostname && sudo -n cloud-init status --wait --long"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SET_UP_S)
    print(f"boot: {said.stdout}{said.stderr}", file=sys.stderr)
    assert said.stdout.startswith(f"{_ACTOR}\n")
    assert "status: done" in said.stdout
    assert "errors: []\nrecoverable_errors: {}" in said.stdout, "cloud-init finds fault with what flash.sh wrote"


def _pull_the_plug(machine: Machine, run_dir: Path) -> None:
    """At a swap, and it comes back."""
    _await_new_policy(run_dir)  # on its way to the card, where the spool is written too
    machine.pull_the_plug()
    machine.power_on()
    _await_new_boot(run_dir)
    machine.say("experience arrives again")


def _update(fleet: local_fleet.LocalFleet, directory: Path, machine: Machine, heard: Heartbeats) -> None:
    """The board takes a release that works, and comes back from one that crashes, over a plug pulled in between."""
    wheel, run_dir = releases.built(directory / "wheel"), directory / "run"
    good = releases.changed(wheel, directory / "good", "9.1")
    began_s = time.monotonic()
    with _ordered(fleet, directory, good) as command:
        told = _answer(command, errors.EXIT_OK)
    took_s = time.monotonic() - began_s
    machine.say(f"it acts as the new release, {took_s:.0f} s after the command began,")
    assert told["outcome"] == "done", told
    assert took_s <= _UPDATE_S
    conftest.wait_until(lambda: heard.release == "9.1", "a heartbeat of the new release", _UPDATE_S)

    bad = releases.changed(wheel, directory / "bad", "9.2", releases.CRASHES)
    with _ordered(fleet, directory, bad) as command:
        conftest.wait_until(
            lambda: command.poll() is not None or not heard.states[-1].online, "the end of the process", _SET_UP_S
        )
        assert command.poll() is None, "the board has taken that release"
        assert "is given up" not in machine.log.read_text(errors="replace"), "its trial is yet to come"
        machine.pull_the_plug()
        machine.power_on()
        _await_new_boot(run_dir)
        machine.say("experience arrives again")
        told = _answer(command, errors.OrderRefused.exit_code)
    assert told["outcome"] == "undone" and "it ended with 10 before" in told["text"], told
    conftest.wait_until(lambda: heard.states[-1].online, "a heartbeat", _UPDATE_S)
    assert heard.release == "9.1"


def _release_key(directory: Path) -> Path:
    """The secret half of the fleet's release key."""
    return directory / "release.pem"


def _ordered(
    fleet: local_fleet.LocalFleet, directory: Path, wheel: Path
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`fleet update` of the board, under way."""
    words = ["update", str(wheel), _ACTOR, "--fleet", fleet.name, "--broker", fleet.address]
    words += ["--key", str(_release_key(directory)), "--json"]
    home = os.environ | {"ACTORQ_HOME": str(directory / "fleet" / "home")}
    return started([sys.executable, "-m", "learner", "fleet", *words], env=home, stdout=subprocess.PIPE)


def _answer(command: subprocess.Popen[str], code: int) -> dict[str, Any]:
    """What became of the order in the end."""
    output, _ = command.communicate(timeout=_SET_UP_S)
    assert command.returncode == code, output
    answer: dict[str, Any] = json.loads(output.splitlines()[0])
    return answer


def _assert_no_gap(run_dir: Path, recorded: Mapping[int, int]) -> None:
    """The learner holds every message up to the newest of each boot, and all that earlier boots said they had."""
    for boot in {boot for boot, _ in _messages(run_dir)}:
        seqs = [seq for b, seq in _messages(run_dir) if b == boot]
        assert seqs == list(range(1, len(seqs) + 1)), f"boot {boot} lost messages that it had accepted: {seqs}"
    held = _steps(run_dir)
    earlier = [boot for boot, steps in recorded.items() if steps and boot < max(held)]
    assert earlier, recorded
    for boot in earlier:  # what they left went out before anything of the newest
        assert held[boot] >= recorded[boot], f"boot {boot} had accepted {recorded[boot]} steps, {held[boot]} are here"


def _await_new_policy(run_dir: Path) -> None:
    known = _policies(run_dir)
    conftest.wait_until(lambda: _policies(run_dir) - known, "a new policy", _SET_UP_S)


def _policies(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.glob("policies/*.tflite")}


def _messages(run_dir: Path) -> list[tuple[int, int]]:
    """(boot, seq) of all that the learner holds."""
    return sorted(_rows(run_dir, "SELECT boot, seq FROM messages"))


def _steps(run_dir: Path) -> dict[int, int]:
    """Steps of each boot up to the newest message that the learner holds."""
    return dict(_rows(run_dir, "SELECT boot, max(step + steps) FROM messages GROUP BY boot"))


def _rows(run_dir: Path, query: str) -> list[tuple[int, int]]:
    ledger = run_dir / "ledger.sqlite"
    if not ledger.exists():
        return []
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as opened:
        if not opened.execute("SELECT 1 FROM sqlite_master WHERE name = 'messages'").fetchone():
            return []  # the learner has only just made the file
        return opened.execute(query).fetchall()


def _await_new_boot(run_dir: Path) -> None:
    """Waits for messages of a boot that the learner has not heard of."""
    known = {boot for boot, _ in _messages(run_dir)}
    conftest.wait_until(lambda: {boot for boot, _ in _messages(run_dir)} - known, "experience of a new boot", _SET_UP_S)


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    if verb == "image":
        image(*map(Path, paths))
    else:
        run(*map(Path, paths))
