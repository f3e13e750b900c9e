"""Draws what a command prints on a terminal: python -m tests.benchmarks.pictures.record OUT.svg COMMAND..."""

from __future__ import annotations

import html
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CHARACTER, _LINE, _MARGIN = 7.3, 17, 14
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def terminal(command: str, lines: Sequence[str]) -> str:
    """The command behind a prompt, and what it printed, light on dark."""
    shown = [("#7fd1b9", f"$ {command}"), *(("#e6e6e6", line) for line in lines)]
    width = round(2 * _MARGIN + _CHARACTER * max(len(text) for _, text in shown))
    height = 2 * _MARGIN + _LINE * len(shown)
    rows = "".join(
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * (index + 0.75):.0f}" fill="{colour}" xml:space="preserve">'
        f"{html.escape(text)}</text>"
        for index, (colour, text) in enumerate(shown)
    )
    size = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
    back = f'<rect width="{width}" height="{height}" rx="8" fill="#1d2430"/>'
    return f'<svg {size} font-family="{_FONT}" font-size="12">{back}{rows}</svg>\n'


if __name__ == "__main__":
    done = subprocess.run(sys.argv[2:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    Path(sys.argv[1]).write_text(terminal(" ".join(sys.argv[2:]), done.stdout.splitlines()))
