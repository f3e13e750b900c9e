"""The brokers that we start meet each need; what a broker lacks is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.fleet import identity
from broker.serve.mosquitto import process
from tests import conftest
from tests.broker.conformance import __main__ as command
from tests.broker.conformance import brokers, client, needs

OURS = ("mosquitto, as up --tls starts it", "mosquitto, as up starts it", "embedded")


@pytest.fixture(scope="module", params=OURS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[client.Site]:
    conftest.require("mosquitto" if request.param.startswith("mosquitto") else "embedded")
    with brokers.installed()[request.param](tmp_path_factory.mktemp("home")) as started:
        yield started


@pytest.mark.parametrize("need", needs.NEEDS, ids=lambda need: need.__name__)
def test_our_brokers_meet_each_need(
    site: client.Site, need: needs.Need, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if need is needs.actors_are_kept_apart and not site.actors:
        with pytest.raises(client.Unmet, match="sent as another"):
            need(client.Site(site.where, site.fleet, _strangers(site)))
        return
    if need is needs.will_of_the_silent and "embedded" in request.node.name:  # of a process that dies, its socket tells
        monkeypatch.setattr(client, "ANSWER_S", 5.0)
        with pytest.raises(client.Unmet, match="nothing arrived"):
            need(site)
        return
    need(site)


def _strangers(site: client.Site) -> list[identity.Bundle]:
    return [site.fleet.enroll(name) for name in ("pi-one", "pi-two")]


@pytest.mark.mosquitto
def test_what_is_dropped_in_silence_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mosquitto at its defaults acknowledges all, and drops what a slow subscriber is not fast enough for."""
    conftest.require("mosquitto")
    assert process.find()
    monkeypatch.setattr(needs, "NEEDS", (needs.order, needs.slow_subscriber, needs.actors_are_kept_apart))
    with brokers.installed()["mosquitto, its defaults"](tmp_path) as started:
        assert command._run([f"{started.where.host}:{started.where.port}"]) == 1
    told = dict(line.split(None, 2)[1:] for line in capsys.readouterr().out.splitlines()[:3])
    assert told["order"] == command.MET and told["actors_are_kept_apart"] == command.NOT_ASKED
    assert "were dropped, all of them acknowledged" in told["slow_subscriber"]
