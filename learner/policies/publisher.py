"""Publishes policies: one worker makes, judges, numbers, signs and sends them, and keeps how long each took to act."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, messages, specs, topics
from learner import config
from learner.files import records, run_directory
from learner.networks import layers
from learner.policies import outgoing_policy, policy_channel, policy_maker, timings
from learner.quantize import bits, calibrate, gate
from learner.quantize.tflite import convert

_log = logging.getLogger(__name__)

_TOLD_EACH = 10  # policies that the gate holds back in a row: one now and then is its work
PATIENCE_S = 0.25
"""The longest wait of what can wait until an actor acts on the newest policy: there may be no actor."""


@dataclass(frozen=True, eq=False)  # no slots: cached_property needs a dict
class Published:
    """A policy that went out, and what it was made from: nothing that is known, where it came as a file.

    `sent` has no digest if the policy went ahead in pieces.
    """

    sent: messages.Manifest
    model: bytes
    verdict: gate.Verdict
    layers: layers.PolicyLayers
    calibration: NDArray[np.generic]

    @functools.cached_property
    def manifest(self) -> messages.Manifest:
        """The manifest with the digest: 1 ms a MB, the first time."""
        return outgoing_policy.with_digest(self.sent, self.model)

    @functools.cached_property
    def float32(self) -> bytes:
        """The same policy unquantized, as a .tflite, for comparison; converted when someone asks."""
        return convert.convert(self.layers, self.calibration, "float32")


def describe_as(manifest: messages.Manifest, model: bytes, precision: str) -> messages.Manifest:
    """Returns the manifest of the same policy in another precision."""
    return replace(manifest, length=len(model), sha256=hashlib.sha256(model).hexdigest(), precision=precision)


class Publisher:
    """Publishes on the main channel, and on that of the canaries what is on trial. Versions count up over both.

    Its worker does one job after the other; methods are for one thread.

    Args:
        sender: Signs and sends (`Session`).
        topic_names: Topics of the fleet.
        spec: What policies are for.
        head: What their output means.
        epoch: This session's.
        version: The last version used before this session.
        settings: The gate's.
        directory: Where published policies are kept; None keeps none.
        kept: Counts what the disk does not take.
        send_differences: Whether policies go out as differences where that is smaller.
        precision: One of config.PRECISIONS.
        weight_bits: Bits of the weights, for studies.
        expire_after_s: Actors take no policy older than that; 0: none expires.

    Attributes:
        version: The newest policy's.
        newest: The newest policy; None before the first.
        main: The newest on the main channel.
        main_version: The same, of `version`.
        published: How many policies went out.
        held_back: How many did not, by reason.
        timings: How long the stages took.
        on_published: Called on the worker with place and bytes of each policy, before it goes out.
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
        directory: run_directory.RunDirectory | None,
        kept: records.Records,
        *,
        send_differences: bool = True,
        precision: str = "int8",
        weight_bits: int = bits.BITS_MAX,
        expire_after_s: float = 0.0,
    ) -> None:
        word = config.WEIGHT_BYTES[precision]
        self._channel = policy_channel.PolicyChannel(
            sender, topic_names, topics.MAIN_CHANNEL, enabled=send_differences, word=word
        )
        self._canary = policy_channel.PolicyChannel(
            sender, topic_names, topics.CANARY_CHANNEL, enabled=False, word=word
        )
        self._canary.traffic = self._channel.traffic
        self._maker = policy_maker.PolicyMaker(spec, head, settings, precision, weight_bits)
        self._spec, self._head, self._epoch, self._precision = spec, head, epoch, precision
        self._expire_after_s = expire_after_s
        self._directory, self._kept = directory, kept
        self._worker = futures.ThreadPoolExecutor(1, "publisher")
        self._publishing: futures.Future[Any] | None = None
        self._tidying: futures.Future[None] | None = None
        self._put_off: list[Callable[[], object]] = []  # the worker's
        self._sent_at: dict[int, float] = {}
        self._newest_at, self._acts = 0.0, False
        self.version = self.main_version = version
        self.newest: Published | None = None
        self.main: Published | None = None
        self.published = 0
        self.held_back: Counter[str] = Counter()
        self._held_in_a_row = 0
        self.timings = timings.Timings()
        self.on_published: Callable[[messages.Order, bytes], None] = lambda order, model: None

    @property
    def newest_order(self) -> messages.Order | None:
        """The place of the newest policy of this session; None before the first."""
        return messages.Order(self._epoch, self.version) if self.newest is not None else None

    def prepare(self, policy: layers.PolicyLayers) -> None:
        """Does what policies of this architecture need once, before the first of them is urgent."""
        self._maker.prepare(policy)

    def publish(
        self,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        held_back: NDArray[np.generic],
        channel: str = topics.MAIN_CHANNEL,
    ) -> futures.Future[gate.Verdict]:
        """Has a policy quantized, judged and, if it passes, sent as the next version.

        Args:
            policy: fp32 weights at the end of an update; the clock of publish-to-acting starts here.
            calibration: [M, *shape] observations that set the ranges.
            held_back: [M', *shape] other observations, for the gate.
            channel: Where it goes out.

        Returns:
            What the gate says, when the policy has gone out or is held back.
        """
        job = functools.partial(self._publish, policy, calibration, held_back, time.monotonic(), channel)
        self._publishing = publishing = self._worker.submit(job)
        return publishing

    def publish_again(self, policy: Published) -> futures.Future[None]:
        """Sends an older policy as the newest version on main: a rollback is a new version with the old bytes."""
        self._publishing = publishing = self._worker.submit(self._publish_again, policy, time.monotonic())
        return publishing

    def publish_file(
        self, model: bytes, head: specs.Head, precision: str, channel: str = topics.MAIN_CHANNEL
    ) -> futures.Future[None]:
        """Sends a .tflite of any origin, which was judged before, as the next version."""
        job = functools.partial(self._publish_file, model, head, precision, time.monotonic(), channel)
        self._publishing = publishing = self._worker.submit(job)
        return publishing

    def clear_canary(self) -> None:
        """Takes back what the channel of the canaries retains: nobody follows it any more."""
        self._worker.submit(self._canary.clear).result()

    def acts(self, version: int, now_s: float) -> None:
        """Notes that one more actor acts on `version`."""
        self._acts |= version == self.version
        for older in [sent for sent in list(self._sent_at) if sent < version - timings.REMEMBERED]:  # the worker adds
            del self._sent_at[older]
        if version in self._sent_at:
            self.timings.add_acting((now_s - self._sent_at[version]) * 1e3)

    def tidy(self, *, at_once: bool = False) -> None:
        """Call again and again: what can wait is done when an actor acts on the newest policy, or nobody does.

        The worker does it, so that the caller need not wait; `at_once`, for the end, does all of it and waits.
        """
        if at_once:
            self._worker.submit(self._tidy, at_once=True).result()
            return
        if self._tidying is not None and self._tidying.done():
            tidied, self._tidying = self._tidying, None
            tidied.result()
        is_due = self._acts or time.monotonic() - self._newest_at > PATIENCE_S
        is_busy = self._tidying is not None or (self._publishing is not None and not self._publishing.done())
        if is_due and not is_busy and (self._put_off or self._channel.is_due):
            self._tidying = self._worker.submit(self._tidy, at_once=False)

    def close(self) -> None:
        """Does what can wait, retains the newest policy for those who come later, and ends the threads."""
        try:
            self.tidy(at_once=True)
        finally:
            self._worker.shutdown()
            self._maker.close()

    def metrics(self) -> dict[str, float]:
        """Returns what a row of metrics says of policies: counters, and times and measures of the newest."""
        sent, newest = self._channel.traffic, self.newest
        measures = newest.verdict.measures if newest is not None else {}
        return {
            "policy_version": self.version,
            "policies_held_back": sum(self.held_back.values()),
            "policies_converted": self._maker.converted,
            "keyframes": sent.whole,
            "keyframe_bytes": sent.whole_bytes,
            "deltas": sent.patches,
            "delta_bytes": sent.patch_bytes,
            **self.timings.newest(),
            **{f"gate_{name}": value for name, value in measures.items()},
        }

    def summary(self) -> dict[str, Any]:
        """Returns what a run's summary says of policies: counters, bytes, and percentiles of times."""
        sent = self._channel.traffic
        return {
            "policy_version": self.version,
            "policies_published": self.published,
            "policies_held_back": dict(self.held_back),
            "keyframes": sent.whole,
            "keyframe_bytes": sent.whole_bytes,
            "deltas": sent.patches,
            "delta_bytes": sent.patch_bytes,
            "bytes_per_policy": round(sent.mean_bytes) if sent.mean_bytes is not None else None,
            **self.timings.summary(),
        }

    def sample(self, policy: layers.PolicyLayers) -> calibrate.Sample:
        """Returns how many observations to publish such a policy with."""
        return calibrate.sample(policy, ahead=self._maker.keeps_ranges)

    # -- the worker's jobs ------------------------------------------------------------------------------------------

    def _publish(
        self,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        held_back: NDArray[np.generic],
        started_s: float,
        channel: str,
    ) -> gate.Verdict:
        self._catch_up()
        if self.newest is not None and self.newest.layers and _same(policy, self.newest.layers):
            verdict = gate.Verdict(False, "identical")
        else:
            was_calibrated = self._maker.is_calibrated
            verdict = self._attempt(policy, calibration, held_back, started_s, channel)
            if was_calibrated and not verdict.passed:  # training has left behind what that was made for
                verdict = self._attempt(policy, calibration, held_back, started_s, channel)
        if verdict.reason != "identical":
            self._held_in_a_row = 0 if verdict.passed else self._held_in_a_row + 1
        if not verdict.passed:
            self.held_back[verdict.reason] += 1
            if verdict.reason != "identical" and self._held_in_a_row % _TOLD_EACH == 0:
                acting = f"version {self.version} acts on" if self.newest is not None else "none has gone out"
                _log.warning(
                    "the gate has held back %d policies in a row, the newest for %r; %s; "
                    "--gate-... of `train --help` say how much passes",
                    *(self._held_in_a_row, verdict.reason, acting),
                )
        return verdict

    def _publish_again(self, policy: Published, started_s: float) -> None:
        self._catch_up()
        outgoing = self._begin(topics.MAIN_CHANNEL, None)
        outgoing.add(policy.model)
        known, sent = (policy.verdict, policy.layers, policy.calibration), policy.sent
        # As it was: where policies came as files, that is not what the newest one is
        self._send(policy.model, outgoing, *known, started_s, head=sent.head, precision=sent.precision)

    def _publish_file(self, model: bytes, head: specs.Head, precision: str, started_s: float, channel: str) -> None:
        self._catch_up()
        outgoing = self._begin(channel, None)
        outgoing.add(model)
        passed, unknown = gate.Verdict(True, ""), np.zeros(0, np.float32)
        self._send(model, outgoing, passed, (), unknown, started_s, channel=channel, head=head, precision=precision)

    def _attempt(
        self,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        held_back: NDArray[np.generic],
        started_s: float,
        channel: str,
    ) -> gate.Verdict:
        """Makes a policy; sends what passes."""
        previous = self.newest.model if self.newest else None
        begin = functools.partial(self._begin, channel)
        made = self._maker.make(policy, calibration, held_back, begin, previous)
        for name, ms in made.times_ms.items():
            self.timings.add(name, ms)
        if not made.verdict.passed:
            made.outgoing.cancel()
            return made.verdict
        self._send(made.model, made.outgoing, made.verdict, policy, calibration, started_s, channel=channel)
        if self._maker.keeps_ranges:
            self._put_off.append(functools.partial(self._calibrate, policy, calibration))
        return made.verdict

    def _begin(self, channel: str, beside: futures.Executor | None) -> outgoing_policy.OutgoingPolicy:
        return self._channel_of(channel).begin(messages.Order(self._epoch, self.version + 1), beside)

    def _channel_of(self, name: str) -> policy_channel.PolicyChannel:
        return self._canary if name == topics.CANARY_CHANNEL else self._channel

    def _send(
        self,
        model: bytes,
        outgoing: outgoing_policy.OutgoingPolicy,
        verdict: gate.Verdict,
        policy: layers.PolicyLayers,
        calibration: NDArray[np.generic],
        started_s: float,
        *,
        channel: str = topics.MAIN_CHANNEL,
        head: str = "",
        precision: str = "",
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
            channel=channel,
            length=len(model),
            sha256=outgoing.sha256(),
            fingerprint=self._spec.fingerprint,
            head=head or self._head,
            precision=precision or self._precision,
            created_s=created_s,
            expires_s=created_s + self._expire_after_s if self._expire_after_s else 0.0,
        )
        self.on_published(manifest.order, model)
        self._sent_at[self.version], self._newest_at, self._acts = started_s, time.monotonic(), False
        way = self._channel_of(channel)
        way.send(manifest, model, outgoing)
        self.timings.add("delta_ms", way.patch_ms)
        self.timings.add("parts_ms", way.pieces_ms)
        self.timings.add("send_ms", way.send_ms)
        self.newest = Published(manifest, model, verdict, policy, calibration)
        if channel == topics.MAIN_CHANNEL:
            self.main, self.main_version = self.newest, manifest.version
        self._put_off.append(functools.partial(self._keep, self.newest))
        self.published += 1

    def _calibrate(self, policy: layers.PolicyLayers, calibration: NDArray[np.generic]) -> None:
        with self.timings.times.time("calibrate", 0):
            self._maker.calibrate(policy, calibration)

    def _keep(self, policy: Published) -> None:
        if self._directory is None:
            return
        with self._kept.attempt("files of policies"):
            self._directory.save_policy(policy.manifest, policy.model)

    def _tidy(self, *, at_once: bool) -> None:
        self._catch_up()
        self._channel.retain_newest(at_once=at_once)

    def _catch_up(self) -> None:
        """Does what was put off."""
        if not self._put_off:
            return
        began = time.monotonic()
        while self._put_off:
            self._put_off.pop(0)()
        self.timings.add("put_off_ms", (time.monotonic() - began) * 1e3)


def _same(policy: layers.PolicyLayers, other: layers.PolicyLayers) -> bool:
    """Returns whether nothing has changed; the first layer that differs decides."""
    pairs = zip(layers.arrays(policy).values(), layers.arrays(other).values(), strict=True)
    return all(np.array_equal(one, another) for one, another in sorted(pairs, key=lambda pair: pair[0].size))
