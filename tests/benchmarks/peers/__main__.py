"""`make bench-peers`: this project's learning beside Stable-Baselines3's, one JSON object per line.

Time to a solved task: 20 greedy episodes reach the target, and 20 others confirm it. Ours is found by the published
int8 policy, which actors score while training goes on, and is counted twice: from the first process on, and the loop
of training, which has compiling and scores in it. Theirs is training alone, without imports, building and evaluations,
every 500 steps or phase, with the float32 policy. Steps are those of the policy that solved it: ours goes on while that
is scored. Who is not done in time counts with that time, or all of its steps.
The sides take turns, seed by seed. Each run is kept in a directory, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors
from broker.program import cli
from edge_actor.bench import models
from tests.benchmarks import _machine, peers
from tests.benchmarks.peers import arms, latency

UPDATES = "updates"
ROUNDS, UPDATES_PER_ROUND = 9, 1024
_MODEL = {"hidden": (256, 256), "batch_size": 64, "features": models.FEATURES, "actions": models.ACTIONS}
_GRACE_S = 600.0
"""Seconds for evaluations and starts, beside the time limit of a run."""
_RESAMPLES = 10_000
_COUNTED = {"seconds": "from the first process on", "training_s": "the loop of training, compiling and scores in it"}
"""How time is counted on our side, by the key of a result."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is named; returns an exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    known = arms.duels()
    parser = argparse.ArgumentParser(prog="make bench-peers ARGS=...", description=__doc__, allow_abbrev=False)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{UPDATES}, {', '.join(known)} (default: all)")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=100.0, metavar="X", help="of a run (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench-peers"), metavar="DIR", help="keeps each run")
    args = parser.parse_args(argv)
    wanted = args.parts or [UPDATES, *known]
    if unknown := sorted(set(wanted) - {UPDATES, *known}):
        raise errors.ConfigError(
            f"unknown part {', '.join(unknown)}", todo=f"choose among {', '.join([UPDATES, *known])}"
        )
    if args.seeds < 1 or args.timeout_s <= 0:
        raise errors.ConfigError("--seeds and --timeout-s must be positive")
    python, failed = peers.python(), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that a run ends what it started
    for part in wanted:
        machine = _machine.watch()
        if part == UPDATES:
            rows: Iterable[dict[str, Any]] = updates(python)
        else:
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            found, missing = _play(known[part], seeds, args.timeout_s, args.runs / part, python)
            rows, failed = duel_rows(known[part], found, args.timeout_s), failed + missing
        for row in rows:
            print(json.dumps({**row, "machine": machine()}), flush=True)
    return errors.ActorqError.exit_code if failed else errors.EXIT_OK


def updates(python: str) -> Iterator[dict[str, Any]]:
    """Yields updates per second of both, sampling included, in turn."""
    request = {**_MODEL, "transitions": 100_000, "updates": UPDATES_PER_ROUND}
    for case, double in (("plain DQN on both sides", False), ("double DQN on ours", True)):
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(latency.server(f"{peers.__name__}.ours"))
            theirs = stack.enter_context(latency.server(f"{peers.__name__}.sb3", UPDATES, python=python))
            sides = {"ours": (ours, {"dueling": False, "double": double}), "theirs": (theirs, {})}
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(ROUNDS + 1):
                for name, (process, extra) in sides.items():
                    rate = latency.ask(process, request | extra)["rate"]
                    if turn:  # the first warms up
                        rates[name].append(rate)
        ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
        yield {
            "benchmark": "bench-peers",
            "case": f"DQN updates with sampling, MLP 256x2, batch 64, one thread, uniform replay, {case}",
            "value": round(statistics.median(rates["ours"]), 1),
            "unit": "updates/s",
            "reference": round(statistics.median(rates["theirs"]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "runs": len(ratios),
            "spread": round(max(ratios) - min(ratios), 3),
            "explain": f"no dueling; reference is Stable-Baselines3's DQN.train; turns of {UPDATES_PER_ROUND} updates",
        }


def duel_rows(duel: arms.Duel, found: dict[str, dict[int, dict[str, Any]]], timeout_s: float) -> list[dict[str, Any]]:
    """Returns three rows for each side that ours is compared with: of time, counted in two ways, and of steps.

    Args:
        duel: Who against whom.
        found: Results by name of the arm and seed.
        timeout_s: After which a run was ended.
    """
    rows = []
    for theirs in duel.theirs:
        seeds = sorted(set(found[duel.ours.name]) & set(found[theirs.name]))
        if not seeds:
            continue
        sides = [[found[name][seed] for seed in seeds] for name in (duel.ours.name, theirs.name)]
        rows += [_in_time(duel, theirs.name, sides, key, timeout_s) for key in _COUNTED]
        rows.append(_in_steps(duel, theirs.name, sides))
    return rows


def _in_steps(duel: arms.Duel, theirs: str, sides: list[list[dict[str, Any]]]) -> dict[str, Any]:
    mine, other = ([float(r.get("solved_env_steps") or r["env_steps"]) for r in side] for side in sides)
    late = [sum(not r["solved"] for r in side) for side in sides]
    return {
        **_row(duel, f"steps to {duel.target:g}, {duel.ours.name} beside {theirs}", "steps", mine, other),
        "explain": "medians of environment steps, when the policy that solved it was made; "
        f"ours {min(mine):.0f} to {max(mine):.0f}, published int8 policy, {late[0]} not solved; "
        f"theirs {min(other):.0f} to {max(other):.0f}, {late[1]} not solved; interval of the "
        f"ratio: 95 %, bootstrap over seeds; {sides[1][0].get('versions', '')}",
    }


def _in_time(
    duel: arms.Duel, theirs: str, sides: list[list[dict[str, Any]]], key: str, timeout_s: float
) -> dict[str, Any]:
    counted = _COUNTED[key]
    mine, other = (
        [min(result[name], timeout_s) if result["solved"] else timeout_s for result in side]
        for side, name in zip(sides, (key, "seconds"), strict=True)
    )
    late = [sum(not r["solved"] for r in side) for side in sides]
    steps = [round(statistics.median(r["env_steps"] for r in side)) for side in sides]
    is_bound = timeout_s in (statistics.median(mine), statistics.median(other))
    case = f"seconds to {duel.target:g}, {duel.ours.name} beside {theirs}, {counted}"
    return {
        **_row(duel, case, "s", mine, other),
        "explain": f"medians; ours {min(mine):.1f} to {max(mine):.1f} s {counted}, published "
        f"int8 policy, {late[0]} not within {timeout_s:g} s, {steps[0]} steps; theirs {min(other):.1f} to "
        f"{max(other):.1f} s of training alone, {late[1]} not within it, {steps[1]} steps"
        f"{', so the ratio is a bound' if is_bound else ''}; interval of "
        f"the ratio: 95 %, bootstrap over seeds; {sides[1][0].get('versions', '')}",
    }


def _row(duel: arms.Duel, case: str, unit: str, mine: list[float], other: list[float]) -> dict[str, Any]:
    """Returns a row about medians over seeds, without what explains it."""
    value, reference = statistics.median(mine), statistics.median(other)
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    return {
        "benchmark": "bench-peers",
        "case": f"{duel.env}, {case}",
        "value": round(value, 2),
        "unit": unit,
        "reference": round(reference, 2),
        "ratio": round(value / reference, 3),
        "runs": len(ratios),
        "spread": round(max(ratios) - min(ratios), 3),
        "interval": [round(bound, 3) for bound in _interval(mine, other)],
    }


def _interval(mine: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the ratio of medians, drawing runs of both sides anew."""
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(mine, k=len(mine))) / statistics.median(rng.choices(other, k=len(other)))
        for _ in range(_RESAMPLES)
    )
    return ratios[round(0.025 * _RESAMPLES)], ratios[round(0.975 * _RESAMPLES) - 1]


def _play(
    duel: arms.Duel, seeds: Sequence[int], timeout_s: float, kept: Path, python: str
) -> tuple[dict[str, dict[int, dict[str, Any]]], int]:
    """Runs all that is not kept yet, in turn; returns results by arm and seed, and how many runs gave none."""
    found: dict[str, dict[int, dict[str, Any]]] = {arm.name: {} for arm in (duel.ours, *duel.theirs)}
    missing = 0
    kept.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for arm in (duel.ours, *duel.theirs):
            request = {
                **dataclasses.asdict(arm),
                "env": duel.env,
                "target": duel.target,
                "best": duel.best,
                "seed": seed,
                "timeout_s": timeout_s,
            }
            file = kept / f"{arm.name}-{seed}.json"
            result = read(file, request)
            if result is None:
                print(f"{duel.env}, {arm.name}, seed {seed} ...", file=sys.stderr, flush=True)
                try:
                    result = _ours(request) if arm.library == "actorq" else _theirs(request, python)
                except (ChildProcessError, subprocess.TimeoutExpired, ValueError) as error:
                    print(f"error: {arm.name}, seed {seed}, gave no result: {error}", file=sys.stderr, flush=True)
                    missing += 1
                    continue
                partial = file.with_suffix(".tmp")
                partial.write_text(json.dumps({"request": request, "result": result}) + "\n")
                partial.rename(file)
            told = "solved after" if result["solved"] else "not solved within"
            print(f"{duel.env}, {arm.name}, seed {seed}: {told} {result['seconds']:.1f} s", file=sys.stderr, flush=True)
            found[arm.name][seed] = result
    return found, missing


def read(file: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the result of a run that is kept; None if it is not, or was run with other settings."""
    try:
        kept = json.loads(file.read_text())
        result: dict[str, Any] = kept["result"]
        is_told = request.get("library") != "actorq" or "solved_env_steps" in result  # not in those of an older release
        return result if is_told and kept["request"] == json.loads(json.dumps(request)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ours(request: dict[str, Any]) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="actorq-bench-"))
    command = [sys.executable, "-m", "learner", "demo", "--json", "--run-dir", str(directory / "run")]
    for name in ("env", "algorithm", "seed"):
        command += [f"--{name}", str(request[name])]
    command += [f"--solved-return={request['target']}", "--max-wall-s", str(request["timeout_s"])]
    command += ["--max-env-steps", str(request["total_steps"])]
    try:
        output = _finish(command, "", request["timeout_s"], (errors.EXIT_OK, errors.NotSolved.exit_code))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    summary = json.loads(output)
    return {
        "solved": summary["solved"],
        "seconds": summary["train_wall_s"],
        "training_s": summary["training_s"],
        "env_steps": summary["env_steps"],
        "solved_env_steps": summary["solved_env_steps"],
        "updates": summary["updates"],
        "return_mean": summary["int8_return_mean"],
    }


def _theirs(request: dict[str, Any], python: str) -> dict[str, Any]:
    output = _finish([python, "-m", f"{peers.__name__}.sb3", "learn"], json.dumps(request), request["timeout_s"], (0,))
    result: dict[str, Any] = json.loads(output)
    return result


def _finish(command: list[str], said: str, timeout_s: float, codes: tuple[int, ...]) -> str:
    """Returns what a command printed; ended, if need be, so that a fleet ends its own processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=peers.REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            output, log = process.communicate(said + "\n", timeout=timeout_s + _GRACE_S)
        except BaseException:
            process.terminate()
            raise
    if process.returncode not in codes:
        last = (log.strip().splitlines() or ["no word"])[-1]
        raise ChildProcessError(f"it ended with {process.returncode}: {last}")
    return output


if __name__ == "__main__":
    sys.exit(main())
