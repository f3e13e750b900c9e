"""Boots the card that flash.sh wrote, in qemu, and pulls the plug while the actor swaps policies and spools to disk.

The kernel is a real one, so what the actor says of its memory there holds for a board too.

`image FILE ROOT` makes a disk image with the layout of Bookworm's; `run DIRECTORY KERNEL WHEELS` does the rest.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from broker import codec, identity, messages, signing, topics
from learner import local_fleet
from tests import conftest
from tests.broker import plain_client
from tests.pi import images
from tests.system.conftest import QUICK

_HOST = "10.0.2.2"
"""What a machine in qemu's user network calls the host's loopback."""
_BOOT_BYTES = 256 << 20
_ROOT_BYTES = 3 << 30
_SET_UP_S = 1500.0
_ACTOR = "pi-boot"
_RSS_BYTES = 80_000_000


def image(path: Path, root: Path) -> None:
    """A disk image of a Debian root, with Bookworm's boot partition."""
    images.image(path, {"cmdline.txt": f"{images.BOOKWORM}\n"}, boot_bytes=_BOOT_BYTES, root_bytes=_ROOT_BYTES)
    start = images.OFFSET + _BOOT_BYTES
    options = ["-q", "-F", "-t", "ext4", "-d", str(root), "-E", f"offset={start}", str(path), f"{_ROOT_BYTES >> 10}k"]
    subprocess.run(["mke2fs", *options], check=True)


class Machine:
    """An emulated board with that card in it."""

    def __init__(self, card: Path, kernel: Path, log: Path) -> None:
        self._card, self._kernel, self._log = card, kernel, log
        self._began = time.monotonic()

    def power_on(self) -> None:
        cmdline = self._on_boot("mtype", "cmdline.txt", check=True).stdout
        words = [word for word in cmdline.split() if not word.startswith(("console=", "root=", "init="))]
        command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", "-smp", "2", "-m", "1024", "-nographic"]
        command += ["-kernel", str(self._kernel / "vmlinuz"), "-initrd", str(self._kernel / "initrd"), "-no-reboot"]
        command += ["-drive", f"file={self._card},if=none,format=raw,id=card", "-device", "virtio-blk-pci,drive=card"]
        command += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
        command += ["-append", " ".join(["console=ttyAMA0", "panic=-1", *words])]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.say("powered on")

    def has_on_boot(self, name: str) -> bool:
        """On the boot partition of the card."""
        return self._on_boot("mdir", name).returncode == 0

    def _on_boot(self, tool: str, name: str, *, check: bool = False) -> subprocess.CompletedProcess[str]:
        command = [tool, "-i", f"{self._card}@@{images.OFFSET}", f"::{name}"]
        return subprocess.run(command, capture_output=True, text=True, check=check)

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
        self.subscribe(topics.Topics(fleet.name).actor_state(_ACTOR))

    def check(self) -> None:
        """Little memory, and every policy on XNNPACK."""
        arrived = [self.next() for _ in range(self.received.qsize())]
        said = [codec.decode(messages.ActorState, self._mac.open(topic, sealed)).vitals for topic, sealed, _ in arrived]
        rss_bytes = max(vitals.rss_bytes or 0 for vitals in said)
        kernels = {vitals.delegate for vitals in said} - {""}
        print(f"boot: {len(said)} heartbeats: {rss_bytes / 1e6:.1f} MB RSS at most, {kernels}", file=sys.stderr)
        assert 0 < rss_bytes <= _RSS_BYTES
        assert kernels == {"XNNPACK"}


def run(directory: Path, kernel: Path, wheels: Path) -> None:
    card, home = directory / "card.img", directory / "fleet" / "home"
    init = [sys.executable, "-m", "broker", "init", "local", "--address", _HOST]
    subprocess.run(init, check=True, env=os.environ | {"ACTORQ_HOME": str(home)}, stderr=subprocess.DEVNULL)
    with local_fleet.LocalFleet(directory / "fleet", tls=True) as fleet:
        fleet.start_actor(_ACTOR, ["--dump-config"]).wait()  # enrols it
        bundle = json.loads((home / f"{_ACTOR}.json").read_text())
        bundle["brokers"] = [f"{_HOST}:{fleet.broker['port']}"]
        (directory / "pi.bundle").write_text(json.dumps(bundle))
        (directory / "key.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJt0HCnkUmPb lab@desktop\n")
        flash = ["firmware_notes/flash.sh", str(directory / "bookworm.img"), str(card), "--wheels", str(wheels)]
        flash += ["--bundle", str(directory / "pi.bundle"), "--ssh-key", str(directory / "key.pub")]
        flash += ["--set", "ACTORQ_ACTOR_ENV=CartPole-v1", "--set", "ACTORQ_ACTOR_SPOOL_DIR=disk"]
        python = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        subprocess.run(flash, check=True, env=python)
        learner = ["--publish-period-updates", "50", "--solved-return", "inf", "--max-env-steps", "10000000"]
        fleet.start_learner([*QUICK, *learner, "--run-dir", str(directory / "run")])
        machine = Machine(card, kernel, directory / "console.log")
        machine.power_on()  # firstrun.sh
        try:
            heard = Heartbeats(fleet)
            with heard:
                _follow(machine, directory / "run")
                heard.check()
            assert not machine.has_on_boot("actorq"), "what flash.sh wrote, secrets among it, is still on the card"
        finally:
            machine.pull_the_plug()
            print(
                "\n".join((directory / "console.log").read_text(errors="replace").splitlines()[-15:]), file=sys.stderr
            )


def _follow(machine: Machine, run_dir: Path) -> None:
    machine.await_reboot()
    machine.power_on()  # set-up
    _await_new_boot(run_dir)
    machine.say("experience arrives")
    for moment in ("at a swap", "and once more"):
        _await_new_policy(run_dir)  # on its way to the card, where the spool is written too
        machine.pull_the_plug()
        machine.power_on()
        _await_new_boot(run_dir)
        machine.say(f"plug pulled {moment}, and experience arrives again")
    for boot in {boot for boot, _ in _messages(run_dir)}:
        seqs = [seq for b, seq in _messages(run_dir) if b == boot]
        assert seqs == list(range(1, len(seqs) + 1)), f"boot {boot} lost messages that it had accepted: {seqs}"


def _await_new_policy(run_dir: Path) -> None:
    known = _policies(run_dir)
    conftest.wait_until(lambda: _policies(run_dir) - known, "a new policy", _SET_UP_S)


def _policies(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.glob("policies/*.tflite")}


def _messages(run_dir: Path) -> list[tuple[int, int]]:
    """(boot, seq) of all that the learner holds."""
    ledger = run_dir / "ledger.sqlite"
    if not ledger.exists():
        return []
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as opened:
        return sorted(opened.execute("SELECT boot, seq FROM messages").fetchall())


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
