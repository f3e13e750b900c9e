"""Feeds a trial with the episodes of actors that play one of two policies at the same time.

A stream is one environment of one actor: its episodes, one after the other. Each stream of the challenger has a partner
among those of the incumbent, and the k-th episode of one is compared with the k-th of the other. What ends first is not
compared first: in a pool of streams that would be the short episodes, of whichever side has more streams.

Partners are made in the order in which streams begin their first episode, which tells nothing of how that ends. What a
stream plays while it has no partner does not count, nor the episode in which it gets one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from broker.contract import messages
from learner.experience import whole_episodes
from learner.policies import sequential

WAITING_MAX = 4096
"""Returns of a stream that wait for its partner's; those beyond are passed over."""


@dataclass(slots=True, eq=False)
class _Stream:
    """One environment's episodes under one policy; `returns` are those that wait for the partner's."""

    actor_id: str
    env: int
    is_challenger: bool
    partner: _Stream | None = None
    returns: deque[float] = field(default_factory=deque)


class PairedTrial:
    """A challenger's trial against the incumbent.

    Args:
        challenger: Place of its policy among all.
        incumbent: The same of the other one's.

    Attributes:
        challenger_return, incumbent_return: Sums of the returns that were compared.
    """

    def __init__(self, challenger: messages.Order, incumbent: messages.Order) -> None:
        self._orders = {challenger: True, incumbent: False}
        self._trial = sequential.Trial()
        self._episodes: dict[str, whole_episodes.WholeEpisodes] = {}
        self._sides: dict[str, bool] = {}
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._free: dict[bool, dict[_Stream, None]] = {True: {}, False: {}}  # without a partner, by side
        self.challenger_return = self.incumbent_return = 0.0

    @property
    def decision(self) -> sequential.Decision:
        """What the pairs so far have decided."""
        return self._trial.decision

    @property
    def pairs(self) -> int:
        """Pairs of episodes that were compared."""
        return self._trial.pairs

    @property
    def actors(self) -> set[str]:
        """Those whose episodes are followed."""
        return set(self._sides)

    def add(self, actor_id: str, experience: messages.Experience) -> None:
        """Takes in a message. What another policy chose tells nothing."""
        side = self._orders.get(messages.Order(experience.epoch, experience.version))
        if self.decision != "wait":
            return
        if self._sides.get(actor_id, side) != side:
            self.drop(actor_id)
        if side is None:
            return
        self._sides[actor_id] = side
        followed = self._episodes.setdefault(actor_id, whole_episodes.WholeEpisodes())
        ended = followed.add(experience)
        for env in sorted({env for env, _ in ended} | followed.begun):  # by how they ended would favour what is short
            if (actor_id, env) not in self._streams:
                self._join(_Stream(actor_id, env, side))
        for env, total in ended:
            stream = self._streams[actor_id, env]
            if stream.partner is not None and len(stream.returns) < WAITING_MAX:
                stream.returns.append(total)
                self._compare(stream, stream.partner)

    def drop(self, actor_id: str) -> None:
        """Forgets an actor's streams: it is gone, or plays another policy. Their partners look for others."""
        self._episodes.pop(actor_id, None)
        self._sides.pop(actor_id, None)
        left: list[_Stream] = []
        for key in [key for key in self._streams if key[0] == actor_id]:
            stream = self._streams.pop(key)
            self._free[stream.is_challenger].pop(stream, None)
            if stream.partner is not None:
                left.append(stream.partner)
        for partner in left:
            partner.partner = None
            partner.returns.clear()
            self._find_partner(partner, begins_anew=True)

    def _join(self, stream: _Stream) -> None:
        self._streams[stream.actor_id, stream.env] = stream
        self._find_partner(stream, begins_anew=False)

    def _find_partner(self, stream: _Stream, *, begins_anew: bool) -> None:
        free = self._free[not stream.is_challenger]
        if not free:
            self._free[stream.is_challenger][stream] = None
            return
        other = next(iter(free))
        del free[other]
        stream.partner, other.partner = other, stream
        self._forget_begun(other)
        if begins_anew:
            self._forget_begun(stream)

    def _forget_begun(self, stream: _Stream) -> None:
        self._episodes[stream.actor_id].begun.discard(stream.env)

    def _compare(self, stream: _Stream, partner: _Stream) -> None:
        one, other = (stream, partner) if stream.is_challenger else (partner, stream)
        while one.returns and other.returns and self.decision == "wait":
            tried, kept = one.returns.popleft(), other.returns.popleft()
            self.challenger_return += tried
            self.incumbent_return += kept
            self._trial.add_challenger(tried)
            self._trial.add_incumbent(kept)
