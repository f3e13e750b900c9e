"""Hears the episodes of a trial in a deployment: experience is granted a little ahead, looked at, and not kept.

What is granted here is receipted, so that actors can go on. What an actor still holds of a training run is not, for its
learner shall have it; nor is then what comes behind, for a receipt covers all before it. Such an actor is heard until
its window is full (`edge_actor/experience/window.py`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping

from broker.contract import codec, errors, messages, specs
from learner.experience import validate
from learner.fleet import actors, receipts, roster, session

_log = logging.getLogger(__name__)
AHEAD_STEPS = 4096
"""Steps that an actor which acts flat out may record before it is heard."""
AHEAD_S = 2.0
"""The same of one that holds a rate, in seconds."""


class Listener:
    """Takes in what actors record under assignments of this session.

    Args:
        fleet: Seals receipts.
        actors: Count what they were granted.
        spec: Of the environment.
        heads: What policies put out, by version.

    Attributes:
        refused: Messages that do not count, by reason; those of training runs as `held`, those that came before as
            `duplicate`.
    """

    def __init__(
        self, fleet: session.Session, actors: roster.Roster, spec: specs.EnvSpec, heads: Mapping[int, specs.Head]
    ) -> None:
        self._session, self._roster, self._spec, self._heads = fleet, actors, spec, heads
        self._first: dict[tuple[str, int], int] = {}  # number of the first message that is ours, by actor and boot
        self._last: dict[tuple[str, int], int] = {}
        self._owed: dict[tuple[str, int], int] = {}
        self.refused: Counter[str] = Counter()

    def ahead(self, actor: actors.Actor) -> int:
        """Returns how many steps an actor may record before it is heard."""
        birth = actor.state.birth if actor.state else None
        if birth is None or not birth.rate_hz:
            return AHEAD_STEPS
        return math.ceil(birth.rate_hz * birth.n_envs * max(AHEAD_S, self._roster.grant_s))

    def receive(self, actor_id: str, topic: str, payload: bytes, newest: int) -> messages.Experience | None:
        """Returns the experience of a message if it is sound, was granted here, and did not come before.

        Args:
            actor_id: The actor whose topic it came by.
            topic: That topic.
            payload: The sealed message.
            newest: The newest version on the channel that the actor follows.
        """
        try:
            experience = self._opened(actor_id, topic, payload, newest)
        except errors.MessageError as error:
            self.refused[error.reason] += 1
            self._session.note_outcome(topic, len(payload), None)
            return None
        steps, key = len(experience.reward), (actor_id, experience.boot)
        self._session.note_outcome(topic, len(payload), steps)
        first = self._first.setdefault(key, experience.seq)
        if experience.oldest >= first:
            self._owed[key] = max(experience.seq, self._last.get(key, 0))
        elif key not in self._last:
            _log.info("actor %s holds experience of another session, which stays there", actor_id)
        if experience.seq <= self._last.get(key, 0):
            self.refused["duplicate"] += 1
            return None
        self._last[key] = experience.seq
        self._roster.count_received(actor_id, experience.boot, experience.assigned_epoch, steps)
        return experience

    def send_receipts(self) -> None:
        """Tells actors what they need not hold any longer."""
        ledger, owed, self._owed = f"trial-{self._session.id}", self._owed, {}
        receipts.send(
            self._session.retain_all,
            self._session.topics,
            ((actor_id, messages.Receipt(ledger, boot, seq)) for (actor_id, boot), seq in owed.items()),
        )

    def _opened(self, actor_id: str, topic: str, payload: bytes, newest: int) -> messages.Experience:
        """Returns what is in a message.

        Raises:
            MessageError: It does not count.
        """
        mac = self._session.macs.get(actor_id)
        if mac is None:
            raise errors.SignatureError("the actor is not enrolled", reason="unknown_actor")
        experience = codec.decode(messages.Experience, mac.open(topic, payload))
        if experience.assigned_epoch != self._session.epoch:
            raise errors.DecodeError("recorded for another session", reason="held")
        if experience.fingerprint != self._spec.fingerprint:
            raise errors.DecodeError("made in another environment", reason="fingerprint")
        if experience.epoch == self._session.epoch and experience.version > newest:
            raise errors.DecodeError("chosen by a policy that does not go to this actor", reason="version")
        head = self._heads.get(experience.version, self._spec.action.heads[0])
        experience = validate.checked(experience, self._spec, head)
        if not self._roster.may_send(actor_id, experience.boot, experience.assigned_epoch, len(experience.reward)):
            raise errors.DecodeError("more steps than were granted", reason="grant")
        return experience
