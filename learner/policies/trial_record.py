"""Which policy a run has proven last, and how its trials ended: what a learner that was killed goes on from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable
from typing import Any

from broker.contract import messages, specs
from broker.program import storage
from learner.files import records, run_directory
from learner.policies import publisher

_log = logging.getLogger(__name__)
_KIND = "records of trials"
_PROVEN = "proven-{}.tflite"


class TrialRecord:
    """The files `canary.json` and `proven-EPOCH.VERSION.tflite` of a run.

    Args:
        directory: The run's.
        kept: Counts what the disk does not take.
    """

    def __init__(self, directory: run_directory.RunDirectory, kept: records.Records) -> None:
        self._directory, self._kept = directory, kept
        self._file = directory.path / run_directory.CANARY

    def note(self, proven: publisher.Published, outcomes: Iterable[Any]) -> None:
        """Writes down which policy all have now, and how the newest trials ended (dataclasses).

        The model goes first, and the one before last: whenever a learner is killed, one that was proven is here.
        """
        if not self._directory.is_ours():
            return
        about = {
            "incumbent": dataclasses.asdict(proven.manifest),
            "trials": [dataclasses.asdict(one) for one in outcomes],
        }
        with self._kept.attempt(_KIND):
            model = self._directory.path / _PROVEN.format(proven.sent.order)
            storage.write_atomic(model, proven.model, mode=0o644)
            storage.write_atomic(self._file, (json.dumps(about, indent=2) + "\n").encode(), mode=0o644)
            for old in self._directory.path.glob(_PROVEN.format("*")):
                if old != model:
                    old.unlink(missing_ok=True)

    def incumbent(self, spec: specs.EnvSpec) -> tuple[messages.Manifest, bytes] | None:
        """Returns the policy that all had when the run ended, for such an environment; None if it has proven none."""
        if not self._file.exists():
            return None
        try:
            manifest = messages.Manifest(**json.loads(self._file.read_text())["incumbent"])
            model = (self._directory.path / _PROVEN.format(manifest.order)).read_bytes()
            sound = manifest.sha256 == hashlib.sha256(model).hexdigest()
            if sound and manifest.fingerprint == spec.fingerprint and manifest.head in spec.action.heads:
                return manifest, model
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        _log.warning(
            "%s does not say which policy this run proved last: the next one goes to all without a trial", self._file
        )
        return None
