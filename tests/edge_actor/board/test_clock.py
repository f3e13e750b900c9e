"""The date can be trusted when systemd and the kernel say so."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from edge_actor.board import clock


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_either_word_will_do(touched: bool, kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "synchronized"
    if touched:
        mark.touch()
    monkeypatch.setattr(clock, "_TIMESYNCD", mark)
    monkeypatch.setattr(clock, "_kernel_is_synchronised", lambda: kernel)
    now_s = clock.now_s()
    assert (now_s is not None) == (touched or kernel)
    assert now_s is None or abs(now_s - time.time()) < 60.0


def test_the_kernel_is_asked_as_others_ask_it() -> None:
    """`adjtimex --print` and `timedatectl` are not everywhere; Python's own struct of the same call is."""
    answer = clock._kernel_is_synchronised()
    program = shutil.which("adjtimex")
    if program is None:
        assert answer == (_state() < 5)
        return
    shown = subprocess.run([program, "--print"], capture_output=True, text=True, check=True).stdout
    assert answer == ("return value = 5" not in shown)


def _state() -> int:
    class Timex(ctypes.Structure):  # how struct timex begins
        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset_frequency_and_errors", ctypes.c_long * 4),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_char * 400),
        )

    asked = Timex()
    state: int = ctypes.CDLL(None).adjtimex(ctypes.byref(asked))
    assert bool(asked.status & 0x40) == (state == 5), "STA_UNSYNC, by the kernel's header"
    return state
