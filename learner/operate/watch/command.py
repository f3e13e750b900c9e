"""`actorq-learner watch`: its arguments, and the process that serves the page."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from broker.contract import address, errors
from broker.fleet import identity
from broker.program import children, cli, logs
from learner.operate.watch import fleet_view, home_assistant, run_files, watcher

PORT = 8765
_LOOK_S = 5.0
"""Between two looks for a run that was begun since."""
_STOP_S = 1
_END_S = 5.0
_NICE = 10
"""At 19 it got next to nothing where others left no core idle, and showed what was a minute old."""


def add(commands: Any) -> None:
    """Adds the command's arguments."""
    watch = commands.add_parser(
        "watch", allow_abbrev=False, help="show a fleet, live, on a page and to Prometheus", description=run.__doc__
    )
    watch.add_argument("run", type=Path, nargs="?", metavar="RUN", help="replay this run, instead of a live fleet")
    watch.add_argument("--fleet", default=identity.DEFAULT_FLEET, metavar="NAME", help="(default: %(default)s)")
    watch.add_argument(
        "--broker", default="", metavar="HOST[:PORT],...", help="(default: as told to `actorq-broker init`)"
    )
    watch.add_argument(
        "--curve", type=Path, metavar="RUN", help="run whose learning curve is shown (default: the fleet's newest here)"
    )
    watch.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen on; off this machine the page is served over TLS, to who has the token (default: %(default)s)",
    )
    watch.add_argument("--port", type=int, default=PORT, metavar="N", help="0 takes any (default: %(default)s)")
    watch.add_argument("--host", action="append", default=[], metavar="NAME", help="a further name of this machine")
    watch.add_argument(
        "--home-assistant",
        default="",
        metavar="HOST[:PORT]",
        help="show each actor as a device in Home Assistant, by its MQTT broker; over TLS, unless on this machine",
    )
    watch.add_argument(
        "--home-assistant-user",
        default="",
        metavar="NAME",
        help=f"who says it there; the password is in the environment variable {home_assistant.PASSWORD}",
    )
    watch.add_argument(
        "--home-assistant-ca",
        type=Path,
        metavar="FILE",
        help="authority of that broker's certificate (default: those that this system trusts)",
    )
    watch.add_argument("--json", action="store_true", help="print the address as one JSON object on stdout")
    watch.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Shows a fleet on a page: learning curve, a row for each actor, alarms; /metrics is for Prometheus.

    It follows the broker as a member that may only read, on the machine that has the fleet's keys; it needs no
    learner. With RUN it shows what a run wrote in its files. Ctrl-C ends it.
    """
    _require()
    logs.configure()
    _wait_for_others()
    view = fleet_view.FleetView()
    if args.run is not None:
        if args.home_assistant:
            raise errors.ConfigError(
                "Home Assistant is told of a live fleet alone", where="--home-assistant", todo="leave RUN out"
            )
        shown = run_files.open_run(args.run)
        with _listen(args) as listener:
            rows = [_replayed(row) for row in shown.actors()]
            _serve(args, listener, view, lambda: shown, f"run {args.run.name}", rows, None)
        return errors.EXIT_OK
    addresses = tuple(str(address.Address.parse(one)) for one in args.broker.split(",") if one)
    fleet = identity.Fleet.open(args.fleet, create=False)
    following = watcher.Watcher(fleet, addresses, view, fleet.watch_tls())
    with contextlib.ExitStack() as open_:
        listener = open_.enter_context(_listen(args))
        open_.enter_context(contextlib.closing(following))
        told = _home_assistant(args, view)
        following.start()
        if told is not None:
            told.start()
            open_.enter_context(contextlib.closing(told))
        curve = Curve(args.fleet, args.curve)

        followed_s = -math.inf

        def follow(now_s: float) -> bool:
            nonlocal followed_s
            is_more = following.read()
            if now_s - followed_s < watcher.FOLLOW_S:
                return is_more
            followed_s = now_s
            following.follow()
            curve.follow(now_s)
            view.hear_drift(curve.run.drift if curve.run is not None else {})
            view.tick()
            if told is not None:
                told.follow(following.enrolled)
            return is_more

        _serve(args, listener, view, lambda: curve.run, f"fleet {args.fleet}", None, follow)
    return errors.EXIT_OK


@contextlib.contextmanager
def beside(fleet: str, brokers: Sequence[str], port: int, curve: str) -> Iterator[None]:
    """Serves the page in a process of its own, for as long as the context lasts: training shall not wait for it.

    It waits for the broker and the fleet's keys as the learner does. Where the port is taken, another page has it, and
    says so on stderr.

    Args:
        fleet: Its name.
        brokers: Their addresses; the fleet's own, if there are none.
        port: 0 takes any.
        curve: The run whose learning curve is shown; empty: the fleet's newest in runs/.
    """
    _require()
    command = [sys.executable, "-m", "learner", "watch", "--fleet", fleet, "--port", str(port)]
    command += ["--broker", ",".join(brokers)] if brokers else []
    command += ["--curve", curve] if curve else []
    # A session of its own, so that Ctrl-C ends the learner first, and this after it
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=children.die_with_parent())  # noqa: PLW1509
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Curve:
    """The run whose rows are shown: the one named, or the newest of a fleet in runs/, looked for again and again."""

    def __init__(self, fleet: str, named: Path | None) -> None:
        self._fleet, self._named = fleet, named
        self._looked_s = -math.inf
        self.run: run_files.RunFiles | None = None

    def follow(self, now_s: float) -> None:
        """Reads what the run wrote since."""
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            path = self._named or run_files.newest_run(self._fleet)
            if path is not None and (self.run is None or self.run.path != path):
                self.run = run_files.RunFiles(path)
        if self.run is not None:
            self.run.follow()


def _home_assistant(args: argparse.Namespace, view: fleet_view.FleetView) -> home_assistant.HomeAssistant | None:
    """Makes what tells Home Assistant, which is not connected yet; None where nobody asked for it.

    Raises:
        ConfigError: It cannot be so.
    """
    if not args.home_assistant:
        return None
    where = (args.home_assistant, args.home_assistant_user, args.home_assistant_ca)
    return home_assistant.HomeAssistant(args.fleet, view, home_assistant.open_link(*where, args.fleet))


def _wait_for_others() -> None:
    """Has this process begin where a core is idle, interrupt nobody and yield: a learner may compute here."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(_NICE)


