"""Decides which experience may enter replay, each message exactly once; everything else is counted.

Order of checks: MAC, decoding, sequence, content. A message that fails on its content is receipted all the same, so
that its actor does not send it for ever; so is one that cannot be decoded, if it is genuine and says which one it is.
What is the next one of its boot follows from the ledger, and only what the ledger has is receipted. A number that came
before with another content is a conflict: two machines count as one, and what the second sent is nowhere. From that
number on its boot gets no receipt, so that nothing leaves a spool unless the ledger has it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.contract import codec, errors, frames, messages, signing, specs
from broker.program import logs
from learner.experience import dead_letters, ledger

_log = logging.getLogger(__name__)


class Validated(NamedTuple):
    """A message that is its boot's next, with its verdict; `experience` is None if it could not be decoded."""

    entry: ledger.Entry
    experience: messages.Experience | None


class _Position(NamedTuple):
    """The place of a message among those of its boot."""

    boot: int
    seq: int
    oldest: int
    step: int
    steps: int


class Opened(NamedTuple):
    """A genuine message, and what is wrong with it as far as the message alone tells.

    Attributes:
        body: Without its seal.
        position: Its place.
        experience: As it was sent; None if it could not be decoded.
        failure: Why it could not.
        unpacked: The same with its frames unpacked, or why they could not be; None if there was nothing to unpack.
    """

    body: memoryview
    position: _Position
    experience: messages.Experience | None
    failure: errors.DecodeError | None
    unpacked: messages.Experience | errors.DecodeError | None


