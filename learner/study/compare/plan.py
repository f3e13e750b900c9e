"""Which runs a comparison is made of, and in which order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

LEARNER_BOUND, ACTOR_BOUND = "learner-bound", "actor-bound"
REGIMES = (LEARNER_BOUND, ACTOR_BOUND)
"""The learner samples each step as often as is tuned, and is what is waited for; or each actor has a share of a core,
the learner has little to do, and actors are what is waited for."""
THROUGHPUT, THRESHOLD = "throughput", "threshold"
KINDS = (THROUGHPUT, THRESHOLD)
"""Runs of equally many steps, whatever is learned; and runs until the task's threshold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A comparison as it is asked for; it is what `plan.json` holds.

    Attributes:
        env: The task.
        precisions: Of published policies; the first is what the others are compared with.
        hidden: Widths of the policy's hidden layers, one entry for each size that is compared.
        seeds: How many.
        seed: The first of them.
        regimes, kinds: Some of REGIMES and of KINDS.
        actors: In each fleet.
        actor_cpu_share: Of a core, for each actor in the actor-bound regime.
        run_s: What a run for throughput shall take its fastest arm.
        steps: Environment steps of it instead; 0 chooses them by a first short run.
        samples_per_insert: In the actor-bound regime; 0 chooses it by a first short run.
        max_s: After which a run towards the threshold is given up.
        peers: Runtimes of others that run float32 policies.
        settings: Further settings of every run, NAME=VALUE.
        fleet: Of actors that are there; empty starts them on this machine.
        broker: Of that fleet.
        wait_s: For its actors.
        keep: Whether to keep checkpoints, ledgers and policies of runs that have ended.
    """

    env: str = "CartPole-v1"
    precisions: tuple[str, ...] = ("float32", "int8")
    hidden: tuple[tuple[int, ...], ...] = ()
    seeds: int = 3
    seed: int = 0
    regimes: tuple[str, ...] = REGIMES
    kinds: tuple[str, ...] = KINDS
    actors: int = 4
    actor_cpu_share: float = 0.25
    run_s: float = 15.0
    steps: int = 0
    samples_per_insert: float = 0.0
    max_s: float = 180.0
    peers: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    fleet: str = ""
    broker: str = ""
    wait_s: float = 30.0
    keep: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison with others of the same regime and widths."""

    regime: str
    hidden: tuple[int, ...]
    precision: str
    peer: str = ""

    @property
    def name(self) -> str:
        """The precision, or the peer's name."""
        return self.peer or self.precision

    def facts(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        return dataclasses.asdict(self) | {"hidden": list(self.hidden)}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One fleet, from its start to its end."""

    kind: str
    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Returns the name of its directory."""
        arm = self.arm
        return f"{arm.regime}-{widths(arm.hidden)}-{arm.name}-{self.kind}-seed{self.seed}"


def widths(hidden: Sequence[int]) -> str:
    """Returns widths as people write them."""
    return "x".join(map(str, hidden))


def arms(request: Request, regime: str, hidden: tuple[int, ...]) -> list[Arm]:
    """Returns the arms of a regime and size, the reference first. Peers run what is published in float32."""
    ours = [Arm(regime, hidden, precision) for precision in request.precisions]
    return ours + [Arm(regime, hidden, "float32", peer) for peer in request.peers]


def cells(request: Request) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields regimes and sizes within which arms are compared."""
    for hidden in request.hidden:
        for regime in request.regimes:
            yield regime, hidden


def runs(request: Request) -> list[Run]:
    """Returns all runs in their order.

    Arms of a cell follow one another, and each seed begins with the next arm: what changes on the machine within
    minutes then meets all alike. A comparison that ends early has whole seeds of all sizes.
    """
    found = []
    for index in range(request.seeds):
        for regime, hidden in cells(request):
            beside = arms(request, regime, hidden)
            first = index % len(beside)
            for kind in request.kinds:
                found += [Run(kind, arm, request.seed + index) for arm in beside[first:] + beside[:first]]
    return found
