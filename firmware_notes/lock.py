"""Writes board-64.txt and board-32.txt: what setup_pi.sh installs, in exact versions, with the hashes of PyPI's wheels.

    .venv/bin/python firmware_notes/lock.py       after a change of constraints.txt; needs the network and no board

pip resolves on this machine and says the hashes of each system's wheels; no wheel is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

HERE = Path(__file__).parent
WANTED = (
    *("numpy", "paho-mqtt", "safetensors", "cryptography", "zstandard"),  # what the package needs, see setup.cfg
    *("psutil", "gymnasium"),  # and the actor besides a TFLite runtime
    "setuptools",  # builds a checkout
)
FROM_DEBIAN = {"numpy", "psutil", "cffi", "pycparser", "zstandard"}
"""On 32-bit, where PyPI has no wheels of them."""
ON_32_BIT = {"cryptography": "46.0.7", "tflite-runtime": "2.14.0"}
"""Newer ones of the first need a newer cffi than Bookworm's."""
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC = range(36, 4, -1)
"""2.36 is Bookworm's, the oldest system."""


def main() -> None:
    """Writes both files."""
    constraints = HERE.parent / "constraints.txt"
    pins = [Requirement(line) for line in constraints.read_text().splitlines() if line[:1] != "#"]
    for pin in pins:
        if pin.name == "setuptools":  # named for Python 3.12 and newer alone, as older ones bring one along
            pin.marker = None

    closure = names(report(*WANTED, "ai-edge-litert", "-c", str(constraints)))
    ours = [pin for pin in pins if name(pin.name) in closure]
    write("board-64.txt", ours, [(machine, p) for machine in ("x86_64", "aarch64") for p in PYTHONS])

    exact = [f"{package}=={version}" for package, version in ON_32_BIT.items()]
    closure = names(report(*WANTED, *exact, "numpy<2")) - FROM_DEBIAN - ON_32_BIT.keys()
    ours = [pin for pin in pins if name(pin.name) in closure] + [Requirement(one) for one in exact]
    write("board-32.txt", ours, [("armv7l", "3.11")])


def names(found: list[dict[str, Any]]) -> set[str]:
    """Of a report's packages."""
    return {name(one["metadata"]["name"]) for one in found}


def write(file: str, pins: list[Requirement], systems: list[tuple[str, str]]) -> None:
    """A requirements file in pip's hash-checking form, with a hash for each system's wheel."""
    hashes: dict[str, set[str]] = {}
    for machine, version in systems:
        wanted = [f"{pin.name}{pin.specifier}" for pin in pins if applies(pin, version)]
        tags = [*(f"manylinux_2_{minor}_{machine}" for minor in GLIBC), f"manylinux2014_{machine}", f"linux_{machine}"]
        platforms = [word for tag in tags for word in ("--platform", tag)]
        # pip asks this Python whether a package is for it, in place of the other one
        target = [
            "--no-deps",
            "--ignore-requires-python",
            "--only-binary",
            ":all:",
            "--python-version",
            version,
            "--target",
            "nowhere",
        ]
        for found in report(*wanted, *target, *platforms):
            key = f"{name(found['metadata']['name'])}=={found['metadata']['version']}"
            hashes.setdefault(key, set()).add(found["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = ["# Written by lock.py; setup_pi.sh installs these and no others."]
    for pin in pins:
        marker = f" ; {pin.marker}" if pin.marker else ""
        allowed = sorted(hashes.get(f"{name(pin.name)}{pin.specifier}", ()))
        if allowed:
            lines.append(
                " \\\n".join([f"{pin.name}{pin.specifier}{marker}", *(f"    --hash=sha256:{one}" for one in allowed)])
            )
    (HERE / file).write_text("\n".join(lines) + "\n")


def applies(pin: Requirement, version: str) -> bool:
    """Whether a pin is meant for a Python."""
    return pin.marker is None or pin.marker.evaluate({"python_version": version, "python_full_version": f"{version}.0"})


def report(*arguments: str) -> list[dict[str, Any]]:
    """What pip would install from PyPI alone, whatever else this machine has configured."""
    own = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command += ["--index-url", "https://pypi.org/simple", "--report", str(file), *arguments]
        subprocess.run(command, env=own | {"PIP_CONFIG_FILE": os.devnull}, check=True)
        installed: list[dict[str, Any]] = json.loads(file.read_text())["install"]
    return installed


def name(written: str) -> str:
    """As PyPI compares them."""
    return written.lower().replace("_", "-").replace(".", "-")


if __name__ == "__main__":
    main()