def _require() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise errors.RuntimeMissing(
            f"the page needs what is not installed: {error.name}", todo="pip install 'actorq-fleet[learner,watch]'"
        ) from error


@contextlib.contextmanager
def _listen(args: argparse.Namespace) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in args.bind else socket.AF_INET
    try:
        listener = socket.create_server((args.bind, args.port), family=family)
    except (OSError, OverflowError) as error:
        raise errors.ConfigError(
            f"the page cannot be served there: {error}",
            where=f"--bind {args.bind} --port {args.port}",
            todo="end who has the port, or name another with --port",
        ) from error
    with listener:
        yield listener


def _serve(
    args: argparse.Namespace,
    listener: socket.socket,
    view: fleet_view.FleetView,
    run: Any,
    title: str,
    actors: list[dict[str, Any]] | None,
    follow: Callable[[float], bool] | None,
) -> None:
    import uvicorn

    from learner.operate.watch import server

    class Server(uvicorn.Server):
        """Leaves signals to us."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    port = listener.getsockname()[1]
    page = server.Page(view, run, title, actors)
    token, options, scheme = "", {}, "http"
    hosts = ["localhost", "127.0.0.1", "[::1]", args.bind, *args.host]
    if not address.is_loopback(args.bind):
        fleet = identity.Fleet.open(args.fleet, create=False)
        names = [*args.host, socket.gethostname()] + ([] if args.bind in ("0.0.0.0", "::") else [args.bind])
        if args.bind in ("0.0.0.0", "::"):
            names += [address.Address.parse(one).host for one in fleet.brokers]
        hosts += names
        options = {"ssl_certfile": str(fleet.page_credential(names))}
        token, scheme = fleet.watch_token, "https"
    config = uvicorn.Config(
        page.application(hosts, token),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
        **options,  # type: ignore[arg-type]
    )
    serving = Server(config)

    def turn(now_s: float) -> bool:
        is_more = follow is not None and follow(now_s)
        page.tell()
        return is_more

    def stop() -> None:
        page.closed = serving.should_exit = True

    cli.on_stop_signal(stop)
    shown = args.bind if not token or args.bind not in ("0.0.0.0", "::") else socket.gethostname()
    url = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}/" + (f"?token={token}" if token else "")
    print(f"{title}: {url}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"url": url, "port": port}), flush=True)
    asyncio.run(_run(serving, listener, turn, stop))


async def _run(
    serving: Any,
    listener: socket.socket,
    turn: Callable[[float], bool],
    stop: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    served = asyncio.ensure_future(serving.serve(sockets=[listener]))
    try:
        while not served.done():
            is_more = turn(loop.time())
            await asyncio.wait([served], timeout=0.0 if is_more else watcher.READ_S)
    finally:
        stop()
        await served


def _replayed(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of an actor of a run that has ended, as the page has those of live ones."""
    known = {key: value for key, value in row.items() if key not in ("actor_id", "delegate", "refused")}
    alarm = {"refused": str(row["refused"])} if row.get("refused") else {}
    return known | {"actor": row.get("actor_id", "?"), "kernels": row.get("delegate", ""), "alarms": alarm}
