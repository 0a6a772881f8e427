"""`python -m meka.lab.scorecard`: as `meka scorecard`, with plain lines.

For machines that have jax, optax, equinox and numpy, and not the packages of the
terminal; the page is made where matplotlib is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from meka.lab.scorecard.command import Scorecard, make
from meka.lab.scorecard.plan import SCALES


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m meka.lab.scorecard", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", choices=SCALES)
    parser.add_argument("--optimizers", nargs="+", default=())
    parser.add_argument("--workloads", nargs="+", default=())
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--steps-scale", type=float)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--merge", type=Path, nargs="+", default=())
    parser.add_argument("--seconds", type=float)
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    for name, value in given.items():
        given[name] = tuple(value) if isinstance(value, list) else value
    asked = Scorecard(**given)
    try:
        return make(asked, lambda text: print(text, flush=True))
    except ValueError as error:
        if not type(error).__module__.startswith("meka."):
            raise
        print(f"meka: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
