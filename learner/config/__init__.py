"""Every setting of a training run, with its meaning: CLI, environment, file and run directory all come from here.

Precedence, weakest first: the defaults below, tasks.toml for the environment and algorithm, --config FILE,
ACTORQ_LEARNER_* environment variables, flags. No TensorFlow here: --help must be quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from broker.contract import errors, messages, specs
from broker.fleet import identity
from broker.program import settings
from broker.program.settings import setting
from learner.config import tasks

ENV_PREFIX = "ACTORQ_LEARNER_"

PRECISIONS = ("int8", "float32", "float16", "dynamic")
"""Precisions of a policy as .tflite; quantize/tflite/convert.py says what each is."""
WEIGHT_BYTES = {"int8": 1, "float32": 4, "float16": 2, "dynamic": 1}
"""Bytes of a weight, by precision."""
MAX_WORKERS = 64
"""The most processes that take in experience."""
NETWORKS = ("auto", "nature", "impala-small", "minatar", "mlp")
"""Convolutions in front of an image's dense layers; networks/convolutions.py says what each is."""
ACTIVATIONS = ("relu", "tanh")
"""Of the hidden layers of policies that sample."""


class Noise(NamedTuple):
    """The noise that actors add to the actions of a deterministic policy; see the settings noise_*."""

    std: float = 0.0
    ladder: float = 1.0
    correlation_steps: float = 0.0


class Epsilon(NamedTuple):
    """The share of random actions over the fleet's steps; see the settings epsilon_*."""

    start: float = 0.0
    end: float = 0.0
    decay_steps: int = 0


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Settings that all algorithms have: the policy network and its learning.

    Attributes:
        actions: The kind of actions that it learns, as in specs.ActionSpec; empty: either.
        without: Settings of TrainConfig that mean nothing to it.
    """

    actions: ClassVar[str] = "discrete"
    without: ClassVar[frozenset[str]] = frozenset()
    hidden: tuple[int, ...] = setting((256, 256), "widths of the policy's hidden layers, after convolutions for images")
    network: str = setting(
        "auto", f"convolutions for images: {', '.join(NETWORKS)}; auto: nature from 36 pixels on, else minatar"
    )
    gamma: float = setting(0.99, "discount per step")
    learning_rate: float = setting(5e-4, "Adam's step size")
    normalizer_floor: float = setting(0.1, "inputs of a smaller standard deviation count as that large when normalised")
    max_grad_norm: float = setting(1000.0, "gradients of a larger global norm are scaled down to it")
    batch_size: int = setting(128, "transitions per gradient step")

    @classmethod
    def learns(cls, actions: str) -> bool:
        """Returns whether it learns such actions; empty: any."""
        return "" in (actions, cls.actions) or actions == cls.actions

    def head(self, action: specs.ActionSpec) -> specs.Head:
        """Returns what the output of its policies means."""
        return "q_values" if action.kind == "discrete" else "deterministic"

    @property
    def capacity(self) -> int:
        """Steps of experience that are kept."""
        raise NotImplementedError

    @property
    def epsilon(self) -> Epsilon:
        """What samples its actions explores by that."""
        return Epsilon()

    @property
    def noise(self) -> Noise:
        """Choices among discrete actions have none."""
        return Noise()


@dataclass(frozen=True, slots=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from replay, and whose actors explore by random actions."""

    n_step: int = setting(3, "rewards summed before bootstrapping")
    updates_per_call: int = setting(
        16, "gradient steps per TensorFlow call, fewer of images; samples are drawn for all at once"
    )
    replay_capacity: int = setting(100_000, "transitions kept; the oldest leave first")
    prioritized: bool = setting(False, "sample in proportion to the TD error instead of uniformly")
    priority_exponent: float = setting(0.6, "how strongly the TD error counts when prioritized: 0 not at all, 1 fully")
    importance_exponent: float = setting(0.4, "how far weights correct for prioritized sampling: 0 not at all, 1 fully")
    epsilon_start: float = setting(1.0, "share of random actions at the start")
    epsilon_end: float = setting(0.05, "share of random actions after the decay")
    epsilon_decay_steps: int = setting(10_000, "environment steps of the whole fleet over which epsilon falls")

    @property
    def capacity(self) -> int:
        return self.replay_capacity

    @property
    def epsilon(self) -> Epsilon:
        return Epsilon(self.epsilon_start, self.epsilon_end, self.epsilon_decay_steps)


