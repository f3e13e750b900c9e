"""Every MQTT topic of the fleet: builders, filters and one parser.

`Topics("lab").experience("pi-kitchen")` is `actorq/lab/actor/pi-kitchen/experience`. The table of who publishes what,
at which QoS and retained or not, is in README.md beside this file.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

from broker.contract import errors

ROOT = "actorq"
MAIN_CHANNEL = "main"
CANARY_CHANNEL = "canary"
"""The channel of policies that only some of the actors try."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def check_name(name: str, what: str) -> str:
    """Returns `name` if it can be one level of a topic.

    Raises:
        ConfigError: It holds anything but a-z, 0-9, `-` and `_`, or is longer than 63 characters.
    """
    if not _NAME.fullmatch(name):
        raise errors.ConfigError(
            f"{what} {name!r} is not a valid name",
            todo="use 1 to 63 characters of a-z, 0-9, '-' and '_', the first a letter or digit",
        )
    return name


def shard_of(actor_id: str, shards: int) -> int:
    """Returns which of so many shards an actor's experience goes to, on every machine the same; -1 of none."""
    if not shards:
        return -1
    return int.from_bytes(hashlib.blake2b(actor_id.encode(), digest_size=8).digest(), "little") % shards


@functools.lru_cache(4096)  # a learner asks for each message
def _actor_id(fleet: str, topic: str) -> str:
    parts = topic.split("/")
    if len(parts) == 5 and parts[:3] == [ROOT, fleet, "ingest"] and _NAME.fullmatch(parts[4]):
        return parts[4]
    if len(parts) != 5 or parts[:3] != [ROOT, fleet, "actor"] or not _NAME.fullmatch(parts[3]):
        raise errors.DecodeError("not an actor's topic", reason="topic", where=topic)
    return parts[3]


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one fleet."""

    fleet: str

    def __post_init__(self) -> None:
        check_name(self.fleet, "fleet")

    @property
    def learner_state(self) -> str:
        return f"{ROOT}/{self.fleet}/learner/state"

    def policy(self, channel: str) -> str:
        """The whole policy of a channel, retained."""
        return f"{ROOT}/{self.fleet}/policy/{channel}/whole"

    def policy_patch(self, channel: str) -> str:
        """A newer policy of a channel as a patch on its whole one, retained."""
        return f"{ROOT}/{self.fleet}/policy/{channel}/patch"

    def policy_piece(self, channel: str) -> str:
        """The newest policies of a channel in pieces, as they are made."""
        return f"{ROOT}/{self.fleet}/policy/{channel}/piece"

    def policies(self, channel: str) -> tuple[str, ...]:
        """Returns all topics by which policies of a channel come."""
        return self.policy(channel), self.policy_piece(channel), self.policy_patch(channel)

    def actor(self, actor_id: str, leaf: str) -> str:
        return f"{ROOT}/{self.fleet}/actor/{actor_id}/{leaf}"

    def actor_state(self, actor_id: str) -> str:
        return self.actor(actor_id, "state")

    def assignment(self, actor_id: str) -> str:
        return self.actor(actor_id, "assignment")

    def experience(self, actor_id: str, shard: int = -1) -> str:
        """The topic of an actor's experience: its own, or the one at which a shard's worker listens for it."""
        return self.actor(actor_id, "experience") if shard < 0 else self.ingest(shard, actor_id)

    def ingest(self, shard: int | str, actor_id: str) -> str:
        """The experience of an actor that goes to a shard (`+`: to any), each of which has a worker of its own."""
        return f"{ROOT}/{self.fleet}/ingest/{shard}/{actor_id}"

    def receipt(self, actor_id: str) -> str:
        return self.actor(actor_id, "receipt")

    def command(self, actor_id: str) -> str:
        return self.actor(actor_id, "command")

    def report(self, actor_id: str) -> str:
        return self.actor(actor_id, "report")

    def orders(self, actor_id: str) -> str:
        return self.actor(actor_id, "orders")

    def answer(self, actor_id: str) -> str:
        return self.actor(actor_id, "answer")

    @property
    def release_list(self) -> str:
        """The signed list of the release that goes out, retained while it does."""
        return f"{ROOT}/{self.fleet}/release/list"

    def release_piece(self, index: int) -> str:
        """A piece of its bytes, retained as long."""
        return f"{ROOT}/{self.fleet}/release/piece/{index}"

    @property
    def every_release(self) -> str:
        """The filter that matches both."""
        return f"{ROOT}/{self.fleet}/release/#"

    def every_actor(self, leaf: str) -> str:
        """Returns the filter that matches `leaf` of all actors."""
        return self.actor("+", leaf)

    def actor_id(self, topic: str) -> str:
        """The actor that a topic belongs to.

        Raises:
            DecodeError: The topic is not one of this fleet's actor topics.
        """
        return _actor_id(self.fleet, topic)
