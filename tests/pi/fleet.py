"""A board that setup_pi.sh set up joins a fleet: broker and learner here, the actor on the board, as its unit runs it.

The learner computes steps of it again on this machine, and finds them true; beside it, on the same emulated core, act
those that do not do what they say (tests/fakes/environments/liars.py), and each is named.

Called by board.sh, whose function on_board runs a command on the board.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.audit import holding
from learner.files import run_directory
from learner.run import local_fleet
from tests import conftest
from tests.fakes.environments import liars

_SOON_S = 600.0
_HONEST = "pi-kitchen"
_TASK = "Pendulum-v1"
_ACTING = ("--rate-hz", "25", "--envs", "4")
"""Five emulated actors without a rate would take all there is of this machine, and the learner would have none."""
_LEARNING = ("--algorithm", "ddpg", "--hidden", "64,64", "--critic-hidden", "32", "--batch-size", "32")
_PACE = ("--learning-starts", "200", "--samples-per-insert", "4", "--publish-period-updates", "64")
_SCORES = ("--evaluate-episodes", "1", "--no-energy")
_OTHER_CORE = "QEMU_CPU=max"
"""ARM's built-in kernels answer like XNNPACK's in every bit. For this core, newer than any Pi's, XNNPACK has others,
which qemu computes wrongly, in silence."""
_ON_32_BITS = ("older", "reports")
"""Kernels that are not XNNPACK anyway are held to a step of int8 alone: what is finer than that is not seen there."""


def on_board(*command: str) -> list[str]:
    return ["bash", "-c", 'on_board "$@"', "on_board", *command]


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(on_board(*command), stderr=subprocess.PIPE, text=True, process_group=0)


def _named_after_s(run: Path) -> dict[str, float]:
    """Returns of each actor that was named for how long the learner had had its first message.

    That one may be older than its first policy. How long a process takes to start is not counted: emulation tells
    nothing of it.
    """
    with contextlib.closing(sqlite3.connect(run / run_directory.LEDGER)) as ledger:
        first = dict(ledger.execute("SELECT actor, min(arrived_s) FROM messages GROUP BY actor"))
    return {name: hold.since_s - first[name] for name, hold in holding.read(run).items()}


def main(directory: Path, board: Path) -> None:
    kinds = _ON_32_BITS if os.environ["ARCHITECTURE"] == "armhf" else tuple(liars.LIARS)
    lying = {f"pi-{kind}": liars.LIARS[kind] for kind in kinds}
    with local_fleet.LocalFleet.start(directory / "fleet", tls=True) as fleet:
        for enrolling in [fleet.start_actor(name, ["--dump-config"]) for name in (_HONEST, *lying)]:
            enrolling.wait()
        for name in (_HONEST, *lying):
            (board / "srv" / f"{name}.json").write_bytes((fleet.directory / "home" / f"{name}.json").read_bytes())
        moved = on_board(f"ACTORQ_BUNDLE=/srv/{_HONEST}.json", "/srv/checkout/firmware_notes/setup_pi.sh")
        said = subprocess.run(moved, check=True, capture_output=True, text=True).stdout
        assert "changed: /etc/actorq/bundle.json\n" in said, said  # and nothing else: the program stayed
        run = directory / "run"

        def acting(state: str, task: str = _TASK) -> list[str]:
            # A directory for each core: what the core before has left was for its fleet
            return ["run", "--state-dir", f"{state}-{directory.name}", "--env", task, *_ACTING]

        # Its user may write below /var/lib/actorq, as under its unit
        actors = {_HONEST: _start("actorq-actor", *acting("/var/lib/actorq/fleet"))}
        try:
            stop = ["--max-env-steps", "1000000000", "--solved-return", "inf", "--run-dir", str(run), "--json"]
            learner = fleet.start_learner([*_LEARNING, *_PACE, *_SCORES, *stop])

            def told() -> dict[str, Any]:
                for name, process in (("learner", learner), *actors.items()):
                    assert process.poll() is None, f"{name} ended with {process.returncode}"
                rows = conftest.rows_of(run / "metrics.jsonl")
                return rows[-1] if rows else {}

            conftest.wait_until(lambda: told().get("audited_messages"), "some of its messages are audited", _SOON_S)
            for name, (kind, _) in lying.items():
                program = ["/opt/actorq/venv/bin/python", "-m", "edge_actor"]
                liar = acting(f"/srv/{name}", f"/srv/checks/tests/fakes/environments/liars.py:{kind}")
                if kind == "OtherKernels":
                    program, liar = [_OTHER_CORE, *program], acting(f"/srv/{name}")
                actors[name] = _start(*program, *liar, "--bundle", f"/srv/{name}.json")
            conftest.wait_until(lambda: told()["actors_held"] >= len(lying), "who lies is named", _SOON_S)
            wanted = told()["audited_messages"] + 3  # of the honest one: who is held is not checked again
            conftest.wait_until(lambda: told()["audited_messages"] >= wanted, "the other one is checked again", _SOON_S)
            learner.terminate()
            output, _ = learner.communicate(timeout=_SOON_S)
            assert learner.returncode == errors.EXIT_INTERRUPTED, learner.returncode
        finally:
            for actor in [one for one in actors.values() if one.poll() is None]:
                os.killpg(actor.pid, signal.SIGTERM)  # the shell and what it started
            logs = {name: actor.communicate()[1] for name, actor in actors.items()}
            for name, log in logs.items():
                print(f"{name} said:\n{log}", file=sys.stderr)
            print(f"named: {', '.join(holding.read(run)) or 'nobody'}", file=sys.stderr)
    summary = json.loads(output)
    for fault in ("a counter cannot be kept", "policy refused"):
        assert fault not in logs[_HONEST], fault
    assert summary["publish_to_acting_count"] > 0, "none of its policies acted"
    # What had no receipt within window.RESEND_S, as happens where emulation has little of the machine, is sent again
    assert summary["messages_refused"].keys() <= {"duplicate"}, summary
    assert not summary["steps_missed"], summary
    assert summary["actors_held"].keys() == lying.keys(), summary["actors_held"]
    for name, (_, why) in lying.items():
        assert why in summary["actors_held"][name], summary["actors_held"]
    passed_over = summary["audits_passed_over"]
    assert not passed_over.get("not computed") and not passed_over.get("its kernels are not known here"), passed_over
    assert bool(summary["audited_with_tolerance"]) == (summary["delegate"] != "XNNPACK"), summary
    print(
        f"audit: {summary['audited_steps']} steps of {summary['audited_messages']} messages computed again, the honest "
        "actor not named; the others, which act at once, so long after the learner had the first message of each:"
    )
    for name, after_s in _named_after_s(run).items():
        print(f"audit: {name} {after_s:.1f} s: {summary['actors_held'][name]}")
    shown = ("env_steps", "policy_version", "publish_to_acting_count", "int8_return_mean", "runtime", "delegate")
    print("fleet, over TLS: " + ", ".join(f"{name} {summary[name]}" for name in (*shown, "messages_refused")))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
