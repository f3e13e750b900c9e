"""Tries each new policy on a share of the actors, the canaries, and goes by the returns of their episodes.

The candidate goes out on a channel of its own, and the canaries' assignments say that they follow it; the others go on
with the incumbent. Versions count up over both channels, so that one number names a policy wherever it acted. When it
is decided, the one that has won goes out on the main channel as a newer version than both, and all follow that: so the
loser can never be the newest again, on any actor. A trial that cannot go on because of who came or left is broken off,
which ends like a withdrawal and says nothing of the policy.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from broker.contract import messages
from broker.program import logs
from learner.fleet import roster
from learner.policies import paired_trial, publisher

_log = logging.getLogger(__name__)
LOOK_S = 0.5
"""Between two looks at who is there."""
PATIENCE_S = 10.0
"""A trial goes on for so long where too few actors are there for it, or too many of those are canaries."""
_KEPT = 100
_AGAIN_S = 60.0
Verdict = Literal["promoted", "withdrawn", "broken off"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a trial: `return_mean` of the candidate's compared episodes and the incumbent's, None without one.

    `candidate` and `incumbent` are the places among all under which they were compared, and `newest` is that under
    which the better one goes on; `actors` are all that were canaries in it.
    """

    verdict: Verdict
    why: str
    candidate: str
    incumbent: str
    newest: str
    actors: tuple[str, ...]
    pairs: int
    return_mean: float | None
    incumbent_return_mean: float | None
    took_s: float


class _Trial:
    """What is known of the trial that goes on."""

    def __init__(self, candidate: publisher.Published, incumbent: publisher.Published, now_s: float) -> None:
        self.candidate, self.incumbent, self.since_s = candidate, incumbent, now_s
        self.pairs = paired_trial.PairedTrial(candidate.sent.order, incumbent.sent.order)
        self.members: dict[str, None] = {}  # in the order in which they came
        self.unfit_since_s: float | None = None


