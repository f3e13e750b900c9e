"""Experience by the actor's own code: real policies, environments and exploration; and fp32 layers turned to int8."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import codec, frames, messages, specs
from edge_actor.acting import exploration, rollout
from edge_actor.environment import env
from edge_actor.experience import trajectory
from edge_actor.policies import policy as policies
from learner.audit import recompute
from learner.experience import validate
from learner.networks import layers
from learner.quantize.tflite import convert
from tests.fakes import fake_learner

OUTPUTS = {"gaussian": 2, "squashed_gaussian": 2}


def model(spec: specs.EnvSpec, head: str = "q_values", seed: int = 0, precision: str = "int8") -> bytes:
    """Returns a policy of random weights, by the learner's own quantizer."""
    rng = np.random.default_rng(seed)
    size = spec.observation.size
    x = rng.uniform(-2, 2, (256, *spec.observation.shape)).astype(np.float32)
    if spec.observation.dtype == "uint8":
        x = rng.integers(0, 256, x.shape).astype(np.uint8)
    outputs = spec.action.size * OUTPUTS.get(head, 1)
    scale = 1.0 / 255 if spec.observation.dtype == "uint8" else 1.0
    made: list[Any] = [layers.Flatten()] if len(spec.observation.shape) > 1 else []
    for inputs, width, last in ((size, 32, False), (32, outputs, True)):
        unit = (scale if inputs == size else 1.0) / inputs**0.5
        kernel = (unit * rng.standard_normal((width, inputs))).astype(np.float32)
        activation = "relu" if not last else ("tanh" if head == "deterministic" else "none")
        made.append(layers.Dense(kernel, 0.1 * rng.standard_normal(width).astype(np.float32), activation))  # type: ignore[arg-type]
    if head == "deterministic":
        low, high = np.array(spec.action.low), np.array(spec.action.high)
        made.append(layers.Rescale(*(one.astype(np.float32) for one in ((high - low) / 2, (high + low) / 2))))
    return convert.convert(tuple(made), x, precision)


class Actor:
    """An actor that acts as it is told, or nearly: `lie` is applied to what it chose, after it was done."""

    def __init__(
        self,
        name: str,
        n_envs: int = 1,
        *,
        message_steps: int = 512,
        stack: int = 1,
        record_fraction: float = 1.0,
        arguments: dict[str, Any] | None = None,
        **assigned: Any,
    ) -> None:
        self.environment = env.make(name, n_envs, arguments, frame_stack=stack)
        self.spec = self.environment.spec
        self.n_envs = n_envs
        self.record = trajectory.Trajectory(self.spec, n_envs, message_steps)
        self.record.configure(message_steps, record_fraction)
        self.steps = self.seq = 0
        explorer = exploration.Explorer(self.spec.action, n_envs, 0, lambda: self.steps + self.record.recorded)
        self.assignment = fake_learner.assignment(1, **assigned)
        explorer.assign(self.assignment)
        self.explorer = explorer
        self.record.start(self.environment.reset(seed=1 + self.assignment.seed)[0])

    def policy(self, made: bytes, head: str, **changes: Any) -> policies.Policy:
        return policies.Policy(made, head, self.spec, self.n_envs, **changes)

    def act(self, acting: policies.Policy, version: int = 1, rows: int = 0, part: int = 64) -> messages.Experience:
        """Returns the next message, as the learner has it when it was checked."""
        goal = rows or self.record.free
        while self.record.used < min(goal, self.record.capacity):
            rollout.burst(self.environment, acting, self.explorer, self.record, min(part, goal - self.record.used))
        cut = self.record.flush()
        self.seq += 1
        packed = frames.pack(cut.observation) if cut.observation.dtype == np.uint8 else cut.observation
        whole = {n: getattr(cut, n) for n in cut.__slots__ if n not in ("finished", "observation")}
        made = messages.Experience(
            boot=1, seq=self.seq, oldest=1, step=self.steps, fingerprint=self.spec.fingerprint,
            assigned_epoch=1, epoch=1, version=version, observation=packed, **whole,
        )  # fmt: skip
        self.steps += cut.steps
        sent = codec.decode(messages.Experience, codec.encode(made))
        return validate.checked(sent, self.spec, acting.head)

    def acting(self, kernels: str = "XNNPACK") -> recompute.Acting:
        return recompute.Acting(self.assignment, self.n_envs, kernels)


def audited(
    actor: Actor,
    experience: messages.Experience,
    made: bytes,
    head: str = "q_values",
    kernels: str = "XNNPACK",
    others: tuple[tuple[str, bytes], ...] = (),
    chosen: NDArray[np.int64] | None = None,
    precision: str = "int8",
) -> recompute.Verdict:
    every = np.arange(len(experience.reward)) if chosen is None else chosen
    acting = actor.acting(kernels)
    return recompute.audit(
        *(experience, actor.spec, specs.check_head(head, actor.spec.action), precision, acting, every, made),
        lambda: list(others),
    )
