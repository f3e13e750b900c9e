"""Whatever keeps workers from being is said before anybody waits for actors."""

from __future__ import annotations

import importlib.metadata
import socket
from pathlib import Path
from typing import Any

import pytest

from broker.contract import errors, topics
from learner import config
from learner.run.workers import cluster


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Ray can be found, and nobody has a token."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.52.0")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_ray_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(errors.RuntimeMissing, match="Ray, which is not installed") as caught:
        cluster.check("")
    assert "actorq-fleet[ray]" in caught.value.todo


def test_a_ray_that_asks_for_no_token_is_refused(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(importlib.metadata, "version", lambda name: "2.9.3")
    with pytest.raises(errors.RuntimeMissing, match=r"needs Ray 2\.52 or newer.*2\.9\.3 is here"):
        cluster.check("")


def test_a_cluster_is_used_with_a_token_only(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster.check("")
    with pytest.raises(errors.ConfigError, match="with a token only") as caught:
        cluster.check("head:6379")
    assert "RAY_AUTH_MODE=token" in caught.value.todo
    installed.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(errors.ConfigError, match="not on this machine") as caught:
        cluster.check("head:6379")
    assert caught.value.where == str(tmp_path / ".ray" / "auth_token")
    installed.setenv("RAY_AUTH_TOKEN", "secret")
    cluster.check("head:6379")


def test_a_wrong_address_is_named() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        _refuses(where)


def _refuses(where: str) -> None:
    with pytest.raises(errors.RuntimeMissing, match="no Ray cluster answers") as caught:
        cluster.RayCluster.open(where, 2)
    assert where in caught.value.where


@pytest.mark.parametrize(
    ("algorithm", "changes", "why"),
    [
        (config.PpoConfig(), {}, "need steps in order"),
        (config.DqnConfig(prioritized=True), {}, "sampled uniformly"),
        (config.DqnConfig(), {"deterministic": True}, "one process"),
        (config.DqnConfig(replay_capacity=3000), {}, "exceeds the share of one of 4"),
        (config.DqnConfig(), {"ingest_workers": 65}, "0 to 64, not 65"),
        (config.DqnConfig(), {"ingest_workers": 0, "ray": "head:6379"}, "ingest_workers is 0"),
    ],
)
def test_settings_that_cannot_go_together_are_refused(
    algorithm: config.AlgorithmConfig, changes: dict[str, Any], why: str
) -> None:
    train = config.TrainConfig(**({"ingest_workers": 4} | changes))
    with pytest.raises(errors.ConfigError, match=why):
        config.check(config.Settings(train, algorithm, config.GateConfig()))


def test_shards_are_the_same_everywhere_and_share_a_fleet() -> None:
    names = [f"pi-{number}" for number in range(1000)]
    assert [topics.shard_of(name, 5) for name in names[:6]] == [3, 3, 4, 0, 1, 2]
    counts = [sum(topics.shard_of(name, 4) == shard for name in names) for shard in range(4)]
    assert min(counts) > 200
    assert topics.shard_of("pi", 0) == -1
