"""A board that setup_pi.sh set up joins a fleet: broker and learner here, the actor on the board, as its unit runs it.

Called by board.sh, whose function on_board runs a command on the board.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from broker.contract import errors
from learner.run import local_fleet
from tests.system.conftest import QUICK

_STEPS = 6000
_SOON_S = 600.0


def on_board(*command: str) -> list[str]:
    return ["bash", "-c", 'on_board "$@"', "on_board", *command]


def main(directory: Path, board: Path) -> None:
    with local_fleet.LocalFleet.start(directory / "fleet", tls=True) as fleet:
        fleet.start_actor("pi-kitchen", ["--dump-config"]).wait()  # enrols it
        bundle = board / "srv" / "fleet.json"
        bundle.write_bytes((fleet.directory / "home" / "pi-kitchen.json").read_bytes())
        moved = on_board("ACTORQ_BUNDLE=/srv/fleet.json", "/srv/checkout/firmware_notes/setup_pi.sh")
        said = subprocess.run(moved, check=True, capture_output=True, text=True).stdout
        assert "changed: /etc/actorq/bundle.json\n" in said, said  # and nothing else: the program stayed
        actor = subprocess.Popen(on_board("actorq-actor", "run"), stderr=subprocess.PIPE, text=True, process_group=0)
        try:
            stop = ["--max-env-steps", str(_STEPS), "--solved-return", "inf"]
            run = [*stop, "--run-dir", str(directory / "run"), "--json"]
            learner = fleet.start_learner([*QUICK, *run, "--publish-period-updates", "100", "--evaluate-episodes", "2"])
            output, _ = learner.communicate(timeout=_SOON_S)
            assert learner.returncode == errors.EXIT_OK, learner.returncode
        finally:
            os.killpg(actor.pid, signal.SIGTERM)  # the shell and what it started
            _, log = actor.communicate()
    summary = json.loads(output)
    print(f"the actor said:\n{log}", file=sys.stderr)
    assert summary["env_steps"] >= _STEPS
    assert summary["publish_to_acting_count"] > 0, "none of its policies acted"
    assert not summary["messages_refused"], summary
    assert not summary["steps_missed"], summary
    shown = ("env_steps", "policy_version", "publish_to_acting_count", "int8_return_mean", "runtime", "delegate")
    print("fleet, over TLS: " + ", ".join(f"{name} {summary[name]}" for name in shown))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
