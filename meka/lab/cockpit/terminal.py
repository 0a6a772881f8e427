"""Runs of other processes in this terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meka.lab import progress
from meka.lab.cockpit.follow import Run
from meka.lab.cockpit.view import label
from meka.lab.progress import Display
from meka.lab.train import Watcher

_EVERY = 0.5  # seconds between two looks


class _Follower:
    """Tells a watcher what a run folder says, as the run itself would."""

    def __init__(self, path: Path, display: Display):
        self.run, self._display = Run(path), display
        self._watcher: Watcher | None = None
        self._generation, self._steps, self._evals = -1, 0, 0

    @property
    def over(self) -> bool:
        return self.run.finished or self.run.problem is not None

    def look(self) -> None:
        """Read what is new, and pass it on."""
        run = self.run
        news = run.poll()
        if run.problem is not None:
            if news:
                watcher = self._watcher or self._display.watcher(str(run.path), 1)
                watcher.note(run.problem)
            return
        if run.config is None:
            return
        if self._watcher is None:
            title = f"{run.path.name}: {run.config.workload} {label(run)}"
            self._watcher = self._display.watcher(title, run.config.steps)
        if self._generation != run.generation:
            if self._steps:
                self._watcher.note(f"{run.path} began again or went on from before")
            self._generation, self._steps, self._evals = run.generation, 0, 0
        if len(run.steps) > self._steps:
            table = run.steps
            logs = {name: table.column(name, self._steps) for name in table.names}
            pace = run.timing[-1][1] if run.timing else float("nan")
            seconds = pace * (len(table) - self._steps)
            self._watcher.step(run.last_step, logs, seconds)
            self._steps = len(table)
        if len(run.evals) > self._evals:
            last = len(run.evals) - 1
            found = {n: run.evals.column(n, last)[0] for n in run.evals.names}
            seeds = range(len(next(iter(found.values()))))
            results = [{n: float(x[k]) for n, x in found.items()} for k in seeds]
            self._watcher.evaluated(int(run.evals.step[-1]), results)
            self._evals = len(run.evals)


def follow(paths: Sequence[Path], console: Console) -> int:
    """Show runs until all are done, or until Ctrl-C."""
    missing = [path for path in paths if not Path(path).exists()]
    for path in missing:
        console.print(f"{path} is not there yet: waiting for it", markup=False)
    try:
        with progress.display(console, every_curve=True) as display:
            followers = [_Follower(path, display) for path in paths]
            while True:
                for follower in followers:
                    follower.look()
                if all(follower.over for follower in followers):
                    break
                time.sleep(_EVERY)
    except KeyboardInterrupt:
        console.print("stopped watching; the runs go on", markup=False)
    return 1 if any(f.run.problem for f in followers) else 0