@dataclass(frozen=True, slots=True)
class DqnConfig(OffPolicyConfig):
    """Settings of algorithms/dqn.py."""

    dueling: bool = setting(True, "separate streams for state value and advantages; only the latter is published")
    double: bool = setting(True, "choose the bootstrap action by the online network, value it by the target network")
    huber_delta: float = setting(100.0, "TD error beyond which the loss grows linearly; 1 hides episode ends worth 100")
    target_period: int = setting(200, "updates between two copies of the weights into the target network")


@dataclass(frozen=True, slots=True)
class ContinuousConfig(OffPolicyConfig):
    """Settings that algorithms for continuous actions have."""

    actions: ClassVar[str] = "continuous"
    n_step: int = setting(5, "rewards summed before bootstrapping")
    learning_rate: float = setting(3e-4, "Adam's step size")
    max_grad_norm: float = setting(40.0, "gradients of a larger global norm are scaled down to it")
    epsilon_start: float = setting(0.0, "share of random actions at the start")
    epsilon_end: float = setting(0.0, "share of random actions after the decay")
    critic_hidden: tuple[int, ...] = setting((256, 256), "widths of the critic's hidden layers")
    critic_learning_rate: float = setting(1e-3, "Adam's step size for the critic")
    action_cost: float = setting(
        0.0, "cost of the squared inputs of the policy's tanh, in units of return: keeps it off its ends"
    )
    rounding_cost: float = setting(
        0.03, "cost of an action that int8 rounding moves by 1 % of its range, in deviations of the values of states"
    )


@dataclass(frozen=True, slots=True)
class DeterministicConfig(ContinuousConfig):
    """Settings that algorithms have whose policies say one action, to which actors add noise."""

    noise_std: float = setting(0.1, "deviation of the noise on actions, relative to half their range")
    noise_ladder: float = setting(1.0, "noise of the last actor of the fleet relative to the first; geometric between")
    noise_correlation_steps: float = setting(
        0.0, "steps over which noise forgets itself (Ornstein-Uhlenbeck); 0: Gaussian, new at every step"
    )

    @property
    def noise(self) -> Noise:
        return Noise(self.noise_std, self.noise_ladder, self.noise_correlation_steps)


@dataclass(frozen=True, slots=True)
class DdpgConfig(DeterministicConfig):
    """Settings of algorithms/ddpg.py."""

    target_rate: float = setting(0.005, "share of the way that targets go towards the weights with each update")


@dataclass(frozen=True, slots=True)
class D4pgConfig(DeterministicConfig):
    """Settings of algorithms/d4pg.py."""

    target_period: int = setting(100, "updates between two copies of the weights into the target network")
    atoms: int = setting(51, "values on which the critic's distribution lies")
    value_min: float = setting(-150.0, "lowest of them: no discounted return should be lower")
    value_max: float = setting(150.0, "highest of them: no discounted return should be higher")


@dataclass(frozen=True, slots=True)
class SacConfig(ContinuousConfig):
    """Settings of algorithms/sac.py."""

    n_step: int = setting(1, "rewards summed before bootstrapping")
    batch_size: int = setting(256, "transitions per gradient step")
    target_rate: float = setting(0.005, "share of the way that targets go towards the weights with each update")
    temperature: float = setting(1.0, "what a nat of entropy is worth at first, in units of return")
    temperature_learning_rate: float = setting(3e-4, "Adam's step size for the log of the temperature")
    target_entropy: float = setting(-1.0, "nats of entropy that the temperature keeps, per element of the action")
    atoms: int = setting(1, "values on which the critics' distributions lie; 1: they say the mean alone")
    value_min: float = setting(-150.0, "lowest of them: no discounted return, entropy included, should be lower")
    value_max: float = setting(150.0, "highest of them: no discounted return, entropy included, should be higher")

    def head(self, action: specs.ActionSpec) -> specs.Head:
        return "squashed_gaussian"


