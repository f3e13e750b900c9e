"""How a policy gets from the network to the acting loop.

    announced ─▶ fetched ─▶ verified ─▶ built ─▶ warmed_up ─▶ active
        └───────────┴───────────┴──────────┴─▶ refused (reason counted; the actor goes on with what it has)

`offer` runs on the network thread and checks the manifest before anything parses the model. A thread of its own builds
the interpreter, which holds Python's lock for 0.1 to 5 ms: an actor with a control rate offers slack for that, one that
runs flat out pays it whenever it comes. The loop takes the finished policy between two steps as one reference.

The sealed message of the last good policy is kept on disk, as it came, so that it is verified again when it is read.
"""

from __future__ import annotations

import enum
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from broker import codec, errors, identity, messages, signing, specs, topics
from edge_actor import policy

SLACK_WAIT_S = 1.0
"""The most that a finished download waits for slack; after that a missed deadline is the smaller evil."""
STORE_PERIOD_S = 60.0
"""Policies may come every second; an SD card should not be written so often."""


class Phase(enum.Enum):
    """How far the newest policy has come."""

    NONE = ""
    ANNOUNCED = "announced"
    FETCHED = "fetched"
    VERIFIED = "verified"
    BUILT = "built"
    WARMED_UP = "warmed_up"
    ACTIVE = "active"
    REFUSED = "refused"


Order = tuple[int, int]
"""Epoch and version: what orders policies."""


def check(manifest: messages.Manifest, model: bytes, spec: specs.EnvSpec, now_s: float) -> None:
    """Refuses a policy that must not reach an interpreter.

    Args:
        manifest: Signed by the learner.
        model: Bytes of the .tflite file.
        spec: Of the environment here.
        now_s: Unix time. A board without a clock lags behind, and an early clock never makes a policy expire.

    Raises:
        PolicyError: It is too large, altered, made for another spec, or expired.
    """
    if max(manifest.length, len(model)) > messages.MAX_POLICY_BYTES:
        raise errors.PolicyError(f"the policy has {len(model)} bytes, more than any actor takes", reason="size")
    if manifest.length != len(model):
        raise errors.PolicyError(
            f"the policy has {len(model)} bytes, its manifest says {manifest.length}", reason="length"
        )
    if manifest.sha256 != hashlib.sha256(model).hexdigest():
        raise errors.PolicyError("the policy's bytes are not those of its manifest", reason="sha256")
    if manifest.fingerprint != spec.fingerprint:
        raise errors.PolicyError(
            f"the policy is for spec {manifest.fingerprint}, this environment {spec.fingerprint} ({spec.describe()})",
            reason="fingerprint",
        )
    if manifest.head not in spec.action.heads:
        raise errors.PolicyError(f"a head {manifest.head!r} cannot choose these actions", reason="head")
    if 0.0 < manifest.expires_s < now_s:
        raise errors.PolicyError("the policy has expired", reason="expired")


