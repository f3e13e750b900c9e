"""The pause before the next attempt grows, and is jittered."""

from __future__ import annotations

from broker.mqtt import backoff


def test_backoff_grows_is_capped_and_is_jittered() -> None:
    limit = backoff.LIMIT_S
    for failures, base in ((0, 0.1), (1, 0.2), (3, 0.8), (6, 6.4), (7, limit), (10**6, limit)):
        delays = [backoff.delay_s(failures) for _ in range(200)]
        assert base * 0.5 <= min(delays) and max(delays) <= base
        assert len(set(delays)) > 100, "a fleet must not come back as one"
