"""Releases as they are taken: signed, whole, newer and fitting, or refused with the reason; and gone on with."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import errors, release, topics
from broker.fleet import release_files, release_key
from edge_actor.updates import launcher, release_directory, updater
from tests import conftest
from tests.fakes import releases

NAMES = topics.Topics("lab")
GOOD = {"edge_actor/__init__.py": "", "edge_actor/__main__.py": "import sys; sys.exit(0)"}
BAD = 'import json, sys; print(json.dumps({"findings": [{"name": "runtime", "state": "fail", "what": "none here"}]}))'


class Board:
    """An updater, and a broker that has what `leave` left there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.key = ed25519.Ed25519PrivateKey.generate()
        self.retained: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.on_send: Callable[[str, bytes], bytes | None] = lambda topic, payload: payload
        self.start("")

    def start(self, running: str, version: str = "1.0", reserve_bytes: int = 0) -> None:
        """Makes the next process."""
        self.directory = release_directory.ReleaseDirectory(self.root / "releases", running)
        self._followed: set[str] = set()
        half = release_key.half(self.key)
        self.updater = updater.Updater(
            self.directory, half, NAMES, self._follow, version=version, reserve_bytes=reserve_bytes
        )

    def _follow(self, wanted: Iterable[str]) -> None:
        before, self._followed = self._followed, set(wanted)
        for topic in sorted(self._followed - before):
            sent = self.on_send(topic, self.retained.get(topic, b""))
            if sent:
                self.sent.append(topic)
                self.updater.receive(topic, sent, True)

    def leave(self, files: dict[str, Any], version: str = "2.0", **options: Any) -> release_files.SignedRelease:
        wheel = releases.wheel(self.root / "wheels", files, version)
        made = release_files.make([wheel], options.pop("key", self.key), downgrade=options.pop("downgrade", False))
        made = dataclasses.replace(made, **options)
        self.retained = dict(made.retained(NAMES))
        return made

    def take(self, digest: str) -> updater.Result:
        assert self.updater.why_not() == ""
        self.updater.begin(updater.Wanted(7, digest, 30.0))
        conftest.wait_until(lambda: self.updater.result is not None, "an outcome", 30.0)
        result = self.updater.pop_result()
        assert result is not None and not self._followed, "it asks for nothing more"
        return result

    def refusal(self, digest: str) -> str:
        result = self.take(digest)
        assert result.outcome == "refused", result
        assert launcher.read(self.directory.root / "trial") == {}
        return result.text


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    monkeypatch.setattr(sys, "argv", ["edge_actor", "run"])
    monkeypatch.setattr(updater, "_ASK_AGAIN_S", 0.3)
    made = Board(tmp_path)
    yield made
    made.updater.close()


def test_a_release_is_unpacked_and_looks_at_the_board(board: Board) -> None:
    made = board.leave(GOOD | {"edge_actor/data.bin": bytes(range(256)) * 2000})
    result = board.take(made.digest)
    assert (result.outcome, result.name, result.serial) == ("ready", made.name, made.listed.serial)
    site = board.directory.root / made.name / "site"
    assert (site / "edge_actor" / "data.bin").read_bytes() == bytes(range(256)) * 2000
    assert [path.name for path in board.directory.root.iterdir()] == [made.name], "nothing else is left"
    board.start(made.name)
    again = board.leave(GOOD | {"edge_actor/data.bin": bytes(range(256)) * 2000})
    assert again.digest != made.digest, "signed anew"
    assert board.take(again.digest).outcome == "done", "and the same to those that have it"


