"""`python -m meka.lab.reproduce`: as `meka reproduce`, with plain lines.

For machines that have jax, optax, equinox, numpy and matplotlib, and not the packages
of the terminal. The data is read from the folder that MEKA_DATA names.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from meka.lab.reproduce import command
from meka.lab.reproduce.table import SCALES, ReproduceError
from meka.lab.train import Silent

_SECONDS = 10.0  # between two lines


class _Lines(Silent):
    """A line every few seconds, and one at the end."""

    def __init__(self, title: str, steps: int):
        self._title, self._steps, self._last = title, steps, time.monotonic()

    def step(self, done: int, logs, seconds: float) -> None:
        del logs, seconds
        if time.monotonic() - self._last >= _SECONDS or done == self._steps:
            self._last = time.monotonic()
            _say(f"    {self._title}: {done}/{self._steps}")

    def note(self, message: str) -> None:
        _say(f"    {message}")


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m meka.lab.reproduce", description=__doc__
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--scale", choices=SCALES, default="desk")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--workloads", nargs="+", default=())
    parser.add_argument("--optimizers", nargs="+", default=())
    parser.add_argument("--finished", action="store_true")
    parser.add_argument("--data-dir", type=Path)
    asked = parser.parse_args(arguments)
    if asked.list:
        _say(command.listed())
        return 0
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return command.reproduce(
            asked.names,
            scale=asked.scale,
            out=asked.out or Path(f"meka-reproduce-{asked.scale}"),
            seeds=asked.seeds,
            epochs=asked.epochs,
            workloads=asked.workloads,
            optimizers=asked.optimizers,
            finished=asked.finished,
            data_dir=asked.data_dir,
            command="meka reproduce " + shlex.join(given),
            watch=_Lines,
            say=_say,
        )
    except ReproduceError as error:
        print(f"meka: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
