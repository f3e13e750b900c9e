"""An actor of the schema before ours, as a program: this source with what has changed since put back.

Its bytes are compared with the golden ones that the release before wrote. What is put back is written anew whenever
SCHEMA_VERSION changes; an edit whose text is not there any more fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from broker.contract import messages, previous
from broker.fleet import identity
from broker.program import children
from learner.run import local_fleet
from tests.fakes import releases

EDITS = {
    "broker/contract/messages.py": [
        (f"SCHEMA_VERSION = {messages.SCHEMA_VERSION}\n", f"SCHEMA_VERSION = {previous.VERSION}\n"),
        ("    shard: int = -1\n", ""),
    ],
    "broker/contract/previous.py": [
        (f"VERSION = {previous.VERSION}\n", "VERSION = 0\n"),  # it reads no other schema than its own
    ],
    "edge_actor/run/dispatcher.py": [
        ("        if self._connection.follow_shard(assignment.shard):\n", "        if False:\n"),
    ],
    "edge_actor/experience/spool.py": [
        (
            "            return codec.with_oldest(body, held.seq)\n",
            "            import dataclasses\n"
            "            read = codec.decode(messages.Experience, body)\n"
            "            return codec.encode(dataclasses.replace(read, oldest=held.seq))\n",
        ),
    ],
}
_COMPARES = """
import sys
from broker.contract import codec, messages
from tests.broker.contract.payloads import examples
assert messages.__file__.startswith(sys.argv[1]), messages.__file__
for kind, message in examples.EXAMPLES.items():
    assert codec.encode(message) == examples.golden(kind, examples.PREVIOUS), kind
    codec.decode(messages.KINDS[kind], examples.golden(kind, examples.PREVIOUS))
    try:
        codec.decode(messages.KINDS[kind], examples.golden(kind))
    except Exception as error:
        assert error.reason == "schema", error
    else:
        raise AssertionError(f"{kind} of the newer schema is understood")
"""


class PreviousRelease:
    """Lies in `directory`, and says what the release before said.

    Args:
        directory: Is made.

    Attributes:
        directory: Where its packages are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for package in ("broker", "edge_actor"):
            shutil.copytree(releases.ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name, edits in EDITS.items():
            text = (directory / name).read_text()
            for old, new in edits:
                assert text.count(old) == 1, f"{name} has no {old!r} any longer"
                text = text.replace(old, new)
            (directory / name).write_text(text)
        done = subprocess.run(
            [sys.executable, "-P", "-c", _COMPARES, str(directory)],
            env=releases.environment(directory, releases.ROOT),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]

    def start_actor(self, fleet: local_fleet.LocalFleet, name: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Starts an actor as `fleet.start_actor` does, which may take its place later."""
        home = fleet.directory / "home"
        bundle = home / f"{name}.json"
        if not bundle.exists():
            keys = identity.Fleet.open(fleet.name, home / "fleets" / fleet.name, create=False)
            keys.enroll(name, fleet.addresses).write(bundle)
        places = ["--state-dir", str(home / "actors" / name), "--spool-dir", str(fleet.spool(name))]
        with (fleet.directory / "logs" / f"{name}.log").open("a") as log:
            fleet.children[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "edge_actor", "run", "--bundle", str(bundle), *places, *arguments],
                env=releases.environment(self.directory, ACTORQ_HOME=str(home)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=children.die_with_parent(),  # noqa: PLW1509  no thread runs here yet
            )
        return fleet.children[name]
