"""Makes the models of the actor's tests and benchmarks: MLPs of two layers that keep CartPole up.

    python -m tests.edge_actor.policies.models.make WIDTH int8|float32 [HEAD] FILE

The hidden layers are random; the last one is fitted by least squares to push where the pole falls. So the models are
like trained ones, in that their episodes are long, and take no training. Needs TensorFlow; its output is committed:
cartpole-int8.tflite and cartpole-float32.tflite have width 16.

A head that samples actions of Pendulum gets a new network of the learner's, since any will do: its episodes have one
length.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from broker.contract import specs
from learner.networks import layers, networks, policy_value, soft_actor_critic
from learner.quantize.tflite import convert

PENDULUM = specs.EnvSpec(
    specs.ObservationSpec((3,)), specs.ActionSpec("continuous", shape=(1,), low=(-2.0,), high=(2.0,))
)


def swinging(width: int, precision: str, head: str) -> bytes:
    """Returns a .tflite that maps Pendulum's observation [1, 3] to a distribution [1, 2]."""
    rng, hidden = np.random.default_rng(0), (width, width)
    identity = networks.Normalizer.identity(PENDULUM.observation)
    if head == "gaussian":
        network = policy_value.PolicyValue.build(PENDULUM, hidden, (1,), 0.6, rng)
        policy = network.policy_layers(list(network.initial().values()), identity)
    else:
        soft = soft_actor_critic.SoftActorCritic.build(PENDULUM, hidden, (1,), 1, rng)
        policy = soft.policy_layers(list(soft.initial_actor().values()), identity)
    observations = rng.uniform(-1, 1, (2048, 3)).astype(np.float32) * np.array([1, 1, 8], np.float32)
    return convert.convert(policy, observations, precision)


def balancing(width: int, precision: str, steepness: float = 1.0) -> bytes:
    """Returns a .tflite that maps CartPole's observation [1, 4] to two values [1, 2], or to steeper logits."""
    rng = np.random.default_rng(0)
    scale = np.array([0.8, 1.0, 0.1, 1.0], np.float32)  # of position, speed, angle, its speed
    observations = rng.normal(size=(2048, 4)).astype(np.float32) * scale
    hidden, policy = observations, []
    for inputs in (4, width):
        kernel = rng.normal(0.0, inputs**-0.5, (inputs, width)).astype(np.float32)
        if inputs == 4:
            kernel /= scale[:, None]
        bias = rng.normal(0.0, 0.3, width).astype(np.float32)
        policy.append(layers.Dense(kernel.T, bias, "relu"))
        hidden = np.maximum(hidden @ kernel + bias, 0.0)
    push = np.clip(observations @ np.array([0.1, 0.3, 4.0, 1.0], np.float32), -1.0, 1.0)
    push *= steepness
    fitted = np.linalg.lstsq(np.c_[hidden, np.ones(len(hidden))], push, rcond=1e-3)[0].astype(np.float32)
    last = np.stack([-fitted, fitted], axis=1)
    return convert.convert((*policy, layers.Dense(last[:-1].T, last[-1], "none")), observations, precision)


if __name__ == "__main__":
    _, units, kind, *heads, file = sys.argv
    if heads in ([], ["q_values"]):
        made = balancing(int(units), kind)
    elif heads == ["categorical"]:
        made = balancing(int(units), kind, steepness=5.0)
    else:
        made = swinging(int(units), kind, heads[0])
    Path(file).write_bytes(made)
