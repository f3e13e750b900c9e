"""actorq-broker: makes a fleet's keys, starts its broker, and says which machines may use it."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import sys
from collections.abc import Sequence
from pathlib import Path

from broker.contract import address, errors
from broker.fleet import enrolled, identity, release_files, release_key
from broker.program import cli, logs, storage
from broker.serve.mosquitto import access, process

_log = logging.getLogger("broker.up")  # __name__ is "__main__" here, which is nobody's logger

_CHECK_PERIOD_S = 0.25  # how late an enrolment or a revocation takes effect at the most


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, argv)


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    logs.configure()
    return {
        "up": _up,
        "init": _init,
        "enroll": _enroll,
        "revoke": _revoke,
        "rotate": _rotate,
        "release-key": _release_key,
        "release": _release,
    }[args.command](args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="actorq-broker", description=__doc__, allow_abbrev=False)
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True)

    up = commands.add_parser("up", allow_abbrev=False, help="run a broker in the foreground until Ctrl-C or SIGTERM")
    up.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    up.add_argument(
        "--port",
        type=int,
        help=f"0 finds a free one (default: {address.PLAIN_PORT}, or {address.TLS_PORT} where TLS is spoken)",
    )
    up.add_argument(
        "--tls",
        action="store_true",
        help="TLS and enrolled actors only on an address of this machine too; on any other it is always so",
    )
    up.add_argument(
        "--kind",
        choices=("auto", "mosquitto", "embedded"),
        default="auto",
        help="mosquitto serves a site, embedded (pure Python) this machine; auto takes mosquitto where it is installed",
    )
    up.add_argument(
        "--brokers",
        type=int,
        default=1,
        metavar="N",
        help="run so many, on ports that follow each other, where one takes all of a core; name them all to init, and "
        "actors enrolled after that share them (default: 1)",
    )
    up.add_argument(
        "--json", action="store_true", help="print a JSON object on stdout for each broker, once all of them serve"
    )

    init = commands.add_parser("init", allow_abbrev=False, help="make a fleet's keys and certificates")
    init.add_argument(
        "fleet", nargs="?", default=identity.DEFAULT_FLEET, metavar="FLEET", help="its name (default: %(default)s)"
    )
    init.add_argument(
        "--address",
        action="append",
        metavar="HOST[:PORT]",
        help="where learner and actors find the broker, as a name or an address; repeat for several",
    )
    init.add_argument(
        "--renew", action="store_true", help="replace the broker's and the learner's certificate before they end"
    )

    enroll = commands.add_parser(
        "enroll", allow_abbrev=False, help="make the keys that let one machine act in the fleet"
    )
    enroll.add_argument("name", metavar="NAME", help="of the actor: a-z, 0-9, '-' and '_'")
    enroll.add_argument(
        "--broker",
        action="append",
        metavar="HOST[:PORT]",
        help="where the actor finds a broker (default: as told to init)",
    )
    enroll.add_argument("-o", "--output", type=Path, metavar="FILE", help="the bundle (default: NAME.json)")
    enroll.add_argument("--force", action="store_true", help="replace FILE")

    revoke = commands.add_parser("revoke", allow_abbrev=False, help="shut one actor out, at once")
    revoke.add_argument("name", metavar="NAME", help="of the actor")

    rotate = commands.add_parser(
        "rotate", allow_abbrev=False, help="replace the keys of learner and actors, and shut out who has the old ones"
    )
    rotate.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="where the new bundles go (default: here)"
    )

    release = commands.add_parser(
        "release-key",
        allow_abbrev=False,
        help="make the key that signs releases of the actor's program (actorq-learner fleet update)",
    )
    release.add_argument(
        "-o", "--output", type=Path, default=Path("release.pem"), metavar="FILE", help="its secret half (default: here)"
    )
    release.add_argument("--force", action="store_true", help="replace the fleet's release key")

    signs = commands.add_parser(
        "release", allow_abbrev=False, help="sign wheels as a release, where the key is; other machines send the file"
    )
    signs.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="that of actorq-fleet, and what it needs")
    signs.add_argument("--key", type=Path, default=Path("release.pem"), metavar="FILE", help="(default: %(default)s)")
    signs.add_argument("--downgrade", action="store_true", help="also for boards that run a higher version")
    signs.add_argument("-o", "--output", type=Path, metavar="FILE", help="(default: VERSION-DIGEST.release)")

    for command in (up, enroll, revoke, rotate, release):
        command.add_argument("--fleet", default=identity.DEFAULT_FLEET, help="name of the fleet (default: %(default)s)")
    return parser


def _up(args: argparse.Namespace) -> int:
    kind = args.kind
    args.tls = args.tls or not address.is_loopback(args.bind)
    if args.port is None:
        args.port = address.TLS_PORT if args.tls else address.PLAIN_PORT
    if kind == "auto":
        kind = "mosquitto" if process.find() or args.tls or args.brokers > 1 else "embedded"
    if args.brokers < 1:
        raise errors.ConfigError(f"--brokers {args.brokers}", todo="start one at least")
    if kind == "embedded":
        if args.tls and address.is_loopback(args.bind):
            raise errors.ConfigError("the embedded broker has no TLS", todo="install mosquitto, or leave out --tls")
        if args.brokers > 1:
            raise errors.ConfigError("there is one embedded broker to a process", todo="leave out --brokers")
        from broker.serve import embedded  # here, because amqtt is an optional part

        embedded.run(args.bind, args.port, lambda port: _announce(args, "embedded broker", kind, [(port, os.getpid())]))
    else:
        _up_mosquitto(args)
    _log.info("broker stopped")
    return errors.EXIT_OK


def _up_mosquitto(args: argparse.Namespace) -> None:
    events: queue.SimpleQueue[tuple[int, str, str] | None] = queue.SimpleQueue()
    cli.on_stop_signal(lambda: events.put(None))
    gate = _Gate.open(args) if args.tls else None
    with contextlib.ExitStack() as running:
        brokers = [
            running.enter_context(
                process.Mosquitto(
                    args.bind,
                    args.port + index if args.port else 0,
                    fleet=args.fleet,
                    admission=gate.admission if gate else None,
                    on_excess=lambda user, what, index=index: events.put((index, user, what)),  # type: ignore[misc]
                )
            )
            for index in range(args.brokers)
        ]
        _announce(args, "Mosquitto", "mosquitto", [(one.port, one.pid) for one in brokers])
        while True:
            try:
                excess = events.get(timeout=_CHECK_PERIOD_S)
            except queue.Empty:
                pass
            else:
                if excess is None:
                    return
                index, user, what = excess
                if gate is not None and (not user or gate.shut_out(user)):
                    # Not a reload: Mosquitto may be at work for minutes on what it was sent, and would keep the rest.
                    brokers[index].restart(gate.admission)
                    for other in brokers:
                        if other is not brokers[index]:
                            other.reload(gate.admission)
                    _log_excess(user, what)
            for one in brokers:
                _keep_up(one, gate, is_alone=len(brokers) == 1)
            if gate is not None and gate.changed():
                for one in brokers:
                    one.reload(gate.admission)
                _log.info(
                    "%d actors enrolled",
                    len(gate.admission.users.keys() - {identity.LEARNER_USER, identity.WATCH_USER}),
                )


def _keep_up(broker: process.Mosquitto, gate: _Gate | None, *, is_alone: bool) -> None:
    """Starts a broker that has ended again, where others serve its clients meanwhile.

    Raises:
        BrokerUnreachable: It was the only one: whoever supervises this shall know.
    """
    try:
        broker.check()
    except errors.BrokerUnreachable as error:
        if is_alone:
            raise
        try:
            broker.restart(gate.admission if gate else None)
        except errors.ActorqError as again:  # the others serve; the next look tries once more
            _log.warning("%s (%s); it cannot be started: %s", error.what, error.where, again.what)
        else:
            _log.warning("%s (%s); started it again", error.what, error.where)


def _log_excess(user: str, what: str) -> None:
    if user:
        _log.warning("SHUT OUT %s, and started Mosquitto anew: it %s, as no actor of ours does", user, what)
        _log.warning(
            "  to do: actorq-broker revoke %s; enrolling it with --force, or a new start of this, lets it in again",
            user,
        )
    else:
        _log.warning("started Mosquitto anew: a client %s, which hides whose it is", what)
        _log.warning("  to do: find the machine at that address, and revoke its actor")


class _Gate:
    """Knows who may come in, as the fleet's directory says it at any time; made by `open`."""

    admission: access.Admission

    def __init__(self, fleet: identity.Fleet, hosts: list[str]) -> None:
        self._fleet = fleet
        self._hosts = hosts
        self._shut_out: set[tuple[str, str]] = set()
        self._enrolled = enrolled.Enrolled(self._fleet, lambda bundle: bundle.password)
        self._is_readable = True

    @classmethod
    def open(cls, args: argparse.Namespace) -> _Gate:
        """Opens the fleet, and reads who is enrolled.

        Raises:
            IdentityError: The fleet cannot be read, or its broker's certificate would name no address.
            OSError: Its directory cannot be read.
        """
        made = cls(_fleet(args), [] if _is_wildcard(args.bind) else [args.bind])
        made._enrolled.follow()
        made.admission = made._admission()
        return made

    def changed(self) -> bool:
        """Looks again; returns true if `admission` is another one now."""
        before = self.admission
        try:
            self._enrolled.follow()
            self.admission = self._admission()
        except (errors.IdentityError, OSError) as error:
            if self._is_readable:
                _log.warning("keeping actors and certificate as they were: %s", error)
            self._is_readable = False
            return False
        self._is_readable = True
        return self.admission != before

    def shut_out(self, user: str) -> bool:
        """Leaves a user out of `admission`, until it is enrolled anew; returns false if it is not in there."""
        if user not in self.admission.users:
            return False
        self._shut_out.add((user, self.admission.users[user]))
        self.admission = self._admission()
        return True

    def _admission(self) -> access.Admission:
        users = self._fleet.own_users() | self._enrolled.found
        for user, password in self._shut_out:
            if users.get(user) == password:
                del users[user]
        return access.Admission(users, self._fleet.authority.certificate, self._fleet.broker_credential(self._hosts))