@dataclass(frozen=True, slots=True)
class OnPolicyConfig(AlgorithmConfig):
    """Settings of algorithms that learn from what their newest policies did, once, and then forget it."""

    actions: ClassVar[str] = ""
    # Each phase has its steps, and a policy follows on it
    without: ClassVar[frozenset[str]] = frozenset({"publish_period_updates", "samples_per_insert"})
    hidden: tuple[int, ...] = setting((64, 64), "widths of the policy's hidden layers, after convolutions for images")
    activation: str = setting(
        "relu", f"of the policy's hidden dense layers: {' or '.join(ACTIVATIONS)}, which takes int8 longer"
    )
    learning_rate: float = setting(3e-4, "Adam's step size")
    max_grad_norm: float = setting(0.5, "gradients of a larger global norm are scaled down to it")
    batch_size: int = setting(64, "steps per gradient step")
    value_hidden: tuple[int, ...] = setting((64, 64), "widths of the value network's hidden layers; it is not exported")
    value_learning_rate: float = setting(1e-3, "Adam's step size for the value network")
    decay_updates: int = setting(0, "gradient steps over which both step sizes fall to a tenth; 0: never")
    rollout_steps: int = setting(2048, "steps of the fleet that a phase of updates learns from; then a policy goes out")
    epochs: int = setting(10, "times that a phase learns from each step")
    trace_decay: float = setting(0.95, "lambda of the advantages: 0 trusts the value network, 1 the rewards")
    advantage_floor: float = setting(
        0.02, "advantages of a smaller deviation, relative to returns, are not scaled up to 1: they may be errors"
    )
    entropy_cost: float = setting(0.0, "how much the policy's entropy is worth")
    max_rollout_lag: int = setting(
        2, "learn from no step whose policy was more than so many versions old by then; such are counted"
    )
    kept_steps: int = setting(20_000, "newest steps that are kept, to find int8 ranges by and to compare policies on")
    initial_std: float = setting(0.6, "first deviation of continuous actions, relative to half their range")

    def head(self, action: specs.ActionSpec) -> specs.Head:
        return "gaussian" if action.kind == "continuous" else "categorical"

    @property
    def capacity(self) -> int:
        return self.kept_steps

    @property
    def updates_per_phase(self) -> int:
        """Gradient steps of one phase."""
        return self.epochs * (self.rollout_steps // self.batch_size)


@dataclass(frozen=True, slots=True)
class PpoConfig(OnPolicyConfig):
    """Settings of algorithms/ppo.py."""

    clip: float = setting(0.2, "how far the ratio of probabilities may leave 1 before it earns nothing more")
    value_clip: float = setting(
        0.2, "how far values may leave those of the phase's start, in deviations of returns; 0: as far as they go"
    )
    max_kl: float = setting(
        0.05, "nats by which the policy may leave the one that acted, before minibatches pull it back; 0: any number"
    )


@dataclass(frozen=True, slots=True)
class A2cConfig(OnPolicyConfig):
    """Settings of algorithms/a2c.py."""

    batch_size: int = setting(256, "steps per gradient step")
    rollout_steps: int = setting(256, "steps of the fleet that a phase of updates learns from; then a policy goes out")
    epochs: int = setting(1, "times that a phase learns from each step")
    trace_decay: float = setting(1.0, "lambda of the advantages: 0 trusts the value network, 1 the rewards")
    learning_rate: float = setting(7e-4, "Adam's step size")
    entropy_cost: float = setting(0.01, "how much the policy's entropy is worth")
    rho_bar: float = setting(1.0, "V-trace: the most that a step's importance weight counts in its error")
    c_bar: float = setting(1.0, "V-trace: the most that it counts in how far later errors reach back")


ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "dqn": DqnConfig,
    "ddpg": DdpgConfig,
    "d4pg": D4pgConfig,
    "sac": SacConfig,
    "ppo": PpoConfig,
    "a2c": A2cConfig,
}
"""Settings by the name of the algorithm."""
AUTO = "auto"
"""A word in the place of an algorithm: whichever learns such actions."""
_BY_ACTIONS = {"discrete": "dqn", "continuous": "d4pg", "multi_discrete": "ppo"}


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Thresholds of quantize/gate.py: what an int8 policy must show beside fp32 before it is published."""

    gate_agreement_min: float = setting(0.9, "least share of the fp32 action gap on which both act alike")
    gate_ties_max: float = setting(0.4, "largest share of observations where the two best int8 actions are equal")
    gate_saturation_max: float = setting(0.05, "largest share of observations tied at the end of the int8 range")
    gate_action_error_max: float = setting(0.02, "largest mean error of a continuous action, relative to its range")
    gate_action_error_p99_max: float = setting(0.1, "largest 99th percentile of it")
    gate_kl_max: float = setting(0.02, "largest mean KL divergence of a sampled policy's int8 from its fp32, nats")
    gate_kl_p99_max: float = setting(0.2, "largest 99th percentile of it")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of training_loop.py: the fleet, the pace, and when to publish, score, save and stop."""

    fleet: str = setting(identity.DEFAULT_FLEET, "name of the fleet; its keys lie in ~/.actorq/fleets/NAME")
    broker: tuple[str, ...] = setting(
        (), "MQTT brokers as host[:port], tried in turn (default: as told to `actorq-broker init`, else 127.0.0.1)"
    )
    env: str = setting("", "task: actors without an environment of their own take it; empty: the first actor's")
    algorithm: str = setting(
        AUTO,
        "learning algorithm: dqn (discrete actions), ddpg, d4pg or sac (continuous ones), ppo or a2c (either); auto: "
        "the tuned one, or one that learns such actions",
    )
    seed: int = setting(0, "seed of weights, replay sampling and the actors' exploration")
    actors: int = setting(1, "actors to wait for before training starts")
    wait_s: float = setting(0.0, "give up when no actor came after so long; 0 waits for ever")
    learning_starts: int = setting(1000, "environment steps (random policy) before the first update")
    learning_starts_s: float = setting(
        60.0,
        "begin with fewer, of two minibatches at least, when gathering them takes longer; 0 (as where learning_starts "
        "alone is named): never",
    )
    samples_per_insert: float = setting(32.0, "times each transition is sampled on average; sets the actors' pace")
    message_steps: int = setting(1024, "most steps in one experience message; in a large fleet up to four times that")
    message_period_s: float = setting(0.25, "longest time an actor gathers steps before it sends them")
    message_budget_per_s: float = setting(
        0.0,
        "messages a second of each kind that all actors may send; 0: what brokers and ingest are measured to take",
    )
    record_fraction: float = setting(1.0, "share of the episodes that actors record, whole and evenly spread")
    max_policy_lag: int = setting(0, "refuse steps chosen by a policy more than so many versions old; 0: none")
    max_experience_age_s: float = setting(
        0.0, "keep steps that come later than so long after they were taken out of replay; 0: none"
    )
    audit_share: float = setting(
        0.01, "share of the messages whose actions are computed again; some of each actor's at least; 0: none"
    )
    publish_period_updates: int = setting(100, "updates between two published policies")
    canary: float = setting(
        0.0,
        "try each new policy on this share of the actors first (one at least, never all), and go by the returns of "
        "their episodes beside the others'; 0: no trials",
    )
    delta: bool = setting(True, "send policies as differences from earlier ones where that is smaller")
    policy_expire_s: float = setting(0.0, "actors take no policy published longer ago, if they know the date; 0: any")
    precision: str = setting("int8", "of published policies: int8, float32, float16 or dynamic (int8 weights only)")
    weight_bits: int = setting(8, "bits to which published weights are rounded, 2 to 8; fewer than 8 are for studies")
    evaluate_episodes: int = setting(20, "greedy episodes by which an actor scores a published policy; 0: never")
    evaluate_steps: int = setting(30_000, "give a score up whose episodes are longer on average")
    evaluate_s: float = setting(
        60.0, "give a score up that takes an actor longer; one that holds a control rate has five times as long"
    )
    evaluate_seed: int = setting(10_000, "seed of the first scored episode; confirmations use seeds of their own")
    solved_return: float = setting(float("inf"), "stop when the published int8 policy's mean return reaches this")
    max_env_steps: int = setting(200_000, "stop after so many environment steps")
    max_wall_s: float = setting(0.0, "stop after so long; 0: no limit")
    checkpoint_period_s: float = setting(30.0, "time between two checkpoints")
    keep_experience: bool = setting(False, "keep all experience in the ledger, not only what replay holds")
    run_dir: str = setting("", "run directory; empty: runs/ENV-ALGORITHM-TIME")
    ingest_workers: int = setting(
        0, "processes on Ray that take in experience, each with a ledger and a replay of its own; 0: the learner does"
    )
    ray: str = setting("", "a Ray cluster for them, host:port, used with its token; empty: one is started here")
    deterministic: bool = setting(False, "lock-step with one actor: the same seed gives the same weights and bytes")
    threads: int = setting(1, "TensorFlow threads per operation; 1 is fastest for small networks")
    learner_devices: tuple[str, ...] = setting(
        (),
        "devices for the updates, as GPU:0 or CPU:0,CPU:1; each of several learns from minibatches of its own, and "
        "after each TensorFlow call they take the mean (default: TensorFlow's choice of one)",
    )
    energy: bool = setting(True, "estimate the learner's energy and CO2 with codecarbon's offline tracker")
    country: str = setting("USA", "ISO code of the country whose carbon intensity codecarbon uses")

    @property
    def replicas(self) -> int:
        """Networks that learn side by side."""
        return max(1, len(self.learner_devices))


