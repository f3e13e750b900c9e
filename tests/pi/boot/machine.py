"""An emulated board with a card in it: qemu-system-aarch64, whose plug can be pulled."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.pi import images

_REBOOT_S = 2400.0
_WORDS = ("console=ttyAMA0", "panic=-1", "net.ifnames=0", "systemd.journald.forward_to_console=1")
"""Kernel arguments of every boot: eth0 has its name as on a board, and what services say is in the console's log."""
_CORES = {1: ["-accel", "tcg,thread=single", "-smp", "1"], 2: ["-smp", "2"]}


class Machine:
    """An emulated board with that card in it.

    Args:
        card: An image.
        kernel: A directory with it.
        directory: With the initial file system; the console's log goes there.
        cores: That it has, and that it takes of this machine at most.

    Attributes:
        log: What it says on its console.
        ssh_port: Of this machine; leads to the board's.
        words: More kernel arguments, from the next boot on.
    """

    def __init__(self, card: Path, kernel: Path, directory: Path, cores: int = 2) -> None:
        self._card, self._kernel, self._initrd = card, kernel, directory / "initrd"
        self._cores = _CORES[cores]
        self.log = directory / "console.log"
        self.words: list[str] = []
        self._began = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.ssh_port: int = found.getsockname()[1]

    def power_on(self) -> None:
        read = ["mtype", "-i", f"{self._card}@@{images.OFFSET}", "::cmdline.txt"]
        cmdline = subprocess.run(read, capture_output=True, text=True, check=True).stdout
        words = [word for word in cmdline.split() if not word.startswith(("console=", "root=", "init="))]
        command = ["qemu-system-aarch64", "-M", "virt", "-cpu", "cortex-a72", *self._cores, "-m", "1024", "-nographic"]
        command += ["-kernel", str(self._kernel / "vmlinuz"), "-initrd", str(self._initrd), "-no-reboot"]
        # unsafe: a flush costs nothing. What the board has written to its card is with this machine, and outlives qemu;
        # what it has not is in qemu's memory, and is lost
        command += ["-drive", f"file={self._card},if=none,format=raw,cache=unsafe,id=card"]
        command += ["-device", "virtio-blk-pci,drive=card", "-device", "virtio-net-pci,netdev=net,romfile="]
        command += ["-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self.ssh_port}-:22"]
        command += ["-append", " ".join([*_WORDS, *self.words, *words])]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.say("powered on")

    def await_reboot(self) -> None:
        assert self._process.wait(_REBOOT_S) == 0
        self.say("it rebooted")

    def pull_the_plug(self) -> None:
        self._process.kill()
        self._process.wait()
        self.say("plug pulled")

    def say(self, what: str) -> None:
        print(f"boot: {what} after {time.monotonic() - self._began:.0f} s", file=sys.stderr, flush=True)
