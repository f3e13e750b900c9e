"""Wheels for tests of updates: tiny ones, whose program is a script, and real ones, built of this source."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from edge_actor import updates

ROOT = Path(__file__).parents[2]
LIBRARY = ("__init__", "launcher", "release_directory", "download")
"""Modules of edge_actor.updates that a tiny release brings along, as a real one would."""
CRASHES = {"edge_actor/run/service.py": ("    lines = log_lines.LogLines.attached()\n", "    raise SystemExit(10)\n")}
"""What makes a real release end when it is to act, and not when it looks at the board."""
UNHEARD = {
    "edge_actor/run/fleet_connection.py": (
        "return self._mac.seal(self.experience_topic, body)",
        'return b"x" + self._mac.seal(self.experience_topic, body)',
    )
}
"""What has a real release connect, act and send, and nothing that it sends is understood."""
FILLS = {
    "edge_actor/run/service.py": (
        "    lines = log_lines.LogLines.attached()\n",
        """    lines = log_lines.LogLines.attached()
    taken = open(f"{os.environ['ACTORQ_RELEASES']}/{os.environ['ACTORQ_RELEASE']}/taken", "ab")

    def take_all() -> None:
        for bits in range(30, 8, -1):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(taken.fileno(), taken.seek(0, os.SEEK_END), 1 << bits)

    def go_on() -> None:
        while not threading.Event().wait(0.01):
            take_all()

    take_all()
    threading.Thread(target=go_on, daemon=True).start()
""",
    )
}
"""What has a real release take all that is free on the disk when it is to act, act on, and take what others let go."""


def wheel(directory: Path, files: Mapping[str, str | bytes], version: str = "9.0") -> Path:
    """Writes a wheel of actorq-fleet with these files."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"actorq_fleet-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: actorq-fleet\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in {**files, f"actorq_fleet-{version}.dist-info/METADATA": metadata}.items():
            made.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)  # the same bytes whenever it is made
    return path


def tiny(program: str) -> dict[str, str]:
    """Returns the files of a release whose `python -m edge_actor` is this script."""
    library = Path(updates.__file__).parent  # where it is installed, on a board, too
    files = {f"edge_actor/updates/{one}.py": (library / f"{one}.py").read_text() for one in LIBRARY}
    return files | {"edge_actor/__init__.py": "", "edge_actor/__main__.py": program}


def lay_out(directory: Path, files: Mapping[str, str]) -> Path:
    """Writes files into a directory, as if they had been installed there."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def built(directory: Path) -> Path:
    """Builds a wheel of the actor's packages of this source, by the project's own build."""
    source = directory / "source"
    for package in ("broker", "edge_actor"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(directory)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return directory / done.stdout.splitlines()[-1]


def changed(
    original: Path,
    directory: Path,
    version: str,
    edits: Mapping[str, tuple[str, str]] = {},
    more: Mapping[str, bytes] = {},
) -> Path:
    """Returns a wheel like another one, with another version, a text replaced in some of its files, and more files."""
    files: dict[str, str | bytes] = {}
    with zipfile.ZipFile(original) as read:
        for name in read.namelist():
            if ".dist-info/" not in name:
                files[name] = read.read(name)
    for name, (old, new) in edits.items():
        before = files[name]
        text = before if isinstance(before, str) else before.decode()
        assert old in text, f"{name} has no {old!r} any longer"
        files[name] = text.replace(old, new)
    return wheel(directory, {**files, **more}, version)


def environment(*path: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a launcher whose own program lies in these directories."""
    kept = {name: text for name, text in os.environ.items() if not re.match("ACTORQ_|PYTHON", name)}
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, path))} | more
