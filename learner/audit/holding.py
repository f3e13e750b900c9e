"""Holds back the experience of actors that do not act as they say, until a person decides.

In the run directory `held.json` says who is held and why; the learner alone writes it, and a session that resumes the
run reads it. `decisions/NAME` has one word, `release` or `discard`; `actorq-learner held` writes it, and the learner
follows and deletes it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.contract import errors, messages
from broker.program import storage
from learner.audit import auditor
from learner.experience import ingestion
from learner.files import records

_log = logging.getLogger(__name__)
HELD = "held.json"
DECISIONS = "decisions"
RELEASE, DISCARD = "release", "discard"
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Hold:
    """Why an actor's experience is held back, and since when (Unix time)."""

    why: str
    boot: int
    seq: int
    steps: int
    wrong: int
    since_s: float


class Holding:
    """Follows what the auditor finds, and what people decide.

    Args:
        checks: The auditor.
        source: Whose experience it is.
        path: Of the run.
        commit: Commits all that was received.
        on_release: Called with experience that enters replay after all.
        held: Who is held from the start.
        kept: Counts what the disk does not take.

    Attributes:
        held: Who is held, by name.
        named: How often any actor was.
    """

    def __init__(
        self,
        checks: auditor.Auditor,
        source: ingestion.Ingestion,
        path: Path,
        commit: Callable[[], None],
        on_release: Callable[[messages.Experience], None],
        held: dict[str, Hold],
        kept: records.Records,
    ) -> None:
        self._checks, self._source, self._path = checks, source, path
        self._commit, self._on_release, self._kept = commit, on_release, kept
        self._good: dict[str, tuple[int, int]] = {}  # boot and seq of the last message that was true
        self._look_at = 0.0
        self.held = held
        self.named = 0

    def advance(self) -> None:
        """Does what is due. To be called again and again.

        Raises:
            StorageError, RunError: The ledger cannot be written.
        """
        if (finding := self._checks.pop_finding()) is not None:
            self.follow(finding)
        now = time.monotonic()
        if now >= self._look_at and self.held:
            self._look_at = now + _LOOK_S
            for actor_id in list(self.held):
                if (file := self._path / DECISIONS / actor_id).exists():
                    self._decide(actor_id, file.read_text().strip())
                    file.unlink()

    def follow(self, finding: auditor.Finding) -> None:
        """Notes that a message was true, or holds its actor back."""
        actor_id, boot, seq, verdict = finding
        if not verdict.wrong:
            self._good[actor_id] = boot, seq
            return
        if actor_id in self.held:
            return
        self._commit()
        (self._path / DECISIONS / actor_id).unlink(missing_ok=True)  # of a hold before: of this one nobody has decided
        steps = self._source.hold(actor_id, self._good.get(actor_id))
        self.held[actor_id] = Hold(verdict.why, boot, seq, verdict.steps, verdict.wrong, round(time.time(), 3))
        self.named += 1
        self._write()
        _log.warning(
            "actor %s did not do what it says: %d of %d steps in message %d of boot %d are not its policy's; %s. Its "
            "experience is held back, with the %d steps since it was last found true. See to the board; then "
            "`actorq-learner held %s --release %s` lets it in, and --discard leaves it out",
            *(actor_id, verdict.wrong, verdict.steps, seq, boot, verdict.why, steps, self._path, actor_id),
        )

    def metrics(self) -> dict[str, float]:
        """Returns who is held now, for a row of metrics."""
        return {"actors_held": len(self.held), "steps_held": self._source.steps_held}

    def summary(self) -> dict[str, Any]:
        """Returns who is held at the end, and why, for the summary."""
        return {
            "actors_held": {name: hold.why for name, hold in self.held.items()},
            "actors_named": self.named,
            "steps_held": self._source.steps_held,
        }

    def _decide(self, actor_id: str, decision: str) -> None:
        self._commit()
        if decision == RELEASE:
            for experience in self._source.release(actor_id):
                self._on_release(experience)
            _log.info("actor %s is released: what was held of it is in replay", actor_id)
        elif decision == DISCARD:
            steps = self._source.discard(actor_id)
            _log.info("what was held of actor %s is discarded: %d steps; what it sends now counts", actor_id, steps)
        else:
            return
        del self.held[actor_id]
        self._write()

    def _write(self) -> None:
        held = {name: dataclasses.asdict(hold) for name, hold in self.held.items()}
        with self._kept.attempt("who is held"):
            storage.write_atomic(self._path / HELD, (json.dumps(held, indent=2) + "\n").encode(), mode=0o644)


def read(path: Path) -> dict[str, Hold]:
    """Returns who is held in a run, by name.

    Raises:
        RunError: Its file is broken.
    """
    file = path / HELD
    try:
        return {name: Hold(**hold) for name, hold in json.loads(file.read_text()).items()} if file.exists() else {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise errors.RunError(
            f"who is held cannot be read: {error}",
            where=str(file),
            todo="delete the file: the ledger knows who is held, if not why",
        ) from error


def decide(path: Path, actor_id: str, decision: str) -> None:
    """Leaves a decision for the learner of a run, now or when it is resumed.

    Raises:
        ConfigError: The actor is not held.
    """
    held = read(path)
    if actor_id not in held:
        raise errors.ConfigError(
            f"{actor_id} is not held back",
            where=str(path),
            todo=f"name one of {', '.join(sorted(held))}" if held else "nobody is: there is nothing to decide",
        )
    (path / DECISIONS).mkdir(exist_ok=True)
    storage.write_atomic(path / DECISIONS / actor_id, f"{decision}\n".encode(), mode=0o644)