class Settings(NamedTuple):
    """All settings of a run."""

    train: TrainConfig
    algorithm: AlgorithmConfig
    gate: GateConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting of a run, whatever its algorithm."""
    settings.add_arguments(parser, *_classes(*ALGORITHMS.values()))


def effective(args: argparse.Namespace, env_id: str, *weakest: settings.Table, actions: str = "") -> Settings:
    """Returns the settings of a run: tuned ones where tasks.toml has some, under whatever the user gave.

    Args:
        args: What `add_arguments` parsed.
        env_id: The environment; empty while it is not known.
        weakest: Tables that are weaker than tasks.toml.
        actions: The kind of actions that it takes (specs.ActionSpec); empty while that is not known.

    Returns:
        Of the algorithm that is named, else of the tuned one, else of the one that learns such actions. As long as none
        of that is known, `algorithm` is AUTO: its settings are then provisional, and none is refused as another's.

    Raises:
        ConfigError: A setting is unknown, of a wrong type, or of another algorithm; or they cannot go together; or the
            algorithm cannot learn such actions.
    """
    every = _classes(*ALGORITHMS.values())
    tables = [*weakest, (f"tasks.toml [{env_id}]", tasks.settings(env_id))]
    values = settings.resolve(every, args, tables=tables, env_prefix=ENV_PREFIX)
    name = values["algorithm"]
    if name == AUTO:
        tuned = [one for one in tasks.algorithms(env_id) if ALGORITHMS[one].learns(actions)]
        name = tuned[0] if tuned else _BY_ACTIONS.get(actions, AUTO)
    elif name not in ALGORITHMS:
        raise errors.ConfigError(
            f"algorithm {name!r} is unknown", where="algorithm", todo=f"use one of {', '.join((AUTO, *ALGORITHMS))}"
        )
    elif not ALGORITHMS[name].learns(actions):
        *able, last = [one for one, cls in ALGORITHMS.items() if cls.learns(actions)]
        raise errors.ConfigError(
            f"{name} learns {ALGORITHMS[name].actions} actions, and {env_id} takes {actions} ones",
            where=f"--algorithm {name}",
            todo=f"leave it out, or name {', '.join(able)} or {last}",
        )
    given = settings.given(args, ENV_PREFIX)
    if "learning_starts" in given and "learning_starts_s" not in given:
        values["learning_starts_s"] = 0.0  # who names the steps means them
    if name == AUTO or (not env_id and not any("algorithm" in table for _, table in weakest)):
        provisional = _classes(ALGORITHMS.get(name, DqnConfig))
        decided = {"learning_starts_s": values["learning_starts_s"]}
        # Of settings that several have, the defaults are those of the class that comes first
        values = settings.resolve((*provisional, *every), args, tables=tables, env_prefix=ENV_PREFIX) | decided
        return check(Settings(*(settings.build(cls, values) for cls in provisional)))
    chosen = _classes(ALGORITHMS[name])
    known = {field.name for cls in chosen for field in dataclasses.fields(cls)}
    flags = {field.name for cls in every for field in dataclasses.fields(cls) if getattr(args, field.name) is not None}
    if foreign := sorted((flags - known) | (flags & ALGORITHMS[name].without)):
        named = ", ".join("--" + field.replace("_", "-") for field in foreign)
        raise errors.ConfigError(f"{name} has no {named}", todo="leave it out, or choose another --algorithm")
    tables[-1] = (f"tasks.toml [{env_id}]", tasks.settings(env_id, name))
    decided = {"algorithm": name, "learning_starts_s": values["learning_starts_s"]}
    values = settings.resolve(chosen, args, tables=tables, env_prefix=ENV_PREFIX) | decided
    return check(Settings(*(settings.build(cls, values) for cls in chosen)))


def _classes(*algorithms: type[AlgorithmConfig]) -> tuple[type[Any], ...]:
    return TrainConfig, *algorithms, GateConfig


def hidden_bytes(chosen: Settings) -> int:
    """Returns the bytes of a policy's weights between its hidden layers."""
    weights = sum(one * other for one, other in pairwise(chosen.algorithm.hidden))
    return weights * WEIGHT_BYTES[chosen.train.precision]


