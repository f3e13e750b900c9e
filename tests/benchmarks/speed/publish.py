"""Measures what turns weights into a policy on the wire, stage by stage; requantizing against TFLiteConverter.

One process; converter and requantizer alternate on the same policies and the same observations. The converter is called
in the quickest way we know (constants in the graph, one calibration batch): from a Keras model it takes twice as long.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ed25519
from numpy.typing import NDArray

from broker.contract import messages, signing, specs, topics
from broker.contract.policies import policy_patch
from learner import config
from learner.files import records, run_directory
from learner.networks import layers, networks
from learner.policies import patch_loops, publisher
from learner.quantize import calibrate, fp32, gate, ptq
from learner.quantize.tflite import convert, quantizer
from learner.run import train
from tests.benchmarks.speed import _pixels, _sink

SPEC = specs.EnvSpec(specs.ObservationSpec((24,)), specs.ActionSpec("discrete", n=6))
STEP = 5e-4  # change of each weight between two policies: a few Adam steps
REPEATS = 4
TOPIC = "actorq/bench/policy/main/whole"


def run() -> Iterator[dict[str, Any]]:
    """Yields one row per case and stage."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # another benchmark has started TensorFlow already
        tf.config.threading.set_intra_op_parallelism_threads(1)  # as learner.config's default
    sys.setswitchinterval(train.SWITCH_S)
    rng = np.random.default_rng(0)
    yield from _stages("MLP 256x2", _initial((256, 256), rng), _vectors, conversions=15, rounds=45)
    yield from _stages("MLP 2048x2", _initial((2048, 2048), rng), _vectors, conversions=7, rounds=21)
    nature = _pixels.nature(_pixels.SPEC, rng)
    yield from _stages("Nature CNN, 84x84x4", nature, lambda count, rng: _pixels.observations(count), 3, 21)
    for precision in ("float32", "float16", "dynamic"):
        yield _float("MLP 256x2", (256, 256), precision, rounds=15)
        yield _float("MLP 2048x2", (2048, 2048), precision, rounds=7)
    for precision, is_local in itertools.product(("float32", "float16", "dynamic", "int8"), (True, False)):
        yield _published("MLP 2048x3", (2048, 2048, 2048), precision, is_local=is_local, rounds=15)


