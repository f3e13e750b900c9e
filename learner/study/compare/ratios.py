"""Rows of a comparison: one a ratio, with what explains it."""

from __future__ import annotations

import dataclasses
import statistics as plain
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from learner.study import energies
from learner.study.compare import headroom, plan, statistics

Record = dict[str, Any]
_STAGES = 4
_EXPLAINED_US = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A figure that is compared.

    Attributes:
        key: In the figures of a run.
        name, unit: For people.
        better: `higher` or `lower`.
        kinds: Of runs that tell it.
        as_difference: Whether arms are compared by their difference, because a ratio says nothing.
        energy: The part of the summary's energy that says where it comes from.
        so_far: In the figures of a run that was ended before it got there; `key` by default.
    """

    key: str
    name: str
    unit: str
    better: str = "lower"
    kinds: Sequence[str] = plan.KINDS
    as_difference: bool = False
    energy: str = ""
    so_far: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What a ratio is at least, or at most, because runs that did not get to the threshold would have cost more.

    Attributes:
        side: `at least` or `at most`.
        found: With what they had cost when they were ended, over all seeds of which one arm at least got there.
    """

    side: str
    found: statistics.Paired

    def facts(self) -> Record:
        """Returns it for a row."""
        ends = self.found.interval and [_rounded(end) for end in self.found.interval]
        return {"side": self.side, "ratio": _rounded(self.found.ratio), "interval": ends, "runs": self.found.pairs}

    def __str__(self) -> str:
        ends = "({:.3g} to {:.3g}) ".format(*self.found.interval) if self.found.interval else ""
        return f"{self.side} {self.found.ratio:.3g} {ends}over {self.found.pairs} seed{'s' * (self.found.pairs > 1)}"


MEASURES = (
    Measure("env_steps_per_s", "environment steps/s at equal learner work", "1/s", "higher", (plan.THROUGHPUT,)),
    Measure("return", "return at equal steps", "return", "higher", (plan.THROUGHPUT,), as_difference=True),
    Measure("threshold_s", "time to the threshold", "s", kinds=(plan.THRESHOLD,), so_far="trained_s"),
    Measure("threshold_steps", "steps to the threshold", "steps", kinds=(plan.THRESHOLD,), so_far="trained_steps"),
    Measure("policy_bytes", "bytes of a policy's file", "bytes", kinds=(plan.THROUGHPUT,)),
    Measure("bytes_per_policy", "bytes of a policy on the wire", "bytes", kinds=(plan.THROUGHPUT,)),
    Measure("bytes", "bytes at the learner in all", "bytes"),
    Measure("learner_cpu_s", "CPU of the learner", "s"),
    Measure("actors_cpu_s", "CPU of the actors", "s"),
    Measure("learner_joules", "energy of the learner", "J", energy="learner"),
    Measure("actors_joules", "energy of the actors", "J", energy="actors"),
    Measure("kgco2e", "CO2 in all", "kg CO2e", energy="carbon"),
)
_TIME = next(measure for measure in MEASURES if measure.key == "threshold_s")
_WORK = {plan.THROUGHPUT: "equal steps", plan.THRESHOLD: "to the threshold"}


def ratios(request: plan.Request, records: Sequence[Record], paces: Mapping[Any, headroom.Pace]) -> Iterator[Record]:
    """Yields a row for each measure of each arm beside the reference, the first precision, of its regime and size.

    Args:
        request: What was asked for.
        records: Runs that ended (comparison.py writes them).
        paces: What the runs of a regime and size share, by (regime, hidden).
    """
    for regime, hidden in plan.cells(request):
        reference, *others = plan.arms(request, regime, hidden)
        for other in others:
            for measure in MEASURES:
                for kind in (kind for kind in request.kinds if kind in measure.kinds):
                    cell = _Cell(request, kind, measure, reference, other, records)
                    if (row := cell.row(paces.get((regime, hidden)))) is not None:
                        yield row


def unreached(request: plan.Request, records: Sequence[Record]) -> Iterator[str]:
    """Yields a line for each two arms of which no seed has both at the threshold: no row tells of them."""
    for regime, hidden in plan.cells(request):
        reference, *others = plan.arms(request, regime, hidden)
        for other in others if plan.THRESHOLD in request.kinds else ():
            beside = [
                [one for one in records if of(one, plan.THRESHOLD, arm) and not one["failed"]]
                for arm in (other, reference)
            ]
            seeds = [{one["seed"] for one in runs if _is_reached(one)} for runs in beside]
            if all(beside) and not seeds[0] & seeds[1]:
                told = (
                    f"{len(reached)} of {len(runs)} runs of {arm.name}"
                    for arm, runs, reached in zip((other, reference), beside, seeds, strict=True)
                )
                bound = _Cell(request, plan.THRESHOLD, _TIME, reference, other, records).bound()
                yield (
                    f"{regime}, {request.env} {plan.widths(hidden)}: no ratio of times to the threshold, which "
                    f"{' and '.join(told)} reached within {request.max_s:g} s" + (f"; it is {bound}" if bound else "")
                )


