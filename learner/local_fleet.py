"""A whole fleet on one machine: broker, learner and actors as processes of their own, for the demo and for tests.

Everything that must outlive a process (keys, boot counters, policies) lies in the run directory, so that a demo never
touches the user's fleets. Children are started in sessions of their own: Ctrl-C reaches only this process, which ends
them in order, learner first, so that it can still save and say goodbye.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker import cli, errors, identity, settings
from broker.mosquitto import process
from learner import config, run_directory

_BROKER_TIMEOUT_S = 15.0
_LEARNER_STOP_S = 3.5
_STOP_S = 1.0


class LocalFleet:
    """Processes of one fleet; a context that ends them all.

    Args:
        directory: For keys, boot counters and logs.
        broker_kind: As in `actorq-broker up --kind`.
    """

    def __init__(self, directory: Path, broker_kind: str = "auto") -> None:
        self.directory = directory
        self.name = "local"
        self.children: dict[str, subprocess.Popen[str]] = {}
        self._environment = os.environ | {"ACTORQ_HOME": str(directory / "home"), "PYTHONUNBUFFERED": "1"}
        self._fleet = identity.Fleet.open(self.name, directory / "home" / "fleets" / self.name)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._spools = tempfile.TemporaryDirectory(
            prefix="actorq-", dir=memory
        )  # what is left there ends with the fleet
        child = self._spawn("broker", ["broker", "up", "--port", "0", "--kind", broker_kind, "--json"], pipe=True)
        self.broker = self._await_broker(child)
        self.address = f"{self.broker['host']}:{self.broker['port']}"

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start_actor(self, actor_id: str, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Enrols and starts an actor; its output goes to logs/ACTOR.log."""
        bundle = self.directory / "home" / f"{actor_id}.json"
        if not bundle.exists():
            self._fleet.enroll(actor_id, (self.address,)).write(bundle)
        state = self.directory / "home" / "actors" / actor_id
        spool = Path(self._spools.name) / actor_id
        command = ["edge_actor", "run", "--bundle", str(bundle), "--state-dir", str(state), "--spool-dir", str(spool)]
        return self._spawn(actor_id, [*command, *arguments])

    def start_learner(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Starts a learner whose stderr is ours and whose stdout is a pipe."""
        command = ["learner", "train", "--fleet", self.name, "--broker", self.address, *arguments]
        return self._spawn("learner", command, pipe=True, log=False)

    def stop(self) -> None:
        """Ends the learner, then the actors, then the broker; each gets time to end by itself."""
        deadlines = {"learner": _LEARNER_STOP_S}
        actors = [name for name in self.children if name not in ("learner", "broker")]
        for group in (["learner"], actors, ["broker"]):
            alive = [self.children[name] for name in group if name in self.children]
            for child in alive:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + deadlines.get(group[0] if group else "", _STOP_S)
            for child in alive:
                try:
                    child.wait(max(0.01, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        self._spools.cleanup()

    def learner_output(self) -> str:
        """What the learner printed on stdout; it must have ended."""
        stream = self.children["learner"].stdout
        return stream.read() if stream else ""

    def ended(self) -> str:
        """Name of a broker or actor that ended by itself, or empty."""
        return next((n for n, c in self.children.items() if n != "learner" and c.poll() is not None), "")

    def log_tail(self, name: str) -> str:
        """The last lines that a child wrote."""
        file = self.directory / "logs" / f"{name}.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-8:]) if file.exists() else ""

    def _spawn(
        self, name: str, module: Sequence[str], *, pipe: bool = False, log: bool = True
    ) -> subprocess.Popen[str]:
        stderr = open(self.directory / "logs" / f"{name}.log", "a") if log else None  # noqa: SIM115  the child's
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else stderr,
                stderr=stderr,
                text=True,
                env=self._environment,
                start_new_session=True,
                preexec_fn=process.die_with_parent(),  # noqa: PLW1509  no thread runs here yet
            )
        finally:
            if stderr:
                stderr.close()
        self.children[name] = child
        return child

    def _await_broker(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        killer = threading.Timer(_BROKER_TIMEOUT_S, child.kill)
        killer.start()
        line = child.stdout.readline() if child.stdout else ""
        killer.cancel()
        if not line:
            child.wait()
            raise errors.BrokerUnreachable(
                "the broker did not start",
                where=str(self.directory / "logs" / "broker.log"),
                todo=self.log_tail("broker"),
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def demo(effective: config.Settings, *, envs: int, broker_kind: str) -> tuple[dict[str, Any] | None, int]:
    """Trains on a fleet of this machine.

    Args:
        effective: Settings of the learner.
        envs: Environments per actor.
        broker_kind: As in `actorq-broker up --kind`.

    Returns:
        The learner's summary with `train_wall_s`, counted from the start of the first process; and its exit code.

    Raises:
        EnvironmentFailure: The broker or an actor ended by itself.
    """
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    train = effective.train
    path = run_directory.new_path(train, train.env)
    if (path / "config.toml").exists():
        raise errors.RunError("the run directory holds a run already", where=str(path), todo="choose another --run-dir")
    started = time.time()
    with LocalFleet(path, broker_kind) as fleet:
        print(f"{fleet.broker['kind']} broker on {fleet.address}; run directory: {path}", file=sys.stderr, flush=True)
        config_file = path / "demo.toml"
        config_file.write_text(settings.dump(effective.train, effective.algorithm, effective.gate))
        learner = fleet.start_learner(["--config", str(config_file), "--run-dir", str(path), "--json"])
        for index in range(train.actors):
            fleet.start_actor(f"actor-{index}", ["--envs", str(envs), "--heartbeat-s", "1"])
        while learner.poll() is None and not stop.wait(0.05):
            if gone := fleet.ended():
                raise errors.EnvironmentFailure(
                    f"{gone} ended by itself: {fleet.log_tail(gone)}", where=str(path / "logs" / f"{gone}.log")
                )
        fleet.stop()
        output = fleet.learner_output()
    summary: dict[str, Any] | None = json.loads(output) if output else None
    if summary is not None:
        summary = {"train_wall_s": round(summary["finished_unix_s"] - started, 3), **summary}
    return summary, learner.returncode
