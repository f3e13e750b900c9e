"""A power cut, a bad card or a stranger may damage an actor's state: that is said, and the actor starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from broker.contract import errors, messages
from broker.fleet import identity
from edge_actor import config
from edge_actor.experience import journal
from edge_actor.policies import policy_store
from edge_actor.run import build
from tests.edge_actor.policies import offers

pytestmark = [pytest.mark.usefixtures("synchronised"), pytest.mark.fault(20)]
SEED = 20
TIME_S = 1_700_000_000
"""Later than any of the boots here."""
ODD_TEXTS = [
    b"",
    b"\n",
    b"\0" * 4096,
    b"-7",
    b"1e3",
    b"9" * 30,
    b"9" * 5000,
    b"NaN",
    b"null",
    b"\xff\xfe",
    b"[" * 4000,
    b'{"a":' * 700,
    b'"../../../etc/passwd"',
]
ODD_VALUES = [
    "NaN",
    "Infinity",
    "-1",
    "1e999",
    "1.5",
    "null",
    "true",
    '"7"',
    "[7]",
    "{}",
    "9" * 25,
    "9" * 4000,
    "[" * 2000,
]


def odd_orders() -> Iterator[bytes]:
    """Yields orders as a crafted `newest.json` might hold them."""
    key = offers.VERIFIER.public_key.hex()
    for value in ODD_VALUES:
        for epoch, version in ((value, "9"), ("1", value)):
            yield f'{{"learner_key": "{key}", "epoch": {epoch}, "version": {version}}}'.encode()
    yield json.dumps({"learner_key": [key], "epoch": 1, "version": 9}).encode()
    yield json.dumps({"learner_key": key, "epoch": 1, "version": 9, "file": "/etc/passwd", "keyframe": "../x"}).encode()


def damaged(sound: bytes, count: int) -> Iterator[bytes]:
    """Cut off, with bits flipped, a block of zeros, bytes put in, or nothing left of it."""
    random = np.random.default_rng(SEED)
    for _ in range(count):
        data = bytearray(sound)
        at = int(random.integers(len(data)))
        match random.integers(5):
            case 0:
                del data[at:]
            case 1:
                data[at] ^= 1 << random.integers(8)
            case 2:
                data[at : at + 512] = bytes(len(data[at : at + 512]))
            case 3:
                data[at:at] = random.bytes(int(random.integers(1, 9)))
            case _:
                data = bytearray(random.bytes(len(data)))
        yield bytes(data)


def outside(path: Path) -> Path:
    """Makes the file that a link leads to, which is none of the actor's."""
    return path.parent.parent / f"outside-{path.name}"


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


NODES: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to(outside(path)),
    "a link to nowhere": lambda path: path.symlink_to("/nonexistent/file"),
    "a gigabyte": huge,
}


@contextlib.contextmanager
def not_blocking(limit_s: float = 60.0) -> Iterator[None]:
    def ring(signum: int, frame: object) -> None:
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def boot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], tuple[int, list[str]]]]:
    """Starts an actor, as far as its boot is made; its number, and what it said."""
    bundle = identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", ["127.0.0.1:1"])
    settings = config.ActorConfig(state_dir=str(tmp_path / "state"), spool_dir=str(tmp_path / "spool"))

    def start() -> tuple[int, list[str]]:
        caplog.clear()
        made = build.build(settings, bundle)
        return made.connection.boot, caplog.messages

    (tmp_path / "state").mkdir()
    with not_blocking():
        yield start


def test_a_boot_counter(boot: Callable[[], tuple[int, list[str]]], tmp_path: Path) -> None:
    counter = tmp_path / "state" / "boot"
    for content in (*ODD_TEXTS, *damaged(b"1700000007\n", 100)):
        counter.write_bytes(content)
        first, lines = boot()
        second, more = boot()
        assert 0 < first < 1 << 63 and second != first, content[:40]
        assert bool(lines) == (not content.strip().isdigit() or len(content) > 20), (content[:40], lines)
        assert not more, "it counts again"
        if lines:
            assert first >= TIME_S and str(counter) in lines[0]


@pytest.mark.parametrize("name", ["boot", ".boot.lock"])
@pytest.mark.parametrize("node", NODES)
def test_no_counter_at_all(boot: Callable[[], tuple[int, list[str]]], tmp_path: Path, node: str, name: str) -> None:
    path = tmp_path / "state" / name
    NODES[node](path)
    found, lines = boot()
    assert found >= TIME_S
    assert bool(lines) == (name == "boot" or node != "a gigabyte"), lines
    assert not outside(path).exists()