class Validator:
    """Validates what actors send.

    Args:
        macs: MAC of each enrolled actor.
        spec: What experience must look like.
        epochs: Of all sessions of this run, this one the last; experience of other runs is refused.
        marks: How far the ledger is, by actor and boot.
        letters: Where refused messages go.
        fits: Whether replay has room for so many steps in so many segments at all.
        max_policy_lag: Refuse steps of policies more than so many versions old; 0 for no limit.
        may_send: Whether an actor's boot was granted so many steps under an assignment of an epoch.
        on_outcome: Called for each message with its topic, its size and the steps that it brought, or None if it was
            refused.
        head: What policies put out.

    Attributes:
        refused: Messages that did not enter replay, by reason.
        messages: Messages that did.
        steps_refused: Steps in refused messages that could be read.
        steps_missed: Steps that actors recorded and had to drop before they could be sent.
    """

    def __init__(
        self,
        macs: Mapping[str, signing.ActorMac],
        spec: specs.EnvSpec,
        epochs: Collection[int],
        marks: Mapping[tuple[str, int], ledger.Mark],
        letters: dead_letters.DeadLetters,
        fits: Callable[[int, int], bool],
        max_policy_lag: int = 0,
        may_send: Callable[[str, int, int, int], bool] = lambda actor_id, boot, assigned_epoch, steps: True,
        on_outcome: Callable[[str, int, int | None], None] = lambda topic, size_bytes, steps: None,
        head: specs.Head = "q_values",
    ) -> None:
        self._macs = macs
        self._spec = spec
        self._epochs, self._epoch = frozenset(epochs), max(epochs)
        self._max_policy_lag = max_policy_lag
        self._digest_of: Callable[[str, int, int], bytes | None] = lambda actor_id, boot, seq: None
        self._on_conflict: Callable[[str, int, int], None] = lambda actor_id, boot, seq: None
        self._conflicts: dict[tuple[str, int], int] = {}
        self._uncommitted: dict[tuple[str, int, int], ledger.Entry] = {}  # taken, and not in the ledger yet
        self._marks = dict(marks)
        self._durable = dict(marks)
        self._letters = letters
        self._fits = fits
        self._may_send, self._on_outcome = may_send, on_outcome
        self._head = head
        self._due: set[tuple[str, int]] = set()  # boots that shall get a receipt
        self._refused_boots: dict[str, dict[int, None]] = {}  # new in this session, and all of each was refused
        self.refused: Counter[str] = Counter()
        self.messages = 0
        self.steps_refused = 0
        self.steps_missed = 0

    def metrics(self) -> dict[str, float]:
        """Returns the counts of messages and steps, for a row of metrics."""
        return {
            "messages": self.messages,
            "messages_refused": sum(self.refused.values()),
            "steps_refused": self.steps_refused,
            "steps_missed": self.steps_missed,
        }

    def summary(self) -> dict[str, Any]:
        """Returns the counts of messages and steps, for the summary; those refused by reason."""
        return {
            "experience_messages": self.messages,
            "messages_refused": dict(self.refused),
            "steps_refused": self.steps_refused,
            "steps_missed": self.steps_missed,
        }

    def unpack_stored(self, experience: messages.Experience) -> messages.Experience:
        """Returns a message from the ledger as replay wants it.

        Raises:
            DecodeError: Its arrays are not, or no longer, those of the spec.
        """
        return checked(experience, self._spec, self._head)

    def compare_with(
        self,
        digest_of: Callable[[str, int, int], bytes | None],
        conflicts: Mapping[tuple[str, int], int],
        on_conflict: Callable[[str, int, int], None],
    ) -> None:
        """Sets where messages that came before are looked up, so that a number with another content is noticed.

        Args:
            digest_of: Returns the digest of a message that the ledger has, by actor, boot and number; None if unknown.
            conflicts: The first number that came with two contents, by actor and boot.
            on_conflict: Called with actor, boot and number of another such message, if it is the first of its boot.
        """
        self._digest_of, self._conflicts, self._on_conflict = digest_of, dict(conflicts), on_conflict

    @property
    def unpacks(self) -> bool:
        """Returns whether messages have frames to unpack."""
        return self._spec.observation.dtype == "uint8"

    def open(self, actor_id: str, topic: str, payload: bytes) -> Opened:
        """Returns a message whose seal fits; all else about it is for `validate`. On any thread.

        Args:
            actor_id: The actor whose topic it came by.
            topic: That topic.
            payload: The sealed message.

        Raises:
            MessageError: It is not genuine, or does not say where it belongs.
        """
        mac = self._macs.get(actor_id)
        if mac is None:
            raise errors.SignatureError("the actor is not enrolled", reason="unknown_actor")
        body = mac.open(topic, payload)
        experience = failure = None
        whole: messages.Experience | errors.DecodeError | None = None
        try:
            experience = codec.decode(messages.Experience, body)
            position = _Position(
                experience.boot, experience.seq, experience.oldest, experience.step, len(experience.reward)
            )
        except errors.DecodeError as error:
            position, failure = _position_of(body, error), error
        if position.seq < 1:
            raise errors.DecodeError(f"message number {position.seq}", reason="sequence")
        if experience is not None and self.unpacks:
            try:
                whole = unpacked(experience, self._spec)
            except errors.DecodeError as error:
                whole = error
        return Opened(body, position, experience, failure, whole)

    def validate(
        self,
        actor_id: str,
        topic: str,
        payload: bytes,
        version: int,
        opened: Callable[[], Opened] | None = None,
    ) -> Validated | None:
        """Returns the message with its verdict, for the ledger; None if it is not genuine or not its boot's next one.

        Args:
            actor_id: The actor whose topic it came by.
            topic: That topic.
            payload: The sealed message.
            version: The newest policy version published.
            opened: Returns, or raises, what `open` did of it on another thread; None opens it here.
        """
        try:
            body, position, experience, failure, whole = opened() if opened else self.open(actor_id, topic, payload)
        except errors.MessageError as error:
            self._refuse(error, topic, payload)
            return None
        is_new = (actor_id, position.boot) not in self._marks
        try:
            if not self._is_next(actor_id, position, body):
                return None
        except errors.DecodeError as error:
            self._refuse(error, topic, payload)
            return None
        if experience is not None:
            try:
                experience = self._checked(actor_id, experience, version, whole)
                if len(body) > specs.MAX_EXPERIENCE_BYTES:
                    raise errors.DecodeError(
                        f"{len(body)} bytes, more than the {specs.MAX_EXPERIENCE_BYTES} of a message of experience",
                        reason="too_large",
                    )
                self.messages += 1
                self._on_outcome(topic, len(payload), position.steps)
            except errors.DecodeError as error:
                failure = error
        if failure is not None:
            self._refuse(failure, topic, payload)
            self.steps_refused += position.steps
            _log.warning(
                "what %s sends is refused (%s): %s; %d steps so far, the rest is counted in messages_refused",
                actor_id,
                failure.reason,
                failure.what,
                position.steps,
                extra=logs.once((actor_id, failure.reason)),
            )
            if is_new or position.boot in self._refused_boots.get(actor_id, ()):
                self._note_refused_boot(actor_id, position.boot)
        elif actor_id in self._refused_boots:
            self._refused_boots[actor_id].pop(position.boot, None)
        entry = ledger.Entry(
            actor_id=actor_id,
            boot=position.boot,
            seq=position.seq,
            step=position.step,
            steps=position.steps,
            ended=0 if experience is None else int(np.count_nonzero(experience.terminated | experience.truncated)),
            size_bytes=len(body),
            verdict=failure.reason if failure else ledger.OK,
            body=None if failure else body,
            digest=ledger.digest(body) if failure else None,
        )
        self._uncommitted[actor_id, position.boot, position.seq] = entry
        return Validated(entry, experience)

    def note_committed(self, entries: Sequence[ledger.Entry]) -> None:
        """Notes that the ledger has these, so that receipts for them are due."""
        for entry in entries:
            key = entry.actor_id, entry.boot
            self._uncommitted.pop((*key, entry.seq), None)
            if key not in self._marks:  # forgotten meanwhile
                continue
            self._durable[key] = ledger.Mark(entry.seq, entry.step + entry.steps)
            self._due.add(key)

    def receipts(self, ledger_id: str) -> Iterator[tuple[str, messages.Receipt]]:
        """Yields actors and receipts: one for each boot of which the ledger has something new since the last call."""
        for key in sorted(self._due):
            actor_id, boot = key
            mark = self._durable.get(key, ledger.Mark())
            seq = min(mark.seq, self._conflicts[key] - 1) if key in self._conflicts else mark.seq
            if seq > 0:
                yield actor_id, messages.Receipt(ledger_id, boot, seq)
        self._due.clear()

    def _refuse(self, error: errors.MessageError, topic: str, payload: bytes) -> None:
        self.refused[error.reason] += 1
        self._on_outcome(topic, len(payload), None)
        self._letters.add(topic, error.reason, error.what, payload)

    def _note_refused_boot(self, actor_id: str, boot: int) -> None:
        """Notes a boot of which all was refused; of too many, forgets the one heard longest ago, as the ledger does."""
        boots = self._refused_boots.setdefault(actor_id, {})
        boots.pop(boot, None)
        boots[boot] = None
        if len(boots) > ledger.BOOTS_KEPT:
            key = actor_id, next(iter(boots))
            del boots[key[1]]
            for known in (self._marks, self._durable):
                known.pop(key, None)
            self._due.discard(key)

    def _is_next(self, actor_id: str, position: _Position, body: memoryview) -> bool:
        """Returns whether this is the message awaited; moves the mark if so. A gap is left for the actor to fill again.

        Raises:
            DecodeError: It was here before, with another content.
        """
        key = actor_id, position.boot
        mark = self._marks.get(key, ledger.Mark())
        if position.seq <= mark.seq:
            known = self._known_digest(*key, position.seq)
            if known is not None and known != ledger.digest(body):
                self._conflict(key, position.seq)
            self.refused["duplicate"] += 1
            self._due.add(key)
            return False
        if position.seq > max(mark.seq + 1, position.oldest):
            self.refused["gap"] += 1
            return False
        if mark.seq:  # a ledger's first message of a boot tells nothing: those before went to another ledger
            self.steps_missed += max(0, position.step - mark.steps)
        self._marks[key] = ledger.Mark(position.seq, position.step + position.steps)
        return True

    def _known_digest(self, actor_id: str, boot: int, seq: int) -> bytes | None:
        """Returns the digest of a message that was here before, if that can be told."""
        entry = self._uncommitted.get((actor_id, boot, seq))
        if entry is None:
            return self._digest_of(actor_id, boot, seq)
        return entry.digest if entry.body is None else ledger.digest(entry.body)

    def _conflict(self, key: tuple[str, int], seq: int) -> None:
        if seq < self._conflicts.get(key, math.inf):
            self._conflicts[key] = seq
            self._on_conflict(*key, seq)
        raise errors.DecodeError(
            f"number {seq} of boot {key[1]} was here before, with another content", reason="conflict"
        )

    def _checked(
        self,
        actor_id: str,
        experience: messages.Experience,
        version: int,
        whole: messages.Experience | errors.DecodeError | None,
    ) -> messages.Experience:
        """Checks a message's content; returns it unpacked, as `whole` is, or says why that is not to be had.

        Raises:
            DecodeError: Its arrays do not fit each other, the spec, this run or replay.
        """
        if experience.oldest < 1 or experience.oldest > experience.seq:
            raise errors.DecodeError("the oldest message held is not among those sent", reason="sequence")
        if not 0 <= experience.created_ms < 1 << 53:
            raise errors.DecodeError("finished at no time that there is", reason="value")
        if experience.fingerprint != self._spec.fingerprint:
            raise errors.DecodeError("made in another environment", reason="fingerprint")
        if experience.assigned_epoch not in self._epochs:
            raise errors.DecodeError("recorded for another run", reason="epoch")
        newest = version if experience.epoch == self._epoch else math.inf
        if not 0 <= experience.epoch <= self._epoch or not 0 <= experience.version <= newest:
            raise errors.DecodeError("chosen by a policy that was never published", reason="version")
        if self._max_policy_lag and experience.version and self._lag(experience, version) > self._max_policy_lag:
            raise errors.DecodeError("chosen by a policy that is too old", reason="stale")
        experience = checked(experience, self._spec, self._head, whole)
        if not self._fits(len(experience.reward), len(experience.length)):
            raise errors.DecodeError("longer than replay is", reason="too_long")
        if not self._may_send(actor_id, experience.boot, experience.assigned_epoch, len(experience.reward)):
            raise errors.DecodeError("more steps than were granted", reason="grant")
        return experience

    def _lag(self, experience: messages.Experience, version: int) -> float:
        return version - experience.version if experience.epoch == self._epoch else math.inf


