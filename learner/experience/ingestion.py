"""What the learner's loop asks of whatever takes in experience: itself (`Ingest`), or workers, each for a share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Protocol

from broker.contract import messages
from broker.program import stopwatch
from learner.experience import age, ledger, validate


class Ingestion(Protocol):
    """Takes in experience; see `ingest.Ingest` for each of these."""

    @property
    def pending_steps(self) -> int: ...

    @property
    def is_full(self) -> bool: ...

    @property
    def due_in_s(self) -> float: ...

    @property
    def steps_held(self) -> int: ...

    @property
    def ages(self) -> age.Ages: ...

    @property
    def held(self) -> Container[str]: ...

    @property
    def times(self) -> stopwatch.Stopwatch: ...

    @property
    def loop_s(self) -> float: ...

    def receive(
        self,
        actor_id: str,
        topic: str,
        payload: bytes,
        version: int,
        opened: Callable[[], validate.Opened] | None = None,
    ) -> validate.Validated | None: ...

    def commit(self, *, wait: bool) -> list[messages.Experience]: ...

    def receipts(self) -> Iterator[tuple[str, messages.Receipt]]: ...

    def quarantine(self, transitions: Iterable[int]) -> list[ledger.Source]: ...

    def hold(self, actor_id: str, since: tuple[int, int] | None) -> int: ...

    def release(self, actor_id: str) -> list[messages.Experience]: ...

    def discard(self, actor_id: str) -> int: ...

    def close(self) -> None: ...


class Counts(Protocol):
    """Counts what was accepted and refused; see `validate.Validator`."""

    @property
    def refused(self) -> Counter[str]: ...

    def metrics(self) -> dict[str, float]: ...

    def summary(self) -> dict[str, Any]: ...