# -- the stored policy ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """With policy 5, the patch to 9 and their order."""
    directory = tmp_path / "state"
    policy_store.PolicyStore(directory, offers.VERIFIER.public_key).write(
        (offers.whole(5)[1], offers.patch(5, 9)[1]), messages.Order(1, 9)
    )
    with not_blocking():
        yield directory


def check_starts(store: Path, about: object) -> dict[str, int]:
    """It acts on a stored policy that is sound or on none, and refuses what is older than it knows or nothing."""
    made = offers.Receiver(store)
    made.start(offers.VERIFIER, offers.NAMES)
    assert made.held.floor in ((0, 0), (1, 9)), about
    assert made.acts() in (None, 5, 9), about
    refused = dict(made.refused)
    made.receive(*offers.whole(10))
    assert made.acts() == 10, "it is not locked out"
    made.close()
    return refused


FILES = ("newest.json", "keyframe.sealed", "delta.sealed")


@pytest.mark.parametrize("name", FILES)
def test_a_stored_policy(store: Path, name: str) -> None:
    sound = {one: (store / one).read_bytes() for one in FILES}
    crafted = odd_orders() if name == "newest.json" else ()
    for content in (*crafted, *damaged(sound[name], 100), *ODD_TEXTS):
        for one in FILES:
            (store / one).write_bytes(content if one == name else sound[one])
        assert check_starts(store, content[:200]).get("stored", 0) == (content != sound[name]), content[:200]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("node", NODES)
def test_no_stored_policy_at_all(store: Path, node: str, name: str) -> None:
    """A link is not followed, though what it leads to would be good."""
    (store / name).rename(outside(store / name))
    NODES[node](store / name)
    assert check_starts(store, node)["stored"] == 1


# -- the spool --------------------------------------------------------------------------------------------------------


def test_a_spool(tmp_path: Path) -> None:
    bodies = [bytes([n]) * 100 for n in range(20)]
    written = journal.Journal.open(tmp_path / "spool", 1 << 20)
    for seq, body in enumerate(bodies):
        written.append(7, seq, 0, 1, body)
    (segment,) = (tmp_path / "spool").iterdir()
    written.close()
    sound = segment.read_bytes()
    with not_blocking():
        for content in (*ODD_TEXTS, *damaged(sound, 100)):
            segment.parent.mkdir(exist_ok=True)
            segment.write_bytes(content)
            opened = journal.Journal.open(segment.parent, 1 << 20)
            for record in opened.records:
                assert opened.read(record) == bodies[record.seq], "as it was, or not at all"
            opened.close()


@pytest.mark.parametrize("node", [node for node in NODES if node != "a gigabyte"])
def test_no_file_of_a_spool(tmp_path: Path, node: str) -> None:
    """The file that a link leads to is neither cut off nor deleted."""
    precious = tmp_path / "outside-x.segment"
    precious.write_bytes(b"precious")
    (tmp_path / "spool").mkdir()
    NODES[node](tmp_path / "spool" / "x.segment")
    with not_blocking():
        opened = journal.Journal.open(tmp_path / "spool", 1 << 20)
    assert (len(opened.records), opened.damaged) == (0, 1)
    opened.append(7, 1, 1, 1, b"new")
    opened.close()
    assert precious.read_bytes() == b"precious"


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_an_actor_with_nothing_but_ruins_looks_for_its_broker(tmp_path: Path) -> None:
    """With 13, which a service manager starts again; 15 it does not."""
    identity.Fleet.open("lab", tmp_path / "fleet").enroll("pi", ["127.0.0.1:1"]).write(tmp_path / "pi.json")
    state = tmp_path / "state"
    state.mkdir()
    (state / "boot").touch()
    (state / "newest.json").write_bytes(b'{"epoch": null, "version": ' + b"[" * 2000)
    os.mkfifo(state / "keyframe.sealed")
    (state / "delta.sealed").mkdir()
    command = [sys.executable, "-m", "edge_actor", "run", "--bundle", str(tmp_path / "pi.json"), "--env", "CartPole-v1"]
    command += ["--state-dir", str(state), "--spool-dir", "disk", "--connect-timeout-s", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == errors.BrokerUnreachable.exit_code, done.stderr
    assert "a counter file does not hold a number" in done.stderr and "stored policy" in done.stderr
    assert "Traceback" not in done.stderr