def _fleet(args: argparse.Namespace) -> identity.Fleet:
    """Returns the fleet that a broker on the network serves; it must know under which names clients reach that."""
    fleet = identity.Fleet.open(args.fleet, create=False)
    if _is_wildcard(args.bind) and fleet.brokers == (identity.DEFAULT_BROKER,):
        raise errors.IdentityError(
            "the broker's certificate must say under which names or addresses clients reach it",
            where=f"--bind {args.bind}, fleet {args.fleet}",
            todo=f"run `actorq-broker init {args.fleet} --address HOST`, then start again",
        )
    return fleet


def _announce(args: argparse.Namespace, name: str, kind: str, serving: Sequence[tuple[int, int]]) -> None:
    """Says where brokers serve: ports and process ids."""
    open_to = "this machine only" if address.is_loopback(args.bind) else "the network"
    where = ", ".join(str(address.Address(args.bind, port)) for port, _ in serving)
    _log.info("%s serves %s (%s%s)", name, where, open_to, ", TLS" if args.tls else "")
    fleet = "" if args.fleet == identity.DEFAULT_FLEET else f"--fleet {args.fleet} "
    local = ",".join(str(address.Address(_local(args.bind), port, args.tls)) for port, _ in serving)
    _log.info("a learner here joins with: actorq-learner train %s--broker %s", fleet, local)
    if args.tls:
        _log.info("an actor joins with the bundle of `actorq-broker enroll NAME`: actorq-actor run --bundle NAME.json")
    for port, pid in serving if args.json else ():
        print(json.dumps({"kind": kind, "host": args.bind, "port": port, "pid": pid, "tls": args.tls}), flush=True)


