"""From layers to messages: what is done beside the gate, what is put off, and what the last policy's ranges serve."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import messages, specs, topics
from edge_actor.policies import assembly
from learner import config
from learner.files import records, run_directory
from learner.networks import layers, networks
from learner.policies import publisher, timings
from learner.quantize import gate
from tests import conftest

SPEC = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=3))


class Wire:
    """A sender that keeps what it is given."""

    is_local = True

    def __init__(self) -> None:
        self.sent: list[messages.Message] = []

    def retain(self, topic: str, message: messages.Message) -> int:
        if isinstance(message, messages.PolicyPiece):  # whose bytes are good until the next one is made
            message = dataclasses.replace(message, patch=message.patch.copy())
        self.sent.append(message)
        return 1

    def tell(self, topic: str, message: messages.Message) -> int:
        return self.retain(topic, message)

    def forget(self, topic: str) -> None:
        pass


@pytest.mark.parametrize(
    ("width", "precision"),
    [(16, "int8"), (1800, "int8"), (16, "float16"), (1000, "float32"), (1500, "float16"), (1800, "dynamic")],
)
def test_only_what_the_gate_lets_pass_goes_out_and_an_actor_makes_the_same_bytes_of_it(
    width: int, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "learner")
    rng = np.random.default_rng(0)
    network = networks.QNetwork.build(SPEC, (width, width), False, rng)
    normalizer = networks.Normalizer.identity(SPEC.observation)
    policies = [network.policy_layers(list(network.initial().values()), normalizer)]
    for _ in range(2):
        moved = [a + 0.01 * rng.standard_normal(a.shape, np.float32) for a in layers.arrays(policies[-1]).values()]
        policies.append(layers.with_arrays(policies[-1], moved))
    wire, held = Wire(), assembly.Assembly(SPEC)
    lenient = config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0, gate_saturation_max=1.0)
    directory = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    names = topics.Topics("f")
    made = publisher.Publisher(
        wire, names, SPEC, "q_values", 1, 0, lenient, directory, records.Records(), precision=precision
    )
    x = rng.standard_normal((96, 4), np.float32)
    first, second, third = policies
    reasons = [made.publish(policy, x[:64], x[64:]).result().reason for policy in (first, second, second, third)]
    assert reasons == ["", "", "identical", ""]
    pieces = [message for message in wire.sent if isinstance(message, messages.PolicyPiece)]
    ahead = [piece for piece in pieces if piece.changes is None]
    kinds = [type(message) for message in wire.sent if message not in ahead]
    assert kinds == [messages.Policy, messages.PolicyPiece, messages.PolicyPiece]
    for message in wire.sent:
        assert isinstance(message, assembly.Message)
        held.add(message, b"", None)
    assert made.newest is not None
    assert held.newest is not None
    assert held.newest.model == made.newest.model
    assert (len(ahead) > 2) == (width > 16)
    assert caplog.messages == [], "nothing fell back to the slow converter"


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(("number", "reason"), [(np.nan, "not_finite"), (3e38, "not_finite"), (0.0, "dead")])
def test_a_policy_of_floats_that_cannot_act_is_held_back(
    precision: str, number: float, reason: str, tmp_path: Path
) -> None:
    wire, directory = Wire(), run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    made = publisher.Publisher(
        wire, topics.Topics("f"), SPEC, "q_values", 1, 0, config.GateConfig(), directory, records.Records(),
        precision=precision,
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((96, 4), np.float32)
    broken = layers.with_arrays(_policy(0), [np.full_like(a, number) for a in layers.arrays(_policy(0)).values()])
    assert made.publish(broken, x[:64], x[64:]).result().reason == reason
    assert not wire.sent
    assert made.publish(_policy(0), x[:64], x[64:]).result().passed
    made.close()


def test_it_is_told_when_no_policy_passes_the_gate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The fleet acts by an old policy then, which may cost most of a run."""
    made, _, x = _publisher(tmp_path, Wire())
    assert made.publish(_policy(0), x[:64], x[64:]).result().passed
    broken = layers.with_arrays(_policy(0), [np.full_like(a, np.nan) for a in layers.arrays(_policy(0)).values()])
    for _ in range(9):
        made.publish(broken, x[:64], x[64:]).result()
    assert not caplog.records
    made.publish(_policy(0), x[:64], x[64:]).result()  # is known: says nothing of the others
    made.publish(broken, x[:64], x[64:]).result()
    (told,) = caplog.messages
    assert told.startswith(
        "the gate has held back 10 policies in a row, the newest for 'not_finite'; version 1 acts on"
    )
    made.close()


