"""The journal: what was accepted is found again, whatever else the disk did."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from broker.contract import errors
from edge_actor.experience import journal


def opened(directory: Path, limit_bytes: int = 10**6) -> journal.Journal:
    return journal.Journal.open(directory, limit_bytes)


def filled(directory: Path, count: int, limit_bytes: int = 10**6) -> journal.Journal:
    made = opened(directory, limit_bytes)
    for seq in range(1, count + 1):
        made.append(7, seq, 1, 10, body(seq))
    return made


def body(seq: int) -> bytes:
    return bytes([seq]) * (20 + seq)


def found(files: journal.Journal) -> list[int]:
    """Seqs of what is there, each of which must be readable."""
    assert all(files.read(r) == body(r.seq) for r in files.records)
    assert all((r.boot, r.oldest, r.steps) == (7, 1, 10) for r in files.records)
    return [record.seq for record in files.records]


def test_finds_all_again(tmp_path: Path) -> None:
    filled(tmp_path, 50, limit_bytes=1600).close()
    assert len(list(tmp_path.iterdir())) > 10
    assert found(opened(tmp_path)) == list(range(1, 51))


def test_a_torn_tail_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    filled(tmp_path / "whole", 3).close()
    (file,) = (tmp_path / "whole").iterdir()
    data = file.read_bytes()
    ends = [0]
    for seq in (1, 2, 3):
        ends.append(ends[-1] + journal.HEADER_BYTES + len(body(seq)))
    assert ends[-1] == len(data)
    for length in range(len(data) + 1):
        directory = tmp_path / str(length)
        directory.mkdir()
        torn = directory / file.name
        torn.write_bytes(data[:length])
        files = opened(directory)
        whole = max(k for k, end in enumerate(ends) if end <= length)
        assert found(files) == [1, 2, 3][:whole]
        assert files.damaged == 0
        assert files.size_bytes == ends[whole]
        files.close()
        assert not torn.exists() or torn.stat().st_size == ends[whole]


def test_a_flipped_bit_costs_its_own_record_alone(tmp_path: Path) -> None:
    filled(tmp_path / "whole", 3).close()
    (file,) = (tmp_path / "whole").iterdir()
    data = file.read_bytes()
    second = journal.HEADER_BYTES + len(body(1))
    third = second + journal.HEADER_BYTES + len(body(2))
    for at in range(second, third):
        directory = tmp_path / str(at)
        directory.mkdir()
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        (directory / file.name).write_bytes(flipped)
        files = opened(directory)
        assert found(files) == [1, 3]
        assert files.damaged == 1
        files.close()


def test_files_go_when_nothing_in_them_is_needed(tmp_path: Path) -> None:
    files = filled(tmp_path, 0, limit_bytes=16 * 100)
    kept = [files.append(7, seq, 1, 10, body(1)) for seq in range(1, 9)]  # two to a file
    for record in kept[:5]:
        files.release(record)
    assert len(list(tmp_path.iterdir())) == 2
    files.close()
    assert [r.seq for r in opened(tmp_path).records] == [5, 6, 7, 8], "5 is needless, and known to be when it is sent"


def test_a_released_record_can_be_read_no_more_but_others_can(tmp_path: Path) -> None:
    files = opened(tmp_path)
    first, second = files.append(7, 1, 1, 10, body(1)), files.append(7, 2, 1, 10, body(2))
    files.release(first)
    assert files.read(second) == body(2)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"")
    with pytest.raises(OSError, match="cut"):
        files.read(second)


def test_is_closed_to_others(tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    filled(directory, 1)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()] == [0o600]


def test_two_processes_never_share_it(tmp_path: Path) -> None:
    files = opened(tmp_path)
    code = "import pathlib; from edge_actor.experience import journal; "
    code += f"journal.Journal.open(pathlib.Path({str(tmp_path)!r}), 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is using the spool" in done.stderr
    assert "--spool-dir" in done.stderr
    files.close()
    opened(tmp_path).close()


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigError, match="cannot be opened"):
        opened(tmp_path / "file" / "spool")


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "actors" / "pi"
    assert journal.default_directory(state, "disk") == state / "spool"
    assert journal.default_directory(state, str(tmp_path / "x")) == tmp_path / "x"
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(journal, "_MEMORY", memory)
    monkeypatch.setattr(journal, "in_memory", lambda directory: directory == memory)
    chosen = journal.default_directory(state, "")
    assert chosen.parent.parent == memory
    assert stat.S_IMODE(chosen.parent.stat().st_mode) == 0o700
    assert journal.default_directory(tmp_path / "others" / "pi", "") != chosen
    chosen.parent.chmod(0o755)
    assert journal.default_directory(state, "") == state / "spool", "someone else may have made it, to read along"


@pytest.mark.parametrize("in_memory", [True, False])
def test_on_a_disk_an_empty_directory_stays_since_a_full_one_has_no_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    monkeypatch.setattr(journal, "in_memory", lambda directory: in_memory)
    opened(tmp_path / "spool").close()
    assert (tmp_path / "spool").exists() != in_memory


def test_knows_what_lies_in_memory() -> None:
    assert journal.in_memory(Path("/dev/shm")) == ("tmpfs" in subprocess.getoutput("stat -f -c %T /dev/shm"))
    assert not journal.in_memory(Path("/proc"))
