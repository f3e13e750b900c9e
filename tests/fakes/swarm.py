"""Many simulated actors in one process, for benchmarks and tests of load.

One thread serves all sockets: with a paho thread each, 500 clients deliver what 340 should. A policy that is sent to
all is verified once, unless each shall do it for itself (--verify-each): it is work of 500 machines, not of this one.

    python -m tests.fakes.swarm --bundles DIR --rate 50

prints one JSON line when all are connected, and one after SIGTERM or when --messages are sent.
"""

from __future__ import annotations

import argparse
import collections
import gc
import heapq
import json
import random
import resource
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from broker.fleet import identity
from broker.mqtt import backoff
from tests.fakes import simulated_actor

HEARTBEAT_S = 1.0
CONNECTS_AT_ONCE = 20
RETRY_S = 0.05
CATCH_UP_S = 1.0
RECEIPTS_TIMEOUT_S = 30.0


class Swarm:
    """Simulated actors on one epoll loop."""

    def __init__(
        self,
        bundles: Sequence[identity.Bundle],
        load: simulated_actor.Load,
        *,
        share: bool,
        state: Path | None = None,
    ) -> None:
        self.tally = simulated_actor.Tally()
        self._load = load
        self._bundles = list(bundles)
        self._share = share
        self._state = state
        self._policies: simulated_actor.Policies | None = None
        self._actors: dict[int, simulated_actor.SimulatedActor] = {}
        self._poll = select.epoll()
        self._writing: set[int] = set()
        self._due: list[tuple[float, int, str]] = []
        self._starved: set[int] = set()  # of actors that wait to be granted more steps
        self._stop = False
        self._away: dict[simulated_actor.SimulatedActor, float] = {}  # whose broker was lost, and when

    def stop(self) -> None:
        """Ends `run` soon; safe in a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Connects everybody, says so, and serves them until all are done or `stop`."""
        said = False
        while not (self._stop or (said and self._load.messages and all(a.done for a in self._actors.values()))):
            if self._bundles and len(self._actors) - self.tally.connected < CONNECTS_AT_ONCE:
                self._connect(self._bundles.pop())
            if not said and not self._bundles and self.tally.connected == len(self._actors):
                said = True
                self.tally.warm_until_s = time.monotonic() + self._load.warm_s
                gc.freeze()
                shares = collections.Counter(str(actor.where) for actor in self._actors.values())
                now = time.monotonic()
                print(json.dumps({"connected": self.tally.connected, "at_s": now, "shares": shares}), flush=True)
            self._serve()
            self._run_due()
            self._note_back()
        deadline = time.monotonic() + RECEIPTS_TIMEOUT_S
        while any(actor.held for actor in self._actors.values()) and time.monotonic() < deadline:
            self._serve()
        for actor in self._actors.values():
            actor.close()

    def _connect(self, bundle: identity.Bundle) -> None:
        if self._policies is None or not self._share:
            self._policies = simulated_actor.Policies(bundle.learner_key)
        actor = simulated_actor.SimulatedActor(bundle, self._load, self.tally, self._policies, self._state)
        number = self._register(actor)
        now = time.monotonic()
        heapq.heappush(self._due, (now + HEARTBEAT_S * random.uniform(0.5, 1.0), number, "beat"))
        heapq.heappush(self._due, (now + random.random(), number, "send"))

    def _register(self, actor: simulated_actor.SimulatedActor) -> int:
        number = actor.connection.socket.fileno()
        self._actors[number] = actor
        self._poll.register(number, select.EPOLLIN)
        return number

    def _serve(self) -> None:
        wait_s = 0.0 if self._bundles else min(0.1, max(0.0, self._due[0][0] - time.monotonic()))
        events = self._poll.poll(wait_s)
        for number, event in events:
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._read(number, self._actors[number])
        for number, event in events:  # in a real fleet, nobody waits for another one's answer
            actor = self._actors.get(number)  # none if it has just moved
            if actor is None:
                continue
            actor.connection.acknowledge()
            if event & select.EPOLLOUT:
                actor.connection.flush()
            if not self._load.rate:
                while not self._stop and not actor.connection.wants_write and actor.send():
                    pass
            if number in self._starved and (steps := actor.message_steps) > 0:  # it goes on recording
                self._starved.discard(number)
                heapq.heappush(self._due, (time.monotonic() + steps / self._load.rate, number, "send"))
            self._watch(number, actor)

    def _read(self, number: int, actor: simulated_actor.SimulatedActor) -> None:
        try:
            actor.receive()
        except OSError as error:
            self.tally.lost += 1
            if not self._load.fails_over:
                raise
            actor.tries.ended(actor.where, str(error), was_connected=True, is_wanted=False)
            self._move(number, actor)

    def _move(self, number: int, actor: simulated_actor.SimulatedActor) -> int:
        """Connects an actor to its next broker; returns the number of its new socket."""
        self._away.setdefault(actor, time.monotonic())
        actor.connection.socket.close()
        actor.reconnect()
        del self._actors[number]
        self._writing.discard(number)
        new = self._register(actor)
        self._due = [(at, new if one == number else one, what) for at, one, what in self._due]
        heapq.heapify(self._due)
        if number in self._starved:
            self._starved.discard(number)
            self._starved.add(new)
        return new

    def _note_back(self) -> None:
        """Says so, once all are back whose broker was lost."""
        if self._away and all(actor.is_back for actor in self._away):
            shares = collections.Counter(str(actor.where) for actor in self._actors.values())
            back = {"back": len(self._away), "first_lost_s": min(self._away.values()), "at_s": time.monotonic()}
            self._away.clear()
            print(json.dumps({**back, "shares": shares}), flush=True)

    def _watch(self, number: int, actor: simulated_actor.SimulatedActor) -> None:
        """Asks for the socket to be writable as long as there is something to write."""
        wants = actor.connection.wants_write
        if wants != (number in self._writing):
            self._poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if wants else 0))
            (self._writing.add if wants else self._writing.discard)(number)

    def _run_due(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and not self._stop:
            at, number, what = heapq.heappop(self._due)
            actor = self._actors[number]
            if what == "beat" and actor.is_back and actor.tries.home is not None:
                actor.tries.go_home(is_there=True)
                actor.tries.ended(actor.where, "", was_connected=True, is_wanted=False)
                actor.connection.close()
                number = self._move(number, actor)
            if what == "beat":
                actor.beat()
                after = max(HEARTBEAT_S, actor.period_s)
            else:
                steps = actor.message_steps
                if actor.starts and self._load.rate:  # as in edge_actor/experience/recorder.py
                    after = random.random() * actor.period_s
                else:
                    if steps <= 0:
                        self._starved.add(number)
                        continue
                    waits_s = min(RETRY_S, self._load.message_steps / self._load.rate) if self._load.rate else RETRY_S
                    after = actor.full_steps / self._load.rate if actor.send() and self._load.rate else waits_s
            # What came late does not make the next one late, or the rate would not be kept; nor is much made up for
            since = at if now - at < CATCH_UP_S else now
            heapq.heappush(self._due, (since + after, number, what))
            self._watch(number, actor)


def report(tally: simulated_actor.Tally) -> dict[str, Any]:
    """The last line."""
    receipt_ms = np.array(tally.receipt_s or [np.nan]) * 1e3
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "connected": tally.connected,
        "lost": tally.lost,
        "sent": tally.sent,
        "receipted": tally.receipted,
        "steps": tally.steps,
        "bytes_sent": tally.bytes_sent,
        "first_sent_s": tally.first_sent_s,
        "last_receipt_s": tally.last_receipt_s,
        "warm_s": tally.warm_s,
        "warm_steps": tally.warm_steps,
        "receipt_ms": {p: round(float(np.percentile(receipt_ms, p)), 2) for p in (50, 99, 100)},
        "boot": simulated_actor.BOOT,
        "sent_s": tally.sent_s,
        "held_max": tally.held_max,
        "refused": tally.refused,
        "verified_s": {str(version): seen for version, seen in tally.verified_s.items()},
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "rss_mb": round(usage.ru_maxrss / 1024, 1),
    }


