"""The fidelity of int8 policies to their fp32 originals: one row per recipe, for any run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.contract import errors, specs
from broker.program import storage
from learner.quantize import compare
from learner.quantize.tflite import interpreter
from learner.study import play, recipes, trained

_log = logging.getLogger(__name__)
CALIBRATION_OBSERVATIONS = 1024
"""Observations for calibration: as many as published policies are calibrated with."""
PUBLISHED = "as published"
"""The row of the very file that actors were sent; it comes after fp32 where there is one."""
_STATES_MAX = 16_384
_STATES_MIN = 64

Object = dict[str, Any]


def study(path: Path, *, env_id: str = "", episodes: int = 100, seed: int = 0, rows: Sequence[str] = ()) -> Object:
    """Makes every policy, compares it with fp32 on held-back states, and has actors play all of them.

    Args:
        path: Run directory, with a checkpoint and a ledger; gets `fidelity.json`.
        env_id: What actors play; empty takes the run's.
        episodes: Of each policy, paired by seed; 0 plays nothing.
        seed: Of the first episode, and of the choice of states.
        rows: Names of recipes; empty takes all. fp32 and what was published are always there.

    Returns:
        The study as one JSON object; docs/policy/quantization.md shows what it tells.

    Raises:
        RunError: The run cannot be used.
        ConfigError: There is no such recipe.
    """
    run = trained.load(path)
    chosen = _choose(rows, recipes.of(run))
    compared = _comparison(run.action, run.head)
    calibration, held_back = _split(run.observations, seed)
    models = {}
    for recipe in chosen:
        _log.info("making %s", recipe.name)
        models[recipe.name] = recipes.make(recipe, run, calibration)
    reference = {recipes.REFERENCE.name: models.pop(recipes.REFERENCE.name)}
    models = reference | ({PUBLISHED: run.published} if run.published else {}) | models
    exact, _, _ = interpreter.run(models[recipes.REFERENCE.name], held_back)
    found: list[Object] = []
    for name, model in models.items():
        outputs, _, _ = interpreter.run(model, held_back)
        facts = {"recipe": name, "bytes": len(model), "sha256": hashlib.sha256(model).hexdigest()}
        found.append(facts | dataclasses.asdict(compared(exact, outputs)))
    env_id = env_id or run.env_id
    study: Object = {
        "run": str(path),
        "env_id": env_id,
        "updates": run.updates,
        "calibration_states": len(calibration),
        "states": len(held_back),
        "actions": run.action.kind,
        "head": run.head,
        "outputs_range": float(np.ptp(exact)),
        "seed": seed,
        "episodes": episodes,
        "random_return": None,
        "fp32_return": None,
        "runtime": None,
        "not_played": "" if episodes else "no episodes were asked for",
        "rows": found,
    }
    if episodes:
        _add_returns(study, models, run.head)
    storage.write_atomic(path / "fidelity.json", (json.dumps(study, indent=2) + "\n").encode(), mode=0o644)
    return study


def _comparison(
    action: specs.ActionSpec, head: specs.Head
) -> Callable[[Any, Any], compare.States | compare.Actions | compare.Distributions]:
    if head == "squashed_gaussian":
        return lambda exact, other: compare.squashed(exact, other, action)
    if head in specs.SAMPLED_HEADS:
        return lambda exact, other: compare.distributions(exact, other, action)
    if action.kind == "discrete":
        return compare.states
    return lambda exact, other: compare.actions(exact, other, action)


def _choose(names: Sequence[str], offered: Sequence[recipes.Recipe]) -> list[recipes.Recipe]:
    known = {recipe.name: recipe for recipe in offered}
    if unknown := [name for name in names if name not in known]:
        raise errors.ConfigError(
            f"the run has no row {unknown[0]!r}", where="--rows", todo=f"choose among: {', '.join(known)}"
        )
    return [r for r in known.values() if not names or r.name in names or r.name == recipes.REFERENCE.name]


def _split(observations: NDArray[Any], seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns observations to calibrate with, and others to compare on."""
    order = np.random.default_rng(seed).permutation(len(observations))
    count = min(CALIBRATION_OBSERVATIONS, len(order) // 2)
    held_back = order[count : count + _STATES_MAX]
    if len(held_back) < _STATES_MIN:
        raise errors.RunError(
            f"replay holds {len(observations)} observations, too few to calibrate and compare with",
            todo="let the run gather more experience",
        )
    return observations[order[:count]], observations[held_back]


def _add_returns(study: Object, models: dict[str, bytes], head: specs.Head) -> None:
    """Plays each different model once, and random actions; fills in the rows."""
    named = {row["sha256"]: row["recipe"] for row in reversed(study["rows"])}
    with tempfile.TemporaryDirectory(prefix="actorq-") as directory:
        policies = {name: Path(directory) / f"{sha256}.tflite" for sha256, name in reversed(named.items())}
        for name, file in policies.items():
            file.write_bytes(models[name])
        try:
            played = play.play(policies, study["env_id"], study["episodes"], study["seed"], head)
        except errors.EnvironmentFailure as failure:
            study["not_played"] = failure.what
            return
    exact, chance = played[named[study["rows"][0]["sha256"]]], played[play.RANDOM]
    study["random_return"] = float(chance.episode_return.mean())
    study["fp32_return"] = float(exact.episode_return.mean())
    study["runtime"] = exact.runtime
    for row in study["rows"]:
        one = played[named[row["sha256"]]]
        compared = compare.returns(exact.episode_return, one.episode_return, chance.episode_return)
        row |= {f"return_{key}": value for key, value in dataclasses.asdict(compared).items()}
        row |= {"delegate": one.delegate, "returns": one.episode_return.tolist()}


_RETURNS = f"  {'return':>8} {'less fp32':>9} {'95 % interval':>18} {'low/span':>8}  non-"
_RETURN_UNITS = f"  {'':>8} {'':>9} {'':>18} {'%':>8}  inferior"
_CHOICES = f"{'':23}  {'agree':>6}{'decided':>8}{'ties':>6}{'regret':>8}", f"{'':23}  {'%':>6}{'%':>8}{'%':>6}{'%':>8}"
_SAMPLED = f"{'':23}  {'KL':>9}{'p99':>9}{'mode':>9}", f"{'':23}  {'nats':>9}{'nats':>9}{'%':>9}"
_ACTIONS = f"{'':23}  {'error':>7}{'p99':>7}{'largest':>9}", f"{'':23}  {'%':>7}{'%':>7}{'%':>9}"
_DIVERGENCE = f"{'KL':>7}{'p99':>7}", f"{'nats':>7}{'nats':>7}"


def table(study: Object) -> str:
    """Returns the study for people, at most 120 columns wide."""
    lines = [
        f"{study['env_id']}, {study['updates']:,} updates: {study['states']:,} held-back states of replay, "
        f"ranges from {study['calibration_states']:,} others",
    ]
    first = study["rows"][0]
    if "kl_mean" in first and "error_mean" not in first:
        head, units = _SAMPLED
        mode = "share with fp32's likeliest choice" if study["actions"] != "continuous" else "mean error of the mean"
        lines.append(f"KL: divergence of the distribution of actions from fp32's; mode: {mode}")
    elif study["actions"] == "discrete":
        head, units = _CHOICES
        lines += [
            f"decided: states where fp32's best two actions differ by over 1 % of the advantages' range, "
            f"{100 * study['rows'][0]['decided']:.1f} % of all",
            "regret: mean loss of fp32 value, in % of the advantages' range",
        ]
    else:
        head, units = _ACTIONS
        lines.append("error: mean difference of an action from fp32's, in % of its range; of the worst element")
        if "kl_mean" in first:
            head, units = head + _DIVERGENCE[0], units + _DIVERGENCE[1]
            lines.append("KL: mean divergence of the distribution of actions from fp32's; error is that of its mode")
    if study["not_played"]:
        lines.append(f"not played: {study['not_played']}")
    else:
        lines += [
            f"return: mean of {study['episodes']} episodes, seeds {study['seed']} and up, on {study['runtime']}; "
            f"fp32 {study['fp32_return']:.1f}, random {study['random_return']:.1f}",
            "low/span: low end of the paired bootstrap interval in % of fp32 - random; non-inferior from -5 % on",
        ]
    return "\n".join([*lines, "", head + _RETURNS, units + _RETURN_UNITS, *map(_line, study["rows"])])


def _line(row: Object) -> str:
    cells = f"{row['recipe']:23}  "
    if "error_mean" in row:
        cells += f"{100 * row['error_mean']:7.3f}{100 * row['error_p99']:7.2f}{100 * row['error_max']:9.2f}"
        if "kl_mean" in row:
            cells += f"{row['kl_mean']:7.3f}{row['kl_p99']:7.3f}"
    elif "kl_mean" in row:
        mode = row["action_error_mean"] if row["agreement"] is None else row["agreement"]
        cells += f"{row['kl_mean']:9.2g}{row['kl_p99']:9.2g}{100 * mode:9.2f}"
    else:
        cells += f"{100 * row['agreement']:6.2f}"
        cells += f"{'-':>8}" if row["agreement_decided"] is None else f"{100 * row['agreement_decided']:8.2f}"
        cells += f"{100 * row['ties']:6.2f}{100 * row['regret']:8.3f}"
    if "return_mean" not in row:
        return cells
    interval = f"[{row['return_low']:.1f}, {row['return_high']:.1f}]"
    cells += f"  {row['return_mean']:8.1f} {row['return_difference']:9.1f} {interval:>18} "
    if row["return_low_relative"] is None:
        return cells + f"{'-':>8}  -"
    return cells + f"{100 * row['return_low_relative']:8.1f}  {'yes' if row['return_non_inferior'] else 'NO'}"
