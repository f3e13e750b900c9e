"""File trees of boards, as recorded in this folder."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PMIC = (HERE / "5.pmic.txt").read_text()


def plant(board: str, root: Path) -> Path:
    """Writes the files of a board below `root`, and returns it."""
    text = (HERE / f"{board}.txt").read_text()
    for path, content in re.findall(r"^==> (\S+) <==\n(.*?)(?=\n==> |\Z)", text, re.DOTALL | re.MULTILINE):
        put(root, path, content)
    return root


def put(root: Path, path: str, content: str) -> None:
    """Writes one file below `root`."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def program(directory: Path, name: str, script: str) -> None:
    """Puts a shell script that answers as a program of that name would."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
