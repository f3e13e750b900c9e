"""PPO and A2C: one phase by hand, whose log-probabilities count, repeatability, and tasks that they must solve."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors, messages, specs
from edge_actor.policies import policy
from learner import config
from learner.algorithms import a2c, dqn, on_policy, ppo
from learner.experience.buffers import rollouts
from learner.networks import layers
from learner.quantize import compare, fp32, ptq
from learner.quantize.tflite import interpreter, quantizer
from tests.fakes import fleet_examples
from tests.learner import reference

DISCRETE = specs.EnvSpec(specs.ObservationSpec((2,)), specs.ActionSpec("discrete", n=3))
CONTINUOUS = specs.EnvSpec(
    specs.ObservationSpec((2,)), specs.ActionSpec("continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 1.0))
)
SEVERAL = specs.EnvSpec(
    specs.ObservationSpec((2,)), specs.ActionSpec("multi_discrete", shape=(2,), low=(0.0, 0.0), high=(2.0, 1.0))
)
SMALL: dict[str, Any] = {"hidden": (16,), "value_hidden": (16,), "rollout_steps": 64, "batch_size": 32}
NEWEST = messages.Order(1, 1)
SPECS = {"discrete": DISCRETE, "continuous": CONTINUOUS, "several": SEVERAL}


def make(kind: str, spec: specs.EnvSpec, seed: int = 0, **changes: Any) -> on_policy.OnPolicy:
    if kind == "ppo":
        return ppo.Ppo(spec, config.PpoConfig(**({**SMALL, "epochs": 2} | changes)), seed)
    return a2c.A2c(spec, config.A2cConfig(**(SMALL | changes)), seed)


def phase(
    spec: specs.EnvSpec, observation: Any, action: Any, reward: Any, log_prob: Any, *, batch: int = 32, epochs: int = 1
) -> rollouts.Phase:
    """N episodes of one step each."""
    n, memory = len(reward), rollouts.Rollouts(1, 10_000, 0.9, 0)
    both = np.repeat(np.asarray(observation, np.float32), 2, axis=0)
    dtype = spec.action.dtype
    memory.insert(
        fleet_examples.experience(
            (1,) * n,
            observation=both,
            action=np.asarray(action, dtype),
            reward=np.asarray(reward, np.float32),
            log_prob=np.asarray(log_prob, np.float32),
        )
    )
    return memory.draw(n, epochs, batch, NEWEST, np.random.default_rng(0))


def random_actions(spec: specs.EnvSpec, rng: np.random.Generator) -> NDArray[Any]:
    """Returns 64 of them."""
    if spec.action.kind == "continuous":
        return rng.normal(size=(64, 2))
    return rng.integers(0, np.array(spec.action.choices or spec.action.n), (64, *spec.action.shape))


def random_phase(spec: specs.EnvSpec, seed: int, epochs: int = 1) -> rollouts.Phase:
    rng = np.random.default_rng(seed)
    action = random_actions(spec, rng)
    found = phase(spec, rng.normal(size=(64, 2)), action, rng.normal(size=64), np.full(64, -1.0), epochs=epochs)
    return dataclasses.replace(found, discount=np.full(64, 0.9, np.float32))


def phase_of_sequences(spec: specs.EnvSpec, seed: int) -> rollouts.Phase:
    """Three sequences of 30, 20 and 14 steps, of which the second terminates; all steps are one minibatch."""
    rng, memory = np.random.default_rng(seed), rollouts.Rollouts(1, 10_000, 0.9, 0)
    memory.insert(
        fleet_examples.experience(
            (30, 20, 14),
            observation=rng.normal(size=(67, 2)).astype(np.float32),
            action=random_actions(spec, rng).astype(spec.action.dtype),
            reward=rng.normal(size=64).astype(np.float32),
            terminated=np.array([0, 1, 0], np.uint8),
            log_prob=np.full(64, -1.0, np.float32),
        )
    )
    return memory.draw(64, 1, 64, NEWEST, rng)


def log_probs(outputs: NDArray[Any], action: NDArray[Any]) -> NDArray[np.float64]:
    """Returns log-probabilities of actions [N, ...] by a head's outputs, in numpy."""
    y = outputs.astype(np.float64)
    if action.dtype.kind == "i" and action.ndim == 2:  # of SEVERAL
        return log_probs(y[:, :3], action[:, 0]) + log_probs(y[:, 3:], action[:, 1])
    if action.ndim == 1:
        normalized = y - np.log(np.exp(y).sum(1, keepdims=True))
        chosen: NDArray[np.float64] = np.take_along_axis(normalized, action[:, None].astype(int), axis=1)[:, 0]
        return chosen
    mean, log_std = np.split(y, 2, axis=1)
    z = (action - mean) / np.exp(log_std)
    density: NDArray[np.float64] = (-0.5 * z * z - log_std - 0.5 * np.log(2 * np.pi)).sum(1)
    return density


