"""The policy that brokers hold for a channel: what actors had before this session spoke."""

from __future__ import annotations

import hashlib
import logging

import numpy as np

from broker.contract import codec, errors, messages, signing, topics
from broker.contract.policies import policy_patch

_log = logging.getLogger(__name__)


class RetainedPolicy:
    """Hears what is retained at the topics of a channel, and puts the newest policy together again.

    Args:
        names: Topics of the fleet.
        verifier: Opens what the fleet's key has signed.
        channel: The channel's name.

    Attributes:
        topics: To subscribe to with `hear`.
    """

    def __init__(
        self, names: topics.Topics, verifier: signing.LearnerVerifier, channel: str = topics.MAIN_CHANNEL
    ) -> None:
        self.topics = (names.policy(channel), names.policy_patch(channel))
        self._verifier = verifier
        self._heard: dict[tuple[str, bytes], None] = {}  # each once, however often a broker repeats it

    def hear(self, topic: str, payload: bytes, retained: bool) -> None:
        """Takes in a message; called on the network threads of any number of brokers."""
        if retained and payload:
            self._heard[topic, payload] = None

    def newest(self) -> messages.Policy | None:
        """Returns the newest policy of those heard, from whichever broker; None if none is whole and genuine."""
        wholes: list[messages.Policy] = []
        patches: list[messages.PolicyPatch] = []
        for topic, payload in tuple(self._heard):
            try:
                body = self._verifier.open(topic, payload)
                if topic == self.topics[0]:
                    wholes.append(codec.decode(messages.Policy, body))
                else:
                    patches.append(codec.decode(messages.PolicyPatch, body))
            except errors.MessageError as error:
                _log.warning("what is retained at %s is no policy of this fleet: %s", topic, error.what)
        found = [*wholes, *(made for whole in wholes for patch in patches if (made := _patched(whole, patch)))]
        sound = [one for one in found if hashlib.sha256(one.model.data).hexdigest() == one.manifest.sha256]
        return max(sound, key=lambda one: one.order, default=None)


def _patched(whole: messages.Policy, patch: messages.PolicyPatch) -> messages.Policy | None:
    """Returns the policy that a patch makes of a whole one; None if it is for another."""
    if (patch.epoch, patch.base) != tuple(whole.order):
        return None
    manifest = whole.manifest.followed_by(patch.version, patch.changes)
    try:
        return messages.Policy(manifest, np.frombuffer(policy_patch.apply(whole.model, patch.patch), np.uint8))
    except errors.ActorqError as error:
        _log.warning("the patch of policy %s cannot be applied: %s", patch.order, error.what)
        return None
