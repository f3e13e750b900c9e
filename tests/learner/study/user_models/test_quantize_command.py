"""`actorq-learner quantize`: what passes, what is mended, what is refused, and what it says and writes."""

from __future__ import annotations

import hashlib
import io
import json
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from broker.contract import errors
from learner import __main__ as main
from learner.quantize.tflite import interpreter
from learner.study.user_models.converter import keras_aware, keras_model, operations
from learner.study.user_models.formats import observations as observations_file

Build = Callable[[], Any]


@pytest.fixture
def observations(tmp_path: Path) -> Path:
    return save(tmp_path, np.random.default_rng(0).normal(size=(1024, 8)) * np.logspace(-2, 2, 8))


def save(directory: Path, array: NDArray[Any], name: str = "observations") -> Path:
    path = directory / "observations.npz"
    np.savez(path, **{name: array.astype(np.float32) if array.dtype.kind == "f" else array})  # type: ignore[arg-type]
    return path


def mlp(
    *,
    norm: bool = False,
    activation: str = "relu",
    outputs: int = 3,
    value: float = 0.0,
    width: int = 32,
    seed: int = 0,
) -> Any:
    """Two hidden layers over eight features that differ by a factor of 10 000."""
    keras.utils.set_random_seed(seed)
    entry = keras.Input((8,))
    x = entry
    for k in range(2):
        x = keras.layers.Dense(width, bias_initializer="random_normal", name=f"hidden_{k}")(x)
        if norm:
            gamma = keras.initializers.RandomUniform(0.5, 1.5)
            x = keras.layers.LayerNormalization(gamma_initializer=gamma, beta_initializer="random_normal")(x)
        x = keras.layers.Activation(activation, name=f"{activation}_{k}")(x)
    bias = keras.initializers.Constant(value)
    model = keras.Model(entry, keras.layers.Dense(outputs, bias_initializer=bias)(x))
    first = model.get_layer("hidden_0").kernel
    first.assign(first.numpy() / np.logspace(-2, 2, 8, dtype=np.float32)[:, None])
    return model


def quantize(model: Any, observations: Path, *flags: str) -> tuple[int, Path]:
    """Saves the model and runs the command; its exit code and OUT.tflite."""
    path, output = observations.with_name("model.keras"), observations.with_name("out.tflite")
    model.save(path)
    return main.main(["quantize", str(path), "--calibration", str(observations), "-o", str(output), *flags]), output


