"""Constructors wire: they open, start, connect and read nothing; a class method (`open`, `start`) or `build` does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORK = {
    *("open", "fdopen", "connect", "socket", "bind", "listen", "Popen", "run", "start", "mkdir", "exists", "stat"),
    *("read_bytes", "read_text", "write_bytes", "write_text", "write_atomic", "unlink", "flock", "execute"),
    *("executescript", "TemporaryDirectory", "compile", "load"),
}
"""Names of calls that touch the network, files or processes, or compile."""


def work(source: str) -> Iterator[str]:
    """Yields each call in a constructor of `source` that does work."""
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef):
            continue
        for method in kind.body:
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__post_init__"):
                for call in ast.walk(method):
                    if isinstance(call, ast.Call) and _name(call.func) in WORK:
                        yield f"{kind.name}, line {call.lineno}: {ast.unparse(call)[:80]}"


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


@pytest.mark.parametrize("package", ["broker", "edge_actor", "learner"])
def test_constructors_only_wire(package: str) -> None:
    found = [f"{file}: {one}" for file in sorted((ROOT / package).rglob("*.py")) for one in work(file.read_text())]
    assert not found


def test_work_is_found() -> None:
    assert [*work("class A:\n    def __init__(self, path):\n        self.file = open(path)")]
    assert not [*work("class A:\n    def __init__(self):\n        pass\n    def go(self):\n        open(1)")]