def _position_of(body: bytes | memoryview, error: errors.DecodeError) -> _Position:
    """Returns the place of a genuine message that cannot be decoded: its actor runs another release, say.

    Raises:
        DecodeError: `error`, if the message does not say.
    """
    try:
        metadata = codec.metadata(body)
        boot, seq, oldest, step = (int(metadata[name]) for name in ("boot", "seq", "oldest", "step"))
    except (errors.DecodeError, ValueError, KeyError):
        raise error from None
    if not all(0 <= value < 2**63 for value in (boot, seq, oldest, step)):
        raise error
    return _Position(boot, seq, oldest, step, 0)


def unpacked(experience: messages.Experience, spec: specs.EnvSpec) -> messages.Experience:
    """Returns the message with its frames unpacked, where its observations are packed frames.

    Raises:
        DecodeError: They are not as many as its steps and segments need.
    """
    observation = spec.observation
    if observation.dtype != "uint8":
        return experience
    observed = _observed(experience, observation)
    if (bytes_ := observed[0] * observation.frame_bytes) > specs.MAX_EXPERIENCE_BYTES:
        raise errors.DecodeError(f"frames of {bytes_} bytes in one message", reason="too_large")
    return dataclasses.replace(experience, observation=frames.unpack(experience.observation, observed))