class _Cell:
    """Runs of two arms beside each other, for one measure."""

    def __init__(
        self,
        request: plan.Request,
        kind: str,
        measure: Measure,
        reference: plan.Arm,
        other: plan.Arm,
        records: Sequence[Record],
    ) -> None:
        self._request, self._kind, self._measure = request, kind, measure
        self._arms = (other, reference)
        self._all = [[one for one in records if of(one, kind, arm)] for arm in self._arms]
        self._good = [[one for one in beside if not one["failed"]] for beside in self._all]
        # A run towards the threshold that did not get there has no cost of getting there
        self._counted = [[one for one in good if kind != plan.THRESHOLD or _is_reached(one)] for good in self._good]

    def row(self, pace: headroom.Pace | None) -> Record | None:
        """Returns the row; None where no seed has both figures."""
        measure, (other, reference) = self._measure, self._arms
        values, references = (_by_seed(counted, measure.key) for counted in self._counted)
        found = statistics.paired(values, references, as_difference=measure.as_difference)
        if found is None:
            return None
        work = "" if len(measure.kinds) == 1 else f", {_WORK[self._kind]}"
        cell = f"{other.regime}, {self._request.env} {plan.widths(other.hidden)}"
        return {
            "benchmark": "compare",
            "case": f"{cell}, {other.name} over {reference.name}: {measure.name}{work}",
            "value": _rounded(found.value),
            "unit": measure.unit,
            "reference": _rounded(found.reference),
            "ratio": _rounded(found.ratio),
            "difference": _rounded(found.difference),
            "interval": [_rounded(end) for end in found.interval] if found.interval else None,
            "runs": found.pairs,
            "spread": _rounded(found.spread),
            "bound": bound.facts() if (bound := self.bound()) else None,
            "explain": "; ".join(filter(None, self._explain(found, pace))),
            "better": measure.better,
            "measure": measure.key,
            "kind": self._kind,
            "env_id": self._request.env,
            "regime": other.regime,
            "hidden": list(other.hidden),
            "precision": other.precision,
            "peer": other.peer,
            "over": reference.precision,
            "held": self._held(),
            "learner_idle_share": {arm.name: share for arm, share in zip(self._arms, self._idle(), strict=True)},
            "breakdown": {arm.name: self._breakdown(good) for arm, good in zip(self._arms, self._good, strict=True)},
            "pace": dataclasses.asdict(pace) if pace else None,
        }

    def bound(self) -> Bound | None:
        """Returns what runs that did not get to the threshold tell of the ratio; None if nothing.

        Where one arm was too slow with some seeds and the other one with others, it is bounded on no side.
        """
        reached = [_by_seed(counted, self._measure.key) for counted in self._counted]
        missed = [
            _by_seed([one for one in good if one not in counted], self._measure.so_far or self._measure.key)
            for good, counted in zip(self._good, self._counted, strict=True)
        ]
        slower = [missed[0].keys() & reached[1].keys(), missed[1].keys() & reached[0].keys()]
        if bool(slower[0]) == bool(slower[1]):
            return None
        late = 0 if slower[0] else 1
        beside = [reached[arm] | (missed[arm] if arm == late else {}) for arm in (0, 1)]
        found = statistics.paired(*beside)
        if found is None or found.ratio is None:
            return None
        return Bound(("at least", "at most")[late], found)

    def _explain(self, found: statistics.Paired, pace: headroom.Pace | None) -> Iterator[str]:
        measure = self._measure
        yield self._held()
        idle = self._idle()
        if None not in idle:
            names = (arm.name for arm in self._arms)
            yield "learner idle " + ", ".join(f"{share:.0%} ({name})" for share, name in zip(idle, names, strict=True))
        if self._arms[0].regime == plan.ACTOR_BOUND:
            busy = [s for good in self._good for one in good if (s := one["figures"].get("idle_share")) is not None]
            if not busy:
                yield "how long the learner was idle is not known"
            elif min(busy) < headroom.IDLE_MIN:
                yield f"NOT actor-bound: in a run the learner was idle for {min(busy):.0%} only"
        if pace and pace.samples_per_insert:
            yield f"{pace.samples_per_insert:g} samples per insert"
        if pace and pace.remark:
            yield pace.remark
        if measure.key in ("env_steps_per_s", "threshold_s", "actors_cpu_s"):
            yield self._stages("actors")
        if measure.key in ("env_steps_per_s", "learner_cpu_s"):
            yield self._stages("learner")
        if measure.energy:
            yield self._source()
        if measure.as_difference:
            yield f"difference {found.difference:.4g}, and the interval is its own"
        if measure.key == "return":
            yield "mean of the last 100 training episodes, exploration included, which is alike in all"
        for arm, good, ended in zip(self._arms, self._good, self._all, strict=True):
            if failed := len(ended) - len(good):
                yield f"{failed} of {len(ended)} runs of {arm.name} failed and are left out"
            steps = pace.steps if pace and self._kind == plan.THROUGHPUT else 0
            if short := sum((one["summary"].get("env_steps") or 0) < steps for one in good):
                yield f"{short} of {len(good)} runs of {arm.name} ended by time before their {steps:,} steps"
            if self._kind == plan.THRESHOLD and (missed := sum(not _is_reached(one) for one in good)):
                yield f"{missed} of {len(good)} runs of {arm.name} did not reach it within {self._request.max_s:g} s"
        if bound := self.bound():
            yield f"with what such runs had cost when they were ended, the ratio is {bound}"
        yield statistics.remark(found.pairs)

    def _held(self) -> str:
        """Returns what actors were held by."""
        if self._request.fleet:
            return "quota: the actors' own"
        if self._arms[0].regime == plan.LEARNER_BOUND:
            return ""
        found = [one["summary"].get("actors_held") or {} for good in self._good for one in good]
        if free := next((held for held in found if held.get("share") is None), None):
            return str(free.get("how", "unlimited: nobody said by what"))
        if not found or not all(held.get("share") for held in found):
            return "unlimited: nobody said by what"
        throttled = [held["throttled"] for held in found if held.get("throttled") is not None]
        waited = f", which made it wait in {plain.fmean(throttled):.0%} of its periods" if throttled else ""
        return f"each actor held to {found[0]['share']:g} of a core by {found[0]['how']}{waited}"

    def _idle(self) -> list[float | None]:
        return [_mean([one["figures"].get("idle_share") for one in good]) for good in self._good]

    def _breakdown(self, good: Sequence[Record]) -> Record:
        """Returns the mean of microseconds per step, by who and stage."""
        found: dict[str, dict[str, list[float]]] = {}
        for one in good:
            for who, stages in one["breakdown"].items():
                for stage, us in stages.items():
                    found.setdefault(who, {}).setdefault(stage, []).append(us)
        return {who: {s: round(plain.fmean(us), 3) for s, us in stages.items()} for who, stages in found.items()}

    def _stages(self, who: str) -> str:
        """Returns the stages that differ most."""
        ours, theirs = (self._breakdown(good).get(who, {}) for good in self._good)
        both = {stage: (theirs.get(stage, 0.0), ours.get(stage, 0.0)) for stage in ours.keys() | theirs.keys()}
        most = sorted(both, key=lambda stage: -abs(both[stage][0] - both[stage][1]))[:_STAGES]
        told = [f"{s} {_us(both[s][0])} -> {_us(both[s][1])}" for s in most if max(both[s]) > _EXPLAINED_US]
        return f"{who}, us a step: {', '.join(told)}" if told else ""

    def _source(self) -> str:
        """Returns where an energy comes from, in the words of one summary, and whether a ratio tells more than times.

        Those words have the joules of that run, and the row has means.
        """
        all_of = [one["summary"].get("energy") or {} for good in self._good for one in good]
        found, side = all_of[0] if all_of else {}, self._measure.energy
        asked = all_of if side == "carbon" else [{side: one.get(side)} for one in all_of]
        able, why = energies.distinguishable(*asked)
        if self._measure.energy == "carbon":
            texts = [str(found.get("carbon_source", ""))]
        else:
            part = found.get(self._measure.energy) or {}
            texts = [("modelled" if part.get("modelled") else "measured") + f" ({part.get('source', '')})"]
            if part.get("coverage") is not None:
                texts.append(f"of {part['coverage']:.0%} of the actors")
        told = ", ".join(filter(None, [*texts, str(found.get("note", ""))]))
        return "; ".join(filter(None, [told and f"in the first run: {told}", "" if able else why]))


def of(record: Record, kind: str, arm: plan.Arm) -> bool:
    """Returns whether a record is of a run of this kind and arm."""
    return bool(record["kind"] == kind and record["arm"] == arm.facts())


def _by_seed(records: Sequence[Record], key: str) -> dict[int, float]:
    """Returns a figure of runs that have it."""
    return {one["seed"]: one["figures"][key] for one in records if key in one["figures"]}


def _is_reached(record: Record) -> bool:
    return "threshold_s" in record["figures"]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(plain.fmean(known), 4) if known else None


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
