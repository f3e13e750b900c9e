"""Makes models of one policy after another: by template where the architecture maps, else by TFLiteConverter."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.program import logs
from learner.networks import layers
from learner.quantize import bits, calibrate, input_scaling, scales
from learner.quantize.tflite import convert, float_template, requantize, template

_log = logging.getLogger(__name__)
_STAND_IN_ROWS = 8


class _Input(NamedTuple):
    """The form of the model's input, see `convert`."""

    per_feature: bool
    hi_lo: bool


class Quantizer:
    """Makes models; converts once per architecture and precision, and writes numbers after that.

    Args:
        per_channel: Whether each output of a layer has a weight scale of its own.

    Attributes:
        fallbacks: Number of models that TFLiteConverter had to make.
        is_faithful: Whether the newest model holds its policy's numbers so well that running it tells nothing
            (`float_template`); never in int8.
    """

    def __init__(self, *, per_channel: bool = True) -> None:
        self._per_channel = per_channel
        self._templates: dict[template.Architecture, template.Template | None] = {}
        self._floats: dict[template.Architecture, float_template.Template | None] = {}
        self.fallbacks = 0
        self.is_faithful = False

    def prepare(self, policy: layers.PolicyLayers, shape: tuple[int, ...], precision: str = "int8") -> None:
        """Converts the template for policies like this one now, so that the first publish need not wait for it.

        Args:
            policy: A policy of the architecture; its numbers do not matter.
            shape: Shape of one observation.
            precision: One of config.PRECISIONS; int8 policies have gone through `ptq`.
        """
        if precision != "int8":
            self._float_template(policy, shape, precision)
            return
        has_features = calibrate.has_features(policy)
        self._template(policy, shape, _Input(has_features, hi_lo=has_features))

    def quantize(
        self,
        policy: layers.PolicyLayers,
        params: calibrate.QuantParams,
        calibration: NDArray[Any],
        on_written: requantize.OnWritten = lambda piece: None,
    ) -> bytes:
        """Makes the int8 model of a policy.

        Args:
            policy: Layers for raw observations.
            params: From `calibrate.measure` or `ptq`.
            calibration: Observations [N, *shape], for TFLiteConverter should it be needed.
            on_written: See `requantize`. It does not get all of the model where TFLiteConverter was needed.

        Raises:
            PolicyError: A weight or a range is NaN or infinite.
        """
        self.is_faithful = False
        entry = _Input(params.affine is not None, params.affine is not None and params.affine.hi_lo)
        target = self._template(policy, calibration.shape[1:], entry)
        if target is not None:
            try:
                return requantize.requantize(target, policy, params, on_written)
            except scales.Unmapped as why:
                _warn(why)
        self.fallbacks += 1
        return convert.convert(policy, calibration, "int8", **entry._asdict(), per_channel=self._per_channel)

    def convert(
        self,
        policy: layers.PolicyLayers,
        calibration: NDArray[Any],
        precision: str,
        on_written: requantize.OnWritten = lambda piece: None,
        *,
        weight_bits: int = bits.BITS_MAX,
    ) -> bytes:
        """Makes the model that `convert.convert` would, byte by byte, of a policy that has not gone through `ptq`.

        Args:
            policy: Layers for raw observations.
            calibration: Observations [N, *shape], whose ranges scale the input; and what int8 can represent.
            precision: One of config.PRECISIONS. There are templates for all but int8.
            on_written: See `quantize`.
            weight_bits: See `convert.convert`.

        Raises:
            PolicyError: A weight is NaN or infinite.
        """
        self.is_faithful = False
        target = self._float_template(policy, calibration.shape[1:], precision) if precision != "int8" else None
        if target is not None:
            affine = input_scaling.from_ranges(calibration) if calibrate.has_features(policy) else None
            try:
                model = target.write(policy, affine, on_written, weight_bits=weight_bits)
                self.is_faithful = target.is_faithful
                return model
            except scales.Unmapped as why:
                _warn(why)
        self.fallbacks += 1
        return convert.convert(policy, calibration, precision, weight_bits=weight_bits)

    def _float_template(
        self, policy: layers.PolicyLayers, shape: tuple[int, ...], precision: str
    ) -> float_template.Template | None:
        key = (*template.architecture(policy, shape), precision)
        if key not in self._floats:
            try:
                self._floats[key] = float_template.Template.build(policy, shape, precision)
            except scales.Unmapped as why:
                self._floats[key] = None
                _warn(why)
        return self._floats[key]

    def _template(self, policy: layers.PolicyLayers, shape: tuple[int, ...], entry: _Input) -> template.Template | None:
        key = (*template.architecture(policy, shape), entry)
        if key not in self._templates:
            try:
                self._templates[key] = _build(policy, shape, entry, self._per_channel)
            except scales.Unmapped as why:
                self._templates[key] = None
                _warn(why)
        return self._templates[key]


def _warn(why: scales.Unmapped) -> None:
    _log.warning("quantizing by TFLiteConverter, which is slower: %s", why, extra=logs.once())


def _build(policy: layers.PolicyLayers, shape: tuple[int, ...], entry: _Input, per_channel: bool) -> template.Template:
    """Converts a stand-in of the same architecture, and checks that requantizing it gives the same numbers.

    Raises:
        Unmapped: It does not.
    """
    rng = np.random.default_rng(0)
    stand_in = template.stand_in(policy, rng)
    observations = rng.uniform(-1, 1, (_STAND_IN_ROWS, *shape)).astype(np.float32)
    model = convert.convert(stand_in, observations, "int8", **entry._asdict(), per_channel=per_channel)
    layer_count = len(layers.weighted(policy))
    target = template.locate(model, layer_count, per_channel=per_channel)
    params, _ = calibrate.measure(stand_in, observations, len(observations), **entry._asdict())
    expected = target.numbers()
    requantize.requantize(target, stand_in, params)
    for name, number in target.numbers().items():
        # Ranges differ from the converter's in the last bit, by the order of sums, and with them what follows
        if not np.allclose(number, expected[name], rtol=1e-4, atol=1.01 if number.dtype.kind == "i" else 0.0):
            raise scales.Unmapped(f"{name} of the converted model is not what it should be")
    return target