def int8(agent: on_policy.OnPolicy, spec: specs.EnvSpec, seen: NDArray[np.float32]) -> bytes:
    exact = agent.policy_layers()
    calibration = ptq.Calibrator(ptq.STEPS_BY_HEAD[agent.head]).calibrate(exact, seen)
    return quantizer.Quantizer().quantize(calibration.centred(exact), calibration.params, seen)


class Acting:
    """What an actor's int8 policy does and says, on the actor's own code, as the learner gets it."""

    def __init__(self, agent: on_policy.OnPolicy, spec: specs.EnvSpec, n: int = 64) -> None:
        rng = np.random.default_rng(3)
        self.seen = rng.normal(size=(n, 2)).astype(np.float32)
        self.model = int8(agent, spec, self.seen)
        acting = policy.Policy(self.model, agent.head, spec, 1)
        draw = rng.gumbel if agent.head == "categorical" else rng.normal
        noise = draw(size=(n, 1, spec.action.size))
        samples = acting.sampler(noise.astype(np.float32))
        self.action = np.array([samples.act(row[None]) for row in self.seen])
        self.log_prob = samples.log_probs(self.action[:, None])[:, 0]


def steep(agent: on_policy.OnPolicy, kind: str) -> None:
    """Gives it outputs whose rounding is seen."""
    state = agent.state()
    last = sorted(name for name in state if name.startswith("weights/policy/") and name.endswith("kernel"))[-1]
    state[last] = np.random.default_rng(1).normal(0, 1.0 if kind == "continuous" else 2.0, state[last].shape)
    state[last] = state[last].astype(np.float32)
    agent.restore(state)


def importance(agent: on_policy.OnPolicy, taken: rollouts.Phase) -> NDArray[np.float32]:
    """The log importance weights that an update works with."""
    seen: list[Any] = []
    advantages = agent._advantages

    def spy(steps: Any, v_tm1: Any, v_t: Any, log_rho: Any) -> Any:
        seen.append(log_rho.numpy())
        return advantages(steps, v_tm1, v_t, log_rho)

    agent._advantages = spy  # type: ignore[method-assign]
    agent._update_normalizer = lambda observations: None  # type: ignore[method-assign]  # pi as it was when int8 was made of it
    agent._estimates(*map(tf.convert_to_tensor, on_policy.Packed.of(taken)))  # what is compiled, line by line
    found: NDArray[np.float32] = seen[0]
    return found