def _vectors(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.standard_normal((count, *SPEC.observation.shape), np.float32)


def _stages(
    case: str,
    policy: layers.PolicyLayers,
    observe: Callable[[int, np.random.Generator], NDArray[Any]],
    conversions: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(1)
    sample = calibrate.sample(policy, ahead=True)
    calibration, held_back = sample.split(observe(sample.total, rng))
    shape = calibration.shape[1:]
    observations, calibrating = np.concatenate([calibration, held_back]), len(calibration)
    calibrator, published = ptq.Calibrator(hysteresis=True), quantizer.Quantizer()
    published.prepare(policy, shape)
    quantize, key = quantizer.Quantizer(), ed25519.Ed25519PrivateKey.generate()
    sealer, settings = signing.LearnerSealer(key), config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0)
    quantize.prepare(policy, shape)
    keyframe = b""
    times: dict[str, list[float]] = {}

    def timed(stage: str, work: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = work(*arguments)
        times.setdefault(stage, []).append((time.perf_counter() - started) * 1e3)
        return result

    for i in range(rounds):
        _change(policy, rng)
        params, _ = timed("calibration", calibrate.measure, policy, observations, calibrating)
        timed("requantize, cold caches", quantize.quantize, policy, params, calibration)
        for _ in range(REPEATS):
            timed("requantize", quantize.quantize, policy, params, calibration)
        if i % (rounds // conversions) == 0:
            timed("TFLiteConverter", convert.convert, policy, calibration, "int8")
        fitted = timed("fit", calibrator.calibrate, policy, calibration)
        centred = fitted.centred(policy)
        model = timed("requantize refined, cold caches", published.quantize, centred, fitted.params, calibration)
        outputs = timed("exact outputs", fp32.outputs, centred, held_back)
        timed("gate", gate.judge, model, outputs, held_back, settings)
        keyframe = keyframe or model
        timed("delta", policy_patch.difference, keyframe, model, patch_loops.LOOPS)
        timed("signing", sealer.seal, TOPIC, model)
    assert not quantize.fallbacks + published.fallbacks
    reference = times.pop("TFLiteConverter")
    patch = policy_patch.difference(keyframe, model, patch_loops.LOOPS)
    explain = f"{sum(a.size for a in layers.arrays(policy).values())} weights, {len(model)} bytes"
    for stage, seen in times.items():
        value, slow = statistics.median(seen), statistics.median(reference)
        compared = stage.startswith("requantize")
        yield {
            "benchmark": "publish",
            "case": f"{case}, {stage}",
            "value": round(value, 3),
            "unit": "ms",
            "reference": round(slow, 1) if compared else None,
            "ratio": round(slow / value, 1) if compared else None,
            "runs": len(seen),
            "spread": round(max(seen) - min(seen), 3),
            "explain": f"{min(seen):.3f} to {max(seen):.3f} ms; "
            + {
                "requantize": f"reference is TFLiteConverter, {min(reference):.0f} to {max(reference):.0f} ms in "
                f"{len(reference)} runs between ours; {explain}; {REPEATS} times on the same weights",
                "requantize, cold caches": "the first time on new weights, behind all the other stages",
                "calibration": f"fp32 pass over {len(observations)} observations: ranges and exact outputs",
                "fit": f"what publishing does instead, when an actor acts: {calibrating} rows, levels, factors, means",
                "exact outputs": f"fp32 pass over the gate's {len(held_back)} observations",
                "requantize refined, cold caches": "as published: hysteresis of scales, factors, biases corrected",
                "gate": f"int8 by LiteRT over {len(held_back)} observations, interpreter built anew",
                "delta": f"against a keyframe up to {rounds} publishes older; the last took {len(patch)} bytes",
                "signing": "Ed25519 over SHA-256 of the whole model",
            }[stage],
        }


def _ms(work: Callable[[Any], object], argument: Any) -> float:
    started = time.perf_counter()
    work(argument)
    return (time.perf_counter() - started) * 1e3


def _float(case: str, hidden: tuple[int, ...], precision: str, *, rounds: int) -> dict[str, Any]:
    """Returns the row of a model whose activations are floats: written over a converted one, and converted, in turn."""
    rng = np.random.default_rng(0)
    policy = _initial(hidden, rng)
    calibration = rng.standard_normal((64, *SPEC.observation.shape), np.float32)
    quantize = quantizer.Quantizer()
    quantize.prepare(policy, SPEC.observation.shape, precision)
    ours, theirs = list[float](), list[float]()
    for _ in range(rounds):
        _change(policy, rng)
        for make, times in ((quantize.convert, ours), (convert.convert, theirs)):
            started = time.perf_counter()
            model = make(policy, calibration, precision)
            times.append((time.perf_counter() - started) * 1e3)
    assert not quantize.fallbacks
    value, slow = statistics.median(ours), statistics.median(theirs)
    return {
        "benchmark": "publish",
        "case": f"{case}, {precision}",
        "value": round(value, 3),
        "unit": "ms",
        "reference": round(slow, 1),
        "ratio": round(slow / value, 1),
        "runs": rounds,
        "spread": round(max(ours) - min(ours), 3),
        "explain": f"{min(ours):.3f} to {max(ours):.3f} ms; reference is TFLiteConverter, {min(theirs):.0f} to "
        f"{max(theirs):.0f} ms in {rounds} runs between ours; {len(model)} bytes",
    }


def _published(case: str, hidden: tuple[int, ...], precision: str, *, is_local: bool, rounds: int) -> dict[str, Any]:
    """From weights to the last byte in the socket, of policies that follow one another; beside a copy, and the send."""
    rng = np.random.default_rng(0)
    policy = _initial(hidden, rng)
    lenient = config.GateConfig(gate_agreement_min=0.0, gate_ties_max=1.0, gate_saturation_max=1.0)
    times: dict[str, list[float]] = {"publish": [], "send": [], "copy": []}
    sizes: list[int] = []

    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name, _sink.opened(is_local=is_local) as sink:
        directory = run_directory.RunDirectory.open(Path(name) / "run", resume=False)
        publishing = publisher.Publisher(
            sink, topics.Topics("bench"), SPEC, "q_values", 1, 0, lenient, directory, records.Records(),
            precision=precision,
        )  # fmt: skip
        publishing.prepare(policy)
        sample = publishing.sample(policy)
        observations = sample.split(rng.standard_normal((sample.total, *SPEC.observation.shape), np.float32))
        for _ in range(rounds + 1):
            _change(policy, rng)
            this = layers.with_arrays(policy, [array.copy() for array in layers.arrays(policy).values()])
            sink.begin()
            took = _ms(lambda policy: publishing.publish(policy, *observations).result(), this)
            assert publishing.newest is not None
            model, sent = publishing.newest.model, sink.sent
            if isinstance(sent[-1][1], messages.PolicyPiece):  # not the first one, nor what is retained
                sizes.append(sink.sent_bytes)
                times["publish"].append(took)
                times["send"].append(_ms(sink.send_all, sent))
                times["copy"].append(_ms(np.copy, np.frombuffer(model, np.uint8)))
            publishing.tidy(at_once=True)  # what waits until an actor acts
        stages = {name: getattr(publishing.timings, f"{name}_ms") for name in ("quantize", "gate", "delta", "send")}
        made = ", ".join(f"{name} {statistics.median(list(of)[1:]):.1f}" for name, of in stages.items())
        parts = statistics.median(list(publishing.timings.parts_ms)[1:])
        publishing.close()
    ratios = [(p - s) / c for p, s, c in zip(*times.values(), strict=True)]
    value, send, copy = (statistics.median(times[what]) for what in ("publish", "send", "copy"))
    return {
        "benchmark": "publish",
        "case": f"{case}, {precision}, published {'on this machine' if is_local else 'to others'}",
        "value": round(value, 2),
        "unit": "ms",
        "reference": round(copy, 2),
        "ratio": round(statistics.median(ratios), 2),
        "runs": len(ratios),
        "spread": round(max(ratios) - min(ratios), 2),
        "explain": f"ratio is (publish - send) / copy; reference is numpy's copy of {len(model)} bytes; "
        f"send is signing the same {len(sent)} messages and handing them to a socket again, {send:.2f} ms; "
        f"{statistics.median(sizes):.0f} bytes on the wire ({statistics.median(sizes) / len(model):.2f} of the model); "
        f"stages in ms: {made}, pieces beside them {parts:.1f}",
    }


def _initial(hidden: tuple[int, ...], rng: np.random.Generator) -> layers.PolicyLayers:
    network = networks.QNetwork.build(SPEC, hidden, False, rng)
    normalizer = networks.Normalizer.identity(SPEC.observation)
    return network.policy_layers(list(network.initial().values()), normalizer)


def _change(policy: layers.PolicyLayers, rng: np.random.Generator) -> None:
    """Changes the weights where they lie, as training does."""
    for array in layers.arrays(policy).values():
        array += STEP * rng.standard_normal(array.shape, np.float32)
