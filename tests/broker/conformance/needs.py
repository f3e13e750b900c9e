"""What the contract needs of a broker: a function for each need, which raises `Unmet` with what the broker did instead.

Topics are those of a fleet, so that a broker's own rules of access are asked as they will be.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from broker.contract import messages, specs, topics
from tests.broker.conformance.client import Client, Site, Unmet

Need = Callable[[Site], None]
MANY = 3000
"""Messages that wait for a slow subscriber, and topics of one SUBSCRIBE: more than the defaults that are in the way."""


def _name() -> str:
    return f"ask-{secrets.token_hex(4)}"


def _expect(client: Client, *expected: tuple[str, bytes, bool]) -> None:
    found = [client.next() for _ in expected]
    if sorted(found) != sorted(expected):
        raise Unmet(f"{_shown(found)} arrived, not {_shown(list(expected))}")


def _shown(found: list[tuple[str, bytes, bool]]) -> str:
    return ", ".join(f"{payload[:12]!r}{' retained' if retained else ''}" for _, payload, retained in sorted(found))


def _nothing_but(client: Client, site: Site, topic: str) -> None:
    """Sends a message that must be the next one to arrive: so that nothing was on its way before it."""
    with site.client(_name()) as other:
        other.publish(topic, b"marker")
    if (found := client.next()) != (topic, b"marker", False):
        raise Unmet(f"{_shown([found])} arrived, which should not")


def retained_wildcard(site: Site) -> None:
    """Who subscribes to all actors hears what each has retained."""
    names, all_ = topics.Topics(site.fleet.name), ["one", "two", "three"]
    with site.client(_name()) as learner:
        for name in all_:
            learner.publish(names.actor(name, "state"), name.encode(), retain=True)
        with site.client(_name()) as other:
            other.subscribe(names.every_actor("state"))
            _expect(other, *((names.actor(name, "state"), name.encode(), True) for name in all_))
        for name in all_:
            learner.publish(names.actor(name, "state"), b"", retain=True)


def retained_replaced(site: Site) -> None:
    """A newer retained message takes the place of the older one, an empty one takes it away."""
    topic = topics.Topics(site.fleet.name).actor("one", "assignment")
    with site.client(_name()) as learner:
        for payload in (b"old", b"new"):
            learner.publish(topic, payload, retain=True)
        with site.client(_name()) as other:
            other.subscribe(topic)
            _expect(other, (topic, b"new", True))
        learner.publish(topic, b"", retain=True)
        with site.client(_name()) as other:
            other.subscribe(topic)
            _nothing_but(other, site, topic)


def live_is_not_retained(site: Site) -> None:
    """What is retained comes to who subscribed before it without the flag: it is news."""
    topic = topics.Topics(site.fleet.name).learner_state
    with site.client(_name()) as learner, site.client(_name()) as other:
        other.subscribe(topic)
        learner.publish(topic, b"news", retain=True)
        found = other.next()
        learner.publish(topic, b"", retain=True)
    if found != (topic, b"news", False):
        raise Unmet(f"{_shown([found])} arrived")


def will_of_the_dead(site: Site) -> None:
    """The will of a connection that was cut is said and retained."""
    topic = topics.Topics(site.fleet.name).actor("one", "state")
    with site.client(_name()) as watcher:
        watcher.subscribe(topic)
        with site.client(_name(), will=(topic, b"gone")) as dying:
            dying.cut()
            _expect(watcher, (topic, b"gone", False))
        with site.client(_name()) as late:
            late.subscribe(topic)
            _expect(late, (topic, b"gone", True))
        watcher.publish(topic, b"", retain=True)


def will_of_the_silent(site: Site) -> None:
    """The will of a machine that says nothing any more is said after one and a half times its keep-alive."""
    topic = topics.Topics(site.fleet.name).actor("one", "state")
    with site.client(_name()) as watcher:
        watcher.subscribe(topic)
        with site.client(_name(), will=(topic, b"silent"), keepalive_s=2) as dying:
            dying.freeze()
            _expect(watcher, (topic, b"silent", False))
        watcher.publish(topic, b"", retain=True)


def goodbye_withdraws_the_will(site: Site) -> None:
    """Who says goodbye leaves no will."""
    topic = topics.Topics(site.fleet.name).actor("one", "state")
    with site.client(_name()) as watcher:
        watcher.subscribe(topic)
        with site.client(_name(), will=(topic, b"gone")):
            pass
        _nothing_but(watcher, site, topic)


def order(site: Site) -> None:
    """Messages of one publisher arrive in order, and all of them."""
    topic, sent = topics.Topics(site.fleet.name).actor("one", "experience"), [b"%d" % n for n in range(1000)]
    with site.client(_name()) as listener, site.client(_name()) as publisher:
        listener.subscribe(topic)
        publisher.publish_many(topic, sent)
        found = list(dict.fromkeys(listener.next()[1] for _ in sent))
    if found != sent:
        raise Unmet(f"they arrived in another order, {len(found)} different ones of {len(sent)}")


def slow_subscriber(site: Site) -> None:
    """Nothing is dropped for a subscriber that is connected and slow: 3000 messages of 1 KB."""
    topic, sent = topics.Topics(site.fleet.name).actor("one", "experience"), [b"%01000d" % n for n in range(MANY)]
    with site.client(_name()) as listener, site.client(_name()) as publisher:
        listener.subscribe(topic)
        listener.may_receive.clear()
        publisher.publish_many(topic, sent)
        listener.may_receive.set()
        found: set[bytes] = set()
        try:
            while len(found) < len(sent):
                found.add(listener.next(5.0)[1])
        except Unmet:
            raise Unmet(f"{len(sent) - len(found)} of {len(sent)} were dropped, all of them acknowledged") from None


def large_experience(site: Site) -> None:
    """A message of experience has up to 8 MB."""
    _large(site, topics.Topics(site.fleet.name).actor("one", "experience"), specs.MAX_EXPERIENCE_BYTES, retain=False)


def large_policy(site: Site) -> None:
    """A policy has up to 40 MB, and is retained."""
    names = topics.Topics(site.fleet.name)
    _large(site, names.policy(topics.MAIN_CHANNEL), messages.MAX_PACKET_BYTES - 1000, retain=True)


def _large(site: Site, topic: str, size: int, *, retain: bool) -> None:
    payload = os.urandom(1 << 10) * (size >> 10)
    # What paho has read whole in just its 100th read of a turn waits for the next byte that comes (paho 2.1,
    # `_packet_read`): the answer to a ping is that
    with site.client(_name()) as publisher, site.client(_name(), keepalive_s=2) as listener:
        if not retain:
            listener.subscribe(topic)
        publisher.publish(topic, payload, retain=retain, timeout_s=60.0)
        if retain:
            listener.subscribe(topic)
        try:
            found = listener.next(60.0)
        except Unmet:
            raise Unmet(f"a message of {size / 1e6:.0f} MB was acknowledged, and never came") from None
        if retain:
            publisher.publish(topic, b"", retain=True)
    if found != (topic, payload, retain):
        raise Unmet("it came, and differs")


def many_topics(site: Site) -> None:
    """One SUBSCRIBE may name 3000 topics, and each is granted QoS 1."""
    names = topics.Topics(site.fleet.name)
    with site.client(_name()) as learner:
        codes = learner.subscribe(*(names.actor(f"pi-{n}", "state") for n in range(MANY)))
    if codes != [1] * MANY:
        raise Unmet(f"{len(codes)} answers to {MANY}, of them QoS 1: {codes.count(1)}")


def unsubscribed(site: Site) -> None:
    """UNSUBSCRIBE is answered, and nothing of that topic comes after the answer."""
    names = topics.Topics(site.fleet.name)
    one, two = (names.actor(name, "state") for name in ("one", "two"))
    with site.client(_name()) as learner, site.client(_name()) as actor:
        learner.subscribe(one, two)
        learner.unsubscribe(one)
        actor.publish(one, b"unheard")
        _nothing_but(learner, site, two)


def clean_session(site: Site) -> None:
    """Who comes back with a clean session is sent nothing of what came while it was away."""
    topic, name = topics.Topics(site.fleet.name).actor("one", "command"), _name()
    with site.client(name) as first:
        first.subscribe(topic)
    with site.client(_name()) as learner:
        learner.publish(topic, b"missed")
    with site.client(name) as again:
        again.subscribe(topic)
        _nothing_but(again, site, topic)


def long_client_ids(site: Site) -> None:
    """Client ids have more than the 23 characters that every broker must take."""
    with site.client("a" * 90) as made:
        made.subscribe(topics.Topics(site.fleet.name).learner_state)


def actors_are_kept_apart(site: Site) -> None:
    """An actor writes at its own topics alone, and reads no other's."""
    names, (one, two) = topics.Topics(site.fleet.name), site.actors
    at_two = names.actor(two.actor_id, "experience")
    with site.client(_name()) as learner, site.client(_name(), actor=0) as rogue:
        learner.subscribe(at_two, names.actor(one.actor_id, "experience"))
        rogue.subscribe(names.assignment(two.actor_id), names.assignment(one.actor_id))
        try:
            rogue.publish(at_two, b"forged")
        except Unmet:
            return  # cut off for it: as good
        rogue.publish(names.actor(one.actor_id, "experience"), b"mine")
        if (found := learner.next())[1] != b"mine":
            raise Unmet(f"what one actor sent as another arrived: {_shown([found])}")
        for bundle in (two, one):
            learner.publish(names.assignment(bundle.actor_id), bundle.actor_id.encode())
        if (found := rogue.next())[1] != one.actor_id.encode():
            raise Unmet("an actor heard what was said to another")


NEEDS: tuple[Need, ...] = (
    retained_wildcard,
    retained_replaced,
    live_is_not_retained,
    will_of_the_dead,
    will_of_the_silent,
    goodbye_withdraws_the_will,
    order,
    slow_subscriber,
    large_experience,
    large_policy,
    many_topics,
    unsubscribed,
    clean_session,
    long_client_ids,
    actors_are_kept_apart,
)