@pytest.mark.parametrize(("kind", "what"), [("ppo", "discrete"), ("a2c", "continuous"), ("ppo", "several")])
def test_log_mu_is_what_int8_said_on_the_actor(kind: str, what: str) -> None:
    spec, agent = SPECS[what], make(kind, SPECS[what])
    steep(agent, what)
    acting = Acting(agent, spec)
    exact = reference.outputs(agent.policy_layers(), acting.seen)
    quantized, _, _ = interpreter.run(acting.model, acting.seen)
    log_pi, log_mu = log_probs(exact, acting.action), log_probs(quantized, acting.action)

    def is_corrected(log_prob: NDArray[Any]) -> bool:
        taken = phase(spec, acting.seen, acting.action, np.ones(64), log_prob)
        order = np.argsort(taken.ids)
        return bool(np.allclose(importance(agent, taken)[order], log_pi - log_mu, atol=1e-4))

    assert np.abs(log_pi - log_mu).max() > 0.01, "rounding is seen"
    assert is_corrected(acting.log_prob)
    assert not is_corrected(log_pi), "fp32's log-probabilities in the place of int8's are caught"


def test_weighted_by_int8_probabilities_all_choices_add_up_to_fp32_expectation() -> None:
    """Sum over a of mu(a) pi(a) / mu(a) f(a) = sum over a of pi(a) f(a): holds with log mu alone."""
    agent = make("a2c", DISCRETE)
    steep(agent, "discrete")
    acting = Acting(agent, DISCRETE, n=64)
    quantized, _, _ = interpreter.run(acting.model, acting.seen[:16])
    exact = reference.outputs(agent.policy_layers(), acting.seen[:16])
    rows, choices = np.repeat(np.arange(16), 3), np.tile(np.arange(3), 16)
    log_mu, log_pi = log_probs(quantized[rows], choices), log_probs(exact[rows], choices)
    f = np.tile([1.0, -2.0, 5.0], 16)

    def estimate(log_prob: NDArray[Any]) -> NDArray[np.float64]:
        taken = phase(DISCRETE, acting.seen[rows], choices, f, log_prob, batch=16)
        log_rho = importance(agent, taken)[np.argsort(taken.ids)].astype(np.float64)
        weighted: NDArray[np.float64] = (np.exp(log_mu + log_rho) * f).reshape(16, 3).sum(1)
        return weighted

    expected = (np.exp(log_pi) * f).reshape(16, 3).sum(1)
    assert estimate(log_mu) == pytest.approx(expected, abs=1e-3)
    assert estimate(log_pi) != pytest.approx(expected, abs=1e-3)


def test_the_exported_gaussian_has_its_deviation_to_the_bit_and_its_mean_in_the_environments_units() -> None:
    agent = make("ppo", CONTINUOUS, initial_std=0.5)
    acting = Acting(agent, CONTINUOUS)
    quantized, _, _ = interpreter.run(acting.model, acting.seen)
    log_std = np.log(np.float32(0.5) * np.array([2.0, 0.5], np.float32))
    assert np.ptp(quantized[:, 2:], axis=0).tolist() == [0.0, 0.0]
    assert quantized[0, 2:] == pytest.approx(log_std, abs=1e-7)
    assert quantized[:, :2].mean(0) == pytest.approx([0.0, 0.5], abs=0.05)
    assert np.abs(acting.action).max() > 2.0, "unclipped"


def test_a_quantizer_writes_each_policys_deviations() -> None:
    made, model = quantizer.Quantizer(), []
    for std in (0.5, 0.25):
        exact = make("ppo", CONTINUOUS, initial_std=std).policy_layers()
        seen = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
        calibration = ptq.Calibrator(ptq.STEPS_BY_HEAD["gaussian"]).calibrate(exact, seen)
        model.append(made.quantize(exact, calibration.params, seen))
        assert interpreter.run(model[-1], seen)[0][0, 2] == pytest.approx(np.log(2 * std), abs=1e-6)
        assert interpreter.run(made.convert(exact, seen, "float32"), seen)[0][0, 2] == pytest.approx(np.log(2 * std))
    assert made.fallbacks == 0, "by template: a deviation is a number of the policy like any other"


