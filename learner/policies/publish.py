"""From fp32 layers to a signed policy on the wire: convert, gate, number, keep, send; and how long it took to act."""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages, specs, topics
from learner import config
from learner.files import records, run_directory
from learner.networks import layers
from learner.policies import outgoing_policy, policy_channel
from learner.quantize import bits, fp32, gate, ptq
from learner.quantize.tflite import convert, quantizer


@dataclass(frozen=True, eq=False)  # no slots: cached_property needs a dict
class Published:
    """A policy that went out, and what it was made from. `sent` has no digest if it went in parts."""

    sent: messages.Manifest
    model: bytes
    verdict: gate.Verdict
    layers: layers.PolicyLayers
    calibration: NDArray[np.generic]

    @functools.cached_property
    def manifest(self) -> messages.Manifest:
        """With the digest: 1 ms a MB, the first time."""
        return outgoing_policy.digested(self.sent, self.model)

    @functools.cached_property
    def float32(self) -> bytes:
        """The same policy unquantized, as a .tflite, for comparison; converted when someone asks."""
        return convert.convert(self.layers, self.calibration, "float32")


_REMEMBERED = 4096
"""Publishes whose times are kept: a run may make millions."""


LARGE = 400_000
"""Weights of a policy, from which on its digest or parts take longer than a thread takes to begin."""
PATIENCE_S = 0.25
"""What can wait until an actor acts on the newest policy waits no longer than this: there may be no actor."""


def _newest() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass(slots=True)
class Timings:
    """Milliseconds of each stage, and until each actor acted on it (learner's clock), of the newest publishes.

    `parts_ms` was done beside the others: the digest, or differences that went ahead in parts. `put_off_ms` was done
    after acting: ranges for the next policy, and files. `gate_ms` has a large policy's fp32 outputs, made beside it, as
    far as it waited for them.
    """

    calibrate_ms: deque[float] = field(default_factory=_newest)
    quantize_ms: deque[float] = field(default_factory=_newest)
    gate_ms: deque[float] = field(default_factory=_newest)
    delta_ms: deque[float] = field(default_factory=_newest)
    send_ms: deque[float] = field(default_factory=_newest)
    parts_ms: deque[float] = field(default_factory=_newest)
    put_off_ms: deque[float] = field(default_factory=_newest)
    acting_ms: deque[float] = field(default_factory=_newest)


def describe_as(manifest: messages.Manifest, model: bytes, precision: str) -> messages.Manifest:
    """The manifest of the same policy in another precision."""
    return replace(manifest, length=len(model), sha256=hashlib.sha256(model).hexdigest(), precision=precision)