def _is_wildcard(bind: str) -> bool:
    return bind in ("0.0.0.0", "::")


def _local(bind: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)


def _init(args: argparse.Namespace) -> int:
    addresses = [address.Address.parse(text) for text in args.address or []]
    fleet = identity.Fleet.open(args.fleet)
    if addresses:
        fleet.name_brokers(addresses)
    fleet.broker_credential(renew=args.renew)
    fleet.learner_credential(renew=args.renew)
    print(fleet.directory)
    option = "" if args.fleet == identity.DEFAULT_FLEET else f" --fleet {args.fleet}"
    _answer(f"fleet {args.fleet} has its keys; keep a copy of {fleet.directory}, and keep it secret. Next:")
    if fleet.brokers == (identity.DEFAULT_BROKER,):
        _answer("  (for other machines, say where they find the broker: actorq-broker init --address HOST)")
    _answer(f"  actorq-broker enroll NAME{option}     once per actor, on {', '.join(fleet.brokers)}")
    _answer(f"  actorq-broker up --bind ADDRESS{option}")
    return errors.EXIT_OK


def _revoke(args: argparse.Namespace) -> int:
    fleet = identity.Fleet.open(args.fleet, create=False)
    fleet.revoke(args.name)
    _answer(f"revoked {args.name} in fleet {args.fleet}: brokers and learners that run here drop it within a second")
    return errors.EXIT_OK