@pytest.mark.parametrize(("kind", "what"), [("ppo", "continuous"), ("a2c", "discrete")])
def test_same_seed_same_bits_and_a_restored_learner_goes_on_bit_for_bit(kind: str, what: str) -> None:
    spec = SPECS[what]
    one, same, other = (make(kind, spec, seed) for seed in (7, 7, 8))
    for agent in (one, same):
        for i in range(2):
            agent.update(random_phase(spec, i))
    saved = one.state()
    assert all((saved[name] == same.state()[name]).all() for name in saved)
    one.update(random_phase(spec, 9))
    assert any((saved[name] != one.state()[name]).any() for name in saved)
    for agent in (one, other):
        agent.restore(saved)
        agent.update(random_phase(spec, 3))
    assert all((one.state()[name] == other.state()[name]).all() for name in saved)


def test_the_normalizer_takes_in_each_phase_and_is_folded_into_the_policy() -> None:
    agent = make("ppo", DISCRETE, normalizer_floor=1e-3)
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, (50, 2)), rng.normal(-1, 1, (30, 2)), rng.normal(0, 5, (70, 2))]
    for part in parts:
        agent.normalize(part)
    every = np.concatenate(parts)
    assert agent.normalizer.gain == pytest.approx(1 / every.std(0), rel=1e-5)
    assert agent.normalizer.offset == pytest.approx(-every.mean(0) / every.std(0), rel=1e-4)
    x = every.astype(np.float32)
    scaled = x * agent.normalizer.gain + agent.normalizer.offset
    bare = [a for name, a in agent.state().items() if name.startswith("weights/policy/")]
    inside = reference.outputs(layers.with_arrays(agent._network.policy, bare), scaled)
    exported = reference.outputs(agent.policy_layers(), x)
    assert compare.categorical_divergence(inside, exported).max() < 1e-8


def test_values_stay_what_they_were_when_their_unit_changes() -> None:
    agent = make("ppo", DISCRETE)
    state = agent.state()
    last = sorted(name for name in state if name.startswith("weights/value_tanh/") and name.endswith("kernel"))[-1]
    state[last] = np.ones_like(state[last])
    agent.restore(state)
    taken = random_phase(DISCRETE, 0)

    def values() -> NDArray[np.float32]:
        _, value = agent._network.split([w.variable for w in agent._groups["weights"]])
        outputs = agent._network.values(value, agent._normalized(taken.observation))
        found: NDArray[np.float32] = (outputs * agent._value_scale).numpy()
        return found

    before = values()
    assert float(agent._rescale_values(np.array([30.0, 40.0], np.float32))) == pytest.approx(np.sqrt(1250.0))
    assert values() == pytest.approx(before, rel=1e-5)
    assert float(agent._rescale_values(np.zeros(2, np.float32))) == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("max_kl", "apart", "pulls_back"), [(0.05, 0.5, True), (0.05, -0.5, True), (0.05, 0.2, False), (0.0, 0.5, False)]
)
def test_a_policy_too_far_from_the_one_that_acted_is_pulled_back(max_kl: float, apart: float, pulls_back: bool) -> None:
    agent, log_mu = make("ppo", DISCRETE, max_kl=max_kl), tf.constant([-1.0, -2.0, -0.5])
    batch = on_policy.Minibatch(*[tf.zeros(3)] * 6)._replace(log_mu=log_mu, advantage=tf.constant([1.0, -1.0, 0.5]))
    policy_of_now = tf.Variable(log_mu + apart)
    with tf.GradientTape() as tape:
        loss, _ = agent._policy_loss(policy_of_now, batch)
    slope = tape.gradient(loss, policy_of_now).numpy()
    ratio = np.exp(apart)
    if pulls_back:
        assert loss.numpy() == pytest.approx(ratio - 1 - apart, abs=1e-6)
        assert slope == pytest.approx(ratio - 1, abs=1e-6), "a step down the slope brings it nearer"
    else:
        assert loss.numpy() == pytest.approx(
            -np.minimum(ratio, 1.2) * np.maximum(batch.advantage, 0) - ratio * np.minimum(batch.advantage, 0), abs=1e-6
        )


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_layers_are_of_the_functions_they_should_be_and_no_weights_of_others_are_resumed(activation: str) -> None:
    agent = make("ppo", DISCRETE, activation=activation)
    state = agent.state()
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)

    def answers(network: str, activated: Callable[[Any], Any]) -> NDArray[np.float32]:
        kernels, biases = (
            [state[name] for name in sorted(state) if name.startswith(f"weights/{network}/") and name.endswith(kind)]
            for kind in ("kernel", "bias")
        )
        features = x
        for kernel, bias in zip(kernels[:-1], biases[:-1], strict=True):
            features = activated(features @ kernel.T + bias)
        return np.asarray(features @ kernels[-1].T + biases[-1])

    _, value = agent._network.split([w.variable for w in agent._groups["weights"]])
    assert agent._network.values(value, x).numpy() == pytest.approx(answers("value_tanh", np.tanh)[:, 0], abs=1e-6)
    logits = answers("policy", lambda y: np.maximum(y, 0)) if activation == "relu" else answers("policy_tanh", np.tanh)
    expected = logits - logits.mean(axis=1, keepdims=True)
    assert fp32.outputs(agent.policy_layers(), x) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(errors.RunError, match="another network"):
        agent.restore({name.replace("value_tanh", "value"): array for name, array in state.items()})
    with pytest.raises(errors.RunError, match="another network"):
        make("ppo", DISCRETE, activation="tanh" if activation == "relu" else "relu").restore(state)


