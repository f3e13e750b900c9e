"""A policy that `actorq-learner quantize` wrote: the .tflite, and what its report says of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import errors, messages, specs
from learner import config
from learner.quantize.tflite import interpreter

_OUTPUTS: dict[str, tuple[str, specs.Head]] = {
    "values": ("discrete", "q_values"),
    "actions": ("continuous", "deterministic"),
}
"""Kind of the actions that are chosen by outputs of a kind, and the head by which actors read these."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyFile:
    """A policy that may go to a fleet.

    Attributes:
        path: Of the .tflite, for people.
        model: Its bytes.
        outputs: What it puts out, as in `Request.outputs` of quantize: `values` or `actions`.
        precision: One of config.PRECISIONS.
        passed: Whether the gate let it pass.
        shape: Of one observation.
        size: Number of outputs.
    """

    path: Path
    model: bytes
    outputs: str
    precision: str
    passed: bool
    shape: tuple[int, ...]
    size: int

    @classmethod
    def read(cls, path: Path, *, forced: bool = False) -> PolicyFile:
        """Reads a .tflite with the report beside it.

        Args:
            path: Of the .tflite; its report ends with .json.
            forced: Take it although the gate refused it.

        Raises:
            PolicyError: There is no such file, or no report of it, or the gate refused it.
        """
        try:
            model = path.read_bytes()
        except OSError as error:
            raise errors.PolicyError(
                f"the policy cannot be read: {error.strerror}", reason="model", where=str(path), todo="name a .tflite"
            ) from error
        report = _report(path.with_suffix(".json"))
        if report["sha256"] != hashlib.sha256(model).hexdigest():
            raise errors.PolicyError(
                "the report beside the policy is another's: its SHA-256 does not fit",
                reason="sha256",
                where=str(path.with_suffix(".json")),
                todo="run `actorq-learner quantize` again, and keep its two files together",
            )
        if not report["passed"] and not forced:
            raise errors.PolicyError(
                f"the gate refused this policy ({_reason(report)}): it acts otherwise than the original",
                reason="refused",
                where=str(path.with_suffix(".json")),
                todo="quantize it in another way (--aware); or --force-publish, and actors score it all the same",
            )
        if len(model) > messages.MAX_POLICY_BYTES:
            raise errors.PolicyError(
                f"the policy has {len(model)} bytes, more than the {messages.MAX_POLICY_BYTES} that actors accept",
                reason="size",
                where=str(path),
            )
        try:
            shape, size = interpreter.shapes(model)
            answer, _, _ = interpreter.run(model, np.zeros((1, *shape), np.float32))
        except (RuntimeError, ValueError) as error:
            raise errors.PolicyError(
                f"the runtime does not run the policy: {str(error).partition(chr(10))[0]}",
                reason="unrunnable",
                where=str(path),
                todo="run `actorq-learner quantize` again",
            ) from error
        if not np.isfinite(answer).all():
            raise errors.PolicyError("the policy answers NaN or infinite", reason="not_finite", where=str(path))
        return cls(path, model, report["outputs"], report["precision"], report["passed"], shape, size)

    @property
    def head(self) -> specs.Head:
        """The head by which actors read its outputs."""
        return _OUTPUTS[self.outputs][1]

    def unfit(self, birth: messages.Birth) -> str:
        """Returns why an actor's environment is not what this policy is for; empty if it is."""
        spec = birth.spec
        kind, _ = _OUTPUTS[self.outputs]
        if (spec.observation.shape, spec.action.size, spec.action.kind) == (self.shape, self.size, kind):
            return ""
        return (
            f"the policy maps {list(self.shape)} to {self.size} {self.outputs}, and {birth.env_id} has"
            f" {spec.describe()}"
        )


def _report(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        is_one = report["outputs"] in _OUTPUTS and report["precision"] in config.PRECISIONS
        if is_one and isinstance(report["sha256"], str) and isinstance(report["passed"], bool):
            return report
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise errors.PolicyError(
        "there is no report of `actorq-learner quantize` beside the policy, so that nobody says how it was judged",
        reason="report",
        where=str(path),
        todo="run `actorq-learner quantize`, and keep its two files together",
    )


def _reason(report: dict[str, Any]) -> str:
    if report.get("returns"):
        return "its returns are inferior"
    candidates = report.get("candidates")
    candidate = candidates.get(report.get("written")) if isinstance(candidates, dict) else None
    return str(candidate.get("reason", "") if isinstance(candidate, dict) else "") or "refused"
