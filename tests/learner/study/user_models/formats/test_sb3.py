"""Agents of Stable-Baselines3: what is read answers as the agent does, and nothing of a file is executed."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner.quantize import fp32
from learner.study.user_models.formats import sb3, symbolic_pickle, torch_file
from tests.learner.study.user_models import agents

Array = NDArray[Any]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 5)).astype(np.float32)
OBSERVED = agents.box(np.full(5, -1), np.full(5, 1))
ACTED = agents.box([-2, -1, 0], [2, 1, 4])
LOW, HIGH = np.array([-2, -1, 0]), np.array([2, 1, 4])


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def forward(tensors: dict[str, Array], prefix: str, x: Array, activation: Any, numbers: tuple[int, ...]) -> Array:
    for number in numbers:
        x = x @ tensors[f"{prefix}{number}.weight"].T + tensors[f"{prefix}{number}.bias"]
        x = activation(x) if activation else x
    return x


def test_dqn(tmp_path: Path) -> None:
    tensors = agents.mlp(RNG, "q_net.q_net.", [5, 16, 16, 3]) | agents.mlp(RNG, "q_net_target.q_net.", [5, 16, 16, 3])
    policy = sb3.read(agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.discrete(3)))
    hidden = forward(tensors, "q_net.q_net.", X, relu, (0, 2))
    expected = forward(tensors, "q_net.q_net.", hidden, None, (4,))
    assert (policy.kind, policy.shape, policy.head) == ("values", (5,), "q_values")
    np.testing.assert_allclose(fp32.outputs(policy.layers, X), expected, rtol=1e-4, atol=1e-5)


def test_qr_dqn_is_the_mean_of_its_quantiles(tmp_path: Path) -> None:
    tensors = agents.mlp(RNG, "quantile_net.quantile_net.", [5, 16, 7 * 3])
    policy = sb3.read(agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.discrete(3)))
    hidden = forward(tensors, "quantile_net.quantile_net.", X, relu, (0,))
    quantiles = forward(tensors, "quantile_net.quantile_net.", hidden, None, (2,)).reshape(-1, 7, 3)
    np.testing.assert_allclose(fp32.outputs(policy.layers, X), quantiles.mean(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Tanh", "ReLU"])
def test_ppo_is_the_mean_of_its_gaussian_within_the_bounds_and_observations_are_normalised(
    tmp_path: Path, name: str
) -> None:
    tensors = agents.mlp(RNG, "mlp_extractor.policy_net.", [5, 16, 16])
    tensors |= {k.replace("0.", "action_net.", 1): v for k, v in agents.mlp(RNG, "", [16, 3]).items()}
    mean, variance = np.arange(5.0), np.arange(1.0, 6.0)
    statistics = agents.normaliser(tmp_path / "vecnormalize.pkl", mean, variance)
    options = {"activation_fn": agents.Named("torch.nn.modules.activation", name), "log_std_init": -2}
    policy = sb3.read(agents.save(tmp_path / "a.zip", tensors, OBSERVED, ACTED, options), statistics)
    x = (X - mean) / np.sqrt(variance + 1e-8)
    hidden = forward(tensors, "mlp_extractor.policy_net.", x, np.tanh if name == "Tanh" else relu, (0, 2))
    expected = hidden @ tensors["action_net.weight"].T + tensors["action_net.bias"]
    assert policy.clips and policy.head == "deterministic"
    np.testing.assert_array_equal(policy.low, LOW)
    np.testing.assert_allclose(fp32.outputs(policy.layers, X), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_gsde", [False, True])
def test_sac_is_the_tanh_of_its_mean_which_gsde_clips(tmp_path: Path, is_gsde: bool) -> None:
    tensors = agents.mlp(RNG, "actor.latent_pi.", [5, 16, 16])
    last = {k.removeprefix("0."): 8 * v for k, v in agents.mlp(RNG, "", [16, 3]).items()}
    tensors |= {f"actor.mu.{'0.' if is_gsde else ''}{k}": v for k, v in last.items()}
    policy = sb3.read(agents.save(tmp_path / "a.zip", tensors, OBSERVED, ACTED))
    mean = forward(tensors, "actor.latent_pi.", X, relu, (0, 2)) @ last["weight"].T + last["bias"]
    assert np.abs(mean).max() > 2.5
    squashed = np.tanh(np.clip(mean, -2, 2) if is_gsde else mean)
    expected = LOW + (squashed + 1) * (HIGH - LOW) / 2
    np.testing.assert_allclose(fp32.outputs(policy.layers, X), expected, rtol=1e-4, atol=1e-4)


def test_td3(tmp_path: Path) -> None:
    tensors = agents.mlp(RNG, "actor.mu.", [5, 16, 16, 3]) | agents.mlp(RNG, "actor_target.mu.", [5, 16, 16, 3])
    policy = sb3.read(agents.save(tmp_path / "a.zip", tensors, OBSERVED, ACTED))
    hidden = forward(tensors, "actor.mu.", X, relu, (0, 2))
    expected = LOW + (np.tanh(forward(tensors, "actor.mu.", hidden, None, (4,))) + 1) * (HIGH - LOW) / 2
    np.testing.assert_allclose(fp32.outputs(policy.layers, X), expected, rtol=1e-4, atol=1e-4)


def test_frames_are_scaled_and_have_their_channels_last(tmp_path: Path) -> None:
    """NatureCNN, by sums over patches that are written out."""
    rng = np.random.default_rng(1)
    prefix, sizes = "q_net.features_extractor.", {0: (4, 2, 8), 2: (5, 4, 4), 4: (3, 5, 3)}
    tensors: dict[str, Array] = {}
    for number, (out, channels, side) in sizes.items():
        kernel = rng.normal(size=(out, channels, side, side)) / np.sqrt(channels * side * side)
        tensors[f"{prefix}cnn.{number}.weight"] = kernel.astype(np.float32)
        tensors[f"{prefix}cnn.{number}.bias"] = rng.normal(size=out).astype(np.float32) / 10
    tensors |= {f"{prefix}linear.{k}": v for k, v in agents.mlp(rng, "", [3 * 2 * 1, 6]).items()}
    tensors |= agents.mlp(rng, "q_net.q_net.", [6, 3])
    frames = rng.integers(0, 256, (2, 2, 44, 36)).astype(np.uint8)
    policy = sb3.read(agents.save(tmp_path / "a.zip", tensors, agents.images(2, 44, 36), agents.discrete(3)))
    x: Array = frames / 255
    for number, stride in ((0, 4), (2, 2), (4, 1)):
        kernel = tensors[f"{prefix}cnn.{number}.weight"]
        patches = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
        x = relu(np.einsum("nchwij,ocij->nohw", patches, kernel) + tensors[f"{prefix}cnn.{number}.bias"][:, None, None])
    x = relu(x.reshape(2, -1) @ tensors[f"{prefix}linear.0.weight"].T + tensors[f"{prefix}linear.0.bias"])
    expected = forward(tensors, "q_net.q_net.", x, None, (0,))
    assert policy.shape == (44, 36, 2)
    np.testing.assert_allclose(fp32.outputs(policy.layers, np.moveaxis(frames, 1, 3)), expected, rtol=1e-3, atol=1e-4)


def test_a_payload_in_a_pickle_is_never_called(tmp_path: Path) -> None:
    """In the tensors, the spaces, and the statistics: a call of os.system, and of builtins.exec."""
    flag = tmp_path / "ran"
    calls = [
        agents.Call(agents.Named("os", "system"), (f"touch {flag}",)),
        agents.Call(agents.Named("builtins", "exec"), (f"open({str(flag)!r}, 'w')",)),
    ]
    tensors = agents.mlp(RNG, "q_net.q_net.", [5, 3])
    for call in calls:
        data = agents.torch_file(tensors, extra=call)
        path = agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.discrete(3), {"x": call}, policy=data)
        assert sb3.read(path).outputs == 3  # it is data that nobody asked for
        with pytest.raises(errors.PolicyError, match="cannot be read"):
            sb3.read(agents.save(tmp_path / "a.zip", tensors, call, agents.discrete(3)))
        (tmp_path / "vecnormalize.pkl").write_bytes(agents.pickled(call))
        path = agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.discrete(3))
        with pytest.raises(errors.PolicyError, match="no statistics"):
            sb3.read(path, tmp_path / "vecnormalize.pkl")
    assert not flag.exists()
    import os
    import subprocess
    import sys

    loads = "import sys, importlib; importlib.import_module('pick' + 'le').loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", loads], input=agents.pickled(calls[0]), check=True, env=dict(os.environ))
    assert flag.exists()  # as loading it in the usual way would have


def test_archives_that_are_cut_off_or_too_large(tmp_path: Path) -> None:
    tensors = agents.mlp(RNG, "q_net.q_net.", [5, 3])
    path = agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.discrete(3))
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(errors.PolicyError, match="cannot be read") as caught:
            sb3.read(path)
        assert caught.value.todo
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", b"0" * (300 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(errors.PolicyError, match="would unpack to 315 MB, and 268 MB are the limit"):
        sb3.read(path)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = agents.mlp(rng, "q_net.q_net.", [5, 3])
    whole = agents.torch_file(tensors)
    read = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] ^= 1 << int(rng.integers(0, 8))
        try:
            torch_file.read(bytes(data))
            read += 1
        except symbolic_pickle.Unreadable:
            pass
    assert 0 < read < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"q_net.q_net.0.weight": np.full((3, 5), np.nan, np.float32)}, "NaN or infinite"),
        (lambda t: {"lstm_actor.weight": X}, "recurrent"),
        (lambda t: {"something.weight": X}, "of no known kind"),
        (lambda t: t | {"q_net.features_extractor.own.weight": X}, "features extractor is not NatureCNN"),
        (lambda t: t | {"q_net.q_net.0.weight": np.zeros((3, 4), np.float32)}, r"a dense layer of shape \(3, 4\)"),
    ],
)
def test_agents_that_do_not_do(tmp_path: Path, change: Any, message: str) -> None:
    tensors = change(agents.mlp(RNG, "q_net.q_net.", [5, 3]))
    with pytest.raises(errors.PolicyError, match=message):
        sb3.read(agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.discrete(3)))


def test_bounds_that_are_not_finite_are_asked_for(tmp_path: Path) -> None:
    tensors = agents.mlp(RNG, "actor.mu.", [5, 3])
    path = agents.save(tmp_path / "a.zip", tensors, OBSERVED, agents.box(np.full(3, -np.inf), np.full(3, np.inf)))
    with pytest.raises(errors.PolicyError, match="--action-low"):
        sb3.read(path)
    policy = sb3.read(path, low=np.full(3, -1.0), high=np.full(3, 1.0))
    assert np.abs(fp32.outputs(policy.layers, X)).max() <= 1
