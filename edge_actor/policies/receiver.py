"""Takes policies from the network to the acting loop, which asks for the newest one that may act.

    announced ─▶ fetched ─▶ verified ─▶ building ─▶ active
        └───────────┴───────────┴──────────┴─▶ refused (reason counted; the actor goes on with what it has)

What comes is opened, put together and checked beside the acting loop (`arrivals`, `assembly`). Building an interpreter
holds Python's lock for 0.1 to 5 ms, so the loop itself does it, when it suits: at an episode's end, in the slack of a
control period, or `patience_s` after the policy came. What has been overtaken by then is never built. A policy all of
whose bytes are here is built ahead, while the learner still judges it; it acts once its last piece came, and if that
never comes, nobody misses it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from broker.contract import codec, errors, messages, signing, specs, topics
from broker.program import stopwatch
from edge_actor.board import clock
from edge_actor.policies import arrivals, assembly, policy, policy_store

STORE_PERIOD_S = 60.0
"""Policies may come every second; an SD card should not be written so often."""
_log = logging.getLogger(__name__)
_M = TypeVar("_M", messages.Policy, messages.PolicyPatch, messages.PolicyPiece)


class Opener(Protocol):
    """Makes a handler that gives each sound message of a kind to `use`, with its sealed bytes; as `Inbox.opener`."""

    def __call__(self, kind: type[_M], use: Callable[[_M, bytes], None]) -> arrivals.Handler: ...


class _Built(NamedTuple):
    """A policy that was built ahead, which took `ms`."""

    model: bytes
    policy: policy.Policy | None
    ms: float


_NONE_BUILT = _Built(b"", None, 0.0)


class Phase(enum.Enum):
    """The stage that the newest policy has reached."""

    NONE = ""
    ANNOUNCED = "announced"
    FETCHED = "fetched"
    VERIFIED = "verified"
    BUILDING = "building"
    ACTIVE = "active"
    REFUSED = "refused"


class PolicyReceiver:
    """Receives, verifies, keeps and builds policies.

    Args:
        build: Makes a warmed-up policy from a checked manifest and model.
        spec: The environment here.
        store: Keeps the last good policy on disk.
        patience_s: How long after it came a policy waits for a good moment before it is `overdue`.
        on_ready: Called on the checking thread when there is something to build.

    Attributes:
        channel: The channel whose policies are taken.
        phase: How far the newest policy has come.
        announced: Order of the newest policy that was heard of.
        refused: Refusals by reason. `base` is a policy whose base is not here, `pieces` one whose bytes did not all
            come: the next retained one helps. `flood` counts messages that nobody had time to open.
        heard_at: Monotonic time at which there was last no doubt that the acting policy is the newest: a good one came
            that is newer than all before, or the learner said anew that it has no newer one; or of the start.
        pause_ms: How long the acting loop stood still for the newest policy; None before the first.
        opened_s: The seconds that opening and taking in all that came took, on whatever thread.
        times: `policy_receive`: checking the signature of what came, and decoding it; `policy_verify`: unpacking it,
            putting it together and checking that; `policy_build`: interpreters; `policy_swap`: the rest of the pause.
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
        self.announced = self._active = messages.Order(0, 0)
        self.refused: dict[str, int] = {}
        self.heard_at = self._waiting_since = time.monotonic()
        self.pause_ms: float | None = None
        self.opened_s = 0.0
        self.times = stopwatch.Stopwatch("policy_receive", "policy_verify", "policy_build", "policy_swap")
        self._assembly = assembly.Assembly(spec)
        self._candidate: assembly.WholePolicy | None = None
        self._ahead: assembly.WholePolicy | None = None  # its last piece may never come
        self._built = _NONE_BUILT
        self._unstored: assembly.WholePolicy | None = None
        self._stored_at = -STORE_PERIOD_S
        self._stored_epoch = 0
        self._lock = threading.Lock()
        self._arrivals = arrivals.Arrivals(self._base_bytes, self._count_fault, self._count_drop, self._save)

    # -- what comes -------------------------------------------------------------------------------------------------

    def start(self, verifier: signing.LearnerVerifier, names: topics.Topics) -> None:
        """Takes the stored policy, if there is a good one, and starts taking what comes."""
        kinds: tuple[tuple[Callable[[], bytes | None], str, type[messages.Policy | messages.PolicyPatch]], ...] = (
            (self._store.policy, names.policy(self.channel), messages.Policy),
            (self._store.patch, names.policy_patch(self.channel), messages.PolicyPatch),
        )
        for read, topic, kind in kinds:
            try:
                if (sealed := read()) is not None:
                    self.receive(codec.decode(kind, verifier.open(topic, sealed)), sealed)
            except (OSError, errors.MessageError) as error:
                self._refuse("stored", f"the stored policy cannot be used: {error}")
        try:
            self._assembly.floor = self._store.newest()  # from now on: what is on this disk may act, whatever its age
        except (OSError, ValueError) as error:
            self._refuse("stored", f"how new the stored policy was cannot be read: {error}")
        self._arrivals.start()

    def listen(self, subscribe: Callable[[str, arrivals.Handler], None], names: topics.Topics, opener: Opener) -> None:
        """Has all that may make a policy of the `channel` taken in.

        Args:
            subscribe: As `Link.subscribe`, or `Link.route`.
            names: Topics of the fleet.
            opener: Opens what comes (`Inbox.opener`).
        """
        channel = self.channel

        def apply(message: assembly.Message, sealed: bytes) -> None:
            if channel == self.channel:  # topics of one that was followed before are still subscribed to
                with self.times.time("policy_verify"):
                    self.receive(message, sealed)

        def queued(handle: arrivals.Handler) -> arrivals.Handler:
            return self._arrivals.queued(functools.partial(self._open, handle))

        subscribe(names.policy(channel), queued(opener(messages.Policy, apply)))
        subscribe(names.policy_piece(channel), queued(opener(messages.PolicyPiece, apply)))
        subscribe(names.policy_patch(channel), queued(opener(messages.PolicyPatch, apply)))

    def _open(self, handle: arrivals.Handler, topic: str, payload: bytes, retained: bool) -> None:
        """Opens a message and applies what is in it; one at a time."""
        taken_s, began = self.times.seconds("policy_verify"), time.perf_counter()
        handle(topic, payload, retained)
        took_s = time.perf_counter() - began
        self.opened_s += took_s
        self.times.add("policy_receive", took_s - (self.times.seconds("policy_verify") - taken_s))

    def announce(self, newest: messages.Order) -> None:
        """The learner says that this policy is its newest; what it said before must not come here again.

        It says so of the main channel. A policy of another one is on trial, and newer for as long as that goes on: when
        the trial ends, whichever policy has won goes out on the main channel as a newer one than both.
        """
        active = self._active
        is_on_trial = self.channel != topics.MAIN_CHANNEL and newest.epoch == active.epoch and newest < active
        if newest == active or is_on_trial:
            self.heard_at = time.monotonic()
        if newest > self.announced:
            self.announced = newest
            self.phase = Phase.ANNOUNCED

    def receive(self, message: assembly.Message, sealed: bytes) -> None:
        """Takes in a message that came as `sealed`; if that gives a policy newer than all before, it will be built."""
        if isinstance(message, messages.Policy) and message.manifest.channel != self.channel:
            return
        held, order = self._assembly, message.order
        best, makes_one = held.best, not isinstance(message, messages.PolicyPiece) or message.changes is not None
        if makes_one and order > best:
            self.announce(order)
            self.phase = Phase.FETCHED
        try:
            is_new = held.add(message, sealed, clock.now_s())
        except errors.PolicyError as error:
            self._refuse(error.reason, str(error))
        else:
            if is_new and order == best:
                self._refuse("sha256", f"the pieces of policy {order} made something else of it; it is made again")
            if is_new:
                self.heard_at = time.monotonic()  # not by one that was here before: a broker may repeat it for ever
                self._propose()
            elif not makes_one and held.ahead is not None:
                self._ahead = held.ahead
                self._on_ready()
            elif order == self._active:
                self._keep(held.newest)
        if (waiting := held.pop_waiting()) is not None:
            self.receive(*waiting)

    # -- what the acting loop asks ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Returns whether there is something to build."""
        return self._candidate is not None or self._ahead is not None

    @property
    def overdue(self) -> bool:
        """Returns whether a verified policy has waited long enough for a good moment."""
        return self._candidate is not None and time.monotonic() - self._waiting_since > self._patience_s

    @property
    def build_ms(self) -> float:
        """The milliseconds that `newest` will probably take."""
        candidate = self._candidate
        return 0.0 if candidate is not None and candidate.model is self._built.model else self.pause_ms or 0.0

    def newest(self) -> policy.Policy | None:
        """Builds and returns the newest policy that may act, which from now on is the one that does.

        Returns:
            None if there is no newer one than the one that acts, or it cannot be loaded.
        """
        began, built_s = time.perf_counter(), self.times.seconds("policy_build")
        with self._lock:
            candidate, self._candidate = self._candidate, None
        if candidate is None:
            self._build_ahead(began)
            return None
        self.phase = Phase.BUILDING
        model, built, ahead_ms = self._built
        try:
            if built is None or model is not candidate.model:
                built, ahead_ms = self._make(candidate), 0.0
        except errors.ActorqError as error:
            self._refuse(error.reason if isinstance(error, errors.PolicyError) else "build", str(error))
            return None
        self._built = _NONE_BUILT
        with self._lock:
            self._active = candidate.order
            if candidate.order == self._assembly.best:
                self.phase = Phase.ACTIVE
        self._keep(candidate)
        paused_s = time.perf_counter() - began
        self.pause_ms = ahead_ms + paused_s * 1e3
        self.times.add("policy_swap", paused_s - (self.times.seconds("policy_build") - built_s))
        return built

    def _make(self, whole: assembly.WholePolicy) -> policy.Policy:
        with self.times.time("policy_build"):
            return self._build(whole.manifest, whole.model)

    def vitals(self) -> dict[str, Any]:
        """Returns how far the newest policy has come, by fields of `messages.Vitals`."""
        active, newest = self._active, self.announced
        return {
            "policy_lag": max(0, newest.version - (active.version if active.epoch == newest.epoch else 0)),
            "policy_phase": self.phase.value,
            "swap_pause_ms": self.pause_ms,
            "refused": dict(self.refused),
        }

    def close(self) -> None:
        """Stops, and stores what was not stored yet."""
        self._arrivals.stop()
        self._save(always=True)

    def _build_ahead(self, began_s: float) -> None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is None:
            return
        self._built = _NONE_BUILT  # first, so that there are never three
        with contextlib.suppress(errors.ActorqError):  # should it become a policy, it will be refused by name
            built = self._make(ahead)
            self._built = _Built(ahead.model, built, (time.perf_counter() - began_s) * 1e3)

    def _propose(self) -> None:
        with self._lock:
            self._ahead = None
            if self._candidate is None:
                self._waiting_since = self._arrivals.came_s
            self._candidate = self._assembly.newest  # one that was not built yet is overtaken
            self.phase = Phase.VERIFIED
        self._on_ready()

    # -- the store --------------------------------------------------------------------------------------------------

    def _keep(self, acting: assembly.WholePolicy | None) -> None:
        """Has a policy stored soon, if it can be made again from what was sealed.

        One that is on trial is not: an actor that starts again acts on what was proven, until it is told otherwise.
        """
        if acting is not None and acting.sources and acting.manifest.channel == topics.MAIN_CHANNEL:
            self._unstored = acting
            self._arrivals.wake()

    def _save(self, *, always: bool = False) -> None:
        kept = self._unstored
        if kept is None:
            return
        is_due = time.monotonic() - self._stored_at > STORE_PERIOD_S or kept.order.epoch > self._stored_epoch
        if not (always or is_due):
            return
        self._unstored, self._stored_epoch = None, kept.order.epoch
        try:
            self._store.write(kept.sources, kept.order)
        except OSError as error:
            self._refuse("store", f"the policy cannot be stored: {error}")
        self._stored_at = time.monotonic()

    # -- what is counted --------------------------------------------------------------------------------------------

    def _refuse(self, reason: str, line: str) -> None:
        if reason not in self.refused:
            _log.warning("policy refused: %s", line)  # said once per reason, counted each time
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.phase = Phase.REFUSED if reason not in ("base", "pieces") else Phase.ANNOUNCED

    def _count_fault(self, error: Exception) -> None:
        self._refuse("fault", f"{type(error).__name__}: {error}")

    def _count_drop(self) -> None:
        self.refused["flood"] = self.refused.get("flood", 0) + 1

    def _base_bytes(self) -> int:
        newest = self._assembly.newest
        return len(newest.model) if newest else 0
