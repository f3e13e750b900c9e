"""Small images with the layout of the real ones.

That is what pi-gen makes (export-image/prerun.sh): an MBR, from 8 MiB on a FAT partition of type 0x0c, then ext4 of
type 0x83. On the FAT partition cmdline.txt, config.txt and issue.txt; Bookworm's cmdline.txt names
raspberrypi-sys-mods/firstboot as init; Trixie since 2025-11-24 has meta-data, user-data and network-config.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

OFFSET = 8 << 20
BOOT_BYTES = 12 << 20
CMDLINE = "console=serial0,115200 console=tty1 root=PARTUUID=4e639091-02 rootfstype=ext4 fsck.repair=yes rootwait"
BOOKWORM = f"{CMDLINE} quiet init=/usr/lib/raspberrypi-sys-mods/firstboot"


def image(
    path: Path, files: dict[str, str], *, kind: int = 0x0C, boot_bytes: int = BOOT_BYTES, root_bytes: int = 1 << 20
) -> Path:
    """A disk image with these files, and some more, on its boot partition."""
    entries = struct.pack("<4xB3xII", kind, OFFSET // 512, boot_bytes // 512)
    entries += struct.pack("<4xB3xII", 0x83, (OFFSET + boot_bytes) // 512, root_bytes // 512)
    with path.open("wb") as disk:
        disk.write(b"\0" * 446 + entries + b"\0" * 32 + b"\x55\xaa")
        disk.truncate(OFFSET + boot_bytes + root_bytes)
        disk.seek(OFFSET + boot_bytes)
        disk.write(b"rootfs")
    boot = f"{path}@@{OFFSET}"
    subprocess.run(["mformat", "-i", boot, "-v", "bootfs", "-T", str(boot_bytes // 512), "::"], check=True)
    for name, text in {"config.txt": "arm_64bit=1\n", "issue.txt": "Raspberry Pi reference\n", **files}.items():
        put = ["mcopy", "-i", boot, "-", f"::{name}"]
        subprocess.run(put, input=text, text=True, check=True)
    return path


def bookworm(path: Path, **sizes: int) -> Path:
    return image(path, {"cmdline.txt": f"{BOOKWORM}\n"}, **sizes)


def trixie(path: Path, **sizes: int) -> Path:
    seed = {"user-data": "#cloud-config\n", "meta-data": "instance_id: rpios-image\n", "network-config": "# nothing\n"}
    return image(path, {"cmdline.txt": f"{CMDLINE} resize\n", **seed}, **sizes)


SUITES = {"bookworm": bookworm, "trixie": trixie}

if __name__ == "__main__":
    SUITES[sys.argv[1]](Path(sys.argv[2]))
