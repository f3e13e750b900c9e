"""`actorq-learner fleet`: what the command line says, done."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from broker.contract import errors, messages, topics
from broker.fleet import identity, release_files, release_key
from broker.program import cli, logs
from learner.operate.orders import courier, giving, order_book, rollout, tables

_RENEW_S = 40.0
_FOLLOW_S = 90.0
_SHOWN = 10
_HELP = {
    "ls": "list the actors: who is here, what they do",
    "show": "all that is known of one actor, and its last orders",
    "pause": "keep actors from acting, over restarts too, until `resume`",
    "resume": "let them act again",
    "restart": "start the actor's program again, where its board allows it (--allow)",
    "reboot": "boot the board, where it allows it",
    "logs": "print the last lines that actors logged, and follow with -f",
    "set": "change settings for good: " + ", ".join((*messages.SETTABLE, messages.ENV_ARGUMENT + "NAME")),
    "update": "have actors take a new release of their program, which wheels are signed to, in stages",
    "label": "give actors labels, by which --label finds them; `KEY=` takes one away",
    "withdraw": "take back orders that have no answer yet",
}


def add(commands: Any) -> None:
    """Adds the command and those under it."""
    fleet = commands.add_parser(
        "fleet", allow_abbrev=False, help="list the actors of a fleet, and give them orders", description=run.__doc__
    )
    verbs = fleet.add_subparsers(dest="verb", required=True, metavar="ORDER")
    for verb, text in _HELP.items():
        one = verbs.add_parser(verb, allow_abbrev=False, help=text, description=text[0].upper() + text[1:] + ".")
        pairs = (
            " and KEY=VALUE"
            if verb in ("set", "label")
            else " and WHEELS, or a file of `actorq-broker release`"
            if verb == "update"
            else ""
        )
        one.add_argument("words", nargs="*", metavar="NAME", help=f"actors{pairs}")
        one.add_argument("--all", action="store_true", help="every actor that is enrolled")
        one.add_argument(
            "--label",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="actors that have this label; of several, all",
        )
        one.add_argument("--fleet", default=identity.DEFAULT_FLEET, metavar="NAME", help="(default: %(default)s)")
        one.add_argument(
            "--broker", default="", metavar="HOST[:PORT],...", help="(default: as told to `actorq-broker init`)"
        )
        wait_s = {"ls": 2.5, "show": 2.5, "update": 900.0}.get(verb, 10.0)
        if verb != "label":
            one.add_argument(
                "--wait-s",
                type=float,
                default=wait_s,
                metavar="X",
                help="for actors to be heard (default: %(default)s)",
            )
        if verb in messages.ORDER_KINDS and verb not in ("logs", "update"):
            one.add_argument(
                "--expire-s",
                type=float,
                default=86_400.0,
                metavar="X",
                help="an actor that is away gets the order if it is back in so many seconds (default: a day)",
            )
        if verb == "update":
            _add_update(one)
        if verb == "logs":
            one.add_argument("-n", "--lines", type=int, default=100, metavar="N", help="(default: %(default)s)")
            one.add_argument("-f", "--follow", action="store_true", help="go on printing new ones until Ctrl-C")
        one.add_argument("--json", action="store_true", help="print JSON lines, one an actor (of logs: one a line)")
        one.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def _add_update(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--key", type=Path, default=Path("release.pem"), metavar="FILE", help="signs wheels (default: %(default)s)"
    )
    command.add_argument("--first", type=int, default=1, metavar="N", help="actors that begin (default: %(default)s)")
    command.add_argument("--first-label", default="", metavar="KEY=VALUE", help="those with this label begin instead")
    command.add_argument(
        "--shares",
        default="25,100",
        metavar="PERCENT,...",
        help="of the others, that have it after each further stage (default: %(default)s)",
    )
    command.add_argument(
        "--trial-s",
        type=float,
        default=120.0,
        metavar="X",
        help="time within which an actor must act and reach its learner, or it goes back (default: %(default)s)",
    )
    command.add_argument("--downgrade", action="store_true", help="sign it for actors that run a higher version, too")


def run(args: argparse.Namespace) -> int:
    """Shows who is in a fleet, and gives signed orders over its brokers, whether or not a learner trains meanwhile.

    Orders are done at most once. An actor that is away gets them when it is back, unless they have expired. Ends with
    24 if an actor did not answer, with 25 if one refused or failed.
    """
    logs.configure()
    fleet = identity.Fleet.open(args.fleet, create=False)
    with contextlib.closing(order_book.OrderBook.open(fleet.directory)) as book:
        return _run(args, fleet, book)


def _run(args: argparse.Namespace, fleet: identity.Fleet, book: order_book.OrderBook) -> int:
    files = [word for word in args.words if args.verb == "update" and word.endswith((".whl", release_files.SUFFIX))]
    words = [word for word in args.words if word not in files]
    names, changes = [word for word in words if "=" not in word], _pairs(words)
    if changes and args.verb not in ("set", "label"):
        raise errors.ConfigError(f"{args.verb} takes names, and no KEY=VALUE")
    actors = _actors(args, names, fleet, book)
    if args.verb == "label":
        return _label(args, actors, changes, book)
    if args.verb == "set":
        _check_settings(changes)
    if args.verb == "update" and args.first_label and "=" not in args.first_label:
        raise errors.ConfigError(f"--first-label takes KEY=VALUE, not {args.first_label!r}")
    made = _signed(args, list(map(Path, files)), fleet) if args.verb == "update" else None
    expired = book.expire(time.time())
    addresses = tuple(filter(None, args.broker.split(",")))
    with contextlib.closing(courier.Courier(fleet, book, addresses, actors, fleet.tls())) as carrier:
        carrier.start()
        carrier.deliver(expired)
        if args.verb in ("ls", "show"):
            return _look(args, actors, book, carrier)
        if args.verb == "withdraw":
            return _withdraw(args, actors, book, carrier)
        if args.verb == "logs":
            return _logs(args, actors, book, carrier)
        if made is not None:
            return _update(args, made, actors, fleet, book, carrier)
        entries = giving.give(args.verb, changes, actors, book, carrier, wait_s=args.wait_s, valid_s=args.expire_s)
    _print_outcomes(args, entries)
    return _judge(args, entries)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words if "=" in word)


def _actors(
    args: argparse.Namespace, names: Sequence[str], fleet: identity.Fleet, book: order_book.OrderBook
) -> list[str]:
    """Returns the actors that are meant, by name.

    Raises:
        ConfigError: Nobody is.
        IdentityError: Someone is not enrolled.
    """
    enrolled = fleet.actors()
    if unknown := [name for name in names if name not in enrolled]:
        raise errors.IdentityError(
            f"not enrolled: {', '.join(unknown)}",
            where=str(fleet.directory),
            todo=f"enrolled are: {', '.join(enrolled) or 'none; see actorq-broker enroll'}",
        )
    wanted, labels = _pairs(args.label), book.labels()
    if len(wanted) != len(args.label):
        raise errors.ConfigError("--label takes KEY=VALUE")
    found = list(dict.fromkeys(names)) or (enrolled if args.all or wanted or args.verb == "ls" else [])
    found = [name for name in found if all(labels.get(name, {}).get(key) == wanted[key] for key in wanted)]
    if not found and args.verb != "ls":
        raise errors.ConfigError(
            "no actor is meant" if not wanted else f"no actor has {' '.join(args.label)}",
            todo="name actors, or take --all, or --label KEY=VALUE; `actorq-learner fleet ls` lists them",
        )
    return found


def _check_settings(changes: dict[str, str]) -> None:
    for key in list(changes):
        changes[key.replace("-", "_") if not key.startswith(messages.ENV_ARGUMENT) else key] = changes.pop(key)
    wrong = [key for key in changes if key not in messages.SETTABLE and not key.startswith(messages.ENV_ARGUMENT)]
    if wrong or not changes:
        raise errors.ConfigError(
            f"set cannot change {', '.join(wrong)}" if wrong else "set takes KEY=VALUE",
            todo=f"keys are {', '.join(messages.SETTABLE)}, {messages.ENV_ARGUMENT}NAME; `KEY=` undoes one",
        )


def _label(args: argparse.Namespace, actors: Sequence[str], changes: dict[str, str], book: order_book.OrderBook) -> int:
    if wrong := [key for key in changes if not key or any(c.isspace() for c in key + changes[key])]:
        raise errors.ConfigError(f"labels are KEY=VALUE without spaces, not {wrong[0]!r}")
    book.label(actors, changes)
    labels = book.labels()
    for name in actors:
        own = labels.get(name, {})
        print(
            json.dumps({"actor": name, "labels": own})
            if args.json
            else " ".join([name, *(f"{key}={value}" for key, value in own.items())])
        )
    return errors.EXIT_OK


def _look(args: argparse.Namespace, actors: Sequence[str], book: order_book.OrderBook, carrier: courier.Courier) -> int:
    """Prints who is here; asks for answers to orders that were given before."""
    open_orders = {name: book.open_orders(name) for name in actors}
    carrier.deliver([name for name, waiting in open_orders.items() if waiting])
    began = time.monotonic()
    while (left := began + args.wait_s - time.monotonic()) > 0:
        book.note(list(carrier.drain(min(0.1, left))))
        silent = [one for one in carrier.heard.values() if one.state.online and not one.is_live]
        if not silent and time.monotonic() - began > min(1.0, args.wait_s):
            break
    carrier.deliver([name for name, waiting in open_orders.items() if waiting])
    labels = book.labels()
    rows = [
        tables.actor_row(name, carrier.heard.get(name), labels.get(name, {}), book.open_orders(name)) for name in actors
    ]
    if args.verb == "ls":
        print("\n".join(map(json.dumps, rows)) if args.json else tables.fleet(rows), flush=True)
        return errors.EXIT_OK
    for row in rows:
        heard, orders = carrier.heard.get(row["actor"]), book.last(row["actor"], _SHOWN)
        is_known = heard is not None and heard.state.vitals.created_s > 0.0
        vitals = dataclasses.asdict(heard.state.vitals) if heard is not None and is_known else {}
        if args.json:
            print(json.dumps({**row, "vitals": vitals, "orders": [tables.as_object(one) for one in orders]}))
        else:
            print(tables.actor(row, vitals, orders))
    return errors.EXIT_OK


def _signed(args: argparse.Namespace, files: Sequence[Path], fleet: identity.Fleet) -> release_files.SignedRelease:
    """Returns the release of these wheels, or of the one file that has it signed.

    Raises:
        IdentityError: The fleet has no release key, or another one.
        ConfigError: An option does not go with them.
    """
    if not fleet.release_key:
        raise errors.IdentityError(
            f"fleet {fleet.name!r} has no release key, so no actor of it takes an update",
            where=str(fleet.directory),
            todo="make one: actorq-broker release-key; then enrol each actor anew: bundles have the public half",
        )
    if not 5.0 <= args.trial_s <= 3600.0:
        raise errors.ConfigError(f"--trial-s is 5 to 3600, not {args.trial_s:g}")
    if len(files) == 1 and files[0].suffix == release_files.SUFFIX:
        if args.downgrade:
            raise errors.ConfigError("--downgrade is signed: give it to actorq-broker release", where=str(files[0]))
        return release_files.read(files[0], fleet.release_key)
    key = release_key.read(args.key)
    if release_key.half(key) != fleet.release_key:
        raise errors.IdentityError(
            "this is not the fleet's release key: its actors would refuse what it signs", where=str(args.key)
        )
    return release_files.make(files, key, downgrade=args.downgrade)


def _update(
    args: argparse.Namespace,
    made: release_files.SignedRelease,
    actors: Sequence[str],
    fleet: identity.Fleet,
    book: order_book.OrderBook,
    carrier: courier.Courier,
) -> int:
    """Rolls a release out to those that are here, in stages."""
    connected = rollout.connected_actors(actors, book, carrier)
    labels, wanted = book.labels(), _pairs([args.first_label])
    first = connected[: max(0, args.first)]
    if wanted:
        first = [name for name in connected if all(labels.get(name, {}).get(key) == wanted[key] for key in wanted)]
    if connected and wanted and not first:
        raise errors.ConfigError(
            f"no actor that is here has {args.first_label}, so nobody would begin",
            todo="give the label (`actorq-learner fleet label`), or take --first N",
        )
    try:
        shares = [float(share) for share in args.shares.split(",")]
    except ValueError:
        raise errors.ConfigError(f"--shares takes numbers, not {args.shares!r}") from None
    batches, names = rollout.stages(connected, first, shares), topics.Topics(fleet.name)
    with rollout.alone(fleet.directory):
        entries = rollout.roll_out(made, batches, names, book, carrier, trial_s=args.trial_s, wait_s=args.wait_s)
    _print_outcomes(args, entries)
    ordered = {one.actor for one in entries}
    away, untouched = [one for one in actors if one not in connected], [one for one in connected if one not in ordered]
    for name in (*untouched, *away):
        outcome = "away" if name in away else "untouched"
        print(json.dumps({"actor": name, "outcome": outcome}) if args.json else f"{name}  {outcome}", flush=True)
    code = _judge(args, entries)
    if away:
        raise errors.Undelivered(
            f"{len(away)} of {len(actors)} actors are away, and were not ordered anything: {_some(away)}",
            where=f"fleet {args.fleet!r}",
            todo="give the same command when they are back: those that have the release keep it",
        )
    return code


def _withdraw(
    args: argparse.Namespace, actors: Sequence[str], book: order_book.OrderBook, carrier: courier.Courier
) -> int:
    """Takes orders back; one that was answered meanwhile, or is under way, stays what it is."""
    waiting = [one for name in actors for one in book.open_orders(name)]
    book.withdraw(one.number for one in waiting)
    carrier.deliver(actors)
    entries = [book.entry(one.number) for one in waiting]
    _print_outcomes(args, entries)
    return errors.EXIT_OK


def _logs(args: argparse.Namespace, actors: Sequence[str], book: order_book.OrderBook, carrier: courier.Courier) -> int:
    stop = threading.Event()
    if args.follow:
        cli.on_stop_signal(stop.set)

    def show(name: str, lines: tuple[str, ...]) -> None:
        for line in lines:
            prefix = f"{name}: " if len(actors) > 1 else ""
            print(json.dumps({"actor": name, "line": line}) if args.json else f"{prefix}{line}", flush=True)

    def ask(lines: int) -> list[order_book.Entry]:
        options = {"lines": str(lines)} | ({"follow_s": str(_FOLLOW_S)} if args.follow else {})
        given = giving.give(
            "logs", options, actors, book, carrier, wait_s=args.wait_s, valid_s=args.wait_s, on_lines=show
        )
        late = [one.number for one in given if one.outcome == order_book.WAITING]
        book.withdraw(late)  # whoever is back later has nobody to tell them
        carrier.deliver(actors)
        return [book.entry(one.number) for one in given]

    entries = ask(args.lines)
    code = _judge(args, entries) if not args.follow else errors.EXIT_OK
    for _ in _turns(stop) if args.follow else ():
        until = time.monotonic() + _RENEW_S
        while not stop.is_set() and time.monotonic() < until:
            for name, answer in carrier.drain(0.1):
                show(name, answer.lines)
        if not stop.is_set():
            ask(0)
    return code


def _turns(stop: threading.Event) -> Iterator[None]:
    while not stop.is_set():
        yield


def _print_outcomes(args: argparse.Namespace, entries: Sequence[order_book.Entry]) -> None:
    if args.json:
        for one in entries:
            print(json.dumps(tables.as_object(one)), flush=True)
    elif entries:
        print(tables.outcomes(entries), flush=True)


def _judge(args: argparse.Namespace, entries: Sequence[order_book.Entry]) -> int:
    """Ends well if every actor did what it was ordered.

    Raises:
        OrderRefused: Some actor did not.
        Undelivered: Some did not answer.
    """
    late = [one.actor for one in entries if one.outcome in (*order_book.OPEN, order_book.WITHDRAWN)]
    failed = [one for one in entries if one.outcome not in (*order_book.OPEN, order_book.WITHDRAWN, "done")]
    where = f"fleet {args.fleet!r}"
    if failed:
        raise errors.OrderRefused(
            f"{len(failed)} of {len(entries)} actors did not do it: {_some([one.actor for one in failed])}",
            where=where,
            todo=f"{failed[0].actor} says: {failed[0].text or failed[0].outcome}",
        )
    if late:
        raise errors.Undelivered(
            f"{len(late)} of {len(entries)} actors did not answer: {_some(late)}",
            where=where,
            todo="they get the order when they are back; `actorq-learner fleet show NAME` tells what became of it"
            if args.verb != "logs"
            else "see whether they are there: actorq-learner fleet ls",
        )
    return errors.EXIT_OK


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
