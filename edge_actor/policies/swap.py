"""How a policy gets from the network to the acting loop.

    announced ─▶ fetched ─▶ verified ─▶ building ─▶ active
        └───────────┴───────────┴──────────┴─▶ refused (reason counted; the actor goes on with what it has)

A thread of its own opens what comes, puts deltas together with their base and checks the result; the long steps of that
(digest, unpacking, adding) leave Python's lock to the acting loop. What takes less than the handing over is done where
it came. Building an interpreter holds that lock for 0.1 to 5 ms, so the loop itself does it, when it suits: at an
episode's end, in the slack of a control period, or `patience_s` after the policy came. What has been overtaken by then
is never built. A policy all of whose parts are here is built ahead, while the learner still judges it; it acts once the
message came that makes it a policy, and if that never comes, nobody misses it.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from broker.contract import codec, errors, messages, signing, specs, topics
from edge_actor.board import clock
from edge_actor.policies import policy, policy_store, reassembly

_log = logging.getLogger(__name__)
QUEUE_LIMIT = 32
"""Messages that wait to be opened. Beyond it the oldest is dropped, counted as `flood`."""
QUEUE_LIMIT_BYTES = 2 * messages.MAX_POLICY_BYTES
"""Of all that wait: nothing of it is known to be genuine, and a Pi has 512 MB."""
AT_ONCE_BYTES = 400_000
"""Of message and policy: opened, put together and checked within a millisecond. A thread takes several to take over."""
STORE_PERIOD_S = 60.0
"""Policies may come every second; an SD card should not be written so often."""

Handler = Callable[[str, bytes, bool], None]


class _Arrival(NamedTuple):
    """A message that came at a monotonic time."""

    handle: Handler
    topic: str
    payload: bytes
    retained: bool
    at_s: float


class _Built(NamedTuple):
    """A policy that was built ahead, which took `ms`."""

    model: bytes
    policy: policy.Policy | None
    ms: float


_NONE_BUILT = _Built(b"", None, 0.0)


class Phase(enum.Enum):
    """How far the newest policy has come."""

    NONE = ""
    ANNOUNCED = "announced"
    FETCHED = "fetched"
    VERIFIED = "verified"
    BUILDING = "building"
    ACTIVE = "active"
    REFUSED = "refused"


class Swap:
    """Verifies, keeps and builds policies.

    Args:
        build: Makes a warmed-up policy from a checked manifest and model.
        spec: Of the environment.
        store: Of the last good policy.
        patience_s: How long after it came a policy waits for a good moment before it is `overdue`.
        on_ready: Called on the checking thread when there is something to build.

    Attributes:
        phase: Of the newest policy.
        announced: Order of the newest policy that was heard of.
        refused: Refusals by reason. `base` is a delta whose base is not here, `parts` one whose policy did not all come
            ahead of it: the next keyframe or retained one helps. `flood` counts messages that nobody had time to open.
        heard_at: Monotonic time at which there was last no doubt that the acting policy is the newest: a good one came
            that is newer than all before, or the learner said anew that it has no newer one; or of the start.
        pause_ms: How long the acting loop stood still for the newest policy; None before the first.
    """

    def __init__(
        self,
        build: Callable[[messages.Manifest, bytes], policy.Policy],
        spec: specs.EnvSpec,
        store: policy_store.PolicyStore,
        *,
        patience_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._build = build
        self._store = store
        self._patience_s = patience_s
        self._on_ready = on_ready
        self.channel = topics.MAIN_CHANNEL
        self.phase = Phase.NONE
        self.announced: reassembly.Order = (0, 0)
        self.refused: dict[str, int] = {}
        self.heard_at = time.monotonic()
        self.pause_ms: float | None = None
        self._held = reassembly.Reassembly(spec)
        self._candidate: reassembly.Whole | None = None
        self._ahead: reassembly.Whole | None = None  # its parts are here; whether it is a policy, nobody said yet
        self._built = _NONE_BUILT
        self._came_at = self._waiting_since = time.monotonic()
        self._active: reassembly.Order = (0, 0)
        self._unstored: reassembly.Whole | None = None
        self._stored_at = -STORE_PERIOD_S
        self._stored_epoch = 0
        self._lock = threading.Lock()
        self._handling = threading.Lock()
        self._queue: collections.deque[_Arrival] = collections.deque()
        self._queued_bytes = 0
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="policy-checker", daemon=True)

    def start(self, verifier: signing.LearnerVerifier, names: topics.Topics) -> None:
        """Takes the stored policy, if there is a good one, and starts taking what comes."""
        kinds: tuple[tuple[Callable[[], bytes | None], str, type[messages.Policy | messages.PolicyDelta]], ...] = (
            (self._store.keyframe, names.keyframe(self.channel), messages.Policy),
            (self._store.delta, names.delta(self.channel), messages.PolicyDelta),
        )
        for read, topic, kind in kinds:
            try:
                if (sealed := read()) is not None:
                    self.offer(codec.decode(kind, verifier.open(topic, sealed)), sealed)
            except (OSError, errors.MessageError) as error:
                self._refuse("stored", f"the stored policy cannot be used: {error}")
        try:
            self._held.floor = self._store.newest()  # from now on: what is on this disk may act, whatever its age
        except (OSError, ValueError) as error:
            self._refuse("stored", f"how new the stored policy was cannot be read: {error}")
        self._thread.start()

    def queued(self, handle: Handler) -> Handler:
        """A handler for `Link.subscribe` that has `handle` called in the order of arrival, one message at a time."""

        def put(topic: str, payload: bytes, retained: bool) -> None:
            arrival = _Arrival(handle, topic, payload, retained, time.monotonic())
            newest = self._held.newest
            is_small = len(payload) + (len(newest.model) if newest else 0) <= AT_ONCE_BYTES
            if is_small and self._handling.acquire(blocking=False):
                try:
                    if not self._queue:
                        self._handle(arrival)
                        return
                finally:
                    self._handling.release()
            with self._lock:
                self._queue.append(arrival)
                self._queued_bytes += len(payload)
                while len(self._queue) > QUEUE_LIMIT or self._queued_bytes > QUEUE_LIMIT_BYTES:
                    self._queued_bytes -= len(self._queue.popleft().payload)
                    self.refused["flood"] = self.refused.get("flood", 0) + 1
            self._work.set()

        return put

    def announce(self, epoch: int, version: int) -> None:
        """The learner says that this policy is its newest; what it said before must not come here again."""
        if (epoch, version) == self._active:
            self.heard_at = time.monotonic()
        if (epoch, version) > self.announced:
            self.announced = (epoch, version)
            self.phase = Phase.ANNOUNCED

    def offer(self, message: messages.Policy | messages.PolicyDelta, sealed: bytes) -> None:
        """Takes in a message that came as `sealed`; if that gives a policy newer than all before, it will be built."""
        about, held = message.manifest if isinstance(message, messages.Policy) else message, self._held
        if about.channel != self.channel:
            return
        order, best = (about.epoch, about.version), held.best
        if order > best:
            self.announce(*order)
            self.phase = Phase.FETCHED
        try:
            if isinstance(message, messages.Policy):
                is_new = held.add_keyframe(message, sealed, clock.now_s())
            else:
                is_new = held.add_delta(message, sealed, clock.now_s())
        except errors.PolicyError as error:
            self._refuse(error.reason, str(error))
        else:
            if is_new and order == best:
                self._refuse("sha256", f"the parts of policy {order} made something else of it; it is made again")
            if is_new:
                self.heard_at = time.monotonic()  # not by one that was here before: a broker may repeat it for ever
                self._propose()
            elif order == self._active:
                self._keep(held.newest)
        if (waiting := held.take_waiting()) is not None:
            self.offer(*waiting)

    def prepare(self, part: messages.PolicyPart, sealed: bytes) -> None:
        """Takes in a part of a policy to come."""
        del sealed  # nothing can be made again from parts alone
        if part.channel != self.channel:
            return
        try:
            self._ahead = self._held.add_part(part)
        except errors.PolicyError as error:
            self._refuse(error.reason, str(error))
        if self._ahead is not None:
            self._on_ready()

    @property
    def has_work(self) -> bool:
        """There is something to build."""
        return self._candidate is not None or self._ahead is not None

    @property
    def overdue(self) -> bool:
        """A verified policy has waited long enough for a good moment."""
        return self._candidate is not None and time.monotonic() - self._waiting_since > self._patience_s

    @property
    def build_ms(self) -> float:
        """How long `build` will probably take."""
        candidate = self._candidate
        return 0.0 if candidate is not None and candidate.model is self._built.model else self.pause_ms or 0.0

    def build(self) -> policy.Policy | None:
        """Builds the newest verified policy, which from now on is the one that acts, or one that may follow it.

        Returns:
            None if it cannot be loaded, or is not to act yet.
        """
        began = time.perf_counter()
        with self._lock:
            candidate, self._candidate = self._candidate, None
        if candidate is None:
            self._build_ahead(began)
            return None
        self.phase = Phase.BUILDING
        model, built, ahead_ms = self._built
        try:
            if built is None or model is not candidate.model:
                built, ahead_ms = self._build(candidate.manifest, candidate.model), 0.0
        except errors.ActorqError as error:
            self._refuse(error.reason if isinstance(error, errors.PolicyError) else "build", str(error))
            return None
        self._built = _NONE_BUILT
        with self._lock:
            self._active = candidate.order
            if candidate.order == self._held.best:
                self.phase = Phase.ACTIVE
        self._keep(candidate)
        self.pause_ms = ahead_ms + (time.perf_counter() - began) * 1e3
        return built

    def vitals(self) -> dict[str, Any]:
        """Returns how far the newest policy has come, by fields of `messages.Vitals`."""
        (epoch, version), (newest_epoch, newest) = self._active, self.announced
        return {
            "policy_lag": max(0, newest - (version if epoch == newest_epoch else 0)),
            "policy_phase": self.phase.value,
            "swap_pause_ms": self.pause_ms,
            "refused": dict(self.refused),
        }

    def close(self) -> None:
        """Stops, and stores what was not stored yet."""
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._save(always=True)

    def _build_ahead(self, began_s: float) -> None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        self._built = _NONE_BUILT  # first, so that there are never three
        with contextlib.suppress(errors.ActorqError):  # should it become a policy, it will be refused by name
            built = self._build(ahead.manifest, ahead.model)
            self._built = _Built(ahead.model, built, (time.perf_counter() - began_s) * 1e3)

    def _propose(self) -> None:
        with self._lock:
            self._ahead = None
            if self._candidate is None:
                self._waiting_since = self._came_at
            self._candidate = self._held.newest  # one that was not built yet is overtaken
            self.phase = Phase.VERIFIED
        self._on_ready()

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while not self._stopping:
                with self._handling:
                    arrival = self._next()
                    if arrival is None:
                        break
                    self._handle(arrival)
            if self._stopping:
                return
            self._save(always=False)

    def _next(self) -> _Arrival | None:
        with self._lock:
            if not self._queue:
                return None
            arrival = self._queue.popleft()
            self._queued_bytes -= len(arrival.payload)
            return arrival

    def _handle(self, arrival: _Arrival) -> None:
        self._came_at = arrival.at_s
        try:
            arrival.handle(arrival.topic, arrival.payload, arrival.retained)
        except Exception as error:  # a bug: without this thread the actor would keep its policy for ever
            self._refuse("fault", f"{type(error).__name__}: {error}")

    def _keep(self, acting: reassembly.Whole | None) -> None:
        """Has a policy stored soon, if it can be made again from what was sealed."""
        if acting is not None and acting.sources:
            self._unstored = acting
            self._work.set()

    def _save(self, *, always: bool) -> None:
        kept = self._unstored
        if kept is None:
            return
        is_due = time.monotonic() - self._stored_at > STORE_PERIOD_S or kept.manifest.epoch > self._stored_epoch
        if not (always or is_due):
            return
        self._unstored, self._stored_epoch = None, kept.manifest.epoch
        try:
            self._store.write(kept.sources, kept.order)
        except OSError as error:
            self._refuse("store", f"the policy cannot be stored: {error}")
        self._stored_at = time.monotonic()

    def _refuse(self, reason: str, line: str) -> None:
        if reason not in self.refused:
            _log.warning("policy refused: %s", line)  # said once per reason, counted each time
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.phase = Phase.REFUSED if reason not in ("base", "parts") else Phase.ANNOUNCED
