"""Every message on the wire, as a frozen dataclass. `codec` turns them into bytes, `signing` seals them.

Array fields are numpy arrays whose dtype and rank are fixed in `ARRAYS`; all other fields are JSON scalars,
dicts, lists or nested dataclasses. Changing anything here changes SCHEMA_VERSION, previous.py and the golden bytes in
tests/broker.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs

SCHEMA_VERSION = 12
MAX_POLICY_BYTES = 40_000_000
"""The largest model an actor accepts."""
MAX_PACKET_BYTES = MAX_POLICY_BYTES + (1 << 20)
"""The largest policy, its header (64 KB), its seal and its topic, with room to spare: more is neither sent nor read."""

MAX_NAME_CHARS = 1000
"""The longest text of a birth certificate: they go into file names, tables and the learner's console."""
MAX_ENVS = 4096
"""Environments of one actor at once."""
ORDER_KINDS = ("pause", "resume", "restart", "reboot", "logs", "set", "update")
"""What an actor can be ordered; its board's settings say which of them it does."""
SETTABLE = ("rate_hz", "envs", "spool_bytes", "seed")
"""Settings that the order `set` may change, beside `env_kwargs.NAME` of the names that the board allows."""
ENV_ARGUMENT = "env_kwargs."
MAX_ORDERS = 64
"""Orders of one actor that may wait at once."""
MAX_LOG_LINES = 200
"""Lines in one Answer, of MAX_NAME_CHARS at most."""
ACTOR_STAGES = (
    *("environment", "observation_to_action", "record", "spool", "seal", "send"),
    *("policy_receive", "policy_verify", "policy_build", "policy_swap", "wait"),
)
"""Stages of an actor's time; docs/metrics.md says what each is. Their names become those of metrics."""
_STAGE_SECONDS_MAX = 1e9
_STAGE_COUNT_MAX = 1 << 53
_ENERGY_J_MAX = 1e15

FloatArray = NDArray[np.float32]


class Order(NamedTuple):
    """The place of a policy among all of a fleet: by the learner's epoch, and within that by version.

    What compares larger is newer; `Order(0, 0)` is before every policy.
    """

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version}"


def _no_bytes() -> NDArray[np.uint8]:
    return np.zeros(0, np.uint8)


def _no_floats() -> FloatArray:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Learner's birth, heartbeat and will. Retained.

    `session` is new with every process, `epoch` with every session on this fleet (policies are ordered by epoch,
    then version). `env_id` is the task for actors that have none of their own.
    """

    online: bool
    session: str
    epoch: int
    heartbeat: int
    env_id: str = ""
    fingerprint: str = ""
    version: int = 0

    @property
    def newest(self) -> Order:
        """The newest policy that this learner has published."""
        return Order(self.epoch, self.version)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that an actor must know about a policy before its interpreter sees a byte of it.

    `created_s` and `expires_s` are Unix times; `expires_s` 0 means never.
    """

    epoch: int
    version: int
    channel: str
    length: int
    sha256: str
    fingerprint: str
    head: str
    precision: str
    created_s: float
    expires_s: float = 0.0

    @property
    def order(self) -> Order:
        """The policy's place among all."""
        return Order(self.epoch, self.version)

    def followed_by(self, version: int, changes: ManifestChanges) -> Manifest:
        """Returns the manifest of the policy `version` that is this one but for the `changes`."""
        return replace(
            self,
            version=version,
            sha256=changes.sha256 or "",
            created_s=changes.created_s,
            expires_s=changes.expires_s,
        )


@dataclass(frozen=True, slots=True)
class ManifestChanges:
    """The parts in which a policy's manifest differs from that of its base; small policies are sent often.

    `sha256` is None where pieces of the policy went ahead of it. Each of them was signed, and no others have their
    attempt, so they need no digest: of 8 MB, a board without instructions for it takes 50 ms.
    """

    sha256: str | None
    created_s: float
    expires_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A policy as a whole: its manifest and the bytes of its .tflite file. Retained."""

    manifest: Manifest
    model: NDArray[np.uint8]

    @property
    def order(self) -> Order:
        """The policy's place among all."""
        return self.manifest.order


