"""Asks brokers for what the contract needs of them, and prints a verdict on each.

    make test-brokers                                             those that are installed on this machine
    make test-brokers ARGS="mqtt.example.org:1883"                any other that lets you in without a name
    make test-brokers ARGS="mqtts://HOST --fleet default --actor one.json --actor two.json"     by a fleet's keys

It publishes at topics of its own fleet `ask` or, with --fleet, at those of that one: not while that is at work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from broker.contract import address, errors
from broker.fleet import identity
from broker.program import cli
from tests.broker.conformance import brokers, client, needs

MET, NOT_ASKED = "yes", "not asked"


def verdicts(site: client.Site) -> Iterator[tuple[str, str]]:
    """Yields each need with what became of it: `yes`, `not asked`, or what the broker did."""
    for need in needs.NEEDS:
        if need is needs.actors_are_kept_apart and len(site.actors) < 2:
            yield need.__name__, NOT_ASKED
            continue
        try:
            need(site)
        except (client.Unmet, OSError) as error:
            yield need.__name__, f"NO: {error}"
        else:
            yield need.__name__, MET


def main() -> int:
    """Runs the command; returns its exit code."""
    return cli.run(_run, None)


def _run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make test-brokers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("addresses", nargs="*", metavar="HOST[:PORT]", help="default: what is installed here")
    parser.add_argument("--fleet", help="whose keys in $ACTORQ_HOME the learner has")
    parser.add_argument("--actor", action="append", type=Path, default=[], help="bundle of an enrolled actor; give two")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each broker")
    args = parser.parse_args(argv)
    if bool(args.fleet) != (len(args.actor) == 2):
        raise errors.ConfigError("keys are those of a fleet and of two actors", todo="--fleet NAME --actor A --actor B")
    found = {where: _named(where, args) for where in args.addresses} or brokers.installed()
    if not found:
        raise errors.RuntimeMissing("no broker is installed here", todo="name one: make test-brokers ARGS=HOST:PORT")
    unmet = 0
    for name, start in found.items():
        print(f"asking {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="actorq-ask-") as home, start(Path(home)) as site:
            answers = {}
            for need, answer in verdicts(site):
                answers[need] = answer
                if not args.json:
                    print(f"{name}\t{need}\t{answer}".expandtabs(36), flush=True)
        bad = sum(answer not in (MET, NOT_ASKED) for answer in answers.values())
        unmet += bad
        if args.json:
            print(json.dumps({"broker": name, "verdict": "unfit" if bad else "fit", "needs": answers}), flush=True)
        else:
            print(f"{name}: {f'{bad} needs of {len(answers)} are NOT met' if bad else 'carries a fleet'}\n", flush=True)
    return 1 if unmet and args.addresses else 0


def _named(where: str, args: argparse.Namespace) -> brokers.Start:
    @contextlib.contextmanager
    def start(home: Path) -> Iterator[client.Site]:
        if not args.fleet:
            yield brokers.open_site(where, home)
            return
        fleet = identity.Fleet.open(args.fleet, create=False)
        yield client.Site(address.Address.parse(where), fleet, [identity.Bundle.read(file) for file in args.actor])

    return start


if __name__ == "__main__":
    sys.exit(main())
