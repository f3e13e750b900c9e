"""Files that hold together, and files that do not."""

from __future__ import annotations

import pytest

from broker.contract import errors
from edge_actor.bench import models
from edge_actor.policies import model_file
from tests.edge_actor.policies.models import files

SOUND = files.INT8.read_bytes()


def damaged(at: int, value: int) -> bytes:
    return SOUND[:at] + value.to_bytes(4, "little") + SOUND[at + 4 :]


def test_sound_files_pass() -> None:
    for path in (files.INT8, files.FLOAT32):
        model_file.check(path.read_bytes())
    for precision in ("float32", "float16", "int8"):
        model_file.check(models.tflite(models.make(models.Shape(64, 2)), precision))


def test_every_cut_is_noticed() -> None:
    for length in range(len(SOUND)):
        with pytest.raises(errors.PolicyError, match="cut off or damaged"):
            model_file.check(SOUND[:length])


@pytest.mark.parametrize("value", [len(SOUND), 0x7FFFFFFF, 0xFFFFFFFF])
def test_offsets_that_lead_out_are_noticed(value: int) -> None:
    root = int.from_bytes(SOUND[:4], "little")
    vtable = root - int.from_bytes(SOUND[root : root + 4], "little", signed=True)
    subgraphs = root + int.from_bytes(SOUND[vtable + 8 : vtable + 10], "little")
    for at in (0, root, subgraphs):
        with pytest.raises(errors.PolicyError, match="cut off or damaged"):
            model_file.check(damaged(at, value))