@pytest.mark.parametrize("expire_after_s", [0.0, 60.0])
def test_every_policy_says_when_it_expires(expire_after_s: float, tmp_path: Path) -> None:
    wire = Wire()
    made, _, x = _publisher(tmp_path, wire, expire_after_s)
    for seed in range(3):
        assert made.publish(_policy(seed), x[:64], x[64:]).result().passed
    made.tidy(at_once=True)
    assert made.newest is not None
    made.publish_again(made.newest).result()
    assert len(wire.sent) >= 4
    times = set()
    for message in wire.sent:
        assert isinstance(message, assembly.Message)
        said = message.manifest if isinstance(message, messages.Policy) else message.changes
        assert said is not None
        times.add((said.created_s, said.expires_s))
    assert all(expires_s == (created_s + 60.0 if expire_after_s else 0.0) for created_s, expires_s in times)


def test_files_and_ranges_wait_for_an_actor_that_acts_and_for_nobody_at_the_end(tmp_path: Path) -> None:
    made, policies, x = _publisher(tmp_path)
    policy = policies / "v000001.int8.tflite"
    made.publish(_policy(0), x[:64], x[64:]).result()
    made.tidy()
    assert not policy.exists()
    made.acts(1, 0.0)
    made.tidy()
    conftest.wait_until(policy.exists, "the policy is kept")
    assert made.newest is not None
    assert policy.read_bytes() == made.newest.model
    made.publish(_policy(1), x[:64], x[64:]).result()
    made.tidy(at_once=True)
    assert (policies / "v000002.int8.tflite").exists()
    assert len(made.timings.put_off_ms) == 2


def test_one_worker_does_all_in_order_and_ends(tmp_path: Path) -> None:
    """Jobs queue up: whoever publishes waits for none of them, and two policies never are under way."""
    made, _, x = _publisher(tmp_path)
    goes_on = threading.Event()
    made._worker.submit(goes_on.wait, 10.0)
    publishing = [made.publish(_policy(seed), x[:64], x[64:]) for seed in range(2)]
    made.acts(0, 0.0)
    made.tidy()
    assert made.version == 0
    assert not any(one.done() for one in publishing)
    goes_on.set()
    assert all(one.result(10.0).passed for one in publishing)
    made.close()
    assert made.version == 2
    assert not [thread.name for thread in threading.enumerate() if thread in made._worker._threads]


def test_all_swaps_are_counted_though_the_times_of_the_newest_alone_are_kept() -> None:
    made = timings.Timings()
    for ms in range(timings.REMEMBERED + 5):
        made.add_acting(float(ms))
    assert len(made.acting_ms) == timings.REMEMBERED
    assert made.summary()["publish_to_acting_count"] == timings.REMEMBERED + 5


def test_metrics_and_summary_tell_what_went_out(tmp_path: Path) -> None:
    made, _, x = _publisher(tmp_path)
    assert made.metrics()["policy_version"] == 0
    assert made.summary()["calibrate_ms_p50"] is None
    made.publish(_policy(0), x[:64], x[64:]).result()
    made.publish(_policy(0), x[:64], x[64:]).result()
    made.publish(_policy(1), x[:64], x[64:]).result()
    made.acts(2, time.monotonic())
    row, summary = made.metrics(), made.summary()
    assert (row["policy_version"], row["keyframes"], row["deltas"], row["policies_held_back"]) == (2, 1, 1, 1)
    assert row["policies_converted"] == 0
    assert {"quantize_ms", "send_ms", "publish_to_acting_ms", "gate_agreement"} <= row.keys()
    assert (summary["policies_published"], summary["policies_held_back"]) == (2, {"identical": 1})
    assert summary["publish_to_acting_ms_p50"] == row["publish_to_acting_ms"] > 0.0
    assert (summary["publish_to_acting_count"], summary["bytes_per_policy"]) == (1, 1)
    made.close()