@dataclass(frozen=True, slots=True, eq=False)
class PolicyPatch:
    """A newer policy as one patch (`policy_patch.difference`) on the retained whole one, `base`. Retained.

    These two are all that a late joiner needs. Its manifest is that of its base, but for version and `changes`.
    """

    epoch: int
    version: int
    base: int
    changes: ManifestChanges
    patch: NDArray[np.uint8]

    @property
    def order(self) -> Order:
        """The policy's place among all."""
        return Order(self.epoch, self.version)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyPiece:
    """Bytes `start` to `end` of a policy, as a patch on the same bytes of the policy just before it, `base`.

    Streamed to those who listen, in the order of the bytes, the first from 0, and not retained. The last piece of a
    policy has its `changes`, and makes it one; a small policy is one piece. Pieces of a large one go out while the
    learner still makes and judges it, so its last one has no bytes left to bring. If the policy does not go out, none
    comes, and the next attempt at this version has another number: an epoch counts them from 1.
    """

    epoch: int
    version: int
    base: int
    attempt: int
    start: int
    end: int
    changes: ManifestChanges | None
    patch: NDArray[np.uint8]

    @property
    def order(self) -> Order:
        """The policy's place among all."""
        return Order(self.epoch, self.version)


@dataclass(frozen=True, slots=True)
class Birth:
    """Who an actor is: fixed for one process.

    `ordered` has what orders changed of its settings, as KEY=VALUE. `release` is of its actorq-fleet; empty where that
    is not installed.
    """

    env_id: str
    spec: specs.EnvSpec
    n_envs: int
    board: str
    python: str
    runtime: str
    delegate: str
    rate_hz: float
    ordered: tuple[str, ...] = ()
    release: str = ""

    def __post_init__(self) -> None:
        texts = (self.env_id, self.board, self.python, self.runtime, self.delegate, self.release, "".join(self.ordered))
        if any(len(text) > MAX_NAME_CHARS for text in texts):
            raise errors.SpecError(
                f"a birth certificate has texts of at most {MAX_NAME_CHARS} characters",
                todo="give the environment a shorter name or path",
            )
        if not 1 <= self.n_envs <= MAX_ENVS:
            raise errors.SpecError(f"{self.n_envs} environments at once; an actor has 1 to {MAX_ENVS}")


@dataclass(frozen=True, slots=True)
class Vitals:
    """The condition of an actor; every counter since its process started.

    `delegate` names the kernels that the acting policy really runs on (empty before the first policy). `refused` counts
    refusals by reason. `env_failure` says how the environment failed the last time, of `env_failures`. `swap_pause_ms`
    is how long the acting loop stood still for the newest policy. `power_w` is what the whole board drew since the last
    heartbeat, `step_energy_j` that energy per step, both by `power_source`: measured, or `power_modelled` from load.
    `energy_j` is that energy since the process started, as far as readings tell it: of `energy_s` seconds. `board_id`
    is the same for all actors on one board, each of which tells the whole board's (empty: unknown).
    `latency_p50_us` and `latency_p99_us` are of the newest calls of observation to action that were timed. `throttled`
    has the bits of the Pi's get_throttled: those above 15 since its start. `spool_share` is how full the spool is, 0 to
    1. `paused`: an order keeps it from acting.
    `stages` has how often each of ACTOR_STAGES ran, and its seconds; `cpu_s` is the process's CPU time, of all threads,
    and `created_s` the Unix time at which all this was so (0: nobody looked). Fields a board cannot read are None.
    """

    policy_epoch: int = 0
    policy_version: int = 0
    policy_lag: int = 0
    policy_phase: str = ""
    delegate: str = ""
    steps: int = 0
    episodes: int = 0
    steps_recorded: int = 0
    steps_unrecorded: int = 0
    messages_held: int = 0
    steps_dropped: int = 0
    deadlines_missed: int = 0
    env_failures: int = 0
    env_failure: str = ""
    return_mean: float | None = None
    swap_pause_ms: float | None = None
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    memory_available_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    step_energy_j: float | None = None
    power_source: str = ""
    power_modelled: bool = False
    energy_j: float | None = None
    energy_s: float = 0.0
    board_id: str = ""
    refused: dict[str, int] = field(default_factory=dict)
    stages: dict[str, tuple[float, ...]] = field(default_factory=dict)
    cpu_s: float | None = None
    created_s: float = 0.0
    paused: bool = False
    latency_p50_us: float | None = None
    latency_p99_us: float | None = None
    throttled: int | None = None
    spool_share: float | None = None

    def __post_init__(self) -> None:
        if not self.stages.keys() <= _STAGES or not all(map(_is_spent, self.stages.values())):
            raise errors.SpecError(
                "the stages of an actor's vitals are not counts and seconds of stages that there are",
                where=repr(self.stages)[:200],
                todo="run the same release of actorq-fleet on learner and actors",
            )
        if self.cpu_s is not None and not 0.0 <= self.cpu_s <= _STAGE_SECONDS_MAX:
            raise errors.SpecError(f"an actor's CPU time is {self.cpu_s} s")
        joules = self.energy_j or 0.0
        if not (0.0 <= joules <= _ENERGY_J_MAX and 0.0 <= self.energy_s <= _STAGE_SECONDS_MAX):
            raise errors.SpecError(f"an actor's board drew {joules} J in {self.energy_s} s")
        if len(self.board_id) > MAX_NAME_CHARS or len(self.power_source) > MAX_NAME_CHARS:
            raise errors.SpecError(f"vitals have texts of at most {MAX_NAME_CHARS} characters")


