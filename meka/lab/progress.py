"""Following a run: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from meka.lab.sparkline import Strip, sparkline

_PLAIN_SECONDS = 5.0  # between two plain lines
_STRIPS = {
    "loss": "loss",
    "step_size": "step size",
    "gain": "gain",
    "noise_scale": "noise scale",
    "gradient_innovation": "innovation",
}


class _Figures:
    """The few numbers worth a glance."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}

    def step(self, logs: dict[str, np.ndarray], seconds: float) -> None:
        length = len(next(iter(logs.values())))
        if math.isfinite(seconds):
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
    """A bar, and under it the curves of the run so far."""

    def __init__(self, console: Console, title: str, steps: int):
        """Nothing has happened yet."""
        self._console, self._figures, self._steps = console, _Figures(), steps
        self._strips: dict[str, Strip] = {}
        self._last: dict[str, float] = {}
        self._pace = 0.0
        self.done = 0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
        )
        self._task = self._bar.add_task(title, total=steps, figures="waiting")

    @property
    def finished(self) -> bool:
        """Whether every step was taken."""
        return self.done >= self._steps

    def step(self, done: int, logs: dict[str, np.ndarray], seconds: float) -> None:
        """Move the bar and draw the curves on."""
        self._figures.step(logs, seconds)
        if math.isfinite(seconds):
            self._pace = seconds / len(next(iter(logs.values())))
        for name, label in _STRIPS.items():
            if name in logs:
                means = np.mean(logs[name], axis=1)
                self._strips.setdefault(label, Strip()).add(means.tolist())
                self._last[label] = float(means[-1])
        self._move(done)

    def evaluated(self, done: int, results: list[dict[str, float]]) -> None:
        """Show the evaluation."""
        self._figures.evaluated(results)
        self._move(done)

    def note(self, message: str) -> None:
        """Print above the view."""
        self._console.print(message, markup=False)

    def _move(self, done: int) -> None:
        self.done = done
        shown = [self._figures.text.get(name) for name in ("rate", "train", "test")]
        shown += [self._figures.text.get("rejected")]
        if self._pace and not self.finished:
            left = (self._steps - done) * self._pace
            shown.append(f"{left // 60:.0f}:{left % 60:02.0f} left")
        figures = " · ".join(text for text in shown if text)
        self._bar.update(self._task, completed=done, figures=figures)

    def render(self, width: int, strips: bool) -> Group:
        """The bar, with its curves if asked for."""
        parts = [self._bar.get_renderable()]
        if strips and self._strips:
            table = Table.grid(padding=(0, 1))
            room = max(10, min(60, width - 28))
            for label, strip in self._strips.items():
                curve = sparkline(strip.values, room)
                table.add_row(f"  {label}", f"{self._last[label]:.3g}", curve)
            table.columns[0].min_width, table.columns[1].min_width = 13, 9
            table.columns[1].justify = "right"
            parts.append(table)
        return Group(*parts)


class Display:
    """Makes watchers that suit where the output goes."""

    def __init__(self, console: Console | None, *, every_curve: bool = False):
        """A display is made by `display`; without a console it is plain lines."""
        self._console, self._every_curve = console, every_curve
        self._watchers: list[LiveWatcher] = []

    def watcher(self, title: str, steps: int) -> PlainWatcher | LiveWatcher:
        """A watcher for one run."""
        if self._console is None:
            return PlainWatcher(title, steps)
        self._watchers.append(LiveWatcher(self._console, title, steps))
        return self._watchers[-1]

    def render(self) -> Group:
        """All runs; those that are done in one line, unless there is room for more."""
        width = 80 if self._console is None else self._console.width
        alone = len(self._watchers) == 1 or self._every_curve
        return Group(
            *(each.render(width, alone or not each.finished) for each in self._watchers)
        )


@contextmanager
def display(console: Console, *, every_curve: bool = False) -> Iterator[Display]:
    """A live display in a terminal, plain lines elsewhere.

    Args:
        console: where to.
        every_curve: draw the curves of finished runs, too.
    """
    if not console.is_terminal:
        yield Display(None)
        return
    shown = Display(console, every_curve=every_curve)
    with Live(console=console, refresh_per_second=4, get_renderable=shown.render):
        yield shown


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
