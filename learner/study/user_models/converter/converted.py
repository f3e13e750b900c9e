"""What is no chain of known layers, by TFLiteConverter: Keras models, made ready first (`keras_model`), SavedModels."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from broker.contract import errors
from learner.quantize.distil import distillation
from learner.study.user_models import subject
from learner.study.user_models.converter import keras_aware, keras_model, layer_norm
from learner.study.user_models.formats import saved_model

FloatArray = NDArray[np.float32]
_BATCH = 1024


class KerasSubject(subject.Subject):
    """Any Keras model of one input and one output."""

    way = "plain"

    def __init__(
        self,
        model: Any,
        outputs: distillation.Outputs,
        low: NDArray[Any] | None,
        high: NDArray[Any] | None,
        *,
        verbose: bool,
    ) -> None:
        self._model, self._verbose = model, verbose
        self.outputs, self.low, self.high = outputs, low, high
        self.source = "Keras, by TFLiteConverter"
        self.shape, self.size = tuple(model.inputs[0].shape[1:]), int(model.outputs[0].shape[1])
        self._form: layer_norm.Form | None = None

    def float32(self) -> bytes:
        unused = np.zeros((1, *self.shape))
        network = keras_model.prepare(self._model, unused)
        return keras_model.to_tflite(network, network.weights, unused, "float32", verbose=self._verbose)

    def exact(self, observations: NDArray[Any]) -> FloatArray:
        return keras_model.outputs(self._model, observations)

    def make(self, calibration: NDArray[Any], precision: str, *, beyond: float = 0.0) -> subject.Made:
        """Converts it with the form of layer normalisation that fails less on calibration data."""
        rewrites = precision == "int8" and keras_model.has_layer_norm(self._model)
        exact = self.exact(calibration) if rewrites else None
        tried: list[tuple[float, int, keras_model.Network, bytes]] = []
        for form in layer_norm.FORMS if rewrites else (None,):
            network = keras_model.prepare(self._model, calibration, form=form)
            converted = keras_model.to_tflite(network, network.weights, calibration, precision, verbose=self._verbose)
            failing = 0.0
            if exact is not None:
                failing = float(distillation.judge(converted, calibration, exact, self.outputs).mean())
            tried.append((failing, len(tried), network, converted))
        _, _, network, converted = min(tried)
        self._form = network.form
        return subject.Made(converted, self.exact, _notes(network))

    def make_aware(self, calibration: NDArray[Any], steps: int, seed: int) -> subject.Made:
        network = keras_model.prepare(self._model, calibration, form=self._form, centred=self.outputs == "values")
        exact = network.outputs(calibration)
        weights = keras_aware.distil(network, calibration, exact, outputs=self.outputs, steps=steps, seed=seed)
        converted = keras_model.to_tflite(network, weights, calibration, "int8", verbose=self._verbose)
        return subject.Made(converted, network.outputs, _notes(network))


class GraphSubject(subject.Subject):
    """A SavedModel whose graph is no chain: it goes through the converter as it is."""

    way = "plain"
    source = "SavedModel, by TFLiteConverter"

    def __init__(
        self,
        graph: saved_model.Graph,
        outputs: distillation.Outputs,
        low: NDArray[Any] | None,
        high: NDArray[Any] | None,
        *,
        verbose: bool,
    ) -> None:
        self._graph, self._verbose = graph, verbose
        self.outputs, self.low, self.high = outputs, low, high
        self.shape, self.size = graph.shape, graph.size

    def float32(self) -> bytes:
        return self._convert(np.zeros((1, *self.shape)), "float32")

    def exact(self, observations: NDArray[Any]) -> FloatArray:
        rows, batch = observations.astype(np.float32), self._graph.batch or _BATCH
        answers = [self._graph(tf.constant(rows[at : at + batch])).numpy() for at in range(0, len(rows), batch)]
        answer: FloatArray = np.concatenate(answers)
        return answer

    def make(self, calibration: NDArray[Any], precision: str, *, beyond: float = 0.0) -> subject.Made:
        notes = {"levelled": False, "layer_norm": None, "per_feature_input": False}
        return subject.Made(self._convert(calibration, precision), self.exact, notes)

    def make_aware(self, calibration: NDArray[Any], steps: int, seed: int) -> subject.Made:
        raise errors.PolicyError(
            "--aware trains layers, and the SavedModel's graph is no chain of them",
            reason="model",
            todo="save it with model.save('NAME.keras'), or leave --aware out",
        )

    def _convert(self, calibration: NDArray[Any], precision: str) -> bytes:
        rows = calibration.astype(np.float32)
        return keras_model.convert_function(self._graph, rows, precision, verbose=self._verbose)


def _notes(network: keras_model.Network) -> dict[str, Any]:
    return {
        "levelled": network.centred,
        "layer_norm": network.form,
        "per_feature_input": network.affine is not None,
    }