_STAGES = frozenset(ACTOR_STAGES)


def _is_spent(spent: tuple[float, ...]) -> bool:
    """Returns whether this is a count and seconds."""
    return (
        len(spent) == 2
        and 0 <= spent[0] <= _STAGE_COUNT_MAX
        and spent[0] == int(spent[0])
        and 0.0 <= spent[1] <= _STAGE_SECONDS_MAX
    )


@dataclass(frozen=True, slots=True)
class ActorState:
    """Actor's birth certificate, heartbeat and will. Retained.

    `heartbeat` counts up within a boot, over all its connections (edge_actor/fleet/state_sequence.py); a birth counts
    only while it does, and of two states the one with the higher (boot, heartbeat) is true. `schema` is that of the
    message, which its header says: the one that the actor speaks.
    """

    online: bool
    session: str
    boot: int
    heartbeat: int
    birth: Birth | None = None
    vitals: Vitals = field(default_factory=Vitals)
    schema: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Assignment:
    """The learner's wishes for one actor. Retained.

    Exploration: epsilon falls from `epsilon_start` to `epsilon_end` over `epsilon_decay_steps` of this actor's
    recorded steps, of which `epsilon_offset` count as done before `boot` began. A deterministic policy's actions get
    noise of deviation `noise_std`, relative to half the range of each element, that forgets itself over
    `noise_correlation_steps` steps (0: at once). Pace: the actor records at most
    `steps_granted` steps in this `(session, boot)`, rounded up to whole rows of its environments. `lockstep_version`
    > 0: act only with that policy or a newer one, and flush only when a grant is used up. A non-empty `refused` ends
    the actor. Where the learner has ingest workers, experience goes to that of `shard`; -1: it has none.
    """

    session: str
    epoch: int
    boot: int
    channel: str
    slot: int
    epsilon_start: float
    epsilon_end: float
    epsilon_decay_steps: int
    epsilon_offset: int
    seed: int
    steps_granted: int
    record_fraction: float = 1.0
    noise_std: float = 0.0
    noise_correlation_steps: float = 0.0
    message_steps: int = 1024
    message_period_s: float = 0.25
    lockstep_version: int = 0
    refused: str = ""
    shard: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """Segments of trajectories, all chosen by the one policy `(epoch, version)`. Version 0 is uniformly random.

    Segment k has length[k] = T actions and T + `stack` frames, laid end to end in the arrays: N is the sum of the
    lengths, S the number of segments. Without a stack that is T + 1 observations; with one, the policy saw the frames t
    to t + `stack` - 1 before action t, so that a segment which begins within an episode has what it saw there.
    `terminated` and `truncated` flag the last step; a segment with neither goes on in a later message. `episode_return`
    and `episode_length` count from the episode's start to the segment's end. `step` counts the steps this boot recorded
    before this message; `oldest` is the first seq the actor still holds. It has `specs.MAX_EXPERIENCE_BYTES` at most,
    encoded, and its frames unpacked; numbers lie within ±`specs.MAX_MAGNITUDE`. Frames are as `frames.pack` makes them.
    `assigned_epoch` is that of the assignment they were recorded under: it says which run they belong to, where `epoch`
    may be an older one, because an actor acts on with the policy it has. Step j of segment k was taken with the random
    row `draw` + row[k] + j of that assignment's seed and slot (draws.py): so a learner can tell what the policy did.
    `created_ms` is the Unix time, in milliseconds of the actor's clock, at which the message was finished, just after
    its last step (0: the actor does not know the time).
    """

    boot: int
    seq: int
    oldest: int
    step: int
    fingerprint: str
    assigned_epoch: int
    epoch: int
    version: int
    draw: int
    length: NDArray[np.int32]  # [S]
    env_index: NDArray[np.int32]  # [S]
    row: NDArray[np.int32]  # [S]
    terminated: NDArray[np.uint8]  # [S]
    truncated: NDArray[np.uint8]  # [S]
    episode_return: FloatArray  # [S]
    episode_length: NDArray[np.int32]  # [S]
    observation: NDArray[np.generic]  # float32 [N + S * stack, *frame_shape], or uint8 [bytes]
    action: NDArray[np.generic]  # [N] int32, or [N, *action.shape] float32
    reward: FloatArray  # [N]
    log_prob: FloatArray = field(default_factory=_no_floats)  # [N], or [0] for heads that have none
    created_ms: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """All messages of `boot` up to and with `seq` need not be kept any longer. Retained.

    `ledger` names the ledger that holds them; a new ledger inherits no receipts.
    """

    ledger: str
    boot: int
    seq: int


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """Learner asks one actor to `evaluate` the policy that is enclosed, or to `bench` its board.

    Answered by Reports with the same `command_id`: `evaluate` by one, `bench` by one per row and one without values at
    the end. An evaluation that has not ended after `max_steps` steps or `max_s` seconds is given up, and its Report
    says so (0: no limit). `options` are settings of the benchmark by name.
    """

    command_id: str
    kind: str
    boot: int
    episodes: int = 0
    seed: int = 0
    manifest: Manifest | None = None
    model: NDArray[np.uint8] = field(default_factory=_no_bytes)
    options: dict[str, str] = field(default_factory=dict)
    max_steps: int = 0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Actor's answer to a Command. `error` is empty when it succeeded; `values` have their unit in the name."""

    command_id: str
    kind: str
    error: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    episode_return: FloatArray = field(default_factory=_no_floats)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of a person's orders to an actor, done at most once.

    `number` grows with every order of a fleet, over all actors; `kind` is one of ORDER_KINDS. An actor that knows the
    date does nothing after the Unix time `expires_s`. `options` are those of the kind.
    """

    number: int
    kind: str
    expires_s: float
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Orders:
    """All orders to one actor that have no Answer yet, by number, at most MAX_ORDERS. Retained.

    For whichever boot gets them first: an actor that is away finds them when it is back. Whoever has the fleet's key
    may give them, whether or not a learner has the fleet.
    """

    orders: tuple[Instruction, ...]

    def __post_init__(self) -> None:
        numbers = [one.number for one in self.orders]
        if not 1 <= len(numbers) <= MAX_ORDERS or numbers != sorted(set(numbers)):
            raise errors.SpecError(f"orders are 1 to {MAX_ORDERS}, by number", where=repr(numbers)[:200])


@dataclass(frozen=True, slots=True)
class Answer:
    """Tells what became of the order `number`.

    `outcome` is `taken` (another Answer follows), `done`, `refused`, `expired`, `failed` or `undone`; `text` says more.
    Asked again, an actor answers again. `lines` are of its log.
    """

    number: int
    kind: str
    outcome: str
    text: str = ""
    lines: tuple[str, ...] = ()


Message = (
    LearnerState
    | Policy
    | PolicyPatch
    | PolicyPiece
    | ActorState
    | Assignment
    | Experience
    | Receipt
    | Command
    | Report
    | Orders
    | Answer
)

KINDS: dict[str, type[Message]] = {
    "learner_state": LearnerState,
    "policy": Policy,
    "policy_patch": PolicyPatch,
    "policy_piece": PolicyPiece,
    "actor_state": ActorState,
    "assignment": Assignment,
    "experience": Experience,
    "receipt": Receipt,
    "command": Command,
    "report": Report,
    "orders": Orders,
    "answer": Answer,
}

ARRAYS: dict[type[Message], dict[str, tuple[tuple[str, ...], int | None]]] = {
    Policy: {"model": (("uint8",), 1)},
    PolicyPatch: {"patch": (("uint8",), 1)},
    PolicyPiece: {"patch": (("uint8",), 1)},
    # In the order they lie in: all of four bytes, then `observation` of four or one, then bytes, so that each is
    # aligned.
    Experience: {
        "length": (("int32",), 1),
        "env_index": (("int32",), 1),
        "row": (("int32",), 1),
        "episode_length": (("int32",), 1),
        "episode_return": (("float32",), 1),
        "reward": (("float32",), 1),
        "log_prob": (("float32",), 1),
        "action": (("int32", "float32"), None),
        "observation": (specs.OBSERVATION_DTYPES, None),
        "terminated": (("uint8",), 1),
        "truncated": (("uint8",), 1),
    },
    Command: {"model": (("uint8",), 1)},
    Report: {"episode_return": (("float32",), 1)},
}
"""Dtypes allowed and rank (None: any) of each array field."""