def _observed(experience: messages.Experience, observation: specs.ObservationSpec) -> tuple[int, ...]:
    return (len(experience.reward) + len(experience.length) * observation.stack, *observation.frame_shape)


def checked(
    experience: messages.Experience,
    spec: specs.EnvSpec,
    head: specs.Head = "q_values",
    whole: messages.Experience | errors.DecodeError | None = None,
) -> messages.Experience:
    """Checks that shapes, dtypes and values are those of `spec`, and of what a policy with such a head does.

    Returns the message `unpacked`: `whole`, where that was done already, or why it could not be.

    What there is of each segment goes through lists: they are short, and numpy takes 2 us a call whatever the length.

    Raises:
        DecodeError: They are not.
    """
    length, steps = experience.length.tolist(), len(experience.reward)
    env_index, episode_return = experience.env_index.tolist(), experience.episode_return.tolist()
    terminated, truncated = experience.terminated.tolist(), experience.truncated.tolist()
    row = experience.row.tolist()
    per_segment = (env_index, row, terminated, truncated, episode_return, experience.episode_length)
    if not length or set(map(len, per_segment)) != {len(length)}:
        raise errors.DecodeError("arrays of segments differ in length", reason="shape")
    if min(length) < 1 or sum(length) != steps:
        raise errors.DecodeError("segment lengths do not add up to the steps", reason="shape")
    observation, action = spec.observation, spec.action
    if isinstance(whole, errors.DecodeError):
        raise whole
    experience = unpacked(experience, spec) if whole is None else whole
    seen = experience.observation
    if seen.shape != _observed(experience, observation) or seen.dtype != observation.dtype:
        raise errors.DecodeError("observations do not have the spec's shape and dtype", reason="shape")
    if experience.action.shape != (steps, *action.shape) or experience.action.dtype != action.dtype:
        raise errors.DecodeError("actions do not have the spec's shape and dtype", reason="shape")
    if len(experience.log_prob) not in (0, steps):
        raise errors.DecodeError("log-probabilities do not match the steps", reason="shape")
    if head in specs.SAMPLED_HEADS and experience.version and not len(experience.log_prob):
        raise errors.DecodeError("a sampled action came without its log-probability", reason="log_prob")
    if min(env_index) < 0 or min(row) < 0 or experience.draw < 0 or max(terminated) > 1 or max(truncated) > 1:
        raise errors.DecodeError("flags are neither 0 nor 1", reason="value")
    floats: list[NDArray[Any]] = [experience.reward]
    if len(experience.log_prob):
        floats.append(experience.log_prob)
    if observation.dtype == "float32":
        floats.append(experience.observation)
    if head == "gaussian":
        floats.append(experience.action)
    if not all(map(math.isfinite, episode_return)) or not all(map(_is_bounded, floats)):
        raise errors.DecodeError(f"NaN, or values beyond {specs.MAX_MAGNITUDE:g}", reason="value")
    if action.kind == "discrete":
        # As unsigned numbers those below 0 are the largest: one pass for both ends
        legal = bool(experience.action.view(np.uint32).max() < action.n)
    elif head == "gaussian":  # as sampled: bounds clip it on its way to the environment, and learning must not see that
        legal = True
    else:
        flat = experience.action.reshape(steps, -1)
        legal = bool(
            (flat >= np.array(action.low, np.float32)).all() and (flat <= np.array(action.high, np.float32)).all()
        )
    if not legal:
        raise errors.DecodeError("actions out of bounds", reason="action")
    return experience


def _is_bounded(array: NDArray[Any]) -> bool:
    """Returns whether none is larger than MAX_MAGNITUDE. One pass of BLAS: the sum of squares shows it, and NaN."""
    if np.vdot(array, array) < specs.MAX_MAGNITUDE**2 / 2:
        return True
    return bool((np.abs(array) <= specs.MAX_MAGNITUDE).all())
