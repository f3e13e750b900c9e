"""SavedModel directories: the recipe's bytes for chains, the converter for the rest, and nothing of theirs is run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from broker.contract import errors
from learner import __main__ as main
from learner.quantize import scales
from learner.quantize.tflite import interpreter
from learner.study.user_models import reading, recipe
from learner.study.user_models.formats import saved_model

own = keras.layers


def read(path: Path) -> tuple[Any, str]:
    return reading.read(path, outputs=None, low=None, high=None, normaliser=None, verbose=False)


def chain(kind: str) -> Any:
    keras.utils.set_random_seed(0)
    if kind == "frames":
        entry = keras.Input((9, 8, 2))
        x = own.Rescaling(1 / 255)(entry)
        x = own.Conv2D(4, 3, bias_initializer="random_normal")(x)
        x = own.ReLU(6.0)(own.BatchNormalization(moving_mean_initializer="random_normal")(x))
        x = own.Dense(8, "sigmoid", use_bias=False)(own.Flatten()(own.Conv2D(3, 2, strides=2, activation="tanh")(x)))
        return keras.Model(entry, own.Dense(3, "softmax")(x))
    entry = keras.Input((8,))
    x = own.Dense(16, "relu", bias_initializer="random_normal")(entry)
    x = own.Dense(16)(own.Dense(12, use_bias=False)(x))
    return keras.Model(entry, own.Dense(3)(own.ReLU()(x)))


@pytest.mark.parametrize("kind", ["vector", "frames"])
def test_a_chain_goes_by_the_recipe_to_the_bytes_of_the_keras_file(tmp_path: Path, kind: str) -> None:
    model, path = chain(kind), tmp_path / "model"
    model.export(path, verbose=False)
    model.save(tmp_path / "model.keras")
    rows = np.random.default_rng(0).uniform(0, 255 if kind == "frames" else 1, (80, *model.inputs[0].shape[1:]))
    rows = rows.astype(np.float32)
    (subject, said), (same, _) = read(path), read(tmp_path / "model.keras")
    assert isinstance(subject, recipe.ChainSubject) and said == ""
    np.testing.assert_allclose(subject.exact(rows), same.exact(rows), rtol=1e-4, atol=1e-5)
    if kind == "vector":
        assert subject.make(rows, "int8").model == same.make(rows, "int8", beyond=0.125).model


class Module(tf.Module):  # type: ignore[misc]
    """A residual network of TensorFlow's own, with what else signatures may be."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.kernel = tf.Variable(rng.normal(size=(8, 8)).astype(np.float32) / 3)
        self.last = tf.Variable(rng.normal(size=(8, 3)).astype(np.float32))

    def residual(self, x: Any) -> Any:
        return (x + tf.nn.relu(x @ self.kernel)) @ self.last

    def writes(self, x: Any, path: str) -> Any:
        with tf.control_dependencies([tf.io.write_file(path, "ran")]):
            return tf.identity(x @ self.last)


def function(call: Any, *shapes: list[int | None]) -> Any:
    return tf.function(call).get_concrete_function(*(tf.TensorSpec(shape, tf.float32) for shape in shapes))


def test_what_is_no_chain_goes_through_the_converter_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = Module()
    tf.saved_model.save(module, str(tmp_path / "model"), function(module.residual, [None, 8]))
    rows = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", rows)
    output = tmp_path / "out.tflite"
    files = [str(tmp_path / "model"), "--calibration", str(tmp_path / "rows.npz"), "-o", str(output)]
    code = main.main(["quantize", *files])
    said = capfd.readouterr()
    assert code == errors.EXIT_OK, said.err
    assert "without the fleet's recipe: AddV2" in said.out + said.err
    exact = module.residual(tf.constant(rows)).numpy()
    assert (interpreter.run(output.read_bytes(), rows)[0].argmax(1) == exact.argmax(1)).mean() > 0.9
    assert main.main(["quantize", *files, "--aware", "--force"]) == errors.PolicyError.exit_code
    assert "no chain" in capfd.readouterr().err


def saved(path: Path, **signatures: Any) -> Path:
    module = Module()
    tf.saved_model.save(module, str(path), {name: make(module) for name, make in signatures.items()})
    return path


def ordinary(module: Module) -> Any:
    return function(module.residual, [None, 8])