class Swap:
    """Verifies, builds and hands over policies.

    Args:
        build: Makes a warmed-up policy from a checked manifest and model.
        spec: Of the environment.
        store: File of the last good policy.
        wants_slack: Whether building waits until `give_slack`.
        on_ready: Called on the building thread when `take` has something.
        on_log: Takes one line for people.

    Attributes:
        phase: Of the newest policy.
        newest: Order of the newest policy that was heard of.
        refused: Refusals by reason.
        heard_at: Monotonic time of the last policy that was good when it came, or of the start.
    """

    def __init__(
        self,
        build: Callable[[messages.Manifest, bytes], policy.Policy],
        spec: specs.EnvSpec,
        store: Path,
        *,
        wants_slack: bool,
        on_ready: Callable[[], None],
        on_log: Callable[[str], None],
    ) -> None:
        self._build = build
        self._spec = spec
        self._store = store
        self._wants_slack = wants_slack
        self._on_ready = on_ready
        self._on_log = on_log
        self.channel = topics.MAIN_CHANNEL
        self.phase = Phase.NONE
        self.newest: Order = (0, 0)
        self.refused: dict[str, int] = {}
        self.heard_at = time.monotonic()
        self._best: Order = (0, 0)  # of the policies that passed the checks
        self._candidate: tuple[messages.Policy, bytes] | None = None
        self._ready: policy.Policy | None = None
        self._unstored: bytes | None = None
        self._stored_at = -STORE_PERIOD_S
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._slack = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="policy-builder", daemon=True)

    def start(self, verifier: signing.LearnerVerifier, topic: str) -> None:
        """Takes the stored policy, if there is a good one, and starts building what comes."""
        try:
            sealed = self._store.read_bytes()
            self.offer(codec.decode(messages.Policy, verifier.open(topic, sealed)), sealed)
        except FileNotFoundError:
            pass
        except (OSError, errors.MessageError) as error:
            self._refuse("stored", f"the stored policy cannot be used: {error}")
        if self._candidate is not None:
            self._build_candidate()
        self._unstored = None
        self._thread.start()

    def announce(self, epoch: int, version: int) -> None:
        """The learner says that this policy exists."""
        if (epoch, version) > self.newest:
            self.newest = (epoch, version)
            self.phase = Phase.ANNOUNCED

    def offer(self, message: messages.Policy, sealed: bytes) -> None:
        """Checks a policy that came in, sealed as `sealed`, and has it built if it is newer than all before."""
        manifest = message.manifest
        if manifest.channel != self.channel:
            return
        order = (manifest.epoch, manifest.version)
        if order == self._best:  # retained messages come again with every connection
            self.heard_at = time.monotonic()
            return
        self.announce(*order)
        self.phase = Phase.FETCHED
        try:
            if order < self._best:
                raise errors.PolicyError(f"policy {order} is older than {self._best}", reason="older")
            check(manifest, message.model.tobytes(), self._spec, time.time())
        except errors.PolicyError as error:
            self._refuse(error.reason, str(error))
            return
        with self._lock:
            self._best = order
            self._candidate = (message, sealed)  # one that was not built yet is overtaken
            self.phase = Phase.VERIFIED
        self.heard_at = time.monotonic()
        self._work.set()

    @property
    def has_work(self) -> bool:
        """A verified policy waits for slack."""
        return self._candidate is not None

    def give_slack(self) -> None:
        """Nothing is due for a few milliseconds: build now."""
        self._slack.set()

    @property
    def ready(self) -> bool:
        """`take` has a policy."""
        return self._ready is not None

    def take(self) -> policy.Policy:
        """The finished policy, which from now on is the one that acts. Only when `ready`."""
        with self._lock:
            taken, self._ready = self._ready, None
            assert taken is not None
            if (taken.epoch, taken.version) == self._best:
                self.phase = Phase.ACTIVE
        return taken

    def close(self) -> None:
        """Stops building, and stores what was not stored yet."""
        self._stopping = True
        self._work.set()
        self._slack.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._save(always=True)

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            if self._wants_slack:
                self._slack.clear()
                self._slack.wait(SLACK_WAIT_S)
            if self._stopping:
                return
            self._build_candidate()
            self._save(always=False)

    def _build_candidate(self) -> None:
        with self._lock:
            candidate, self._candidate = self._candidate, None
        if candidate is None:
            return
        message, sealed = candidate
        self.phase = Phase.BUILT
        try:
            built = self._build(message.manifest, message.model.tobytes())
        except errors.ActorqError as error:
            self._refuse(error.reason if isinstance(error, errors.PolicyError) else "build", str(error))
            return
        with self._lock:
            self._ready = built
            self._unstored = sealed
            self.phase = Phase.WARMED_UP
        self._on_ready()

    def _save(self, *, always: bool) -> None:
        if self._unstored is None or not (always or time.monotonic() - self._stored_at > STORE_PERIOD_S):
            return
        try:
            identity.write_atomic(self._store, self._unstored)
        except OSError as error:
            self._refuse("store", f"the policy cannot be stored: {error}")
        self._unstored = None
        self._stored_at = time.monotonic()

    def _refuse(self, reason: str, line: str) -> None:
        if reason not in self.refused:
            self._on_log(f"policy refused: {line}")  # said once per reason, counted each time
        self.refused[reason] = self.refused.get(reason, 0) + 1
        self.phase = Phase.REFUSED
