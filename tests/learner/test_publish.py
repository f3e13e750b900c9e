"""From layers to messages: a large policy's digest and difference are made while the gate still judges it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from broker import messages, specs, topics
from edge_actor import reassembly
from learner import config, layers, networks, publish, run_directory

SPEC = specs.EnvSpec(specs.ObservationSpec((4,)), specs.ActionSpec("discrete", n=3))


class Wire:
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[messages.Message] = []

    def retain(self, topic: str, message: messages.Message) -> int:
        self.sent.append(message)
        return 1

    def tell(self, topic: str, message: messages.Message) -> int:
        return self.retain(topic, message)

    def forget(self, topic: str) -> None:
        pass


@pytest.mark.parametrize("width", [16, 640])
def test_only_what_the_gate_lets_pass_goes_out_and_an_actor_makes_the_same_bytes_of_it(
    width: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    network = networks.QNetwork.build(SPEC, (width, width), False, rng)
    normalizer = networks.Normalizer.identity(SPEC.observation)
    policies = [network.policy_layers(list(network.initial().values()), normalizer)]
    for _ in range(2):
        moved = [a + 0.01 * rng.standard_normal(a.shape, np.float32) for a in layers.arrays(policies[-1]).values()]
        policies.append(layers.with_arrays(policies[-1], moved))
    wire, held = Wire(), reassembly.Reassembly(SPEC)
    lenient = config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0, gate_saturation_max=1.0)
    directory = run_directory.RunDirectory(tmp_path / "run", resume=False)
    publisher = publish.Publisher(wire, topics.Topics("f"), SPEC, "q_values", 1, 0, lenient, directory, pytest.fail)
    x = rng.standard_normal((96, 4), np.float32)
    first, second, third = policies
    reasons = [publisher.publish(policy, x[:64], x[64:]).reason for policy in (first, second, second, third)]
    assert reasons == ["", "", "identical", ""]
    assert [type(message) for message in wire.sent] == [messages.Policy, messages.PolicyDelta, messages.PolicyDelta]
    for message in wire.sent:
        if isinstance(message, messages.Policy):
            held.add_keyframe(message, b"", None)
        elif isinstance(message, messages.PolicyDelta):
            held.add_delta(message, b"", None)
    assert publisher.newest is not None
    assert held.newest is not None
    assert held.newest.model == publisher.newest.model
    assert (len(held.newest.model) > publish.LARGE_BYTES) == (width == 640)