def main() -> None:
    """Runs a swarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, required=True, help="directory of enrolment bundles")
    parser.add_argument("--first", type=int, default=0, help="index of the first bundle to take")
    parser.add_argument("--count", type=int, default=1 << 30, help="how many")
    parser.add_argument("--rate", type=float, default=0.0, help="steps/s of each actor; 0: as fast as receipts come")
    parser.add_argument("--message-steps", type=int, default=256, help="of each message, where there is no rate")
    parser.add_argument("--window", type=int, default=64, help="messages without a receipt, at most")
    parser.add_argument("--messages", type=int, default=0, help="messages of each actor; 0: until SIGTERM")
    parser.add_argument("--verify-each", action="store_true", help="each actor verifies each policy itself")
    parser.add_argument("--warm-s", type=float, default=0.0, help="receipts of what is sent before do not count")
    parser.add_argument("--fail-over", action="store_true", help="go to the next broker when one is lost, and go on")
    parser.add_argument("--return-s", type=float, default=backoff.RETURN_S, help="before the way back to the first one")
    parser.add_argument("--state", type=Path, help="follow orders, and write them down there")
    args = parser.parse_args()
    backoff.RETURN_S = args.return_s
    files = sorted(args.bundles.glob("*.json"))[args.first : args.first + args.count]
    load = simulated_actor.Load(args.rate, args.message_steps, args.window, args.messages, args.warm_s, args.fail_over)
    found = [identity.Bundle.read(file) for file in files]
    swarm = Swarm(found, load, share=not args.verify_each, state=args.state)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *args: swarm.stop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    swarm.run()
    print(json.dumps(report(swarm.tally)), flush=True)


if __name__ == "__main__":
    main()
