"""Parts of setup_pi.sh that need no board: what it may install, and that it runs nothing that its settings say."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FIRMWARE = REPOSITORY / "firmware_notes"
SETTINGS = """\
# Settings
ACTORQ_ACTOR_NOTE=$(touch evaluated)
ACTORQ_ACTOR_OTHER="`touch evaluated`"
touch evaluated
ACTORQ_ACTOR_X;touch evaluated;Y=1
PATH=/nonexistent
LD_PRELOAD=/nonexistent.so
ACTORQ_ACTOR_ENV='file.py:Arm = 1'
ACTORQ_ACTOR_RATE_HZ=50"""
PRINTS = (
    '#!/bin/sh\nprintf "%s\\n" "$ACTORQ_ACTOR_NOTE" "$ACTORQ_ACTOR_OTHER" "$ACTORQ_ACTOR_ENV" "$ACTORQ_ACTOR_RATE_HZ"\n'
)


@pytest.mark.fault(22)
def test_the_command_for_people_runs_nothing_that_a_setting_says(tmp_path: Path) -> None:
    """It runs as root, which `id` says here; `setpriv` steps aside."""
    program, settings, bin_ = tmp_path / "opt", tmp_path / "etc", tmp_path / "bin"
    for file, text in (
        (program / "venv/bin/actorq-actor", PRINTS),
        (settings / "actor.env", SETTINGS),
        (bin_ / "id", "#!/bin/sh\necho 0\n"),
        (bin_ / "setpriv", '#!/bin/sh\nshift 5\nexec "$@"\n'),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    script = f". {FIRMWARE}/setup_pi.sh; PROGRAM={program} SETTINGS={settings} STATE={tmp_path}; command_for_people"
    command = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    (tmp_path / "command").write_text(command)
    done = subprocess.run(
        ["sh", str(tmp_path / "command")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": f"{bin_}:{os.environ['PATH']}"},
        check=False,
    )
    assert not (tmp_path / "evaluated").exists(), "a setting was run as a command"
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["$(touch evaluated)", "`touch evaluated`", "file.py:Arm = 1", "50"]


@pytest.mark.parametrize(
    ("allow", "may"),
    [("", False), ("pause,restart", False), ("pause, reboot", True), ("reboot,logs", True), ("noreboot", False)],
)
def test_only_a_board_that_allows_it_is_rebooted(tmp_path: Path, allow: str, may: bool) -> None:
    (tmp_path / "actor.env").write_text(f"ACTORQ_ACTOR_ALLOW='{allow}'\n" if allow else "")
    script = f". {FIRMWARE}/setup_pi.sh; SCRATCH={tmp_path}; DEVICES=() SUPPLEMENTARY=; unit"
    unit = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert ("ExecStopPost=+/bin/sh -c '[ ! -e /run/actorq/reboot ] || systemctl --no-block reboot'" in unit) == may
    assert ("RuntimeDirectory=actorq\n" in unit) == may


@pytest.mark.parametrize(("allow", "may"), [("", False), ("pause,restart", False), ("pause, update", True)])
def test_only_a_board_that_allows_it_takes_updates(tmp_path: Path, allow: str, may: bool) -> None:
    (tmp_path / "actor.env").write_text(f"ACTORQ_ACTOR_ALLOW='{allow}'\n" if allow else "")
    script = f". {FIRMWARE}/setup_pi.sh; SCRATCH={tmp_path}; DEVICES=() SUPPLEMENTARY=; unit"
    unit = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    program = "actorq-launch" if may else "actorq-actor"
    assert f"ExecStart=/opt/actorq/venv/bin/{program} run\n" in unit
    assert ("NotifyAccess=all\nKillMode=mixed\nTimeoutStartSec=150\n" in unit) == may


def pins(file: Path) -> set[str]:
    """Returns the `name==version` that a requirements file lists."""
    return set(re.findall(r"(?m)^([\w.-]+==[\w.]+)", file.read_text()))


def debian_of_32_bit_boards() -> set[str]:
    """Returns the packages that setup_pi.sh takes from apt on a 32-bit board, but for python3-venv."""
    script = "architecture() { echo armhf; }; python_version() { echo 3.11; }; id() { echo 0; }; dpkg() { :; }; "
    script += "systemctl() { :; }"
    done = subprocess.run(
        ["bash", "-c", f". {FIRMWARE}/setup_pi.sh; {script}; look_at_the_board; printf '%s\n' ${{DEBIAN[@]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split()) - {"python3-venv"}


def test_a_32_bit_board_lists_nothing_that_debian_brings() -> None:
    brought = {pin.partition("==")[0] for pin in pins(FIRMWARE / "debian-32.txt")}
    assert not brought & {pin.partition("==")[0] for pin in pins(FIRMWARE / "board-32.txt")}
    asked = {name.removeprefix("python3-") for name in debian_of_32_bit_boards()}
    assert brought == asked | {"pycparser"}, "of cffi, which apt brings along"


@pytest.mark.fault(22)
@pytest.mark.parametrize("file", ["board-64.txt", "board-32.txt"])
def test_all_that_a_board_installs_is_exact_and_has_its_hash(file: str) -> None:
    """`make constraints` writes them anew."""
    assert (FIRMWARE / file).exists(), "versions without hashes: pip takes whatever is called so"
    tested = pins(REPOSITORY / "constraints.txt")
    text = (FIRMWARE / file).read_text().replace("\\\n", " ")
    found = [line for line in text.splitlines() if not line.startswith("#")]
    for line in found:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; .+?)?( +--hash=sha256:[0-9a-f]{64})+", line.strip()), line
    versions = pins(FIRMWARE / file)
    assert versions == {line.split()[0] for line in found}
    # Newer ones need a newer cffi than the Debian of a 32-bit board has
    on_32_bit = {one for one in versions if one.startswith("cryptography==")} if file == "board-32.txt" else set()
    assert versions - on_32_bit <= tested, "run make constraints"
    assert {"gymnasium", "cryptography", "setuptools"} <= {version.split("==")[0] for version in versions}


@pytest.mark.fault(22)
def test_what_builds_the_package_is_exact() -> None:
    required = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    (setuptools,) = required
    assert re.fullmatch(r"setuptools==[\d.]+", setuptools)
    assert setuptools in pins(FIRMWARE / "board-64.txt"), "and the one that a board has"
    assert setuptools in pins(REPOSITORY / "constraints.txt")
