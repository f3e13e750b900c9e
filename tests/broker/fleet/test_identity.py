"""Keys and counters on disk: who can read them, and that they only ever grow."""

from __future__ import annotations

import itertools
import json
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from broker.contract import address, errors, signing
from broker.fleet import counters, identity
from broker.program import storage

COUNT = """
import pathlib, sys
from broker.fleet import counters
for _ in range(50):
    print(counters.next_count(pathlib.Path(sys.argv[1])))
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def fleet(tmp_path: Path) -> identity.Fleet:
    return identity.Fleet.open("lab", tmp_path / "lab")


def test_home_is_where_it_was_put(actorq_home: Path) -> None:
    assert identity.home() == actorq_home
    assert identity.Fleet.open("lab").directory == actorq_home / "fleets" / "lab"


def test_all_is_readable_by_its_owner_alone(fleet: identity.Fleet, tmp_path: Path) -> None:
    fleet.enroll("pi", ["10.0.0.1:1883"])
    fleet.next_epoch()
    fleet.enroll("pi2").write(tmp_path / "bundle.json")
    assert mode(tmp_path / "bundle.json") == 0o600
    for path in (fleet.directory, *fleet.directory.rglob("*")):
        assert mode(path) & 0o077 == 0, path


def test_keys_survive_and_differ_between_fleets(fleet: identity.Fleet, tmp_path: Path) -> None:
    again = identity.Fleet.open("lab", fleet.directory)
    other = identity.Fleet.open("other", tmp_path / "other")
    assert again.sealer.public_key == fleet.sealer.public_key != other.sealer.public_key
    assert again.password == fleet.password != other.password


def test_a_bundle_opens_what_the_learner_seals_and_the_reverse(fleet: identity.Fleet, tmp_path: Path) -> None:
    fleet.enroll("pi", ["10.0.0.1:1883", "10.0.0.2"]).write(tmp_path / "b.json")
    bundle = identity.Bundle.read(tmp_path / "b.json")
    assert (bundle.fleet, bundle.actor_id, bundle.brokers) == ("lab", "pi", ("10.0.0.1:1883", "10.0.0.2"))
    sealed = fleet.sealer.seal("t", b"policy")
    assert bytes(signing.LearnerVerifier(bundle.learner_key).open("t", sealed)) == b"policy"
    sealed = signing.ActorMac(bundle.mac_key).seal("t", b"experience")
    assert bytes(signing.ActorMac(fleet.bundle("pi").mac_key).open("t", sealed)) == b"experience"


def test_every_actor_has_its_own_secrets(fleet: identity.Fleet) -> None:
    one, two = fleet.enroll("one"), fleet.enroll("two")
    assert one.mac_key != two.mac_key and one.password != two.password
    assert fleet.actors() == ["one", "two"]
    assert fleet.users() == fleet.own_users() | {"one": one.password, "two": two.password}


def test_enrolling_again_renews(fleet: identity.Fleet) -> None:
    old, new = fleet.enroll("pi"), fleet.enroll("pi")
    assert old.mac_key != new.mac_key and old.password != new.password
    assert fleet.bundle("pi") == new


def test_rotation_leaves_no_old_secret_good(fleet: identity.Fleet) -> None:
    old = [fleet.enroll("one"), fleet.enroll("two", ["elsewhere:8883"])]
    before = (fleet.password, fleet.sealer.public_key, fleet.learner_credential(), fleet.broker_credential())
    running = identity.Fleet.open("lab", fleet.directory)
    running.check_key()
    assert fleet.next_epoch() == 1

    new = fleet.rotate()
    again = identity.Fleet.open("lab", fleet.directory)
    after = (again.password, again.sealer.public_key, again.learner_credential(), again.broker_credential())
    assert not set(before) & set(after)
    for was, now in zip(old, new, strict=True):
        assert (was.actor_id, was.brokers, was.authority) == (now.actor_id, now.brokers, now.authority)
        assert now.learner_key == again.sealer.public_key == fleet.sealer.public_key
        for secret in ("mac_key", "password", "credential"):
            assert getattr(was, secret) != getattr(now, secret)
        assert again.bundle(now.actor_id) == now
        with pytest.raises(errors.SignatureError):
            signing.LearnerVerifier(now.learner_key).open("t", running.sealer.seal("t", b"of the old learner"))
        with pytest.raises(errors.SignatureError):
            signing.LearnerVerifier(was.learner_key).open("t", again.sealer.seal("t", b"of the new one"))
    assert again.next_epoch() == 2, "an epoch is never used twice"
    with pytest.raises(errors.IdentityError, match="rotated.*\n.*\n.*--resume"):
        running.check_key()


@pytest.mark.parametrize("name", ["learner", "Pi", "a/b", "../evil", "", "+"])
def test_names_that_cannot_be_enrolled(fleet: identity.Fleet, name: str) -> None:
    with pytest.raises(errors.ConfigError):
        fleet.enroll(name)
    assert fleet.actors() == []


def test_epochs_grow_and_survive(fleet: identity.Fleet) -> None:
    epochs = [fleet.next_epoch(), fleet.next_epoch(), identity.Fleet.open("lab", fleet.directory).next_epoch()]
    assert epochs == [1, 2, 3]


def test_counters_are_shared_between_processes(tmp_path: Path) -> None:
    counter = tmp_path / "new" / "boot"
    command = [sys.executable, "-c", COUNT, str(counter)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(line) for one in running for line in one.communicate(timeout=60)[0].split()]
    assert sorted(counts) == list(range(1, 151))
    assert mode(counter) == 0o600


@pytest.mark.parametrize("text", ["", "one", "1.5"])
def test_a_broken_counter_is_not_started_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "epoch").write_text(text)
    with pytest.raises(errors.IdentityError, match="does not hold a number"):
        counters.next_count(tmp_path / "epoch")


def test_a_fleet_that_does_not_exist_is_not_made_when_unwanted(tmp_path: Path) -> None:
    with pytest.raises(errors.IdentityError, match="has no keys.*\n.*where.*\n.*actorq-broker init"):
        identity.Fleet.open("lab", tmp_path / "lab", create=False)
    assert not (tmp_path / "lab").exists()


def test_a_broken_key_is_not_replaced(fleet: identity.Fleet) -> None:
    (fleet.directory / "learner.pem").write_text("not a key")
    with pytest.raises(errors.IdentityError, match="restore it from your backup"):
        identity.Fleet.open("lab", fleet.directory)


def test_bundle_missing(tmp_path: Path) -> None:
    with pytest.raises(errors.IdentityError, match="there is no enrolment bundle"):
        identity.Bundle.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "change",
    [
        {"fleet": "Not A Fleet"},
        {"actor_id": "../etc"},
        {"mac_key": "00"},
        {"mac_key": "zz"},
        {"mac_key": None},
        {"learner_key": "11" * 31},
        {"brokers": None},
    ],
)
def test_bundles_that_are_none(fleet: identity.Fleet, tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "b.json"
    fleet.enroll("pi").write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(errors.IdentityError):
        identity.Bundle.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_files_that_are_no_bundle(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(errors.IdentityError, match="cannot be read"):
        identity.Bundle.read(path)


def test_an_atomic_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    storage.write_atomic(path, b"one")
    storage.write_atomic(path, b"two")
    assert path.read_bytes() == b"two" and [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("left", [None, "", "rubbish", "3", "9999999999"])
def test_boots_of_two_copies_differ_and_rise(left: str | None, tmp_path: Path) -> None:
    files = [tmp_path / card / "boot" for card in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        if left is not None:
            file.write_text(left)
    before = int(time.time())
    boots = [[counters.next_boot(file) for _ in range(3)] for file in files]
    assert all(one == sorted(set(one)) for one in boots)
    assert not {*boots[0]} & {*boots[1]}
    assert all(0 < boot < 2**63 for one in boots for boot in one)
    for file in files:  # lost, or put back: as long as the clock is right, no number is lower than one before
        assert int(file.read_text()) >= max(before, 10_000_000_002 if left == "9999999999" else 0)


def test_actors_share_the_brokers_and_their_second_choices() -> None:
    names = [f"pi-{n}" for n in range(3000)]
    orders = {name: identity.spread(("a", "b", "c"), name) for name in names}
    assert set(orders.values()) == set(itertools.permutations("abc"))
    for count in Counter(orders.values()).values():
        assert 400 < count < 600, "a sixth each: of a broker that is lost, the others share what it had"
    assert orders == {name: identity.spread(("a", "b", "c"), name) for name in names}, "and always the same"
    moved = {name: identity.spread(("a", "b", "c", "d"), name)[0] for name in names}
    changed = {name for name in names if moved[name] != orders[name][0]}
    assert {moved[name] for name in changed} == {"d"} and 600 < len(changed) < 900, "a new one takes its share, no more"


def test_a_bundle_has_an_order_of_its_own_unless_one_is_named(tmp_path: Path) -> None:
    fleet = identity.Fleet.open("lab", tmp_path / "lab")
    fleet.name_brokers([address.Address("10.0.0.1", 8883, True), address.Address("10.0.0.2", 8883, True)])
    bundles = [fleet.enroll(f"pi-{n}") for n in range(20)]
    assert len({bundle.brokers for bundle in bundles}) == 2
    assert all(bundle.brokers == identity.spread(fleet.brokers, bundle.actor_id) for bundle in bundles)
    assert fleet.enroll("x", ["mqtts://b:1", "mqtts://a:1"]).brokers == ("mqtts://b:1", "mqtts://a:1")
