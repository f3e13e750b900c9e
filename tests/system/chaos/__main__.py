"""Everything dies, again and again, and nothing that was accepted is lost: kill -9, cut links, a full disk.

A real fleet of processes under random faults; at the end the books that each environment kept, apart from its actor,
must agree with the learner's ledger. The last line says so in figures, and the exit code is the verdict.

    python -m tests.system.chaos.__main__ --duration-s 900       or: make chaos DURATION_S=900
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from typing import Any

from broker.program import children
from tests.system.chaos import scenario


def run(name: str, duration_s: float, seed: int) -> dict[str, Any]:
    """Runs a scenario in a process that cleans up behind it, whatever becomes of this one; returns its figures."""
    child = subprocess.Popen(
        [sys.executable, "-m", scenario.__name__, name, str(duration_s), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=children.die_with_parent(),  # noqa: PLW1509  one thread
        process_group=0,  # Ctrl-C is for us
    )
    try:
        output, _ = child.communicate()
    finally:
        child.terminate()
        child.wait()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, child.args)
    figures: dict[str, Any] = json.loads(output)
    return figures


def main() -> int:
    """Runs the scenarios one after the other; 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=900.0, help="of all scenarios together")
    choices = scenario.SCENARIOS
    parser.add_argument("--scenario", choices=choices, action="append", help="one or more of them; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", action="store_true", help="one JSON object per scenario on stdout")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = args.scenario or list(choices)
    results = []
    for name in names:
        print(f"scenario {name}, {args.duration_s / len(names):.0f} s", file=sys.stderr, flush=True)
        results.append(run(name, args.duration_s / len(names), args.seed))
        if args.json:
            print(json.dumps(results[-1]), flush=True)
    for result in results:
        if not args.json:
            print(sentence(result))
    return 0 if all(result["holds"] for result in results) else 1


def sentence(result: dict[str, Any]) -> str:
    """The verdict for people."""
    faults = ", ".join(f"{count} x {what}" for what, count in sorted(result["faults"].items()))
    return (
        f"{result['scenario']}: {result['accepted']:,} steps accepted, {result['lost']:,} lost, "
        f"{result['dropped']:,} dropped and counted, {result['twice']} in replay twice, {result['invented']} "
        f"invented; {result['duration_s']:.0f} s of faults ({faults}); settled in {result['settled_s']:.0f} s: "
        f"{'holds' if result['holds'] else 'BROKEN'}"
    )


if __name__ == "__main__":
    sys.exit(main())
