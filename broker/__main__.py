"""actorq-broker: starts the fleet's broker, and enrols the machines that may use it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from broker import address, cli, errors, identity, listener
from broker.mosquitto import process

_CHECK_PERIOD_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    return _up(args) if args.command == "up" else _enroll(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorq-broker", description=__doc__, allow_abbrev=False)
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True)

    up = commands.add_parser("up", allow_abbrev=False, help="run a broker in the foreground until Ctrl-C or SIGTERM")
    up.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    up.add_argument("--port", type=int, default=address.DEFAULT_PORT, help="0 finds a free one (default: %(default)s)")
    up.add_argument(
        "--kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="mosquitto serves a site, embedded (pure Python) this machine; auto takes mosquitto where it is installed",
    )
    up.add_argument("--json", action="store_true", help="print one JSON object on stdout once it serves")

    enroll = commands.add_parser(
        "enroll", allow_abbrev=False, help="make the keys that let one machine act in the fleet"
    )
    enroll.add_argument("name", metavar="NAME", help="of the actor: a-z, 0-9, '-' and '_'")
    enroll.add_argument(
        "--broker", action="append", metavar="HOST[:PORT]", help="where the actor finds a broker; repeat for several"
    )
    enroll.add_argument("-o", "--output", type=Path, metavar="FILE", help="the bundle (default: NAME.json)")
    enroll.add_argument("--force", action="store_true", help="replace FILE")

    for command in (up, enroll):
        command.add_argument("--fleet", default=identity.DEFAULT_FLEET, help="name of the fleet (default: %(default)s)")
    return parser


def _up(args: argparse.Namespace) -> int:
    kind = args.kind
    if kind == "auto":
        kind = "mosquitto" if process.find() or not listener.is_loopback(args.bind) else "embedded"
    if kind == "embedded":
        from broker import embedded  # here, because amqtt is an optional part

        embedded.run(args.bind, args.port, lambda port: _say_ready(args, "embedded broker", kind, port, os.getpid()))
    else:
        _up_mosquitto(args)
    print("broker stopped", file=sys.stderr)
    return errors.EXIT_OK


def _up_mosquitto(args: argparse.Namespace) -> None:
    stop = threading.Event()
    cli.on_stop_signal(stop.set)
    users = None if listener.is_loopback(args.bind) else _enrolled(args.fleet)
    with process.Mosquitto(args.bind, args.port, fleet=args.fleet, users=users, on_log=_say) as mosquitto:
        _say_ready(args, "Mosquitto", "mosquitto", mosquitto.port, mosquitto.pid)
        while not stop.wait(_CHECK_PERIOD_S):
            mosquitto.check()
            if users is not None:
                users = _let_in(mosquitto, args.fleet, users)


def _let_in(mosquitto: process.Mosquitto, fleet: str, users: Mapping[str, str]) -> Mapping[str, str]:
    """Tells Mosquitto if others are enrolled than `users`; returns who is let in now."""
    try:
        now = identity.Fleet.open(fleet, create=False).users()
    except errors.IdentityError as error:  # one broken file must not take the broker from all the others
        _say(f"keeping the actors known so far: {error}")
        return users
    if now != users:
        mosquitto.reload(now)
        _say(f"{len(now) - 1} actors enrolled")
    return now


def _enrolled(fleet: str) -> Mapping[str, str]:
    """Names and passwords of a fleet that has at least one actor."""
    users = identity.Fleet.open(fleet, create=False).users()
    if users.keys() == {identity.LEARNER_USER}:
        raise errors.IdentityError(
            f"fleet {fleet!r} has no enrolled actors, and only such may use a broker on the network",
            todo="run `actorq-broker enroll NAME` once per actor, then start again",
        )
    return users


def _say_ready(args: argparse.Namespace, name: str, kind: str, port: int, pid: int) -> None:
    where = address.Address(args.bind, port)
    _say(f"{name} serves {where} ({'this machine only' if listener.is_loopback(args.bind) else 'the network'})")
    _say(f"a learner here joins with: actorq-learner train --broker {address.Address(_local(args.bind), port)}")
    if not listener.is_loopback(args.bind):
        _say("an actor joins with the bundle of `actorq-broker enroll NAME`: actorq-actor run --bundle NAME.json")
    if args.json:
        print(json.dumps({"kind": kind, "host": args.bind, "port": port, "pid": pid}), flush=True)


def _local(bind: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)


def _enroll(args: argparse.Namespace) -> int:
    output = args.output or Path(f"{args.name}.json")
    brokers = [str(address.Address.parse(text)) for text in args.broker or [identity.DEFAULT_BROKER]]
    if output.exists() and not args.force:
        raise errors.IdentityError(
            "the bundle exists, and enrolling anew would make it useless",
            where=str(output),
            todo="name another file with -o, or replace it with --force",
        )
    bundle = identity.Fleet.open(args.fleet).enroll(args.name, brokers)
    bundle.write(output)
    print(output)
    _say(f"enrolled {args.name} in fleet {args.fleet}; {output} is secret, only its owner can read it. Next:")
    if not args.broker:
        _say(f"  (it says {identity.DEFAULT_BROKER}; for another machine enrol with --broker HOST)")
    _say(f"  scp {output} HOST:")
    _say(f"  on HOST: actorq-actor run --bundle {output.name}")
    return errors.EXIT_OK


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