@pytest.mark.parametrize("what", SPECS)
def test_a_phase_of_one_step_does_in_one_compiled_call_what_it_does_piece_by_piece(what: str) -> None:
    spec, agents = SPECS[what], [make("a2c", SPECS[what], batch_size=64) for _ in range(2)]
    taken = [phase_of_sequences(spec, seed) for seed in range(3)]
    assert {len(one.minibatches) for one in taken} == {1}
    at_once = [agents[0].update(one) for one in taken]
    for one, whole in zip(taken, at_once, strict=True):
        packed = [tf.convert_to_tensor(array) for array in on_policy.Packed.of(one)]
        steps = on_policy.Steps.of(spec.action, *packed)
        found = [array.numpy() for array in agents[1]._estimates(*packed)]
        apart = agents[1]._take_steps(
            *(np.asarray(a)[None] for a in (steps.observation, steps.action, steps.log_mu, *found))
        )
        assert whole.metrics == pytest.approx(apart.metrics, rel=1e-3, abs=1e-5)
        assert whole.td_error == pytest.approx(apart.td_error, abs=1e-4)
    first, second = (agent.state() for agent in agents)
    assert all(first[name] == pytest.approx(second[name], rel=1e-3, abs=1e-4) for name in first)
    assert first["updates"] == 3


def test_each_step_comes_to_the_next_one_or_to_what_is_behind_its_sequence() -> None:
    taken = phase_of_sequences(DISCRETE, 0)
    steps = on_policy.Steps.of(DISCRETE.action, *on_policy.Packed.of(taken))
    both = np.concatenate([steps.observation, steps.bootstrap])
    assert (both[steps.following] == taken.observation[taken.at + 1]).all()
    assert len(steps.bootstrap) == 8, "an eighth, though there are but three ends: compiled once for most phases"
    ends = on_policy.Steps.of(DISCRETE.action, *on_policy.Packed.of(random_phase(DISCRETE, 0))).bootstrap
    assert len(ends) == 64, "each step ends a sequence"


def test_policy_and_value_steps_decay_to_a_tenth() -> None:
    moved = []
    for decay in (0, 1):
        agent = make("a2c", DISCRETE, decay_updates=decay, batch_size=64)
        before = agent.state()
        agent.update(random_phase(DISCRETE, 0))
        after = agent.state()
        moved.append([np.abs(after[name] - before[name]).max() for name in before if name.startswith("weights/policy")])
    assert np.array(moved[1]) == pytest.approx(0.1 * np.array(moved[0]), rel=0.05)