def check(chosen: Settings) -> Settings:
    """Returns the settings if they can go together.

    Raises:
        ConfigError: They cannot; every clash is named.
    """
    train, algorithm = chosen.train, chosen.algorithm
    positive = ("actors", "learning_starts", "samples_per_insert", "message_steps", "publish_period_updates", "threads")
    clashes = [f"{name} must be positive, not {getattr(train, name)}" for name in positive if getattr(train, name) <= 0]
    if not 0.0 <= train.audit_share <= 1.0:
        clashes.append(f"audit_share must be from 0 to 1, not {train.audit_share}")
    clashes += _canary_clashes(chosen)
    if not 0.0 < train.record_fraction <= 1.0:
        clashes.append(f"record_fraction must be above 0 and at most 1, not {train.record_fraction}")
    if train.message_budget_per_s and not 0.1 <= train.message_budget_per_s < math.inf:
        clashes.append(f"message_budget_per_s must be 0 or at least 0.1, not {train.message_budget_per_s}")
    if not 0.0 <= train.policy_expire_s < math.inf:
        clashes.append(f"policy_expire_s must be 0 or positive, not {train.policy_expire_s}")
    if not 0.0 <= train.max_experience_age_s < math.inf:
        clashes.append(f"max_experience_age_s must be 0 or positive, not {train.max_experience_age_s}")
    if train.max_experience_age_s and train.deterministic:
        clashes.append("deterministic runs wait for every step: max_experience_age_s must be 0")
    if train.precision not in PRECISIONS:
        clashes.append(f"precision {train.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
    elif (size := hidden_bytes(chosen)) > messages.MAX_POLICY_BYTES:
        clashes.append(
            f"hidden {algorithm.hidden} makes a {train.precision} policy of {size:,} bytes; actors take "
            f"{messages.MAX_POLICY_BYTES:,}"
        )
    if algorithm.network not in NETWORKS:
        clashes.append(f"network {algorithm.network!r} is unknown; use one of {', '.join(NETWORKS)}")
    if not 2 <= train.weight_bits <= 8:
        clashes.append(f"weight_bits must be 2 to 8, not {train.weight_bits}")
    if train.evaluate_steps <= 0 or not 0.0 < train.evaluate_s < math.inf:
        clashes.append(f"evaluate_steps {train.evaluate_steps} and evaluate_s {train.evaluate_s} must be positive")
    if not 0.0 <= train.learning_starts_s < math.inf:
        clashes.append(f"learning_starts_s must be 0 or positive, not {train.learning_starts_s}")
    if not 0.0 < algorithm.normalizer_floor < math.inf:
        clashes.append(f"normalizer_floor must be positive, not {algorithm.normalizer_floor}")
    if train.max_env_steps < train.learning_starts:
        clashes.append(f"max_env_steps {train.max_env_steps} ends before learning_starts {train.learning_starts}")
    kept = "replay_capacity" if isinstance(algorithm, OffPolicyConfig) else "kept_steps"
    if train.message_steps > algorithm.capacity:
        clashes.append(f"a message of {train.message_steps} steps exceeds {kept} {algorithm.capacity}")
    if train.learning_starts > algorithm.capacity:
        clashes.append(f"learning_starts {train.learning_starts} exceeds {kept} {algorithm.capacity}")
    if train.deterministic and train.actors != 1:
        clashes.append(f"deterministic runs have one actor, not {train.actors}")
    epsilon = algorithm.epsilon
    if not 0.0 <= epsilon.end <= epsilon.start <= 1.0:
        clashes.append(f"epsilon must fall within 0..1, not from {epsilon.start} to {epsilon.end}")
    noise = algorithm.noise
    if not (0.0 <= noise.std <= 1.0 and noise.ladder > 0 and noise.correlation_steps >= 0):
        clashes.append(
            f"noise_std must be 0 to 1, noise_ladder positive and noise_correlation_steps not negative, not {noise}"
        )
    least = 1 if isinstance(algorithm, SacConfig) else 2  # one says the value itself
    if isinstance(algorithm, D4pgConfig | SacConfig) and not (
        algorithm.value_min < algorithm.value_max and algorithm.atoms >= least
    ):
        clashes.append(
            f"{algorithm.atoms} atoms cannot lie between value_min {algorithm.value_min} and value_max "
            f"{algorithm.value_max}"
        )
    if isinstance(algorithm, SacConfig):
        if algorithm.epsilon_start:
            clashes.append(f"sac explores by sampling its actions: epsilon must be 0, not {algorithm.epsilon_start}")
        if not 0.0 < algorithm.temperature < math.inf:
            clashes.append(f"temperature must be positive, not {algorithm.temperature}")
    if isinstance(algorithm, OnPolicyConfig):
        clashes += _on_policy_clashes(train, algorithm)
    clashes += _worker_clashes(train, algorithm)
    clashes += _device_clashes(train, algorithm)
    if clashes:
        raise errors.ConfigError("settings clash: " + "; ".join(clashes), todo="--dump-config prints what is in force")
    return chosen


def _canary_clashes(chosen: Settings) -> list[str]:
    train = chosen.train
    if not train.canary:
        return []
    clashes = []
    if not 0.0 < train.canary < 1.0:
        clashes.append(f"canary must be from 0 to below 1, not {train.canary}")
    if train.deterministic:
        clashes.append("deterministic runs have one actor, and trials need two: canary must be 0")
    elif train.actors < 2:
        clashes.append(f"canary compares actors, so that actors must be 2 at least, not {train.actors}")
    if isinstance(chosen.algorithm, OnPolicyConfig):
        clashes.append(f"{train.algorithm} learns from its newest policy alone, which most actors lack during a trial")
    if train.policy_expire_s:
        clashes.append("a trial may take longer than the incumbent lasts: policy_expire_s must be 0 with canary")
    return clashes


def _worker_clashes(train: TrainConfig, algorithm: AlgorithmConfig) -> list[str]:
    workers = train.ingest_workers
    if not 0 <= workers <= MAX_WORKERS:
        return [f"ingest_workers must be 0 to {MAX_WORKERS}, not {workers}"]
    if not workers:
        return [f"ray {train.ray} is for ingest workers, and ingest_workers is 0"] if train.ray else []
    clashes = []
    if not isinstance(algorithm, OffPolicyConfig):
        clashes.append("ingest_workers are for algorithms that learn from replay: ppo and a2c need steps in order")
    elif algorithm.prioritized:
        clashes.append("shards of replay are sampled uniformly: ingest_workers and prioritized do not go together")
    if train.deterministic:
        clashes.append("deterministic runs are one process: ingest_workers must be 0")
    if train.canary:
        clashes.append("trials of policies follow whole episodes, which workers keep: canary must be 0")
    if train.message_steps > algorithm.capacity // workers:
        clashes.append(
            f"a message of {train.message_steps} steps exceeds the share of one of {workers} ingest_workers, "
            f"{algorithm.capacity // workers} steps"
        )
    return clashes


def _device_clashes(train: TrainConfig, algorithm: AlgorithmConfig) -> list[str]:
    names = train.learner_devices
    clashes = [
        f"learner device {name!r} is none: they are named as CPU:0 or GPU:0"
        for name in names
        if not re.fullmatch(r"(CPU|GPU):\d{1,3}", name, re.ASCII)
    ]
    if len(set(names)) < len(names):
        clashes.append(f"learner_devices {','.join(names)} names one twice")
    if len({name[:3] for name in names}) > 1:
        clashes.append(f"learner_devices {','.join(names)} are not alike, and all would wait for the slowest")
    if len(names) > 1 and not isinstance(algorithm, OffPolicyConfig):
        clashes.append("several learner_devices share what is drawn from replay: ppo and a2c learn on one")
    return clashes


def _on_policy_clashes(train: TrainConfig, algorithm: OnPolicyConfig) -> list[str]:
    positive = ("rollout_steps", "batch_size", "epochs", "initial_std")
    clashes = [f"{n} must be positive, not {getattr(algorithm, n)}" for n in positive if getattr(algorithm, n) <= 0]
    if clashes:
        return clashes
    if algorithm.rollout_steps % algorithm.batch_size:
        clashes.append(f"rollout_steps {algorithm.rollout_steps} is no multiple of batch_size {algorithm.batch_size}")
    if algorithm.kept_steps < (needed := 2 * algorithm.rollout_steps + train.message_steps):
        clashes.append(f"kept_steps {algorithm.kept_steps} is less than two phases and a message take, {needed}")
    if not (0.0 <= algorithm.trace_decay <= 1.0 and 0.0 <= algorithm.gamma <= 1.0):
        clashes.append(f"gamma {algorithm.gamma} and trace_decay {algorithm.trace_decay} must be within 0..1")
    if min(algorithm.max_rollout_lag, algorithm.decay_updates) < 0 or algorithm.entropy_cost < 0:
        clashes.append("max_rollout_lag, decay_updates and entropy_cost must not be negative")
    if algorithm.activation not in ACTIVATIONS:
        clashes.append(f"activation {algorithm.activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    if isinstance(algorithm, PpoConfig) and not (
        algorithm.clip > 0 and min(algorithm.value_clip, algorithm.max_kl) >= 0
    ):
        clashes.append(
            f"clip {algorithm.clip} must be positive, value_clip {algorithm.value_clip} and max_kl {algorithm.max_kl} "
            "not negative"
        )
    if isinstance(algorithm, A2cConfig) and not (algorithm.rho_bar > 0 and algorithm.c_bar > 0):
        clashes.append(f"rho_bar {algorithm.rho_bar} and c_bar {algorithm.c_bar} must be positive")
    return clashes
