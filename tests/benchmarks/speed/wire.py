"""Published bytes per policy over real runs, against the fp32 .tflite of the same policies.

Each run is `actorq-learner demo` on this machine with the tuned settings, until it is solved or for a minute. What it
publishes is noted with its time, and then sent through a policy's channel again, on a clock that follows those times:
with WIRE_POLICIES=DIR what is noted stays there, and whoever finds it there sends the very same policies, be it another
commit. (Two runs publish different ones, as many as they have time for; the bytes of one are no measure for another.)

A row is the mean over all policies of its runs, one per seed; `spread` is the range of the runs' own ratios. A run that
is solved within seconds publishes few policies, which differ much: its ratio is the smallest. Everything counts: whole
policies, patches, headers, seals.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric import ed25519

from broker.contract import codec, errors, messages, previous, signing, topics
from learner.policies import policy_channel, publisher
from tests.benchmarks import _broker

WALL_S = 60
CASES: tuple[tuple[str, Sequence[str], int], ...] = (
    ("CartPole-v1", (), 5),
    ("CartPole-v1", ("--hidden", "256,256"), 3),
    ("LunarLander-v3", (), 2),
)
"""Task, settings, seeds."""
_LOOK_S = 0.2
"""A run directory keeps all of the newest hundred policies, which a run publishes within seconds."""


class Run(NamedTuple):
    """What a run published, oldest first, and its summary."""

    summary: dict[str, Any]
    policies: list[tuple[messages.Manifest, bytes]]


def run() -> Iterator[dict[str, Any]]:
    """Yields a row per case."""
    with contextlib.ExitStack() as stack:
        name = os.environ.get("WIRE_POLICIES")
        kept = Path(name or stack.enter_context(tempfile.TemporaryDirectory(prefix="actorq-bench-")))
        for env, arguments, seeds in CASES:
            case = " ".join((env, *arguments))
            runs = []
            for seed in range(seeds):
                noted = kept / f"{case} {seed}".replace(" ", "_")
                if not (noted / "summary.json").exists():
                    _note(env, seed, arguments, noted)
                runs.append(_noted(noted))
            yield _row(case, runs)


def _note(env: str, seed: int, arguments: Sequence[str], to: Path) -> None:
    """Runs a learner and keeps what it publishes; its summary last."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="actorq-bench-") as name, tempfile.TemporaryFile("w+") as said:
        directory = Path(name) / "run"
        command = [sys.executable, "-m", "learner", "demo", "--env", env, "--seed", str(seed), "--json", "--no-energy"]
        command += ["--run-dir", str(directory), "--max-wall-s", str(WALL_S), "--max-env-steps", "1000000"]
        command += arguments
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as learner:
            while learner.poll() is None:
                _copy(directory, to)
                time.sleep(_LOOK_S)
            _copy(directory, to)
            assert learner.stdout is not None
            summary = learner.stdout.read()
        if learner.returncode not in (errors.EXIT_OK, errors.NotSolved.exit_code):
            said.seek(0)
            raise RuntimeError(f"{env} ended with {learner.returncode}: {said.read()[-2000:]}")
        (to / "summary.json").write_text(summary)


def _copy(directory: Path, to: Path) -> None:
    """Copies the policies that are not there yet; a policy's manifest is written behind its model."""
    for manifest in directory.glob("policies/*.json"):
        for file in (manifest.with_suffix(".tflite"), manifest):
            if not (to / file.name).exists():
                (to / file.name).write_bytes(file.read_bytes())


def _noted(directory: Path) -> Run:
    """Reads what `_note` has kept."""
    summary = json.loads((directory / "summary.json").read_text())
    files = sorted(directory.glob("v*.json"))
    policies = [
        (messages.Manifest(**json.loads(file.read_text())), file.with_suffix(".tflite").read_bytes()) for file in files
    ]
    if len(policies) != summary["policies_published"]:
        raise RuntimeError(f"{directory} has {len(policies)} of {summary['policies_published']} policies only")
    return Run(summary, policies)


class _Counting:
    """Seals what a channel sends, as a learner's session does; the channel counts the bytes."""

    is_local = True

    def __init__(self) -> None:
        self._sealer = signing.LearnerSealer(ed25519.Ed25519PrivateKey.generate())

    def retain(self, topic: str, message: messages.Message) -> int:
        """Returns the message's size in bytes, sealed."""
        return len(self._sealer.seal(topic, *codec.pieces(message, previous.VERSION)))

    tell = retain

    def forget(self, topic: str) -> None:
        """Takes nothing back, for nothing is there."""


def _sent(policies: list[tuple[messages.Manifest, bytes]]) -> policy_channel.Traffic:
    """Sends policies at their times, as the publisher does, whose loop looks every now and then for what is due."""
    now = policies[0][0].created_s
    channel = policy_channel.PolicyChannel(_Counting(), topics.Topics("f"), topics.MAIN_CHANNEL, clock=lambda: now)
    for manifest, model in policies:
        due = now + publisher.PATIENCE_S  # what can wait does so until an actor acts, and no longer than that
        while due < manifest.created_s:
            now = due
            channel.retain_newest()
            due += publisher.PATIENCE_S
        now = manifest.created_s
        outgoing = channel.begin(manifest.order)
        outgoing.add(model)
        outgoing.sha256()
        channel.send(manifest, model, outgoing)
    channel.retain_newest(at_once=True)
    return channel.traffic


def _row(case: str, runs: list[Run]) -> dict[str, Any]:
    summaries = [run.summary for run in runs]
    float32 = summaries[0]["policy_fp32_bytes"]
    policies = [len(run.policies) for run in runs]
    traffic = [_sent(run.policies) for run in runs]
    published = [sent.whole_bytes + sent.patch_bytes for sent in traffic]
    ratios = [float32 * n / size for n, size in zip(policies, published, strict=True)]
    by_the_runs = sum(run["keyframe_bytes"] + run["delta_bytes"] for run in summaries) / sum(policies)
    return {
        "benchmark": "wire",
        "broker": _broker.kind(),
        "case": case,
        "value": round(sum(published) / sum(policies)),
        "unit": "bytes",
        "reference": float32,
        "ratio": round(float32 * sum(policies) / sum(published), 2),
        "runs": len(runs),
        "spread": round(max(ratios) - min(ratios), 2),
        "explain": f"mean payload per policy; int8 model {summaries[0]['policy_int8_bytes']} bytes; "
        f"{sum(sent.whole for sent in traffic)} whole ({sum(sent.whole_bytes for sent in traffic)} bytes), "
        f"{sum(sent.patches for sent in traffic)} patches and steps ({sum(sent.patch_bytes for sent in traffic)} "
        f"bytes); the runs themselves counted {by_the_runs:.0f} a policy. Run by run: "
        + "; ".join(
            f"{ratio:.2f} with {n} policies, {'solved' if run['solved'] else 'not solved'} in "
            f"{run['learner_wall_s']:.0f} s"
            for ratio, n, run in zip(ratios, policies, summaries, strict=True)
        ),
    }