def _rotate(args: argparse.Namespace) -> int:
    storage.make_directory(args.output)
    bundles = identity.Fleet.open(args.fleet, create=False).rotate()
    for bundle in bundles:
        file = args.output / f"{bundle.actor_id}.json"
        bundle.write(file)
        print(file)
    _answer(f"new keys for fleet {args.fleet}: brokers that run here follow, a learner ends and goes on with --resume")
    _answer(f"the {len(bundles)} bundles are secret; copy each to its machine and start its actor again")
    return errors.EXIT_OK


def _release_key(args: argparse.Namespace) -> int:
    fleet = identity.Fleet.open(args.fleet, create=False)
    release_key.make(fleet.directory, args.output, replace=args.force)
    print(args.output)
    _answer(f"{args.output} signs what boards run: best kept on another machine than the learner's. Next:")
    _answer(
        "  actorq-broker enroll NAME --force     for boards enrolled before: their new bundles have its public half"
    )
    return errors.EXIT_OK


def _release(args: argparse.Namespace) -> int:
    made = release_files.make(args.wheels, release_key.read(args.key), downgrade=args.downgrade)
    output = args.output or Path(made.name + release_files.SUFFIX)
    made.write(output)
    print(output)
    _answer(f"signed {made.name}. Next, where the fleet's keys are:")
    _answer(f"  actorq-learner fleet update {output} --all")
    return errors.EXIT_OK


def _enroll(args: argparse.Namespace) -> int:
    output = args.output or Path(f"{args.name}.json")
    brokers = [str(address.Address.parse(text)) for text in args.broker or []]
    if output.exists() and not args.force:
        raise errors.IdentityError(
            "the bundle exists, and enrolling anew would make it useless",
            where=str(output),
            todo="name another file with -o, or replace it with --force",
        )
    bundle = identity.Fleet.open(args.fleet).enroll(args.name, brokers)
    bundle.write(output)
    print(output)
    _answer(f"enrolled {args.name} in fleet {args.fleet}; {output} is secret, only its owner can read it. Next:")
    if bundle.brokers == (identity.DEFAULT_BROKER,):
        _answer(
            f"  (it says {identity.DEFAULT_BROKER}; for another machine: actorq-broker init --address HOST, then this)"
        )
    _answer(f"  scp {output} HOST:")
    _answer(f"  on HOST: actorq-actor run --bundle {output.name}")
    return errors.EXIT_OK


def _answer(line: str) -> None:
    """Writes what a command has to tell besides its result, which goes to stdout."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
