"""What two ingest workers, each held to a core, take in of recorded experience; beside one, and a learner without any.

The real programs: `actorq-learner train` with and without `--ingest-workers`, Ray, ledgers, signed receipts. What they
hear was made before: messages of 256 steps of 24 floats, which `_player.py` sends as fast as each process takes them.
The learner's own process, Ray's, and the player share the cores with what is held to them. The ledgers lie in memory
where they can: on a disk that others use as well, this would measure that.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from broker.contract import codec, errors, messages, signing, topics
from broker.fleet import identity
from learner.files import run_directory
from tests.benchmarks import _load
from tests.benchmarks.learning import _player
from tests.fakes import simulated_actor

TURNS = int(os.environ.get("RECORDED_TURNS", "3"))
MESSAGES = int(os.environ.get("RECORDED_MESSAGES", "16000"))
"""For each process."""
KILL_MESSAGES = int(os.environ.get("RECORDED_KILL_MESSAGES", "24000"))
"""For each of two, of which one is killed: more than the other one takes in until that is back."""
STEPS = 256
SHARDS, ACTORS_EACH = 2, 4
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30 else None
_BEGUN = re.compile(r"ingest workers? ha(?:s|ve) begun \((.*)\)")
_LEARNER = [
    *("--replay-capacity", "1000000", "--max-env-steps", "1000000000", "--message-steps", str(STEPS)),
    *("--samples-per-insert", "0.000001", "--learning-starts", "1000", "--no-energy", "--evaluate-episodes", "0"),
]
"""It grants all at once, and makes next to no updates."""

Share = Sequence[str]
"""The actors of one process that takes in."""


class Taken(NamedTuple):
    """What came of one turn: messages/s of all together, and microseconds of CPU a message."""

    messages_per_s: float
    cpu_us: float
    others_us: dict[str, float]


class Killed(NamedTuple):
    """What became of two workers of which some were killed.

    Attributes:
        back_s: From the kill to the first receipt of whoever took the place of each.
        kept: The other one's messages/s meanwhile, of those before; None if there was none.
        lost: Messages that no ledger has; `twice`: that one has twice.
    """

    back_s: float
    kept: float | None
    lost: int
    twice: int


def rows() -> Iterator[dict[str, Any]]:
    """Yields how two workers compare with one, and one with a learner that takes in by itself."""
    turns = [(_turn(0), _turn(1), _turn(2)) for _ in range(TURNS)]
    alone = statistics.median(none.messages_per_s for none, _, _ in turns) * STEPS / 1e6
    beside = {name: statistics.median(two.others_us[name] for _, _, two in turns) for name in turns[0][2].others_us}
    for case, unit, found, explain in (
        (
            "transitions/s of two ingest workers, each held to one core",
            "M transitions/s",
            [(two.messages_per_s * STEPS / 1e6, one.messages_per_s * STEPS / 1e6) for _, one, two in turns],
            f"reference: one worker, held to one core; a learner without workers, held to one, takes in {alone:.3f}",
        ),
        (
            "CPU of one ingest worker",
            "us/message",
            [(one.cpu_us, none.cpu_us) for none, one, _ in turns],
            "reference: a learner that takes in by itself, held to one core",
        ),
        (
            "CPU of two ingest workers",
            "us/message",
            [(two.cpu_us, none.cpu_us) for none, _, two in turns],
            "reference: as above",
        ),
    ):
        ratios = [value / reference for value, reference in found]
        yield {
            "benchmark": "workers",
            "case": f"recorded messages of {STEPS} steps: {case}",
            "value": round(statistics.median(value for value, _ in found), 3),
            "unit": unit,
            "reference": round(statistics.median(reference for _, reference in found), 3),
            "ratio": round(statistics.median(ratios), 3),
            "runs": TURNS,
            "spread": round(max(ratios) - min(ratios), 3),
            "explain": f"{explain}; {MESSAGES} messages for each process, ledgers in {_MEMORY or '/tmp'}; "
            f"beside two workers, us/message: {', '.join(f'{name} {us:.0f}' for name, us in beside.items())}; ratios "
            f"{[round(one, 3) for one in ratios]}; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
        }


def kill_rows() -> Iterator[dict[str, Any]]:
    """Yields what the kill of one of two workers under full load does, and that of both at once."""
    yield from _kill_rows("one of two ingest workers", 1)
    yield from _kill_rows("both of two ingest workers at once", SHARDS)


def _kill_rows(which: str, count: int) -> Iterator[dict[str, Any]]:
    with _opened(SHARDS) as turn:
        killed = turn.kill(count)
    found = [
        ("each shard of theirs takes in again after", killed.back_s, "s", "10 s at most is wanted"),
        ("messages lost", killed.lost, "messages", f"of {SHARDS * KILL_MESSAGES}, {killed.twice} twice"),
    ]
    if killed.kept is not None:
        found.append(("the other keeps of its messages/s meanwhile", killed.kept, "of before", "0.8 is wanted"))
    for case, value, unit, wanted in found:
        yield {
            "benchmark": "workers",
            "case": f"kill -9 of {which} under all the load that they take: {case}",
            "value": round(value, 3),
            "unit": unit,
            "reference": None,
            "ratio": None,
            "runs": 1,
            "spread": None,
            "explain": f"{wanted}; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores",
        }


def _turn(workers: int) -> Taken:
    with _opened(workers) as turn:
        return turn.measure()


@contextlib.contextmanager
def _opened(workers: int) -> Iterator[_Turn]:
    with tempfile.TemporaryDirectory(prefix="actorq-bench-", dir=_MEMORY) as name, _Turn(Path(name), workers) as turn:
        yield turn


class _Receipts:
    """What came of which actor by when, as receipts say; they are not verified, since nobody else writes here."""

    def __init__(self, names: topics.Topics) -> None:
        self._names = names
        self._came: list[tuple[float, str, bytes]] = []

    def note(self, topic: str, payload: bytes) -> None:
        self._came.append((time.monotonic(), topic, payload))

    def newest(self) -> dict[str, int]:
        """The number of the newest message that has one, by actor."""
        found = {topic: payload for _, topic, payload in list(self._came)}
        return {self._names.actor_id(topic): _seq(payload) for topic, payload in found.items()}

    def counts(self, share: Share) -> list[tuple[float, int]]:
        """Monotonic times, and the messages of a share, but for the first of each, that had a receipt by then."""
        newest, counts = dict.fromkeys(share, 1), []
        for at_s, topic, payload in list(self._came):
            if (actor := self._names.actor_id(topic)) in newest:
                newest[actor] = max(newest[actor], _seq(payload))
                counts.append((at_s, sum(newest.values()) - len(share)))
        return counts


class _Turn:
    """A learner, its workers, and actors that were recorded."""

    def __init__(self, directory: Path, workers: int) -> None:
        self._directory, self._workers = directory, workers
        self._names = topics.Topics(_load.FLEET)
        self._fleet = identity.Fleet.open(_load.FLEET, directory / "home" / "fleets" / _load.FLEET)
        self._macs = {one: signing.ActorMac(self._fleet.enroll(one).mac_key) for one in _actors()}
        self._receipts = _Receipts(self._names)
        self._granted: dict[str, bytes] = {}
        self._open = contextlib.ExitStack()
        self._beats = 0

    def __enter__(self) -> _Turn:
        self._player = self._open.enter_context(_player.Player.open(self._note))
        with open(self._directory / "learner.log", "w") as log:
            self._learner = subprocess.Popen(
                [
                    *(sys.executable, "-m", "learner", "train", "--fleet", _load.FLEET, "--json"),
                    *("--broker", f"127.0.0.1:{self._player.port}", "--run-dir", str(self._directory / "run")),
                    *("--actors", str(len(self._macs)), "--ingest-workers", str(self._workers), *_LEARNER),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"ACTORQ_HOME": str(self._directory / "home"), "PYTHONPATH": str(_load.ROOT)},
                cwd=self._directory,
            )
        self._open.callback(self._end)
        ending = threading.Event()
        beating = threading.Thread(target=self._beat, args=(ending,))
        beating.start()
        self._open.callback(beating.join)
        self._open.callback(ending.set)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def _end(self) -> None:
        self._learner.terminate()
        try:
            self._learner.communicate(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._learner.kill()
            self._learner.wait()

    def measure(self) -> Taken:
        """Plays what is recorded, and measures from then until the last receipt."""
        shares = self._shares()
        recorded = self._record(shares, MESSAGES)
        processes = self._hold()
        before = {name: one() for name, one in processes.items()}
        self._play(recorded)
        self._await_receipts(shares, MESSAGES)
        spent_us = {name: (one() - before[name]) / (MESSAGES * len(shares)) * 1e6 for name, one in processes.items()}
        came = [self._receipts.counts(share) for share in shares]
        began = max(next(at_s for at_s, count in one if count >= MESSAGES / 10) for one in came)
        ended = min(one[-1][0] for one in came)
        return Taken(sum(_rate(one, began, ended) for one in came), spent_us.pop("held"), spent_us)

    def kill(self, count: int) -> Killed:
        """Plays the same to two workers, and kills so many of them when both have taken in a quarter."""
        shares = self._shares()
        recorded = self._record(shares, KILL_MESSAGES)
        self._hold()
        playing = threading.Thread(target=self._play, args=(recorded,))
        playing.start()
        _player.wait(
            lambda: all(sum(self._newest(share)) > KILL_MESSAGES / 4 for share in shares),
            "both have taken in a quarter",
        )
        assert min(self._newest(shares[1])) <= KILL_MESSAGES // len(shares[1]), "the other one has something left"
        for pid in self._pids()[:count]:
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        back = [f"ingest worker {number} is back" for number in range(count)]
        _player.wait(lambda: all(one in self._log() for one in back), "as many are back")
        again = [  # as actors send again what has no receipt
            chunks[min(self._newest(share)) - 1 :] if number < count else []
            for number, (share, chunks) in enumerate(zip(shares, recorded, strict=True))
        ]
        self._play(again)
        playing.join()
        self._await_receipts(shares, KILL_MESSAGES)
        came = [self._receipts.counts(share) for share in shares]
        back_s = max(_first_after(killed_s + 0.1, one) for one in came[:count])  # a receipt may have been on its way
        kept = None
        for others in came[count:]:
            started_s = next(at_s for at_s, taken in others if taken >= KILL_MESSAGES / 20)
            kept = _rate(others, killed_s, min(back_s, others[-1][0])) / _rate(others, started_s, killed_s)
        total, distinct = self._in_ledgers()
        expected = 2 * KILL_MESSAGES + len(self._macs)
        return Killed(back_s - killed_s, kept, expected - distinct, total - distinct)

    # -- the fleet ---------------------------------------------------------------------------------------------------

    def _shares(self) -> list[Share]:
        places = range(max(1, self._workers))
        return [[one for one in self._macs if topics.shard_of(one, len(places)) == place] for place in places]

    def _topic(self, actor: str) -> str:
        return self._names.experience(actor, topics.shard_of(actor, self._workers))

    def _packet(self, actor: str, seq: int, number: int, epoch: int) -> bytes:
        body = simulated_actor._pattern(STEPS).message(seq, 1, STEPS * (seq - 1), epoch)
        topic = self._topic(actor)
        return _player.packet(topic, self._macs[actor].seal(topic, *body), number)

    def _record(self, shares: list[Share], count: int) -> list[list[bytes]]:
        """Has a first message of each actor taken in, so that the learner compiles; returns so many of each share."""
        _player.wait(self._hears, "the learner listens")
        _player.wait(lambda: len(self._granted) == len(self._macs), "all are granted steps")
        epoch = self._assignment(next(iter(self._macs))).epoch
        self._play([[self._packet(one, 1, 1, epoch) for one in share] for share in shares])
        _player.wait(self._has_published, "the learner has compiled and published")
        wanted = {one: STEPS * (1 + count // len(share)) for share in shares for one in share}
        _player.wait(
            lambda: all(self._assignment(one).steps_granted >= steps for one, steps in wanted.items()), "all is granted"
        )
        return [
            [
                b"".join(self._packet(one, seq, number, epoch) for number, one in enumerate(share))
                for seq in range(2, 2 + count // len(share))
            ]
            for share in shares
        ]

    def _play(self, recorded: list[list[bytes]]) -> None:
        """Sends to each process what is its own, all at once."""
        playing = [
            threading.Thread(target=self._player.play, args=(self._topic(share[0]), chunks))
            for share, chunks in zip(self._shares(), recorded, strict=True)
            if chunks
        ]
        for one in playing:
            one.start()
        for one in playing:
            one.join()

    def _beat(self, ending: threading.Event) -> None:
        while True:
            self._beats += 1
            for actor, mac in self._macs.items():
                birth = messages.Birth("Simulated-v0", simulated_actor.SPEC, 1, "simulated", "", "none", "", 0.0)
                vitals = messages.Vitals(delegate="XNNPACK", created_s=time.time())
                state = messages.ActorState(True, "recorded", simulated_actor.BOOT, self._beats, birth, vitals)
                topic = self._names.actor_state(actor)
                self._player.publish(topic, mac.seal(topic, codec.encode(state)), retain=True)
            if ending.wait(1.0):
                return

    def _note(self, topic: str, payload: bytes) -> None:
        leaf = topic.rpartition("/")[2]
        if leaf == "receipt":
            self._receipts.note(topic, payload)
        elif leaf == "assignment":
            self._granted[topic] = payload

    def _assignment(self, actor: str) -> messages.Assignment:
        return codec.decode(messages.Assignment, _body(self._granted[self._names.assignment(actor)]))

    def _newest(self, share: Share) -> list[int]:
        newest = self._receipts.newest()
        return [newest.get(one, 1) for one in share]

    def _await_receipts(self, shares: list[Share], count: int) -> None:
        _player.wait(
            lambda: all(min(self._newest(share)) == 1 + count // len(share) for share in shares),
            "all receipts are here",
        )

    # -- the learner -------------------------------------------------------------------------------------------------

    def _log(self) -> str:
        return (self._directory / "learner.log").read_text()

    def _hears(self) -> bool:
        if self._learner.poll() is not None:
            raise errors.RunError(f"the learner ended:\n{self._log()[-2000:]}")
        return all(self._player.hears(self._topic(one)) for one in self._macs)

    def _has_published(self) -> bool:
        file = self._directory / "run" / "metrics.jsonl"
        lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return bool(lines) and json.loads(lines[-1])["policy_version"] > 0

    def _pids(self) -> list[int]:
        """The processes that take in."""
        found = _BEGUN.search(self._log())
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", found[1])] if found else [self._learner.pid]
        assert len(pids) == max(1, self._workers), self._log()
        return pids

    def _hold(self) -> dict[str, Any]:
        """Holds each process that takes in to a core; returns what tells the CPU seconds of all that run, by name."""
        held = self._pids()
        for core, pid in zip(sorted(os.sched_getaffinity(0)), held, strict=False):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core})
        family = [one.pid for one in psutil.Process(self._learner.pid).children(recursive=True)]
        spent: dict[str, Any] = {"held": lambda: sum(map(_load.cpu_s, held)), "player": time.process_time}
        if self._workers:
            spent["learner"] = lambda: _load.cpu_s(self._learner.pid)
            spent["Ray"] = lambda: sum(_load.cpu_s(pid) for pid in family if pid not in held)
        return spent

    def _in_ledgers(self) -> tuple[int, int]:
        """Messages that reached replay, and how many different ones they are."""
        query = "SELECT count(*), count(DISTINCT actor || ' ' || seq) FROM messages WHERE verdict = 'ok'"
        total = distinct = 0
        for path in run_directory.ledgers(self._directory / "run", self._workers):
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
                own = db.execute(query).fetchone()
            total, distinct = total + own[0], distinct + own[1]
        return total, distinct


def _actors() -> list[str]:
    """Names of as many actors of each shard of two."""
    found: list[list[str]] = [[] for _ in range(SHARDS)]
    for number in range(1000):
        own = found[topics.shard_of(name := f"actor-{number:04}", SHARDS)]
        if len(own) < ACTORS_EACH:
            own.append(name)
    return sorted(name for own in found for name in own)


def _first_after(since_s: float, counts: list[tuple[float, int]]) -> float:
    """When the first receipt came of what had none by then."""
    before = max(count for at_s, count in counts if at_s <= since_s)
    return next(at_s for at_s, count in counts if count > before)


def _rate(counts: list[tuple[float, int]], began_s: float, ended_s: float) -> float:
    """Messages a second between two times."""
    at_began, at_ended = (max(count for at_s, count in counts if at_s <= when) for when in (began_s, ended_s))
    return (at_ended - at_began) / (ended_s - began_s)


def _seq(payload: bytes) -> int:
    return codec.decode(messages.Receipt, _body(payload)).seq


def _body(payload: bytes) -> memoryview:
    """What the learner signed."""
    return signing._open(signing._ED25519, signing._ED25519_BYTES, "", payload)[1]
