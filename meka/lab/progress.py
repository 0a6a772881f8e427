"""Following a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_PLAIN_SECONDS = 5.0  # between two plain lines


class _Figures:
    """The few numbers worth a glance."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}

    def step(self, logs: dict[str, np.ndarray], seconds: float) -> None:
        length = len(next(iter(logs.values())))
        self.text["rate"] = f"{length / max(seconds, 1e-9):.0f} steps/s"
        for name, label in (("loss", "loss"), ("step_size", "step"), ("gain", "gain")):
            if name in logs:
                self.text[label] = f"{label} {float(np.mean(logs[name][-1])):.3g}"
        rejected = logs.get("rejected")
        if rejected is not None and np.max(rejected[-1]) > 0:
            self.text["rejected"] = f"rejected {int(np.max(rejected[-1]))}"

    def evaluated(self, results: list[dict[str, float]]) -> None:
        mean = {name: np.mean([r[name] for r in results]) for name in results[0]}
        if "train_loss" in mean:
            self.text["train"] = f"train {mean['train_loss']:.3g}"
        if "test_accuracy" in mean:
            self.text["test"] = f"test {mean['test_accuracy']:.1%}"

    def __str__(self) -> str:
        return " · ".join(self.text.values())


class PlainWatcher:
    """Prints a line every few seconds, for logs."""

    def __init__(self, title: str, steps: int):
        """Nothing is printed until something happens."""
        self._title, self._steps = title, steps
        self._figures, self._last = _Figures(), time.monotonic()

    def step(self, done: int, logs: dict[str, np.ndarray], seconds: float) -> None:
        """Print, if it is time to."""
        self._figures.step(logs, seconds)
        if done < self._steps and time.monotonic() - self._last >= _PLAIN_SECONDS:
            self._print(done)

    def evaluated(self, done: int, results: list[dict[str, float]]) -> None:
        """Remember for the next line; the last step's is the last line."""
        self._figures.evaluated(results)
        if done >= self._steps:
            self._print(done)

    def note(self, message: str) -> None:
        """Print at once."""
        print(f"{self._title}: {message}")
        sys.stdout.flush()

    def _print(self, done: int) -> None:
        self._last = time.monotonic()
        print(f"{self._title}: step {done}/{self._steps} · {self._figures}")
        sys.stdout.flush()


class LiveWatcher:
    """One task of a rich progress display."""

    def __init__(self, progress: Progress, title: str, steps: int):
        """Add the task."""
        self._progress, self._figures = progress, _Figures()
        self._task = progress.add_task(title, total=steps, figures="compiling")

    def step(self, done: int, logs: dict[str, np.ndarray], seconds: float) -> None:
        """Move the bar."""
        self._figures.step(logs, seconds)
        self._progress.update(self._task, completed=done, figures=str(self._figures))

    def evaluated(self, done: int, results: list[dict[str, float]]) -> None:
        """Show the evaluation."""
        self._figures.evaluated(results)
        self._progress.update(self._task, completed=done, figures=str(self._figures))

    def note(self, message: str) -> None:
        """Print above the bars."""
        self._progress.console.print(message, markup=False)


class Display:
    """Makes watchers that suit where the output goes."""

    def __init__(self, progress: Progress | None):
        """A display is made by `display`."""
        self._progress = progress

    def watcher(self, title: str, steps: int) -> PlainWatcher | LiveWatcher:
        """A watcher for one run."""
        if self._progress is None:
            return PlainWatcher(title, steps)
        return LiveWatcher(self._progress, title, steps)


@contextmanager
def display(console: Console) -> Iterator[Display]:
    """A live display in a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield Display(None)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[figures]}"),
        console=console,
    ) as progress:
        yield Display(progress)


@contextmanager
def downloads(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A function that shows how far each file has come: name, bytes, bytes in all."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total or None)
            progress.update(tasks[name], completed=done, total=total or None)

        yield show