def test_what_another_key_signed_is_refused_before_it_is_read(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    other = board.leave(GOOD, key=ed25519.Ed25519PrivateKey.generate())
    with monkeypatch.context() as changed:
        changed.setattr(json, "loads", lambda *_: pytest.fail("parsed before its signature was checked"))
        assert "not signed by this fleet's release key" in board.refusal(other.digest)
    assert board.updater.refused == {"release_signature": 1}
    signed = bytearray(board.leave(GOOD).signed)
    signed[-5] ^= 1
    board.retained[NAMES.release_list] = bytes(signed)
    assert "not signed" in board.refusal(release.digest(bytes(signed)))
    assert set(board.sent) == {NAMES.release_list}, "no piece of it was asked for"


def test_an_altered_piece_is_asked_for_again(board: Board) -> None:
    made = board.leave(GOOD | {"edge_actor/data.bin": _noise(2 * release.PIECE_BYTES)})
    altered = [NAMES.release_piece(1), NAMES.release_list]

    def on_send(topic: str, payload: bytes) -> bytes:
        if topic in altered:
            altered.remove(topic)
            return payload[:-1] + bytes([payload[-1] ^ 1])
        return payload

    board.on_send = on_send
    assert board.take(made.digest).outcome == "ready"
    assert board.updater.refused == {"release_other": 1, "release_piece": 1}


def test_a_lost_connection_and_a_new_process_go_on_where_they_were(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = board.leave(GOOD | {"edge_actor/data.bin": _noise(5 * release.PIECE_BYTES)})
    count = len(made.listed.pieces)
    lost = {NAMES.release_piece(index) for index in range(3, count)}
    board.on_send = lambda topic, payload: None if topic in lost else payload
    with monkeypatch.context() as short:
        short.setattr(updater, "_GIVE_UP_S", 1.0)
        result = board.take(made.digest)
    assert result.outcome == "failed" and "do not come" in result.text
    board.start("")
    board.sent.clear()
    board.on_send = lambda topic, payload: payload
    again = board.leave(GOOD | {"edge_actor/data.bin": _noise(5 * release.PIECE_BYTES)})
    assert board.take(again.digest).outcome == "ready"
    assert set(board.sent) == {NAMES.release_list} | lost, "what was here was not sent again"


def test_a_full_disk_refuses_before_a_piece_is_asked_for(board: Board) -> None:
    board.start("", reserve_bytes=1 << 60)
    assert "the disk is too full" in board.refusal(board.leave(GOOD).digest)
    assert board.sent == [NAMES.release_list]


def test_an_older_one_needs_a_signed_word(board: Board) -> None:
    board.start("", version="2.1")
    assert "is older than 2.1" in board.refusal(board.leave(GOOD, "2.0").digest)
    assert board.take(board.leave(GOOD, "2.1.0").digest).outcome == "ready", "of the same version another build"
    assert board.take(board.leave(GOOD, "2.0", downgrade=True).digest).outcome == "ready"
    old = board.leave(GOOD, "3.0")
    (board.directory.root / "serial").write_text(str(old.listed.serial + 1))
    assert "signed before the release that was found good last" in board.refusal(old.digest)


def test_one_that_does_not_fit_the_board_is_refused(board: Board) -> None:
    text = board.refusal(board.leave(GOOD | {"edge_actor/__main__.py": BAD + "; sys.exit(18)"}).digest)
    assert "its check ended with 18: runtime: none here" in text
    assert "no edge_actor/__main__.py" in board.refusal(board.leave({"other.py": ""}).digest)


def test_a_wheel_that_cannot_be_unpacked_is_refused(board: Board) -> None:
    for second in ("edge_actor/file/one.py", "edge_actor/file/one/two.py"):
        made = board.leave(GOOD | {"edge_actor/file": "x", second: "x"})
        assert "cannot be unpacked" in board.refusal(made.digest), "a file in the place of a directory"
    wheel = releases.wheel(board.root / "wheels", GOOD | {"edge_actor/data.bin": bytes(100_000)})
    with zipfile.ZipFile(wheel) as read:
        start = read.getinfo("edge_actor/data.bin").header_offset + 30 + len("edge_actor/data.bin")
    data = bytearray(wheel.read_bytes())
    data[start] = 0xFF  # no such block in a deflated stream
    wheel.write_bytes(data)
    made = release_files.make([wheel], board.key, downgrade=False)
    board.retained = dict(made.retained(NAMES))
    assert "cannot be unpacked" in board.refusal(made.digest)
    assert board.updater.refused == {"release_unfit": 3}


def test_an_actor_that_ends_ends_the_check_and_begins_none(board: Board) -> None:
    waits = "import pathlib, time; pathlib.Path(__file__ + '.began').touch(); time.sleep(60)"
    made = board.leave(GOOD | {"edge_actor/__main__.py": waits})

    def ends(topic: str, payload: bytes) -> bytes:
        board.updater._stopping.set()
        return payload

    for has_begun in (True, False):
        board.start("")
        began = board.directory.root / made.name / "site" / "edge_actor" / "__main__.py.began"
        began.unlink(missing_ok=True)
        if not has_begun:
            board.on_send = ends
        board.updater.begin(updater.Wanted(7, made.digest, 30.0))
        thread = board.updater._thread
        assert thread is not None
        if has_begun:
            conftest.wait_until(began.exists, "the check is under way", 20.0)
            board.updater.close()
        thread.join(10.0)
        assert not thread.is_alive() and board.updater.result is None
        assert began.exists() == has_begun


@pytest.mark.parametrize("name", ["../out.py", "/out.py", "edge_actor/../../out.py", "a\\b.py", "./a.py"])
def test_what_would_lie_elsewhere_is_refused(board: Board, name: str) -> None:
    assert "this release cannot be taken" in board.refusal(board.leave(GOOD | {name: "x"}).digest)
    assert not list(board.root.rglob("out.py"))


def test_more_than_is_listed_is_refused(board: Board) -> None:
    made = board.leave(GOOD | {"edge_actor/zeros": bytes(10_000_000)})
    small, few = dataclasses.replace(made.listed, unpacked_bytes=5_000_000), dataclasses.replace(made.listed, files=2)
    for lying in (small, few):
        signed = release.sign(lying, board.key)
        board.retained[NAMES.release_list] = signed
        assert "unpacks to more than its list says" in board.refusal(release.digest(signed))
    assert not list(board.directory.root.glob("2.0-*"))


def test_a_link_in_a_wheel_is_refused(board: Board) -> None:
    link = zipfile.ZipInfo("edge_actor/link.py")
    link.external_attr = 0o120777 << 16
    path = releases.wheel(board.root / "wheels", GOOD)
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr(link, "/etc/passwd")
    made = release_files.make([path], board.key, downgrade=False)
    board.retained = dict(made.retained(NAMES))
    assert "no plain file" in board.refusal(made.digest)


def test_who_takes_none_says_why(board: Board) -> None:
    def why_not(directory: Any, key: bytes) -> str:
        return updater.Updater(directory, key, NAMES, lambda _: None, version="1", reserve_bytes=0).why_not()

    assert "has no release key" in why_not(board.directory, b"")
    assert "actorq-launch" in why_not(None, bytes(32))
    board.updater.receive(NAMES.release_list, b"unasked", False)
    assert board.updater.refused == {"release_unasked": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"version": "../x"},
        {"serial": 0},
        {"wheels": ()},
        {"wheels": (release.Wheel("a/b.whl", 10),)},
        {"wheels": (release.Wheel("a.whl", 10), release.Wheel("a.whl", 10))},
        {"pieces": ("00" * 32,) * 2},
        {"pieces": ("zz" * 32,)},
        {"unpacked_bytes": release.MAX_UNPACKED_BYTES + 1},
        {"files": release.MAX_FILES + 1},
        {"wheels": (release.Wheel("a.whl", release.MAX_BYTES + 1),)},
    ],
)
def test_a_list_that_is_none_is_refused_though_signed(change: dict[str, Any]) -> None:
    good = release.Release("1.0", 1, False, (release.Wheel("a.whl", 10),), ("00" * 32,), 1, 1)
    with pytest.raises(errors.ReleaseError):
        dataclasses.replace(good, **change)
    key = ed25519.Ed25519PrivateKey.generate()
    body = json.dumps(dataclasses.asdict(good) | {name: _plain(value) for name, value in change.items()}).encode()
    signed = b"AQR1" + key.sign(b"actorq release\n" + body) + body
    with pytest.raises(errors.ReleaseError) as refused:
        release.open_list(signed, release_key.half(key))
    assert refused.value.reason == "release"
    assert release.open_list(release.sign(good, key), release_key.half(key)) == good


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, tuple):
        return [dataclasses.asdict(one) if isinstance(one, release.Wheel) else one for one in value]
    return value


