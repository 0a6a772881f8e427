"""One run: a configuration trained in a folder, interruptible and resumable.

The steps fall on a fixed grid of chunks, whatever happens: an interrupt is answered at
the end of a chunk and a resumed run continues on the same grid, through the same
compiled code, so its bits are those of a run that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from meka.lab import checkpoint, optimizers, workloads
from meka.lab.config import RunConfig
from meka.lab.loop import CHUNK, Carry, Loop
from meka.lab.metrics import iterate_metrics
from meka.lab.runfolder import RunFolder

if TYPE_CHECKING:
    from meka.lab.events import EventWriter

TIMING = "timing.jsonl"  # apart from the metrics, which are the same every time


class Interrupted(Exception):
    """The run was asked to stop, and has saved its work."""

    def __init__(self, number: int, step: int, path: Path):
        """Remember the signal, and where the run can go on from."""
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}; saved in {path}, go on with --resume"
        )
        self.exit_code = 128 + number


class TrainingStopped(RuntimeError):
    """The run cannot usefully go on; what it had is saved."""


class Watcher(Protocol):
    """Whoever wants to follow a run while it trains."""

    def step(self, done: int, logs: dict[str, np.ndarray], seconds: float) -> None:
        """A chunk of steps has been taken."""

    def evaluated(self, done: int, results: list[dict[str, float]]) -> None:
        """The run has been evaluated."""

    def note(self, message: str) -> None:
        """Something a person should know."""


@dataclasses.dataclass
class Silent:
    """A watcher that says nothing."""

    def step(self, done: int, logs: dict[str, np.ndarray], seconds: float) -> None:
        """Ignore."""

    def evaluated(self, done: int, results: list[dict[str, float]]) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""


def train(
    config: RunConfig,
    path: Path,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    workload: workloads.Workload | None = None,
    events: bool = False,
) -> Path:
    """Train as configured, in a folder; returns the folder.

    Args:
        config: what to train. When resuming, the folder's own is used.
        path: the run folder: new or empty, or, to resume, one that holds a run.
        resume: go on from the last good checkpoint, if the folder holds a run.
        watcher: told of progress.
        workload: already loaded, to save loading it again.
        events: also write TensorBoard event files.

    Raises:
        Interrupted: SIGINT or SIGTERM; the work is saved.
        TrainingStopped: too many steps in a row were rejected; the work is saved.
    """
    watcher = watcher or Silent()
    if workload is None:
        changes = {} if config.batch_size is None else {"batch_size": config.batch_size}
        workload = workloads.load(config.workload, config.data_dir, **changes)
    workloads.check(workload)
    open_folder = RunFolder.resume if resume else _creator(config)
    with open_folder(Path(path)) as folder, _signals() as received:
        for warning in folder.warnings:
            watcher.note(f"warning: {warning}")
        _Run(folder, workload, watcher, events).go(received)
    return Path(path)


def _creator(config: RunConfig) -> Callable[[Path], RunFolder]:
    return lambda path: RunFolder.create(path, config)


class _Run:
    def __init__(
        self,
        folder: RunFolder,
        workload: workloads.Workload,
        watcher: Watcher,
        events: bool,
    ):
        config = folder.config
        self.folder, self.config, self.watcher = folder, config, watcher
        rows = 0 if workload.data is None else len(workload.data.train[0])
        batch_size = config.batch_size or workload.batch_size
        method = optimizers.make(
            config.optimizer,
            workload.losses,
            steps=config.steps,
            learning_rate=config.learning_rate,
            schedule=config.schedule,
            steps_per_epoch=rows // batch_size or None,
            **config.options,
        )
        self.method = method
        self.loop = Loop(
            workload,
            method,
            seed=config.seed,
            seeds=config.seeds,
            batch_size=config.batch_size,
            average=config.average,
        )
        self.events: EventWriter | None = None
        self.wants_events = events
        self.rejected_in_a_row = np.zeros(config.seeds, int)
        self.rejected = np.zeros(config.seeds, int)

    def go(self, received: list[int]) -> None:
        carry, done = self._begin()
        if self.wants_events:
            from meka.lab.events import FOLDER, EventWriter

            self.events = EventWriter(self.folder.path / FOLDER, resume_at=done)
        try:
            self._train(carry, done, received)
        finally:
            if self.events is not None:
                self.events.close()

    def _train(self, carry: Carry, done: int, received: list[int]) -> None:
        if done == 0:
            self._evaluate(carry, 0)
        while done < self.config.steps:
            refresh = self.method.refresh_every
            if refresh and done % refresh == 0:
                carry = self.loop.refresh(carry)
            length = self._boundary(done) - done
            began = time.perf_counter()
            carry, logs = self.loop.advance(carry, done, length)
            seconds = time.perf_counter() - began
            done += length
            self._log(done, length, logs)
            self._time(done, length, seconds)
            self.watcher.step(done, logs, seconds)
            if done % self.config.eval_every == 0 or done == self.config.steps:
                self._evaluate(carry, done)
            stuck = self._stuck(logs)
            at_checkpoint = done % self.config.checkpoint_every == 0
            if at_checkpoint or done == self.config.steps or received or stuck:
                self._save(carry, done)
            if stuck:
                raise TrainingStopped(stuck)
            if received:
                raise Interrupted(received[0], done, self.folder.path)

    def _begin(self) -> tuple[Carry, int]:
        carry = self.loop.start()
        last = -1
        for record in iterate_metrics(self.folder.path):
            last = max(last, record["step"])
        found = checkpoint.latest(
            self.folder.checkpoints,
            carry,
            on_problem=lambda text: self.watcher.note(f"warning: {text}"),
            up_to=max(last, 0),
        )
        if found is None:
            if last >= 0:
                self.watcher.note("no usable checkpoint: starting from the beginning")
                self.folder.truncate_after(-1)
            return carry, 0
        self.folder.truncate_after(found.step)
        self.watcher.note(f"resuming after step {found.step}")
        rejected = found.extra.get("rejected_in_a_row")
        if rejected is not None:
            self.rejected_in_a_row = np.asarray(rejected)
            self.rejected = np.asarray(found.extra["rejected"])
        return jax.tree.map(jax.numpy.asarray, found.tree), found.step

    def _boundary(self, done: int) -> int:
        """Where the chunk that begins after ``done`` steps ends."""
        every = [self.config.eval_every, self.config.checkpoint_every, CHUNK]
        if self.method.refresh_every:
            every.append(self.method.refresh_every)
        return min(*((done // k + 1) * k for k in every), self.config.steps)

    def _log(self, done: int, length: int, logs: dict[str, np.ndarray]) -> None:
        columns = {name: np.asarray(values) for name, values in logs.items()}
        records = []
        for k in range(length):
            for j, seed in enumerate(self.loop.seeds):
                record = {"kind": "step", "step": done - length + k + 1, "seed": seed}
                record |= {name: x[k, j] for name, x in columns.items()}
                records.append(record)
        self._append(records)

    def _evaluate(self, carry: Carry, done: int) -> None:
        results = self.loop.evaluate(carry)
        records = [
            {"kind": "eval", "step": done, "seed": seed, **result}
            for seed, result in zip(self.loop.seeds, results, strict=True)
        ]
        self._append(records)
        self.watcher.evaluated(done, results)

    def _append(self, records: list[dict[str, Any]]) -> None:
        self.folder.append(records)
        if self.events is not None:
            self.events.write(records)

    def _time(self, done: int, length: int, seconds: float) -> None:
        line = json.dumps({"step": done, "steps": length, "seconds": seconds})
        with open(self.folder.path / TIMING, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _save(self, carry: Carry, done: int) -> None:
        # Metrics first: a checkpoint promises that all records before it are there.
        self.folder.append([], sync=True)
        checkpoint.save(
            self.folder.checkpoints,
            done,
            carry,
            extra={
                "rejected_in_a_row": self.rejected_in_a_row.tolist(),
                "rejected": self.rejected.tolist(),
            },
        )

    def _stuck(self, logs: dict[str, np.ndarray]) -> str | None:
        """Why the run should stop, if one of its seeds has been rejected too often."""
        if "accepted" not in logs:
            return None
        for row in np.asarray(logs["accepted"], bool):
            self.rejected_in_a_row = np.where(row, 0, self.rejected_in_a_row + 1)
        self.rejected = np.asarray(logs["rejected"][-1])
        worst = int(np.argmax(self.rejected_in_a_row))
        if self.rejected_in_a_row[worst] < self.config.max_rejected:
            return None
        suspect = int(np.asarray(logs["suspect"])[-1, worst])
        example = f" (example {suspect} of the batch)" if suspect >= 0 else ""
        return (
            f"seed {self.loop.seeds[worst]}: the last {self.rejected_in_a_row[worst]} "
            f"steps in a row were rejected because something in them was not "
            f"finite{example}. The parameters are those of the last good step, saved "
            f"in {self.folder.path}. Look at the data and the losses; --max-rejected "
            f"sets how many are borne"
        )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the first SIGINT or SIGTERM; a second one ends the process at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    try:
        before = {
            number: signal.signal(number, handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not the main thread: whoever owns it handles signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
