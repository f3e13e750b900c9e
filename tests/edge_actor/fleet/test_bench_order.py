"""A benchmark that the learner orders: rows as they come, errors by their words, and an end when the actor ends."""

from __future__ import annotations

import json
import queue

import psutil
import pytest

from broker.contract import messages
from edge_actor.fleet import bench_order, command
from tests import conftest

SMALL = {"quick": "true", "widths": "64", "cnn": "false", "kernels": "built-in", "seconds": "0.02"}
SMALL |= {"precisions": "int8"}


def ordered(**options: str) -> messages.Command:
    return messages.Command("c-1", "bench", boot=3, options=SMALL | options)


def answers(of: messages.Command) -> list[messages.Report]:
    found: list[messages.Report] = []
    bench_order.Benchmark().run(of, found.append)
    return found


def test_a_report_per_row_and_one_at_the_end() -> None:
    row, end = answers(ordered(parts="latency"))
    assert json.loads(row.labels[bench_order.ROW])["kernels"] == "built-in"
    assert (end.labels, end.error) == ({}, "")
    assert (row.command_id, row.kind) == (end.command_id, end.kind) == ("c-1", "bench")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"widths": "wide"}, "widths must be a whole number, not 'wide'"),
        ({"output": "/etc"}, "unknown key 'output'"),
        ({"meter": "/etc/passwd"}, "not from the network: meter"),
    ],
)
def test_what_cannot_be_meant_is_answered(options: dict[str, str], says: str) -> None:
    (end,) = answers(ordered(**options))
    assert says in end.error and not end.labels


def is_measuring(commander: command.Commander) -> bool:
    return commander.measuring


def test_an_actor_that_ends_takes_its_benchmark_along() -> None:
    commander = command.Commander(boot=3)
    reports: queue.SimpleQueue[messages.Report | None] = queue.SimpleQueue()
    commander.bench(messages.Command("other", "bench", boot=2), reports.put)  # for another boot
    assert reports.empty()
    commander.bench(ordered(parts="control", control_s="60"), reports.put)
    assert is_measuring(commander)
    commander.bench(messages.Command("c-2", "bench", boot=3), reports.put)
    busy = reports.get(timeout=30.0)
    assert busy is not None and busy.error == "this actor is measuring already"
    me = psutil.Process()

    def alive() -> list[psutil.Process]:
        return [child for child in me.children(recursive=True) if conftest.runs(child)]

    conftest.wait_until(lambda: len(alive()) == 3, "the benchmark, its policy, a busy core", 90.0)
    children = alive()
    commander.close()
    end = reports.get(timeout=60.0)
    assert end is not None and "it ended with 130" in end.error
    assert reports.get(timeout=30.0) is None and not is_measuring(commander)
    conftest.wait_until(lambda: not any(map(conftest.runs, children)), "no process is left", 30.0)
