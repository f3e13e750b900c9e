"""flash.sh on small images with the layout of the real ones (images.py)."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from broker.fleet import identity
from tests import conftest
from tests.pi import images

FLASH = Path(__file__).parents[2] / "firmware_notes" / "flash.sh"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJt0HCnkUmPb lab@desktop"
SECRETS = {"ACTORQ_WIFI_PASSWORD": "ThisIsAPassword"}
PSK = "0dc0d6eb90555ed6419756b9a15ec3e3209b63df707dd508d14581f8982721af"
"""The key of network `ThisIsASSID` and the password above, as IEEE 802.11i-2004 says (H.4.3)."""


@pytest.fixture(autouse=True)
def mtools() -> None:
    conftest.require_program(shutil.which("mcopy"), "mtools", "mtools")


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Returns a directory with what a user has: a bundle, a key, and a wheel."""
    identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi_kitchen").write(tmp_path / "pi.bundle")
    (tmp_path / "key.pub").write_text(f"{KEY}\n")
    (tmp_path / "actorq_fleet-0.1.0-py3-none-any.whl").write_bytes(b"not looked at here")
    return tmp_path


def flash(desk: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    usual = ["--bundle", desk / "pi.bundle", "--ssh-key", desk / "key.pub", "--wheel", next(desk.glob("*.whl"))]
    command = [str(FLASH), *map(str, arguments), *map(str, usual)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=os.environ | environment
    )


def on_boot(disk: Path, name: str) -> str:
    command = ["mtype", "-i", f"{disk}@@{images.OFFSET}", f"::{name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


WIFI = ("--wifi", "ThisIsASSID", "--country", "GB", "--set", "ACTORQ_ACTOR_ENV=CartPole-v1")


def test_trixie_gets_cloud_init(desk: Path) -> None:
    target = desk / "card.img"
    done = flash(desk, images.trixie(desk / "trixie.img"), target, *WIFI, **SECRETS)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes()[images.OFFSET + images.BOOT_BYTES :][:6] == b"rootfs"
    assert target.stat().st_mode & 0o077 == 0
    instance = on_boot(target, "meta-data").split("instance-id: ")[1].strip()
    assert on_boot(target, "cmdline.txt") == f"{images.CMDLINE} resize ds=nocloud;i={instance}\n"
    user, network = on_boot(target, "user-data"), on_boot(target, "network-config")
    assert user.startswith("#cloud-config\nhostname: pi-kitchen\n")
    assert f'ssh_authorized_keys: ["{KEY}"]' in user
    assert f'"ThisIsASSID": {{password: "{PSK}"}}' in network
    assert "eth0: {dhcp4: true, optional: true}" in network
    assert json.loads(on_boot(target, "actorq/pi_kitchen.bundle"))["actor_id"] == "pi_kitchen"
    assert on_boot(target, "actorq/setup_pi.sh") == (FLASH.parent / "setup_pi.sh").read_text()
    assert "Environment='ACTORQ_ACTOR_ENV=CartPole-v1'" in on_boot(target, "actorq/first_boot.sh")
    assert SECRETS["ACTORQ_WIFI_PASSWORD"].encode() not in target.read_bytes()


def test_bookworm_gets_firstrun_from_a_packed_image(desk: Path) -> None:
    packed = desk / "bookworm.img.xz"
    packed.write_bytes(lzma.compress(images.bookworm(desk / "bookworm.img").read_bytes(), preset=0))
    target = desk / "card.img"
    done = flash(desk, packed, target, *WIFI, **SECRETS)
    assert done.returncode == 0, done.stderr
    cmdline = on_boot(target, "cmdline.txt")
    assert cmdline.startswith(f"{images.BOOKWORM} systemd.run=/boot/firmware/firstrun.sh ")
    assert cmdline.count("\n") == 1
    script = on_boot(target, "firstrun.sh")
    assert f"imager_custom set_wlan 'ThisIsASSID' '{PSK}' 'GB'\n" in script
    assert f"imager_custom enable_ssh -k '{KEY}'\n" in script
    for name in ("firstrun.sh", "actorq/first_boot.sh"):
        subprocess.run(["bash", "-n"], input=on_boot(target, name), text=True, check=True)


def test_cloud_config_is_what_cloud_init_reads(desk: Path) -> None:
    yaml = pytest.importorskip("yaml")
    target = desk / "card.img"
    assert flash(desk, images.trixie(desk / "trixie.img"), target, *WIFI, "--user", "lab", **SECRETS).returncode == 0
    user = yaml.safe_load(on_boot(target, "user-data"))
    assert user["user"]["name"] == "lab"
    assert user["user"]["ssh_authorized_keys"] == [KEY]
    assert user["ssh_pwauth"] is False
    assert user["runcmd"][1] == ["sh", "/boot/firmware/actorq/first_boot.sh"]
    wifi = yaml.safe_load(on_boot(target, "network-config"))["network"]["wifis"]["wlan0"]
    assert wifi["access-points"] == {"ThisIsASSID": {"password": PSK}}


def test_a_dry_run_writes_nothing(desk: Path) -> None:
    source = images.bookworm(desk / "bookworm.img")
    before = source.read_bytes()
    done = flash(desk, source, desk / "card.img", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "firstrun.sh" in done.stdout
    assert not (desk / "card.img").exists()
    assert source.read_bytes() == before


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("flash: error:") == 1
    assert words in done.stderr
    assert "to do: " in done.stderr


def test_an_image_that_cannot_be_told_is_refused(desk: Path) -> None:
    booted = images.image(desk / "booted.img", {"cmdline.txt": images.CMDLINE})
    refused(flash(desk, booted, desk / "card.img"), "neither cloud-init nor firstrun.sh")
    other = images.image(desk / "other.img", {"cmdline.txt": images.BOOKWORM}, kind=0x83)
    refused(flash(desk, other, desk / "card.img"), "no disk image with a FAT boot partition")
    ubuntu = images.image(desk / "ubuntu.img", {})
    refused(flash(desk, ubuntu, desk / "card.img"), "not for a Raspberry Pi")
    assert not (desk / "card.img").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wifi", "home"], "--wifi needs --country"),
        (["--set", "ACTORQ_ACTOR_ENV='; rm -rf /'"], "is no setting"),
        (["--hostname", "Pi Kitchen"], "is no host name"),
        (["--user", "root;"], "is no user name"),
        (["--wifi", 'a"b', "--country", "GB"], "a quote or a backslash"),
        (["--wheels", "/nowhere"], "is no directory"),
        (["--bundel", "x"], "there is no option --bundel"),
    ],
)
def test_bad_input_is_refused(desk: Path, arguments: list[str], words: str) -> None:
    refused(flash(desk, images.bookworm(desk / "bookworm.img"), desk / "card.img", *arguments), words)


def test_a_short_wifi_password_a_wrong_bundle_and_a_private_key_are_refused(desk: Path) -> None:
    source = images.bookworm(desk / "bookworm.img")
    refused(flash(desk, source, desk / "card.img", *WIFI, ACTORQ_WIFI_PASSWORD="short"), "8 to 63 characters")
    (desk / "key.pub").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n")
    refused(flash(desk, source, desk / "card.img"), "is not one public SSH key")
    (desk / "key.pub").write_text(KEY)
    (desk / "pi.bundle").write_text("{}")
    refused(flash(desk, source, desk / "card.img"), "is not an enrolment bundle")


def test_a_mounted_or_missing_disk_is_never_written(desk: Path) -> None:
    source = images.bookworm(desk / "bookworm.img")
    refused(flash(desk, source, "/dev/no-such-card"), "is not there")
    refused(flash(desk, source, source), "are the same file")
    refused(flash(desk, source, desk), "neither a disk nor a file")
    mounted = subprocess.run(["findmnt", "-vno", "SOURCE", "/"], capture_output=True, text=True, check=True).stdout
    if Path(mounted.strip()).is_block_device():
        done = flash(desk, source, mounted.strip(), "--dry-run")
        assert done.returncode == 3
        assert "is in use" in done.stderr or "not a whole disk" in done.stderr