@pytest.mark.parametrize(
    ("kind", "what"), [("ppo", "discrete"), ("ppo", "continuous"), ("a2c", "discrete"), ("a2c", "several")]
)
def test_learns_what_is_best_from_what_its_int8_policy_did(kind: str, what: str) -> None:
    """A bandit: the best choice follows from the sign of a feature; so does the best action."""
    spec, rng = SPECS[what], np.random.default_rng(0)
    agent = make(kind, spec, learning_rate=0.01, rollout_steps=256, batch_size=64)
    made, calibrator = quantizer.Quantizer(), ptq.Calibrator(ptq.STEPS_BY_HEAD[agent.head])
    gained = []
    for _ in range(25):
        x = rng.normal(size=(256, 2)).astype(np.float32)
        exact = agent.policy_layers()
        model = made.quantize(exact, calibrator.calibrate(exact, x).params, x)
        outputs, _, _ = interpreter.run(model, x)
        best = (x[:, 0] > 0).astype(int)
        if what == "discrete":
            action: NDArray[Any] = (outputs + rng.gumbel(size=outputs.shape)).argmax(1)
            reward = (action == best).astype(float)
        elif what == "several":
            sampled = outputs + rng.gumbel(size=outputs.shape)
            action = np.stack([sampled[:, :3].argmax(1), sampled[:, 3:].argmax(1)], axis=1)
            reward = 0.5 * ((action[:, 0] == 2 * best).astype(float) + (action[:, 1] == best))
        else:
            mean, log_std = np.split(outputs, 2, axis=1)
            action = (mean + np.exp(log_std) * rng.normal(size=mean.shape)).astype(np.float32)
            reward = -np.square(action[:, 0] - (2.0 * best - 1.0))
        gained.append(float(reward.mean()))
        agent.update(phase(spec, x, action, reward, log_probs(outputs, action), batch=64, epochs=2))
    if what == "several":
        assert gained[0] < 0.55
        assert gained[-1] > 0.85
    elif what == "discrete":
        assert gained[0] < 0.5
        assert gained[-1] > 0.85
    else:
        assert gained[0] < -1.5
        assert gained[-1] > -0.75


def test_divergence_of_several_choices_is_the_sum_of_theirs() -> None:
    rng = np.random.default_rng(0)
    exact, other = rng.normal(size=(50, 5)), rng.normal(size=(50, 5))
    found = compare.distributions(exact, other, SEVERAL.action)
    both = (exact[:, :3], other[:, :3]), (exact[:, 3:], other[:, 3:])
    apart = sum(compare.categorical_divergence(*pair) for pair in both)
    assert found.kl_mean == pytest.approx(float(np.mean(apart)))
    assert found.kl_p99 == pytest.approx(float(np.percentile(apart, 99)))
    alike = [(p.argmax(1) == q.argmax(1)) for p, q in both]
    assert found.agreement == pytest.approx(float((alike[0] & alike[1]).mean()))


def test_the_outputs_of_each_choice_are_centred_by_themselves() -> None:
    agent = make("a2c", SEVERAL)
    steep(agent, "several")
    outputs = reference.outputs(agent.policy_layers(), np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32))
    assert outputs[:, :3].mean(1) == pytest.approx(np.zeros(9), abs=1e-5)
    assert outputs[:, 3:].mean(1) == pytest.approx(np.zeros(9), abs=1e-5)


def test_what_learns_action_values_refuses_several_choices_by_name() -> None:
    with pytest.raises(errors.SpecError, match="takes multi_discrete ones") as caught:
        dqn.Dqn.check(SEVERAL)
    assert "ppo or a2c" in caught.value.todo