def test_signatures(tmp_path: Path) -> None:
    assert saved_model.load(saved(tmp_path / "one", act=ordinary)).size == 3
    two = lambda module: function(lambda x: {"a": x, "b": x @ module.last}, [None, 8])  # noqa: E731
    for name, signatures, message in (
        ("none", {}, "no signature"),
        ("several", {"act": ordinary, "value": ordinary}, r"2 signatures \(act, value\)"),
        ("outputs", {"act": two}, "1 inputs and 2 outputs"),
        ("open", {"act": lambda module: function(lambda x: x * 2.0, [None, None])}, "of fixed size"),
        ("flat", {"act": lambda module: function(lambda x: x * 2.0, [8])}, "of fixed size"),
        ("random", {"act": lambda module: function(lambda x: x + tf.random.normal([3]), [None, 3])}, "RandomStandard"),
    ):
        with pytest.raises(errors.PolicyError, match=message) as caught:
            saved_model.load(saved(tmp_path / name, **signatures))
        assert caught.value.todo


def test_nothing_but_the_network_is_run(tmp_path: Path) -> None:
    written = tmp_path / "written"
    by_operation = saved(
        tmp_path / "file", act=lambda module: function(lambda x: module.writes(x, str(written)), [1, 8])
    )
    with pytest.raises(errors.PolicyError, match="WriteFile"):
        saved_model.load(by_operation)
    module = Module()
    module.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)  # set up when loaded
    tf.saved_model.save(module, str(tmp_path / "table"), ordinary(module))
    with pytest.raises(errors.PolicyError, match="resource"):
        saved_model.load(tmp_path / "table")
    calls = lambda module: function(  # noqa: E731
        lambda x: tf.ensure_shape(tf.py_function(lambda x: x, [x @ module.last], tf.float32), [None, 3]), [None, 8]
    )
    with pytest.raises(errors.PolicyError, match="EagerPyFunc"):
        saved_model.load(saved(tmp_path / "python", act=calls))
    assert not written.exists()


def test_damaged_directories_are_refused_by_name(tmp_path: Path) -> None:
    whole, path, refused = saved(tmp_path / "whole", act=ordinary), tmp_path / "damaged", 0
    shutil.copytree(whole, path)
    described = (whole / saved_model.FILE).read_bytes()
    for junk in (b"", b"junk", described[: len(described) // 2], described[:-9]):
        (path / saved_model.FILE).write_bytes(junk)
        with pytest.raises(errors.PolicyError) as caught:
            read(path)
        assert caught.value.todo
    (path / saved_model.FILE).unlink()
    with pytest.raises(errors.PolicyError, match="no saved_model.pb"):
        read(path)
    shutil.copy(whole / saved_model.FILE, path)
    for file in (path / "variables").iterdir():
        kept = file.read_bytes()
        for content in (None, kept[: len(kept) // 2]):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(errors.PolicyError):
                read(path)
            file.write_bytes(kept)
            refused += 1
    assert refused == 4
    module = Module()
    module.last.assign(np.full((8, 3), np.nan))
    tf.saved_model.save(module, str(tmp_path / "nan"), ordinary(module))
    with pytest.raises(errors.PolicyError, match="NaN"):
        read(tmp_path / "nan")


def test_only_a_softmax_at_the_end_changes_no_choice(tmp_path: Path) -> None:
    entry = keras.Input((4,))
    keras.Model(entry, own.Dense(2)(own.Softmax()(own.Dense(4)(entry)))).export(tmp_path / "m", verbose=False)
    with pytest.raises(scales.Unmapped, match="Softmax"):
        saved_model.read(saved_model.load(tmp_path / "m"), "values", None, None)


def test_objects_that_take_part_in_their_own_loading_are_refused(tmp_path: Path) -> None:
    """TensorFlow makes an object by its registered name, whatever its kind, and sets children as its attributes."""
    file = saved(tmp_path / "model", act=ordinary) / saved_model.FILE
    original = file.read_bytes()
    for change in ("registered_name", "child", "link"):
        described = saved_model_pb2.SavedModel()
        described.ParseFromString(original)
        root = described.meta_graphs[0].object_graph_def.nodes[0]
        if change == "registered_name":
            root.registered_name = "tf.StaticHashTable"
        elif change == "child":
            root.children.add(node_id=0, local_name="_serialize_to_tensors")
        else:
            (file.parent / "variables" / "elsewhere").symlink_to(tmp_path)
        file.write_bytes(described.SerializeToString())
        with pytest.raises(errors.PolicyError, match="its loading|is a link") as caught:
            saved_model.load(file.parent)
        assert caught.value.todo
