"""Mutated and random payloads of every kind: a message or a MessageError, never anything else.

Seeded, so that a failure repeats; the failing payload is in the assertion's message. What learner and actor make of
such payloads is in tests/system/security/test_fuzz.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from broker.contract import codec, errors, messages
from tests.broker.contract.payloads import examples, mutations

ROUNDS = 2000


@pytest.mark.parametrize("kind", sorted(messages.KINDS))
@pytest.mark.parametrize("mutate", [mutations.damaged, mutations.with_odd_header, mutations.noise])
def test_mutations(kind: str, mutate: Callable[[bytes, random.Random], bytes]) -> None:
    source = random.Random(kind)
    original = examples.golden(kind)
    for _ in range(ROUNDS):
        payload = mutate(original, source)
        try:
            codec.decode(messages.KINDS[kind], payload)
        except errors.MessageError as error:
            str(error).encode()  # it can be shown
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} on {payload!r}")