class Publisher:
    """Publishes on the main channel.

    Args:
        sender: Signs and sends (`Session`).
        topic_names: Topics of the fleet.
        spec: What policies are for.
        head: What their output means.
        epoch: Of this session.
        version: The last version used before this session.
        settings: Of the gate.
        directory: Where published policies are kept.
        say: Takes one line for people.
        send_deltas: Whether policies go out as differences where that is smaller.
        precision: One of config.PRECISIONS.
        weight_bits: Of the weights, for studies.
        expire_after_s: Actors take no policy older than that; 0: none expires.
        kept: Counts what the disk does not take.
    """

    def __init__(
        self,
        sender: policy_channel.Sender,
        topic_names: topics.Topics,
        spec: specs.EnvSpec,
        head: specs.Head,
        epoch: int,
        version: int,
        settings: config.GateConfig,
        directory: run_directory.RunDirectory,
        say: Callable[[str], None] = lambda line: None,
        *,
        send_deltas: bool = True,
        precision: str = "int8",
        weight_bits: int = bits.BITS_MAX,
        expire_after_s: float = 0.0,
        kept: records.Records | None = None,
    ) -> None:
        self._kept = kept or records.Records()
        self.channel = policy_channel.Channel(sender, topic_names, topics.MAIN_CHANNEL, enabled=send_deltas)
        self._spec = spec
        self._head = head
        self._epoch = epoch
        self._settings = settings
        self._directory = directory
        self._sent_at: dict[int, float] = {}
        self._precision, self._weight_bits, self._expire_after_s = precision, weight_bits, expire_after_s
        self._refines = precision == "int8" and weight_bits == bits.BITS_MAX
        self._keeps_fit = head in ptq.HYSTERESIS_HEADS
        self._fit: ptq.Calibration | None = None  # of the newest policy
        self._refiner = ptq.Calibrator(ptq.STEPS_BY_HEAD[head], hysteresis=self._keeps_fit)
        self._quantizer = quantizer.Quantizer()
        self._beside = futures.ThreadPoolExecutor(1, "publish")
        self._parts = futures.ThreadPoolExecutor(1, "publish-parts")
        self._turn = threading.Lock()  # of whoever publishes or tidies up; the latter hands it to its thread
        self._put_off: list[Callable[[], object]] = []
        self._settling: futures.Future[None] | None = None
        self._newest_at, self._acts = 0.0, False
        self.version = version
        self.newest: Published | None = None
        self.held_back: Counter[str] = Counter()
        self.timings = Timings()
        self.published = 0

    def prepare(self, policy: layers.PolicyLayers) -> None:
        """Does what policies of this architecture need once, before the first of them is urgent."""
        self._quantizer.prepare(policy, self._spec.observation.shape, self._precision)

    def publish(
        self, policy: layers.PolicyLayers, calibration: NDArray[np.generic], held_back: NDArray[np.generic]
    ) -> gate.Verdict:
        """Quantizes, judges and, if it passes, sends a policy as the next version.

        Args:
            policy: fp32 weights at the end of an update; the clock of publish-to-acting starts here.
            calibration: [M, *shape] observations that set the ranges.
            held_back: [M', *shape] other observations, for the gate.
        """
        started = time.monotonic()
        with self._turn:
            self._catch_up()
            if self.newest is not None and _same(policy, self.newest.layers):
                verdict = gate.Verdict(False, "identical")
            else:
                was_fitted = self._fit is not None
                verdict = self._attempt(policy, calibration, held_back, started)
                if was_fitted and not verdict.passed:  # training has left behind what that was made for
                    self._fit = None
                    verdict = self._attempt(policy, calibration, held_back, started)
        if not verdict.passed:
            self.held_back[verdict.reason] += 1
        return verdict

    def settle(self, *, at_once: bool = False) -> None:
        """Call again and again, from any thread: what can wait is done when an actor acts on the newest policy.

        On another thread, so that the caller need not wait; `at_once`, here and now, if no policy will follow.
        """
        if self._settling is not None and self._settling.done():
            settled, self._settling = self._settling, None
            settled.result()
        is_due = self._acts or time.monotonic() - self._newest_at > PATIENCE_S
        if at_once:
            with self._turn:
                self._tidy(at_once=True)
        elif is_due and (self._put_off or self.channel.is_due) and self._turn.acquire(blocking=False):
            self._settling = self._beside.submit(self._tidy_and_let_go)

    def publish_again(self, policy: Published) -> None:
        """Sends an older policy as the newest version: a rollback is a new version with the old bytes."""
        started_s = time.monotonic()
        with self._turn:
            draft = self._drafted(policy.model)
            self._send(policy.model, draft, policy.verdict, policy.layers, policy.calibration, started_s)

    def acts(self, version: int, now_s: float) -> None:
        """Notes that one more actor acts on `version`."""
        self._acts |= version == self.version
        for older in [sent for sent in list(self._sent_at) if sent < version - _REMEMBERED]:  # another thread adds
            del self._sent_at[older]
        if version in self._sent_at:
            self.timings.acting_ms.append((now_s - self._sent_at[version]) * 1e3)

    def _attempt(
        self,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        held_back: NDArray[np.generic],
        started_s: float,
    ) -> gate.Verdict:
        """Quantizes and judges; sends what passes."""
        began, is_large = time.monotonic(), sum(a.size for a in layers.arrays(policy).values()) > LARGE
        if self._refines and self._fit is None:
            self._fit = self._refiner.calibrate(policy, calibration)
        fitted, fit = time.monotonic(), self._fit
        refined = fit.centred(policy) if fit else policy
        draft = self.channel.draft((self._epoch, self.version + 1), self._parts if is_large else None)
        try:
            if fit:
                model = self._quantizer.quantize(refined, fit.params, calibration, draft.add)
            else:
                model = self._quantizer.convert(
                    policy, calibration, self._precision, draft.add, weight_bits=self._weight_bits
                )
        except errors.PolicyError as error:  # weights that are not finite; training may yet be resumed from before
            draft.close()
            return gate.Verdict(False, error.reason)
        if draft.size != len(model):  # TFLiteConverter made it
            draft.close()
            draft = self._drafted(model)
        quantized = time.monotonic()
        outputs: gate.Exact
        if is_large:  # on the thread that tidies up, which has nothing to do in this one's turn
            outputs = self._beside.submit(fp32.outputs, refined, held_back)
        else:
            outputs = fp32.outputs(refined, held_back)
        passed = time.monotonic()
        previous = self.newest.model if self.newest else None
        verdict = gate.judge_policy(model, outputs, held_back, self._spec.action, self._settings, previous)
        self.timings.calibrate_ms.append((fitted - began + passed - quantized) * 1e3)
        self.timings.quantize_ms.append((quantized - fitted) * 1e3)
        self.timings.gate_ms.append((time.monotonic() - passed) * 1e3)
        if verdict.passed:
            self._send(model, draft, verdict, policy, calibration, started_s)
        else:
            draft.close()
        if fit and verdict.passed and self._keeps_fit:
            self._put_off.append(functools.partial(self._refit, policy, calibration))
        else:
            self._fit = None
        return verdict

    def _drafted(self, model: bytes) -> outgoing_policy.Draft:
        draft = self.channel.draft((self._epoch, self.version + 1))
        draft.add(model)
        return draft

    def _keep(self, policy: Published) -> None:
        with self._kept.attempt("files of policies"):
            self._directory.save_policy(policy.manifest, policy.model)

    def _refit(self, policy: layers.PolicyLayers, calibration: NDArray[np.generic]) -> None:
        self._fit = self._refiner.calibrate(policy, calibration)

    def _tidy_and_let_go(self) -> None:
        try:
            self._tidy(at_once=False)
        finally:
            self._turn.release()

    def _tidy(self, *, at_once: bool) -> None:
        self._catch_up()
        self.channel.settle(at_once=at_once)

    def _catch_up(self) -> None:
        """Does what was put off."""
        if not self._put_off:
            return
        began = time.monotonic()
        while self._put_off:
            self._put_off.pop(0)()
        self.timings.put_off_ms.append((time.monotonic() - began) * 1e3)

    def _send(
        self,
        model: bytes,
        draft: outgoing_policy.Draft,
        verdict: gate.Verdict,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        started_s: float,
    ) -> None:
        if len(model) > messages.MAX_POLICY_BYTES:
            raise errors.PolicyError(
                f"the policy has {len(model)} bytes, more than the {messages.MAX_POLICY_BYTES} that actors accept",
                reason="size",
                todo="make the network smaller (--hidden)",
            )
        self.version += 1
        created_s = round(time.time(), 3)
        manifest = messages.Manifest(
            epoch=self._epoch,
            version=self.version,
            channel=topics.MAIN_CHANNEL,
            length=len(model),
            sha256=draft.sha256(),
            fingerprint=self._spec.fingerprint,
            head=self._head,
            precision=self._precision,
            created_s=created_s,
            expires_s=created_s + self._expire_after_s if self._expire_after_s else 0.0,
        )
        self._sent_at[self.version], self._newest_at, self._acts = started_s, time.monotonic(), False
        self.channel.send(manifest, model, draft)
        self.timings.delta_ms.append(self.channel.delta_ms)
        self.timings.parts_ms.append(self.channel.parts_ms)
        self.timings.send_ms.append(self.channel.send_ms)
        self.newest = Published(manifest, model, verdict, policy, calibration)
        self._put_off.append(functools.partial(self._keep, self.newest))
        self.published += 1


def _same(policy: layers.PolicyLayers, other: layers.PolicyLayers) -> bool:
    """Whether nothing has changed; the first layer that differs decides."""
    pairs = zip(layers.arrays(policy).values(), layers.arrays(other).values(), strict=True)
    return all(np.array_equal(one, another) for one, another in sorted(pairs, key=lambda pair: pair[0].size))