def _noise(size: int) -> bytes:
    """Bytes that no zip makes smaller, the same ones each time."""
    import random

    return random.Random(1).randbytes(size)


def test_versions_are_compared_by_their_numbers() -> None:
    assert release.numbers("1.10") > release.numbers("1.9.3")
    assert release.numbers("1.0.0") == release.numbers("1") == release.numbers("1.0rc1")


def test_a_release_that_a_pulled_plug_left_half_removed_does_not_count(board: Board) -> None:
    made = board.leave(GOOD)
    board.take(made.digest)
    assert launcher.usable(board.directory.root, made.name)
    where = board.directory.root / made.name
    calls: list[Path] = []

    def removed(path: Path, **_: Any) -> None:
        calls.append(path)
        assert not (Path(path) / "base").exists(), "first what says that it is whole"

    original, shutil.rmtree = shutil.rmtree, removed  # type: ignore[assignment]
    try:
        board.directory.clear(keep="")
    finally:
        shutil.rmtree = original
    assert where in calls and not launcher.usable(board.directory.root, made.name)


def test_a_part_of_a_file_is_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "stream").write_bytes(b"0123456789")
    with (tmp_path / "stream").open("rb") as file:
        part = release_directory._Part(file, 3, 4)
        assert part.read() == b"3456" and part.read() == b"" and part.seek(-1, io.SEEK_END) == 3
        assert part.read(9) == b"6"


def test_a_release_in_a_file_is_the_one_that_was_signed(board: Board) -> None:
    made, file = board.leave(GOOD), board.root / "x.release"
    made.write(file)
    half = release_key.half(board.key)
    assert release_files.read(file, half) == made
    good = file.read_bytes()
    for at in (0, 5, 20, 100, len(good) - 1):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(errors.ReleaseError):
            release_files.read(file, half)
    file.write_bytes(good[:-1])
    with pytest.raises(errors.ReleaseError):
        release_files.read(file, half)
    file.write_bytes(good)
    with pytest.raises(errors.ReleaseError, match="not signed"):
        release_files.read(file, bytes(32))
