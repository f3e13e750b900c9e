"""Checks whether this machine is fit to be an actor: one line per matter, each ok, warn or fail, with what to do.

It looks at what `run` would use, by the same settings, and works without a bundle too. A warning costs speed, figures
or safety; a failure means that `run` would end or act wrongly.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from broker.contract import address, errors, topics
from broker.fleet import certificates, identity
from broker.mqtt import link
from edge_actor import config
from edge_actor.acting import evaluate
from edge_actor.bench import models
from edge_actor.board import board, clock, power
from edge_actor.experience import journal
from edge_actor.policies import runtimes

_HOT_C = 80.0  # a Pi slows down from there on
_MEMORY_BYTES = 150_000_000  # an actor, and a policy of the largest size being built
_BUILT_S = Path(__file__).stat().st_mtime
_BROKER_S = 5.0
_TIMED = 500
_POLICY = models.Shape(256, 2)
_BEST = "ai-edge-litert"
_ERROR_STEPS = 3.0
"""Quantization steps of the output by which int8 may miss fp32 at the ends of the scale: kernels that miscompute are
tens of steps off (QEMU's `max` processor does that in silence)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report.

    Attributes:
        state: ok, warn or fail.
        code: Exit code of the command if this is its first failure.
    """

    name: str
    state: str
    what: str
    todo: str = ""
    code: int = errors.EXIT_OK


def run(settings: config.ActorConfig, root: Path = board.ROOT, *, offline: bool = False) -> Iterator[Finding]:
    """Looks at one matter after the other.

    Args:
        settings: Of `run`.
        root: Of the file tree that tells about the board.
        offline: Connect to no broker.
    """
    yield _board(root)
    yield _python()
    yield from _runtime(settings)
    yield _clock()
    yield _heat(root)
    yield from _memory(root)
    bundle, found = _bundle(settings)
    yield found
    yield _spool(settings, bundle)
    if bundle is not None and not offline:
        yield from _broker(settings, bundle)
    yield from _power(root)


def exit_code(findings: list[Finding]) -> int:
    """Returns the code of the first failure, as `run` would end with it; 0 if nothing fails."""
    return next((found.code for found in findings if found.state == "fail"), errors.EXIT_OK)


def _failed(name: str, error: errors.ActorqError) -> Finding:
    what = f"{error.what} ({error.where})" if error.where else error.what
    return Finding(name, "fail", what, error.todo, error.exit_code)


def _board(root: Path) -> Finding:
    facts = board.facts(root)
    name = f"{facts.name}, {facts.processor or 'processor unknown'}, {facts.cores} cores, {facts.bits}-bit"
    if not facts.processor:
        return Finding(
            "board", "warn", name, "XNNPACK needs /proc/cpuinfo: remove ProcSubset=pid from the systemd unit"
        )
    if facts.bits == 32:
        return Finding("board", "warn", name, "on a 64-bit system int8 runs on XNNPACK, several times faster")
    return Finding("board", "ok", name)


def _python() -> Finding:
    where = "in a virtual environment" if sys.prefix != sys.base_prefix else "not in a virtual environment"
    return Finding("python", "ok", f"{platform.python_version()}, {where}")


def _runtime(settings: config.ActorConfig) -> Iterator[Finding]:
    """Looks at the runtime, the kernels that it really takes, and whether they answer right."""
    try:
        runtime = runtimes.describe(settings.runtime)
    except errors.ActorqError as error:
        yield _failed("runtime", error)
        return
    best = runtimes.is_plugin(settings.runtime) or runtime.startswith(_BEST)
    missing = not best and board.facts().bits == 64
    todo = f"pip install {_BEST}: only that runs int8 on XNNPACK" if missing else ""
    yield Finding("runtime", "warn" if missing else "ok", runtime, todo)
    yield from _inference(settings)


def _inference(settings: config.ActorConfig) -> Iterator[Finding]:
    policy = models.make(_POLICY)
    rows = models.observations(_POLICY, models.CALIBRATION_ROWS)
    try:
        built, precision = _built(settings, policy)
    except errors.ActorqError as error:
        yield _failed("inference", error)
        return
    whole = built.delegate == "XNNPACK" or runtimes.is_plugin(settings.runtime)
    yield Finding(
        "delegate",
        "ok" if whole else "warn",
        f"{precision} runs on {built.delegate} kernels",
        ""
        if whole or not str(built.runtime).startswith(_BEST)
        else "XNNPACK needs /proc/cpuinfo and /sys/devices/system/cpu: no chroot without /sys, no ProcSubset=pid",
    )

    def answer(row: Any) -> Any:
        built.input[0] = row
        built.invoke()
        return built.output[0].copy()

    answers, expected = np.array([answer(row) for row in rows]), policy(rows)
    step = (expected.max() - expected.min()) / 255
    off = float(np.abs(answers - expected).mean() / step)
    times = evaluate.times(answer, built.invoke, [row for _ in range(_TIMED // len(rows) + 1) for row in rows])
    what = f"{precision} {_POLICY.name} in {times['invoke_us_p50']:g} us (p99 {times['invoke_us_p99']:g})"
    if off > _ERROR_STEPS:
        yield Finding(
            "inference",
            "fail",
            f"{what}, but {off:.0f} steps of 255 off what it should answer",
            "these kernels miscompute on this processor: install another version of the runtime",
            errors.PolicyError.exit_code,
        )
    else:
        yield Finding("inference", "ok", f"{what}, and right to {off:.1f} steps of 255")


def _built(settings: config.ActorConfig, policy: models.Policy) -> tuple[runtimes.Built, str]:
    """Builds the policy as int8, or float32 where a runtime of the user's own takes only that; returns which."""

    def build(precision: str) -> runtimes.Built:
        return runtimes.build(models.tflite(policy, precision), 1, runtime=settings.runtime, threads=settings.threads)

    try:
        return build("int8"), "int8"
    except errors.PolicyError:
        if not runtimes.is_plugin(settings.runtime):
            raise
        return build("float32"), "float32"


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < _BUILT_S - 86400:
        return Finding(
            "clock",
            "fail",
            f"{now} is before this program was installed",
            "a Pi without a clock chip must wait for time-sync.target: certificates and policies are not valid yet",
            errors.ActorqError.exit_code,
        )
    if clock.now_s() is None:
        return Finding(
            "clock", "warn", f"{now}, not synchronised: nothing expires here", "enable it: timedatectl set-ntp true"
        )
    return Finding("clock", "ok", now)


def _heat(root: Path) -> Finding:
    now = board.state(root)
    if now.temperature_c is None and now.throttled is None:
        return Finding("heat", "ok", "the board does not tell")
    degrees = "" if now.temperature_c is None else f"{now.temperature_c:.0f} °C"
    bits = now.throttled or 0
    at_present, before = (", ".join(board.throttle_words(bits, since_boot=at)) for at in (False, True))
    said = "; ".join(
        filter(None, (degrees, f"now: {at_present}" if at_present else "", before and f"since boot: {before}"))
    )
    if "under-voltage" in at_present + before:
        return Finding("heat", "warn", said, "use the board's own power supply and a short, thick cable")
    if bits or (now.temperature_c or 0) >= _HOT_C:
        return Finding("heat", "warn", said, "cool the board: it slows down from 80 °C on")
    return Finding("heat", "ok", said)


def _memory(root: Path) -> Iterator[Finding]:
    available = board.memory_available_bytes(root)
    if available is not None:
        tight = available < _MEMORY_BYTES
        todo = f"free some: an actor with a large policy takes up to {_MEMORY_BYTES / 1e6:.0f} MB" if tight else ""
        yield Finding("memory", "warn" if tight else "ok", f"{available / 1e6:.0f} MB available", todo)
    groups = root / "sys/fs/cgroup"
    unified = _text(groups / "cgroup.controllers").split()
    if "memory" in unified or (groups / "memory").is_dir():
        yield Finding("memory cgroup", "ok", "MemoryMax= of the systemd unit holds")
    else:
        yield Finding(
            "memory cgroup",
            "warn",
            "off: MemoryMax= of the systemd unit is ignored",
            "add cgroup_enable=memory to /boot/firmware/cmdline.txt and restart the board",
        )


def _bundle(settings: config.ActorConfig) -> tuple[identity.Bundle | None, Finding]:
    path = Path(settings.bundle) if settings.bundle else identity.home() / "bundle.json"
    try:
        bundle = identity.Bundle.read(path)
    except errors.IdentityError as error:
        if not settings.bundle and not path.exists():
            return None, Finding("bundle", "warn", f"none at {path}: this machine is no actor yet", error.todo)
        return None, _failed("bundle", error)
    what = f"actor {bundle.actor_id} of fleet {bundle.fleet}, {path}"
    if settings.fleet and settings.fleet != bundle.fleet:
        wrong = f"{what}, not of {settings.fleet}"
        return bundle, Finding("bundle", "fail", wrong, "enrol it there", errors.ConfigError.exit_code)
    if path.stat().st_mode & 0o077:
        return bundle, Finding("bundle", "warn", f"{what}: others may read its keys", f"chmod 600 {path}")
    try:
        bundle.tls()
        soon = certificates.ends_soon(bundle.credential.encode())
    except (errors.ActorqError, ValueError) as error:
        code = error.exit_code if isinstance(error, errors.ActorqError) else errors.IdentityError.exit_code
        return bundle, Finding("bundle", "fail", f"{what}: its certificate: {error}", "enrol it again", code)
    if soon:
        return bundle, Finding("bundle", "warn", f"{what}: its certificate ends within months", "enrol it again")
    return bundle, Finding("bundle", "ok", what)


def _spool(settings: config.ActorConfig, bundle: identity.Bundle | None) -> Finding:
    name = bundle.actor_id if bundle else "check"
    state_dir = Path(settings.state_dir or identity.home() / "actors" / name)
    spool = journal.default_directory(state_dir, settings.spool_dir)
    for directory in (spool, state_dir):
        there = next(path for path in (directory, *directory.resolve().parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"actorq")
                file.flush()
        except OSError as error:
            return Finding(
                "spool",
                "fail",
                f"nothing can be written below {there}: {error.strerror}",
                f"let the user {os.getuid()} write there, or name another place with --spool-dir and --state-dir",
                errors.ConfigError.exit_code,
            )
        if directory is spool:
            kind = "in memory: survives a crash, not a loss of power" if journal.in_memory(there) else "on disk, synced"
            free = shutil.disk_usage(there).free
    what = f"{spool}, {kind}, {free / 1e6:.0f} MB free for {settings.spool_bytes / 1e6:.0f}"
    if free < settings.spool_bytes:
        return Finding("spool", "warn", what, "free some room, or lower --spool-bytes: a full spool drops its oldest")
    return Finding("spool", "ok", what)


def _broker(settings: config.ActorConfig, bundle: identity.Bundle) -> Iterator[Finding]:
    """Asks each broker by itself, as this actor: reachable, its certificate, our password."""
    for broker in settings.broker or bundle.brokers:
        began = time.monotonic()
        connection: link.Link | None = None
        try:
            where = address.Address.parse(broker)
            connection = link.Link(
                [broker], bundle.actor_id, username=bundle.actor_id, password=bundle.password, tls=bundle.tls()
            )
            connection.subscribe(topics.Topics(bundle.fleet).learner_state, lambda topic, payload, retained: None)
            connection.start()
            connection.wait_connected(_BROKER_S)
        except errors.ActorqError as error:
            yield _failed("broker", error)
            continue
        finally:
            if connection is not None:
                connection.close()
        how = "over TLS, with its certificate" if where.tls else "without TLS, on this machine"
        milliseconds = (time.monotonic() - began) * 1e3
        yield Finding("broker", "ok", f"{where} let {bundle.actor_id} in {how}, {milliseconds:.0f} ms")


def _power(root: Path) -> Iterator[Finding]:
    found = power.find(root)
    passed_over = "; ".join(found.passed_over)
    if found.source is None:
        yield Finding(
            "power", "ok", "no source: energy will not be told" + (f" ({passed_over})" if passed_over else "")
        )
        return
    found.source.close()
    what = f"{found.source.name}: {found.source.note}"
    if found.source.modelled:
        yield Finding(
            "power", "warn", what, "wire an INA219 or INA226 to measure" + (f"; {passed_over}" if passed_over else "")
        )
    else:
        yield Finding("power", "ok", what)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