class Canary:
    """Runs one trial at a time. For one thread.

    Args:
        share: Of the actors that are there, at most; one at least, and never all.
        policies: Sends policies out.
        actors: Those who are there; tells them which channel they follow.
        clock: Monotonic seconds.
        held: Names of actors whose experience is held back, as it is by now: their episodes do not count.

    Attributes:
        outcomes: How the newest trials ended.
        ended: How many ended in which way.
    """

    def __init__(
        self,
        share: float,
        policies: publisher.Publisher,
        actors: roster.Roster,
        clock: Callable[[], float] = time.monotonic,
        held: Container[str] = (),
    ) -> None:
        self._held = held
        self._share, self._policies, self._actors, self._clock = share, policies, actors, clock
        self._trial: _Trial | None = None
        self._look_at = 0.0
        self.outcomes: deque[Outcome] = deque(maxlen=_KEPT)
        self.ended: Counter[Verdict] = Counter()

    @property
    def is_trying(self) -> bool:
        """Returns whether a trial goes on."""
        return self._trial is not None

    @property
    def may_begin(self) -> bool:
        """Returns whether a trial can begin: none goes on, and two actors are there."""
        if self._trial is not None:
            return False
        if len(self._present()) < 2:
            _log.warning(
                "no new policy goes out: a trial needs two actors that act", extra=logs.once("canary", again_s=60.0)
            )
            return False
        return True

    def begin(self) -> None:
        """Puts the publisher's newest policy, which went out on the channel of the canaries, on trial."""
        candidate, incumbent = self._policies.newest, self._policies.main
        assert self._trial is None
        assert candidate is not None
        assert incumbent is not None
        self._trial = _Trial(candidate, incumbent, self._clock())
        self._look_at = 0.0
        self._follow_fleet(self._trial)

    def newest_version(self, actor_id: str) -> int:
        """Returns the newest version on the channel that an actor follows."""
        if self._trial is not None:
            known = self._actors.actors.get(actor_id)
            # Who was told nothing yet may follow the canaries by what the session before told it
            if actor_id in self._trial.members or known is None or known.assignment is None:
                return self._trial.candidate.sent.version
        return self._policies.main_version

    def consider(self, actor_id: str, experience: messages.Experience) -> None:
        """Takes in an accepted message."""
        if self._trial is not None:
            self._trial.pairs.add(actor_id, experience)

    def advance(self) -> Outcome | None:
        """Follows who comes and leaves, and ends the trial if it is decided; call again and again.

        Returns:
            How it ended, if it did.
        """
        trial = self._trial
        if trial is None:
            return None
        if trial.pairs.decision == "promote":
            return self._end(trial, "promoted", "not worse than the incumbent, by returns")
        if trial.pairs.decision == "withdraw":
            return self._end(trial, "withdrawn", "worse than the incumbent, by returns")
        if (now := self._clock()) < self._look_at:
            return None
        self._look_at = now + LOOK_S
        unfit = self._follow_fleet(trial)
        if not unfit:
            trial.unfit_since_s = None
            return None
        if trial.unfit_since_s is None:
            trial.unfit_since_s = now
        return self._end(trial, "broken off", unfit) if now - trial.unfit_since_s >= PATIENCE_S else None

    def end(self, why: str) -> Outcome | None:
        """Breaks off the trial that goes on, if one does."""
        return self._end(self._trial, "broken off", why) if self._trial is not None else None

    def metrics(self) -> dict[str, float]:
        """Returns the trial that goes on, and how those before ended, for a row of metrics."""
        trial = self._trial
        return {
            "canary_actors": len(trial.members) if trial else 0,
            "canary_pairs": trial.pairs.pairs if trial else 0,
            "canary_trial_s": self._clock() - trial.since_s if trial else 0.0,
            "canary_promoted": self.ended["promoted"],
            "canary_withdrawn": self.ended["withdrawn"],
            "canary_broken_off": self.ended["broken off"],
        }

    def summary(self) -> dict[str, Any]:
        """Returns how trials ended, and the newest hundred with their reasons, for the summary."""
        return {
            "promoted": self.ended["promoted"],
            "withdrawn": self.ended["withdrawn"],
            "broken_off": self.ended["broken off"],
            "trials": [asdict(one) for one in self.outcomes],
        }

    def _present(self) -> list[str]:
        working = (actor.actor_id for actor in self._actors.working())
        return ranked(name for name in working if name not in self._held)

    def _follow_fleet(self, trial: _Trial) -> str:
        """Makes canaries of as many as there may be, in the order of `ranked`; returns why it cannot go on, if so."""
        present = self._present()
        most = allowed(len(present), self._share)
        for name in present:
            if len(trial.members) >= most:
                break
            if name not in trial.members:
                trial.members[name] = None
                _log.info("policy %s is on trial on %s, of %d actors", trial.candidate.sent.order, name, len(present))
        self._actors.set_canaries(frozenset(trial.members))
        for gone in trial.pairs.actors.difference(present):
            trial.pairs.drop(gone)
        at_work = [name for name in present if name in trial.members]
        if len(present) < 2:
            return f"{len(present)} actor(s) left, and a trial needs two"
        if not at_work:
            return "no canary is left"
        if len(at_work) > most:
            return f"of {len(present)} actors that are left, {len(at_work)} are canaries, and {most} may be"
        return ""

    def _end(self, trial: _Trial, verdict: Verdict, why: str) -> Outcome:
        """Sends the better policy to all. In this order: whatever a killed learner leaves undone, main is proven."""
        winner = trial.candidate if verdict == "promoted" else trial.incumbent
        self._policies.publish_again(winner).result()
        self._trial = None
        self._actors.set_canaries(frozenset())
        self._policies.clear_canary()
        assert self._policies.main is not None
        pairs = trial.pairs.pairs
        totals = trial.pairs.challenger_return, trial.pairs.incumbent_return
        tried_mean, kept_mean = [total / pairs if pairs else None for total in totals]
        outcome = Outcome(
            verdict,
            why,
            str(trial.candidate.sent.order),
            str(trial.incumbent.sent.order),
            str(self._policies.main.sent.order),
            tuple(trial.members),
            pairs,
            tried_mean,
            kept_mean,
            round(self._clock() - trial.since_s, 3),
        )
        self.outcomes.append(outcome)
        self.ended[verdict] += 1
        level = logging.INFO if verdict == "promoted" else logging.WARNING
        _log.log(
            level,
            "policy %s is %s: %s (%d pairs of episodes, means %s and %s, on %s, %.0f s); %s goes out to all",
            *(outcome.candidate, verdict, why, pairs),
            *(f"{mean:.4g}" if mean is not None else "-" for mean in (tried_mean, kept_mean)),
            *(", ".join(outcome.actors) or "nobody", outcome.took_s, outcome.newest),
        )
        return outcome


def allowed(present: int, share: float) -> int:
    """Returns how many of so many actors may be canaries: at most their share, but one, and never all."""
    return 0 if present < 2 else max(1, min(int(share * present + 1e-9), present - 1))


def ranked(names: Iterable[str]) -> list[str]:
    """Returns actors in the order in which they become canaries: by a hash of their names, the same each time."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
