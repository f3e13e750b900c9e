"""The command `export`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from broker.contract import errors


def add(commands: Any) -> None:
    """Adds the command to those of `actorq-learner`."""
    parser = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a run's experience as a Minari dataset",
        description=run.__doc__,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory; it may be training")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="MINARI_DATASETS_PATH of the dataset (default: RUN/minari)"
    )
    parser.add_argument(
        "--dataset-id", default="", metavar="ID", help="[namespace/]name-vN (default: actorq/NAME-OF-RUN-v0)"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    """Writes a run's experience as a Minari dataset: what replay holds, or all of it after train --keep-experience."""
    from learner.study import export

    stem = re.sub(r"[^-\w]", "_", args.run.resolve().name)
    output, name = args.output or args.run / "minari", args.dataset_id or f"actorq/{stem}-v0"
    written = export.run(args.run, output, name)
    if args.json:
        print(json.dumps(written))
    else:
        print(
            f"{written['steps']:,} steps in {written['episodes']:,} episodes, {written['episodes_complete']:,} of them "
            f"whole, {written['size_mb']:.1f} MB\n"
            f"MINARI_DATASETS_PATH={output.resolve()}  minari.load_dataset({name!r})"
        )
    return errors.EXIT_OK