def test_ranges_of_the_last_policy_serve_the_next_and_those_that_do_not_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, x = _publisher(tmp_path)
    policy = _policy(0)
    moved = layers.with_arrays(policy, [a * np.float32(1.01) for a in layers.arrays(policy).values()])
    grown = layers.with_arrays(policy, [a * np.float32(8.0) for a in layers.arrays(policy).values()])
    passes = mock.Mock(wraps=made._maker._calibrator.calibrate)
    monkeypatch.setattr(made._maker._calibrator, "calibrate", passes)
    counts = []
    for each in (policy, moved, grown):
        verdict = made.publish(each, x[:64], x[64:]).result()
        assert verdict.passed, verdict
        assert isinstance(verdict, gate.ChoiceVerdict)
        assert verdict.agreement > 0.95
        counts.append(passes.call_count)
    # The first; after it, before the second; after that, and once more for what it cannot hold
    assert counts == [1, 2, 4]


def _publisher(
    directory: Path, wire: Wire | None = None, expire_after_s: float = 0.0
) -> tuple[publisher.Publisher, Path, NDArray[np.float32]]:
    run = run_directory.RunDirectory.open(directory / "run", resume=False)
    names, limits = topics.Topics("f"), config.GateConfig()
    made = publisher.Publisher(
        *(wire or Wire(), names, SPEC, "q_values", 1, 0, limits, run, records.Records()),
        expire_after_s=expire_after_s,
    )
    return made, run.policies, np.random.default_rng(1).standard_normal((96, 4), np.float32)


def _policy(seed: int) -> layers.PolicyLayers:
    network = networks.QNetwork.build(SPEC, (16, 16), False, np.random.default_rng(seed))
    return network.policy_layers(list(network.initial().values()), networks.Normalizer.identity(SPEC.observation))


def test_a_policy_that_goes_out_again_is_what_it_was(tmp_path: Path) -> None:
    """Between files of different kinds: an actor reads the older one as before."""
    made, _, x = _publisher(tmp_path)
    made.publish(_policy(0), x[:64], x[64:]).result()
    assert made.newest is not None
    first = made.newest
    older = dataclasses.replace(first, sent=dataclasses.replace(first.sent, head="categorical", precision="float32"))
    made.publish_again(older).result()
    assert made.newest.model == first.model
    assert (made.newest.manifest.head, made.newest.manifest.precision) == ("categorical", "float32")
    made.close()


def test_what_is_on_trial_goes_out_whole_on_its_channel_and_the_winner_above_both_on_main(tmp_path: Path) -> None:
    wire = Wire()
    run = run_directory.RunDirectory.open(tmp_path / "run", resume=False)
    made = publisher.Publisher(
        *(wire, topics.Topics("f"), SPEC, "q_values", 1, 0, config.GateConfig(), run, records.Records()),
        send_differences=False,
    )
    x = np.random.default_rng(1).standard_normal((96, 4), np.float32)
    known: list[tuple[messages.Order, bytes]] = []
    made.on_published = lambda order, model: known.append((order, model))
    held = assembly.Assembly(SPEC)  # of a canary, which is told in time which channel it follows
    assert made.publish(_policy(0), x[:64], x[64:]).result().passed
    incumbent = made.main
    assert incumbent is not None
    assert made.publish(_policy(1), x[:64], x[64:], topics.CANARY_CHANNEL).result().passed
    candidate = made.newest
    assert candidate is not None
    assert (made.version, made.main_version, made.main) == (2, 1, incumbent)
    made.publish_again(incumbent).result()
    made.clear_canary()
    assert (made.version, made.main_version) == (3, 3)
    made.publish(_policy(2), x[:64], x[64:], topics.CANARY_CHANNEL).result()
    made.close()
    sent = [message.manifest for message in wire.sent if isinstance(message, messages.Policy)]
    assert len(sent) == len(wire.sent), "no patch has a base on the other channel"
    assert [(one.version, one.channel) for one in sent] == [(1, "main"), (2, "canary"), (3, "main"), (4, "canary")]
    assert sent[2].sha256 == sent[0].sha256 != sent[1].sha256
    for message in wire.sent:
        assert isinstance(message, messages.Policy)
        assert held.add(message, b"", None), "each is the newest to whoever follows"
    assert [order.version for order, _ in known] == [1, 2, 3, 4], "the audit knows what canaries act on"
    assert known[1][1] == candidate.model
