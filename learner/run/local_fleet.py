"""A whole fleet on one machine: broker, learner and actors as processes of their own, for the demo and for tests.

Everything that must outlive a process (keys, boot counters, policies) lies in the run directory, so that a demo never
touches the user's fleets. Children are started in sessions of their own: Ctrl-C reaches only this process, which ends
them in order, learner first, so that it can still save and say goodbye.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.contract import address, errors
from broker.fleet import identity
from broker.program import children, cli, settings
from learner import config
from learner.files import run_directory
from learner.run import cpu_quota

_log = logging.getLogger(__name__)
_NAME = "local"
_BROKER_TIMEOUT_S = 60.0
_LEARNER_STOP_S = 3.5
_STOP_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class ActorOptions:
    """Options of the actors of a fleet.

    Attributes:
        envs: Environments in each.
        cpu_share: Of a core, that each may use; 0 holds them to nothing.
        python: Interpreter that runs them; empty is this one.
        runtime: What runs their policies, as in `actorq-actor run --runtime`; empty is the actor's own choice.
        env_kwargs: Arguments of the environment, JSON.
        frame_stack: Observations that a policy sees at once.
    """

    envs: int = 1
    cpu_share: float = 0.0
    python: str = ""
    runtime: str = ""
    env_kwargs: str = "{}"
    frame_stack: int = 1

    @property
    def of_environment(self) -> list[str]:
        """Flags that say what their environments are, beside the name."""
        return ["--env-kwargs", self.env_kwargs, "--frame-stack", str(self.frame_stack)]


class LocalFleet:
    """Processes of one fleet, as `start` gives it; a context that ends them all.

    Args:
        directory: For keys, boot counters and logs.
        fleet: Enrols its actors.
        spools: Where actors keep what they have not sent.
        broker_kind: As in `actorq-broker up --kind`.
        brokers: How many brokers serve it.
        tls: Whether over TLS, as on a network.
        actors: How its actors run.

    Attributes:
        quota: What holds the actors to a share of a core; None where nothing does.
        children: Processes by name: `broker-0` and so on, `learner`, and actors by their own.
        brokers: What each broker said of itself when it was ready.
    """

    def __init__(
        self,
        directory: Path,
        fleet: identity.Fleet,
        spools: tempfile.TemporaryDirectory[str],
        broker_kind: str,
        brokers: int,
        tls: bool,
        actors: ActorOptions,
        quota: cpu_quota.CpuQuota | None,
    ) -> None:
        self.directory = directory
        self.quota = quota
        self._actors = actors
        self.name = fleet.name
        self.children: dict[str, subprocess.Popen[str]] = {}
        self._environment = os.environ | {"ACTORQ_HOME": str(directory / "home"), "PYTHONUNBUFFERED": "1"}
        self._fleet = fleet
        self._spools = spools
        self._tls = tls
        self._broker_options = ["--fleet", self.name, "--kind", broker_kind, *(["--tls"] if tls else [])]
        self.brokers: list[dict[str, Any]] = [{"port": 0}] * brokers

    @classmethod
    def start(
        cls,
        directory: Path,
        broker_kind: str = "auto",
        *,
        brokers: int = 1,
        tls: bool = False,
        actors: ActorOptions = ActorOptions(),
    ) -> LocalFleet:
        """Makes the keys of a new fleet, and starts its brokers.

        Raises:
            BrokerUnreachable: One does not start.
            ConfigError: The kernel takes no such share of a core.
        """
        quota = cpu_quota.CpuQuota.of(actors.cpu_share) if actors.cpu_share else None
        fleet = identity.Fleet.open(_NAME, directory / "home" / "fleets" / _NAME)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        spools = tempfile.TemporaryDirectory(prefix="actorq-", dir=memory)  # what is left there ends with the fleet
        started = cls(directory, fleet, spools, broker_kind, brokers, tls, actors, quota)
        try:
            for index in range(brokers):
                started.start_broker(index)
        except BaseException:
            started.stop()
            raise
        return started

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the brokers."""
        return tuple(str(address.Address(one["host"], one["port"], self._tls)) for one in self.brokers)

    @property
    def broker(self) -> dict[str, Any]:
        """The first broker."""
        return self.brokers[0]

    @property
    def address(self) -> str:
        """The address of the first broker."""
        return self.addresses[0]

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start_actor(self, actor_id: str, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Enrols and starts an actor; its output goes to logs/ACTOR.log."""
        bundle = self.directory / "home" / f"{actor_id}.json"
        if not bundle.exists():
            self._fleet.enroll(actor_id, self.addresses).write(bundle)
        state = self.directory / "home" / "actors" / actor_id
        spool = str(self.spool(actor_id))
        command = ["edge_actor", "run", "--bundle", str(bundle), "--state-dir", str(state), "--spool-dir", spool]
        command += ["--runtime", self._actors.runtime] if self._actors.runtime else []
        child = self._spawn(actor_id, [*command, *arguments], python=self._actors.python)
        if self.quota:
            self.quota.hold(actor_id, child.pid)
        return child

    def spool(self, actor_id: str) -> Path:
        """Returns the directory in which an actor keeps its spool."""
        return Path(self._spools.name) / actor_id

    def start_learner(
        self, arguments: Sequence[str], name: str = "learner", brokers: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Starts a learner on the fleet's brokers or on these; its stderr is ours, its stdout a pipe."""
        where = ",".join(brokers or self.addresses)
        command = ["learner", "train", "--fleet", self.name, "--broker", where, *arguments]
        return self._spawn(name, command, pipe=True, log=False)

    def start_broker(self, index: int) -> None:
        """Starts a broker, on the port that it had before."""
        name, port = f"broker-{index}", self.brokers[index]["port"]
        command = ["broker", "up", "--port", str(port), *self._broker_options, "--json"]
        self.brokers[index] = self._await_broker(name, self._spawn(name, command, pipe=True))

    def stop(self) -> None:
        """Ends the learner, then the actors, then the brokers; each gets time to end by itself."""
        for group, stop_s in (("learner", _LEARNER_STOP_S), ("actor", _STOP_S), ("broker", _STOP_S)):
            alive = [child for name, child in self.children.items() if _kind(name) == group]
            for child in alive:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + stop_s
            for child in alive:
                try:
                    child.wait(max(0.01, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        self._spools.cleanup()
        if self.quota:
            self.quota.close()

    def learner_output(self) -> str:
        """Returns what the learner printed on stdout; it must have ended."""
        stream = self.children["learner"].stdout
        return stream.read() if stream else ""

    def ended(self) -> str:
        """Returns the name of a broker or actor that ended by itself, or empty."""
        return next((n for n, c in self.children.items() if _kind(n) != "learner" and c.poll() is not None), "")

    def log_tail(self, name: str) -> str:
        """Returns the last lines that a child wrote."""
        file = self.directory / "logs" / f"{name}.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-8:]) if file.exists() else ""

    def _spawn(
        self, name: str, module: Sequence[str], *, pipe: bool = False, log: bool = True, python: str = ""
    ) -> subprocess.Popen[str]:
        stderr = open(self.directory / "logs" / f"{name}.log", "a") if log else None  # noqa: SIM115  the child's
        try:
            child = subprocess.Popen(
                [python or sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else stderr,
                stderr=stderr,
                text=True,
                env=self._environment,
                start_new_session=True,
                preexec_fn=children.die_with_parent(),  # noqa: PLW1509  no thread runs here yet
            )
        finally:
            if stderr:
                stderr.close()
        self.children[name] = child
        return child

    def _await_broker(self, name: str, child: subprocess.Popen[str]) -> dict[str, Any]:
        killer = threading.Timer(_BROKER_TIMEOUT_S, child.kill)
        killer.start()
        line = child.stdout.readline() if child.stdout else ""
        killer.cancel()
        if not line:
            child.wait()
            raise errors.BrokerUnreachable(
                "the broker did not start",
                where=str(self.directory / "logs" / f"{name}.log"),
                todo=self.log_tail(name),
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _kind(name: str) -> str:
    """Returns what kind of process a child is: learner, broker or actor."""
    word = name.partition("-")[0]
    return word if word in ("learner", "broker") else "actor"


def actions_of(env_id: str, actors: ActorOptions = ActorOptions()) -> str:
    """Returns the kind of actions that an environment takes (specs.ActionSpec), as an actor on this machine says.

    Raises:
        ActorqError: It cannot be made, or cannot be carried; with the actor's words and exit code.
    """
    command = [sys.executable, "-m", "edge_actor", "spec", "--env", env_id, *actors.of_environment]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise cli.as_said(done.stderr, done.returncode)
    kind: str = json.loads(done.stdout.splitlines()[-1])["action"]["kind"]
    return kind


def demo(effective: config.Settings, *, actors: ActorOptions, broker_kind: str) -> tuple[dict[str, Any] | None, int]:
    """Trains on a fleet of this machine.

    Args:
        effective: Settings of the learner.
        actors: How the actors run.
        broker_kind: As in `actorq-broker up --kind`.

    Returns:
        The learner's summary with `train_wall_s`, counted from the start of the first process, and `actors_held`, which
        says what held the actors to a share of a core (cpu_quota.Held; None where nothing was to); and its exit code.

    Raises:
        EnvironmentFailure: The broker or an actor ended by itself.
        RunError: The learner was killed.
    """
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    train = effective.train
    path = run_directory.new_path(train, train.env)
    if (path / "config.toml").exists():
        raise errors.RunError("the run directory holds a run already", where=str(path), todo="choose another --run-dir")
    started = time.time()
    with LocalFleet.start(path, broker_kind, actors=actors) as fleet:
        _log.info("%s broker on %s; run directory: %s", fleet.broker["kind"], fleet.address, path)
        config_file = path / "demo.toml"
        config_file.write_text(settings.dump(effective.train, effective.algorithm, effective.gate))
        learner = fleet.start_learner(["--config", str(config_file), "--run-dir", str(path), "--json"])
        for index in range(train.actors):
            options = ["--env", train.env, *actors.of_environment, "--envs", str(actors.envs), "--heartbeat-s", "1"]
            fleet.start_actor(f"actor-{index}", options)
        while learner.poll() is None and not stop.wait(0.05):
            if gone := fleet.ended():
                error = errors.EnvironmentFailure(
                    f"{gone} ended by itself, with code {fleet.children[gone].returncode}: {fleet.log_tail(gone)}",
                    where=str(path / "logs" / f"{gone}.log"),
                )
                _log.error("error: %s", error)  # to stop the others takes seconds
                error.said = True
                raise error
        held = fleet.quota.held() if fleet.quota else None
        fleet.stop()
        output = fleet.learner_output()
    if learner.returncode < 0:
        return None, _killed(-learner.returncode, path, was_stopped=stop.is_set())
    summary: dict[str, Any] | None = json.loads(output) if output else None
    if summary is not None:
        summary = {"train_wall_s": round(summary["finished_unix_s"] - started, 3), **summary}
        summary["actors_held"] = dataclasses.asdict(held) if held else None
    if learner.returncode in (errors.EXIT_INTERRUPTED, errors.NotSolved.exit_code):  # then it named --resume
        named = [] if actors.of_environment == ActorOptions().of_environment else actors.of_environment
        _log.info(
            "its broker and actors have ended too: before --resume start them again, with ACTORQ_HOME=%s/home, by "
            "`actorq-broker up --fleet %s --port %s` and `actorq-actor run --bundle %s/home/actor-0.json %s`",
            *(path, _NAME, fleet.broker["port"], path, shlex.join(["--env", train.env, *named])),
        )
    return summary, learner.returncode


def _killed(signum: int, path: Path, *, was_stopped: bool) -> int:
    """Returns the exit code of a demo whose learner was killed because it did not stop in time.

    Raises:
        RunError: Somebody else killed it.
    """
    if was_stopped:
        _log.warning("interrupted; the learner was busy, and could not save")
        return errors.EXIT_INTERRUPTED
    raise errors.RunError(
        f"the learner was killed by signal {signum} ({signal.strsignal(signum)})",
        where=str(path),
        todo="look whether memory ran out (dmesg); a smaller --replay-capacity takes less",
    )
