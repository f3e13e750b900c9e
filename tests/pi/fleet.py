"""A board that setup_pi.sh set up joins a fleet: broker and learner here, the actor on the board, as its unit runs it.

The learner computes steps of it again on this machine, and finds them true; beside it, on the same emulated core, one
plays another version than it says, and is named.

Called by board.sh, whose function on_board runs a command on the board.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from broker.contract import errors
from learner.run import local_fleet
from tests import conftest
from tests.system.conftest import QUICK

_STEPS = 6000
_SOON_S = 600.0
_LIAR = "/srv/checks/tests/fakes/liars.py:OlderCartPole"


def on_board(*command: str) -> list[str]:
    return ["bash", "-c", 'on_board "$@"', "on_board", *command]


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(on_board(*command), stderr=subprocess.PIPE, text=True, process_group=0)


def main(directory: Path, board: Path) -> None:
    with local_fleet.LocalFleet.start(directory / "fleet", tls=True) as fleet:
        for name, bundle in (("pi-kitchen", "fleet.json"), ("pi-liar", "liar.json")):
            fleet.start_actor(name, ["--dump-config"]).wait()  # enrols it
            (board / "srv" / bundle).write_bytes((fleet.directory / "home" / f"{name}.json").read_bytes())
        moved = on_board("ACTORQ_BUNDLE=/srv/fleet.json", "/srv/checkout/firmware_notes/setup_pi.sh")
        said = subprocess.run(moved, check=True, capture_output=True, text=True).stdout
        assert "changed: /etc/actorq/bundle.json\n" in said, said  # and nothing else: the program stayed
        run = directory / "run"
        # A directory for each core: what the core before has left was for its fleet
        state = [f"--state-dir=/srv/{name}-{directory.name}" for name in ("honest", "liar")]
        actors = {"honest": _start("actorq-actor", "run", state[0])}
        try:
            stop = ["--max-env-steps", "1000000000", "--solved-return", "inf", "--run-dir", str(run), "--json"]
            learner = fleet.start_learner(
                [*QUICK, *stop, "--publish-period-updates", "100", "--evaluate-episodes", "2"]
            )

            def told() -> dict[str, Any]:
                assert learner.poll() is None, f"the learner ended with {learner.returncode}"
                file = run / "metrics.jsonl"
                rows = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
                return json.loads(rows[-1]) if rows else {}

            conftest.wait_until(lambda: told().get("audited_messages"), "some of its messages are audited", _SOON_S)
            began = time.monotonic()
            liar = ["--bundle", "/srv/liar.json", state[1], "--env", _LIAR]
            actors["liar"] = _start("/opt/actorq/venv/bin/python", "-m", "edge_actor", "run", *liar)
            held = run / "held.json"
            conftest.wait_until(lambda: told() and held.exists(), "who plays an older policy is named", _SOON_S)
            named_s = time.monotonic() - began
            conftest.wait_until(lambda: told()["env_steps"] >= _STEPS, f"{_STEPS} steps were taken", _SOON_S)
            learner.terminate()
            output, _ = learner.communicate(timeout=_SOON_S)
            assert learner.returncode == errors.EXIT_INTERRUPTED, learner.returncode
        finally:
            for actor in actors.values():
                os.killpg(actor.pid, signal.SIGTERM)  # the shell and what it started
            logs = {name: actor.communicate()[1] for name, actor in actors.items()}
    summary = json.loads(output)
    for name, log in logs.items():
        print(f"the {name} actor said:\n{log}", file=sys.stderr)
    assert summary["env_steps"] >= _STEPS
    assert summary["publish_to_acting_count"] > 0, "none of its policies acted"
    assert not summary["messages_refused"], summary
    assert not summary["steps_missed"], summary
    assert summary["actors_held"].keys() == {"pi-liar"}, summary["actors_held"]
    assert "it plays version" in summary["actors_held"]["pi-liar"], summary["actors_held"]
    passed_over = summary["audits_passed_over"]
    assert not passed_over.get("not computed") and not passed_over.get("its kernels are not known here"), passed_over
    assert bool(summary["audited_with_tolerance"]) == (summary["delegate"] != "XNNPACK"), summary
    print(
        f"audit: {summary['audited_steps']} steps of {summary['audited_messages']} messages computed again, the honest "
        f"actor not named; the other one {named_s:.0f} s after its process began: {summary['actors_held']['pi-liar']}"
    )
    shown = ("env_steps", "policy_version", "publish_to_acting_count", "int8_return_mean", "runtime", "delegate")
    print("fleet, over TLS: " + ", ".join(f"{name} {summary[name]}" for name in shown))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