def test_a_model_that_int8_holds(observations: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    code, output = quantize(model, observations, "--json")
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    report = json.loads(said.out)
    assert json.loads(output.with_suffix(".json").read_text()) == report
    assert report["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert report["bytes"]["model"] == output.stat().st_size < report["bytes"]["float32"]
    assert report["rows"] == {
        "calibration": 768,
        "judged": 256,
        "split": "blocks",
        "outside": report["rows"]["outside"],
    }
    written = report["candidates"][report["written"]]
    assert written["passed"] and written["agreement"] > 0.95
    assert len(written["relative_max"]) == 3
    assert (report["per_feature_input"], report["levelled"], report["returns"]) == (True, True, None)
    assert report["delegate"] == "XNNPACK"
    names = [operation["name"] for operation in report["operations"]]
    assert names[:3] == ["MUL", "ADD", "QUANTIZE"] and names[-4:] == [*["FULLY_CONNECTED"] * 3, "DEQUANTIZE"]
    assert report["versions"]["keras"] == keras.__version__
    # And it chooses by raw observations as the model does.
    x = np.load(observations)["observations"]
    exact = model.predict(x, verbose=0)
    answer, _, _ = interpreter.run(output.read_bytes(), x)
    assert (answer.argmax(1) == exact.argmax(1)).mean() > 0.95


def test_the_table_is_for_people(observations: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = quantize(mlp(), observations)
    said = capfd.readouterr()
    assert code == errors.EXIT_OK
    assert said.err == ""
    assert "greedy actions alike" in said.out and "XNNPACK kernels of ai-edge-litert" in said.out
    assert max(map(len, said.out.splitlines())) < 200


def test_values_far_from_zero_are_held_by_the_recipe_and_mended_by_aware_elsewhere(
    observations: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = quantize(mlp(value=1000), observations, "--json")
    report = json.loads(capfd.readouterr().out)
    assert code == errors.EXIT_OK
    assert report["candidates"]["recipe"]["agreement"] > 0.95
    code, output = quantize(mlp(value=1000, norm=True), observations, "--force")
    error = capfd.readouterr().err
    assert code == errors.PolicyError.exit_code
    assert "acts otherwise than the original" in error and "--aware" in error
    output.unlink()
    code, output = quantize(mlp(value=1000, norm=True), observations, "--aware", "--steps", "20", "--force", "--json")
    report = json.loads(capfd.readouterr().out)
    assert code == errors.EXIT_OK
    assert (report["written"], report["levelled"]) == ("aware", True)
    assert not report["candidates"]["plain"]["passed"] and report["candidates"]["aware"]["passed"]
    assert report["candidates"]["aware"]["agreement"] > 0.95


def test_what_is_inferior_is_written_only_by_force(observations: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, output = quantize(mlp(value=1000, norm=True), observations, "--force-publish")
    assert code == errors.EXIT_OK
    assert "INFERIOR, and written by --force-publish" in capfd.readouterr().out
    assert not json.loads(output.with_suffix(".json").read_text())["passed"]


def test_layer_normalisation_becomes_integer_and_aware_mends_what_that_costs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Observations whose size varies a hundredfold, and with it by 10^4 the variance that normalisation divides by."""
    rng = np.random.default_rng(0)
    sizes = np.exp(1.2 * rng.normal(size=(2048, 1)))
    wild = save(tmp_path, rng.normal(size=(2048, 8)) * sizes * np.logspace(-2, 2, 8))
    model = mlp(norm=True, width=128, outputs=4, seed=3)
    code, output = quantize(model, wild)
    assert code == errors.PolicyError.exit_code
    assert "disagrees" in capfd.readouterr().err
    code, output = quantize(model, wild, "--aware", "--json")
    report = json.loads(capfd.readouterr().out)
    assert code == errors.EXIT_OK
    assert report["written"] == "aware"
    assert not report["candidates"]["plain"]["passed"] and report["candidates"]["aware"]["passed"]
    assert report["delegate"] == "built-in"  # L2_NORMALIZATION and RSQRT have no XNNPACK kernel
    assert operations.not_integer(operations.list_operations(output.read_bytes())) == []


def test_rewritten_layer_normalisation_is_the_same_in_fp32() -> None:
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32) * np.logspace(-2, 2, 8, dtype=np.float32)
    model = mlp(norm=True)
    exact = keras_model.outputs(model, x)
    for form in ("l2", "rsqrt"):
        network = keras_model.prepare(model, x, form=form)
        answer, _, _ = interpreter.run(keras_model.to_tflite(network, network.weights, x, "float32"), x)
        assert answer == pytest.approx(exact, abs=1e-4 * float(np.ptp(exact))), form


def test_distillation_leaves_the_network_it_was_given_as_it_was() -> None:
    x = np.random.default_rng(0).normal(size=(128, 8)).astype(np.float32)
    network = keras_model.prepare(mlp(norm=True, activation="tanh"), x, form="l2")
    before, _, _ = interpreter.run(keras_model.to_tflite(network, network.weights, x, "float32"), x)
    keras_aware.distil(network, x, network.outputs(x), outputs="values", steps=5)
    after, _, _ = interpreter.run(keras_model.to_tflite(network, network.weights, x, "float32"), x)
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("aware", [False, True])
def test_frames_shortcuts_and_fused_layers(tmp_path: Path, capfd: pytest.CaptureFixture[str], aware: bool) -> None:
    layers = keras.layers
    keras.utils.set_random_seed(0)
    entry = keras.Input((12, 12, 2))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(layers.Rescaling(1 / 255)(entry))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    y = layers.Dense(16, activation="tanh")(x)
    z = layers.Concatenate()([layers.Add()([y, layers.Dense(16)(x)]), layers.LayerNormalization()(y)])
    frames = save(tmp_path, np.random.default_rng(0).integers(0, 256, (256, 12, 12, 2)).astype(np.uint8), "frames")
    flags = ["--aware", "--steps", "10"] if aware else []
    code, _ = quantize(keras.Model(entry, layers.Dense(3)(z)), frames, "--json", *flags)
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    report = json.loads(said.out)
    assert (report["per_feature_input"], report["layer_norm"] is None) == (False, False)


def test_continuous_actions_are_judged_by_their_error(observations: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = mlp(outputs=1)
    assert quantize(model, observations)[0] == errors.ConfigError.exit_code
    assert "--outputs actions" in capfd.readouterr().err
    code, _ = quantize(model, observations, "--outputs", "actions", "--json")
    report = json.loads(capfd.readouterr().out)
    assert code == errors.EXIT_OK
    assert 0 < report["candidates"][report["written"]]["relative_mean"][0] < 0.02


@pytest.mark.parametrize("precision", ["float32", "float16", "dynamic"])
def test_other_precisions(observations: Path, capfd: pytest.CaptureFixture[str], precision: str) -> None:
    code, _ = quantize(mlp(activation="elu", norm=True), observations, "--precision", precision, "--json")
    report = json.loads(capfd.readouterr().out)
    assert code == errors.EXIT_OK
    assert report["precision"] == precision
    assert report["candidates"]["plain"]["agreement"] > 0.97


def test_operations_without_an_int8_kernel_are_named(observations: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, output = quantize(mlp(activation="elu"), observations)
    error = capfd.readouterr().err
    assert code == errors.PolicyError.exit_code
    assert "ELU (elu_0" in error and "ELU (elu_1" in error
    assert not output.exists()


def test_operations_that_tflite_lacks_are_named_without_the_converters_dump(
    observations: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = keras.Input((8,))
    half = keras.layers.Rescaling(0.5)(keras.layers.Dense(4, activation="tanh")(entry))
    model = keras.Model(entry, keras.layers.Dense(3)(keras.ops.erfinv(half)))
    code, _ = quantize(model, observations)
    error = capfd.readouterr().err
    assert code == errors.PolicyError.exit_code
    assert "TFLite has no operation for Erfinv" in error
    assert len(error.splitlines()) <= 3


@pytest.mark.parametrize("existing", ["out.tflite", "out.json"])
def test_existing_files_are_kept_unless_forced(
    observations: Path, capfd: pytest.CaptureFixture[str], existing: str
) -> None:
    path = observations.with_name(existing)
    path.write_text("precious")
    code, _ = quantize(mlp(), observations)
    assert code == errors.ConfigError.exit_code
    assert "--force" in capfd.readouterr().err
    assert path.read_text() == "precious"
    assert quantize(mlp(), observations, "--force")[0] == errors.EXIT_OK
    assert path.read_bytes()[:8] != b"precious"


def two_inputs() -> Any:
    entries = [keras.Input((4,)), keras.Input((4,))]
    return keras.Model(entries, keras.layers.Dense(2)(keras.layers.Concatenate()(entries)))


def two_outputs() -> Any:
    entry = keras.Input((8,))
    return keras.Model(entry, [keras.layers.Dense(2)(entry), keras.layers.Dense(1)(entry)])


def diverged() -> Any:
    model = mlp()
    model.get_layer("hidden_1").kernel.assign(np.full((32, 32), np.nan))
    return model


def recurrent() -> Any:
    return keras.Sequential([keras.Input((5, 8)), keras.layers.LSTM(4, name="memory"), keras.layers.Dense(2)])


def anything() -> Any:
    entry = keras.Input((8,))
    return keras.Model(entry, keras.layers.Lambda(lambda x: 2 * x)(entry))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (two_inputs, "2 inputs and 1 outputs"),
        (two_outputs, "1 inputs and 2 outputs"),
        (diverged, "NaN or infinite"),
        (anything, "Keras cannot load the model"),
        (recurrent, "the recurrent layer 'memory' is a loop"),
        (lambda: keras.Sequential([keras.Input((8, 2)), keras.layers.Dense(2)]), r"maps [N, 8, 2] to [N, 8, 2]"),
    ],
    ids=["inputs", "outputs", "nan", "lambda", "recurrent", "rank"],
)
def test_models_that_are_no_policy(
    observations: Path, capfd: pytest.CaptureFixture[str], build: Build, message: str
) -> None:
    code, _ = quantize(build(), observations)
    error = capfd.readouterr().err
    assert code == errors.PolicyError.exit_code
    assert message in error and "to do:" in error


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros((99, 8)), "b": np.zeros((99, 8))}, "2 arrays (a, b)"),
        ({"a": np.zeros((63, 8))}, "64 rows are the least"),
        ({"a": np.zeros(99)}, "shape (99,)"),
        ({"a": np.full((99, 8), np.nan)}, "NaN"),
        ({"a": np.full((99, 8), "x")}, "not numbers"),
        ({"a": np.zeros((99, 7))}, "one observation has the shape (7,), and the model takes (8,)"),
    ],
)
def test_observations_that_do_not_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arrays: dict[str, NDArray[Any]], message: str
) -> None:
    path = tmp_path / "observations.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]
    code, _ = quantize(mlp(), path)
    error = capfd.readouterr().err
    assert code == errors.ConfigError.exit_code
    assert message in error and "to do:" in error


@pytest.mark.fault(21)
@pytest.mark.parametrize("lies", ["header", "short", "member"])
def test_what_a_file_would_become_is_known_before_it_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], lies: str
) -> None:
    """The array's header says that it is 3 GB, or the archive's; or the two contradict each other."""
    path = tmp_path / "observations.npz"
    claimed = {"short": (65, 8), "member": (64, 8)}.get(lies, (100_000_000, 8))
    header = io.BytesIO()
    numpy_format: Any = np.lib.format
    numpy_format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": claimed})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header.getvalue() + np.zeros((64, 8), np.float32).tobytes())
    if lies == "member":  # its uncompressed size, in the directory at the end
        data = bytearray(path.read_bytes())
        at = data.index(b"PK\1\2") + 24
        data[at : at + 4] = (3_200_000_000).to_bytes(4, "little")
        path.write_bytes(data)
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + (1 << 30), limit_bytes[1]))  # what it may not take either
    try:
        with pytest.raises(errors.ConfigError, match="should have" if lies == "short" else "are the limit") as caught:
            observations_file.load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit_bytes)
    assert "to do:" in str(caught.value)


@pytest.mark.fault(21)
def test_damaged_archives_are_refused_by_name(tmp_path: Path) -> None:
    path, rng = tmp_path / "observations.npz", np.random.default_rng(0)
    np.savez_compressed(path, observations=rng.normal(size=(99, 8)))
    whole = path.read_bytes()
    refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data[: rng.integers(len(data) // 2, len(data) + 1)] if rng.random() < 0.2 else data)
        try:
            observations_file.load(path)
        except errors.ConfigError:
            refused += 1
    assert refused > 500


@pytest.mark.fault(21)
def test_a_model_that_unpacks_to_more_than_there_may_be(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", b"weights")
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2") + 24
    data[at : at + 4] = (3_200_000_000).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(errors.PolicyError, match="unpack to 3,200 MB"):
        keras_model.load(path)


@pytest.mark.parametrize("content", [None, b"junk"])
def test_files_that_are_missing_or_junk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    path = tmp_path / "file"
    if content:
        path.write_bytes(content)
    code, _ = quantize(mlp(), path)
    assert code == errors.ConfigError.exit_code
    assert "no observations can be read" in capfd.readouterr().err
    rows = save(tmp_path, np.zeros((99, 8)))
    output = str(tmp_path / "out.tflite")
    code = main.main(["quantize", str(path), "--calibration", str(rows), "-o", output])
    assert code == errors.PolicyError.exit_code
    assert "to do:" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--aware", "--precision", "float16"], "--aware is for int8"),
        (["--steps", "0"], "--steps must be positive"),
        (["-o", "model.bin"], "no .tflite file"),
    ],
)
def test_flags_that_do_not_go_together(
    observations: Path, capfd: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert quantize(mlp(), observations, *flags)[0] == errors.ConfigError.exit_code
    assert message in capfd.readouterr().err
