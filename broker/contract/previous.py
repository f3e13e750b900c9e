"""How the schema before ours says what ours does: all that is different, and nothing else.

A learner works with actors of its own schema and of this one, so that it is updated first and they follow by `fleet
update`. It says everything in this schema, but for what this one cannot say; and reads both. Fields are the JSON texts
of a header by name, without its arrays, which are the same in both. When SCHEMA_VERSION changes, this file is written
anew (docs/protocol.md, "Two releases").

Here: an assignment has no `shard`, for experience goes to the actor's own topic.
"""

from __future__ import annotations

import dataclasses

from broker.contract import errors, messages, topics

VERSION = 11
CHANGED = frozenset({"assignment"})
"""Kinds of messages that this schema says otherwise; of the others the number alone differs."""
_NO_SHARD = "-1"


def read(kind: str, fields: dict[str, str]) -> dict[str, str]:
    """Returns the fields of a message of this schema as ours has them.

    Raises:
        DecodeError: It has one that this schema does not have.
    """
    if kind not in CHANGED:
        return fields
    if "shard" in fields:
        raise errors.DecodeError(f"schema {VERSION} has no shard", reason="field")
    return {**fields, "shard": _NO_SHARD}


def written(kind: str, fields: dict[str, str]) -> dict[str, str] | None:
    """Returns fields of a message of ours as this schema has them; None where it cannot say the same."""
    if kind not in CHANGED:
        return fields
    return {name: text for name, text in fields.items() if name != "shard"} if fields["shard"] == _NO_SHARD else None


def fitted(assignment: messages.Assignment, schema: int) -> messages.Assignment:
    """Returns an assignment without what an actor of `schema` cannot do."""
    return dataclasses.replace(assignment, shard=-1) if schema == VERSION else assignment


def experience(fleet: topics.Topics, actor_id: str) -> tuple[str, ...]:
    """Returns the topics at which experience of an actor of this schema comes, where ours sends it to its shard."""
    return (fleet.experience(actor_id),)
