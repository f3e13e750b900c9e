"""Constructors wire: they open, start, connect and read nothing; a class method (`open`, `start`) or `build` does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = {
    *("open", "fdopen", "connect", "socket", "bind", "listen", "Popen", "run", "start", "mkdir", "exists", "stat"),
    *("read", "read_w", "read_bytes", "read_text", "write_bytes", "write_text", "write_atomic", "unlink", "flock"),
    *("execute", "executescript", "TemporaryDirectory", "compile", "load", "convert", "tls", "watch_tls"),
    *("client_context", "release", "rename", "rmtree"),
}
"""Names of calls that touch the network, files or processes, or compile, convert or delete."""


def work(source: str) -> Iterator[str]:
    """Yields each call in a constructor of `source` that does work."""
    module = ast.parse(source)
    functions = {one.name: one for one in module.body if isinstance(one, ast.FunctionDef)}
    for kind in ast.walk(module):
        if not isinstance(kind, ast.ClassDef):
            continue
        methods = {one.name: one for one in kind.body if isinstance(one, ast.FunctionDef)}
        reached = [methods[name] for name in ("__init__", "__post_init__") if name in methods]
        for body in reached:  # grows: what a constructor calls of its own object or module is part of it
            for call in ast.walk(body):
                if not isinstance(call, ast.Call):
                    continue
                if (called := _name(call.func)) in WORK:
                    yield f"{kind.name}, line {call.lineno}: {ast.unparse(call)[:80]}"
                is_own = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self"
                near = methods if is_own else functions if isinstance(call.func, ast.Name) else {}
                if called in near and near[called] not in reached:
                    reached.append(near[called])


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


@pytest.mark.parametrize("package", ["broker", "edge_actor", "learner"])
def test_constructors_only_wire(package: str) -> None:
    found = [f"{file}: {one}" for file in sorted((ROOT / package).rglob("*.py")) for one in work(file.read_text())]
    assert not found


def test_work_is_found() -> None:
    assert [*work("class A:\n    def __init__(self, path):\n        self.file = open(path)")]
    assert not [*work("class A:\n    def __init__(self):\n        pass\n    def go(self):\n        open(1)")]
    assert [*work("class A:\n    def __init__(self):\n        self.go()\n    def go(self):\n        open(1)")]
    assert [*work("def go():\n    open(1)\n\nclass A:\n    def __init__(self):\n        self.file = go()")]
