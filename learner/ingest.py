"""Experience messages -> experience that may enter replay, each exactly once; everything else is counted.

Order of checks: MAC, decoding, sequence (`open`), content (`approve`). A message that fails on its content is receipted
all the same, so that its actor does not send it for ever. Sequence numbers are checked in memory here; the durable
ledger replaces that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from broker import codec, errors, messages, signing, specs


@dataclass(slots=True)
class _Mark:
    boot: int = 0
    seq: int = 0
    steps: int = 0  # of this boot, up to and with message `seq`


class Ingest:
    """Checks what actors send.

    Args:
        macs: MAC of each enrolled actor.
        topic: Builds the experience topic of an actor, which its MAC covers.
        ledger: Id that receipts carry.
        spec: What experience must look like.
        epochs: First and last epoch of this run; experience of other runs is refused.
        max_policy_lag: Refuse steps of policies more than so many versions old; 0 for no limit.

    Attributes:
        refused: Messages that did not enter replay, by reason.
        messages: Messages that did.
        steps_refused: Steps in refused messages that could be read.
        steps_missed: Steps that actors recorded and had to drop before they could be sent.
    """

    def __init__(
        self,
        macs: Mapping[str, signing.ActorMac],
        ledger: str,
        spec: specs.EnvSpec,
        epochs: tuple[int, int],
        max_policy_lag: int = 0,
    ) -> None:
        self._macs = macs
        self._ledger = ledger
        self._spec = spec
        self._epochs = epochs
        self._max_policy_lag = max_policy_lag
        self._marks: dict[str, _Mark] = {}
        self.refused: Counter[str] = Counter()
        self.messages = 0
        self.steps_refused = 0
        self.steps_missed = 0

    def open(self, actor_id: str, topic: str, payload: bytes) -> messages.Experience | None:
        """The message, if it is genuine and the next of its actor; else None, and `refused` has counted why.

        Args:
            actor_id: Whose topic it came by.
            topic: That topic.
            payload: The sealed message.
        """
        try:
            mac = self._macs.get(actor_id)
            if mac is None:
                raise errors.SignatureError("the actor is not enrolled", reason="unknown_actor")
            experience = codec.decode(messages.Experience, mac.open(topic, payload))
            return experience if self._is_next(actor_id, experience) else None
        except errors.MessageError as error:
            self.refused[error.reason] += 1
            return None

    def approve(self, experience: messages.Experience, version: int) -> bool:
        """Whether what was opened may enter replay; if not, it is counted.

        Args:
            experience: From `open`.
            version: The newest policy version published.
        """
        try:
            self._check(experience, version)
        except errors.DecodeError as error:
            self.refuse(error.reason, experience)
            return False
        self.messages += 1
        return True

    def refuse(self, reason: str, experience: messages.Experience) -> None:
        """Counts a message that was opened, and its steps, as refused."""
        self.refused[reason] += 1
        self.steps_refused += len(experience.reward)

    def receipt(self, actor_id: str) -> messages.Receipt | None:
        """What an actor need not keep any longer."""
        mark = self._marks.get(actor_id)
        return messages.Receipt(self._ledger, mark.boot, mark.seq) if mark and mark.seq else None

    def _is_next(self, actor_id: str, experience: messages.Experience) -> bool:
        """Whether this is the message awaited; moves the mark if so. A gap is left for the actor to fill again."""
        mark = self._marks.setdefault(actor_id, _Mark())
        if experience.boot < mark.boot or (experience.boot == mark.boot and experience.seq <= mark.seq):
            self.refused["duplicate"] += 1
            return False
        if not 1 <= experience.oldest <= experience.seq:
            raise errors.DecodeError("the oldest message held is not among those sent", reason="sequence")
        last = mark.seq if experience.boot == mark.boot else 0
        if experience.seq > max(last + 1, experience.oldest):
            self.refused["gap"] += 1
            return False
        if last:  # a session's first message of a boot tells nothing: those before went to a session before
            self.steps_missed += max(0, experience.step - mark.steps)
        self._marks[actor_id] = _Mark(experience.boot, experience.seq, experience.step + len(experience.reward))
        return True

    def _check(self, experience: messages.Experience, version: int) -> None:
        """Raises DecodeError unless the arrays fit each other, the spec and this run."""
        if experience.fingerprint != self._spec.fingerprint:
            raise errors.DecodeError("made in another environment", reason="fingerprint")
        first, current = self._epochs
        if not first <= experience.assigned_epoch <= current:
            raise errors.DecodeError("recorded for another run", reason="epoch")
        newest = version if experience.epoch == current else math.inf
        if not 0 <= experience.epoch <= current or not 0 <= experience.version <= newest:
            raise errors.DecodeError("chosen by a policy that was never published", reason="version")
        if self._max_policy_lag and experience.version and self._lag(experience, version) > self._max_policy_lag:
            raise errors.DecodeError("chosen by a policy that is too old", reason="stale")
        check_arrays(experience, self._spec)

    def _lag(self, experience: messages.Experience, version: int) -> float:
        return version - experience.version if experience.epoch == self._epochs[1] else math.inf


def check_arrays(experience: messages.Experience, spec: specs.EnvSpec) -> None:
    """Raises DecodeError unless shapes, dtypes and values are those of `spec`."""
    segments, steps = len(experience.length), len(experience.reward)
    per_segment = (
        experience.env_index,
        experience.terminated,
        experience.truncated,
        experience.episode_return,
        experience.episode_length,
    )
    if segments == 0 or any(len(array) != segments for array in per_segment):
        raise errors.DecodeError("arrays of segments differ in length", reason="shape")
    if experience.length.min() < 1 or int(experience.length.sum(dtype=np.int64)) != steps:
        raise errors.DecodeError("segment lengths do not add up to the steps", reason="shape")
    observation, action = spec.observation, spec.action
    if (
        experience.observation.shape != (steps + segments, *observation.shape)
        or experience.observation.dtype.name != observation.dtype
    ):
        raise errors.DecodeError("observations do not have the spec's shape and dtype", reason="shape")
    action_shape, action_dtype = (
        ((steps,), "int32") if action.kind == "discrete" else ((steps, *action.shape), "float32")
    )
    if experience.action.shape != action_shape or experience.action.dtype.name != action_dtype:
        raise errors.DecodeError("actions do not have the spec's shape and dtype", reason="shape")
    if len(experience.log_prob) not in (0, steps):
        raise errors.DecodeError("log-probabilities do not match the steps", reason="shape")
    if experience.env_index.min() < 0 or max(experience.terminated.max(), experience.truncated.max()) > 1:
        raise errors.DecodeError("flags are neither 0 nor 1", reason="value")
    floats = [experience.reward, experience.log_prob, experience.episode_return]
    if observation.dtype == "float32":
        floats.append(experience.observation)  # type: ignore[arg-type]
    if not all(np.isfinite(array).all() for array in floats):
        raise errors.DecodeError("NaN or infinite values", reason="value")
    if action.kind == "discrete":
        legal = experience.action.min() >= 0 and experience.action.max() < action.n
    else:
        flat = experience.action.reshape(steps, -1)
        legal = bool(
            (flat >= np.array(action.low, np.float32)).all() and (flat <= np.array(action.high, np.float32)).all()
        )
    if not legal:
        raise errors.DecodeError("actions out of bounds", reason="action")
