"""Keras models that are no chain of known layers: made ready (`keras_model`), and converted by TFLiteConverter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.quantize.distil import distillation
from learner.study.user_models import keras_aware, keras_model, layer_norm, subject

FloatArray = NDArray[np.float32]


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


def _notes(network: keras_model.Network) -> dict[str, Any]:
    return {
        "levelled": network.centred,
        "layer_norm": network.form,
        "per_feature_input": network.affine is not None,
    }
