"""One run: a configuration trained in a folder, interruptible and resumable.

The steps fall on a fixed grid of chunks, whatever happens: an interrupt is answered at
the end of a chunk and a resumed run continues on the same grid, through the same
compiled code, so its bits are those of a run that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from meka.lab import checkpoint, optimizers, workloads
from meka.lab.config import RunConfig
from meka.lab.interrupts import collected
from meka.lab.loop import CHUNK, Carry, Loop
from meka.lab.metrics import METRICS, iterate_metrics
from meka.lab.runfolder import DiskError, RunFolder, read_config

if TYPE_CHECKING:
    from meka.lab.writers import Opener, Writer

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
    writers: Sequence[Opener] = (),
) -> Path:
    """Train as configured, in a folder; returns the folder.

    Args:
        config: what to train. When resuming, the folder's own is used.
        path: the run folder: new or empty, or, to resume, one that holds a run.
        resume: go on from the last good checkpoint, if the folder holds a run.
        watcher: told of progress.
        workload: already loaded, to save loading it again.
        writers: openers of what else shall see the records (`meka.lab.writers`).

    Raises:
        Interrupted: SIGINT or SIGTERM; the work is saved.
        TrainingStopped: too many steps in a row were rejected; the work is saved.
    """
    watcher = watcher or Silent()
    if workload is None:
        changes = {} if config.batch_size is None else {"batch_size": config.batch_size}
        workload = workloads.load(config.workload, config.data_dir, **changes)
    workloads.check(workload)
    path = Path(path)
    config = read_config(path) if resume else config
    # Before the folder: a workload and an optimizer that do not go together write none.
    loop = make_loop(config, workload)
    open_folder = RunFolder.resume if resume else _creator(config)
    with open_folder(path) as folder, collected(second_ends=True) as received:
        for warning in folder.warnings:
            watcher.note(f"warning: {warning}")
        folder.describe(loop.subject())
        _Run(folder, loop, watcher).go(received, writers)
    return path


def make_loop(config: RunConfig, workload: workloads.Workload) -> Loop:
    """The loop that a configuration describes."""
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
    return Loop(
        workload,
        method,
        seed=config.seed,
        seeds=config.seeds,
        batch_size=config.batch_size,
        average=config.average,
        eval_examples=config.eval_examples,
    )


def _creator(config: RunConfig) -> Callable[[Path], RunFolder]:
    return lambda path: RunFolder.create(path, config)


class _Run:
    def __init__(self, folder: RunFolder, loop: Loop, watcher: Watcher):
        config = folder.config
        self.folder, self.config, self.watcher = folder, config, watcher
        self.loop, self.method = loop, loop.method
        self.writers: list[Writer] = []
        self.rejected_in_a_row = np.zeros(config.seeds, int)
        self.rejected = np.zeros(config.seeds, int)

    def go(self, received: list[int], openers: Sequence[Opener]) -> None:
        carry, done = self._begin()
        with ExitStack() as stack:
            for opener in openers:
                writer = opener(self.folder.path, self.config, done)
                stack.callback(writer.close)
                self.writers.append(writer)
            self._train(carry, done, received)

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
            if "suspect" in logs:
                # The row of the data, which a person can look up, not of the batch.
                logs["suspect"] = self.loop.data_rows(done, logs["suspect"])
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
        written = Counter(r["step"] for r in iterate_metrics(self.folder.path))
        last = self._complete(written)
        problems: list[str] = []
        found = checkpoint.latest(
            self.folder.checkpoints,
            carry,
            on_problem=problems.append,
            up_to=max(last, 0),
        )
        for problem in problems:
            self.watcher.note(f"warning: {problem}")
        if found is None:
            if written:
                self.watcher.note("no usable checkpoint: starting from the beginning")
                if problems:  # of another model, perhaps: its metrics are not ours
                    kept = self.folder.path / f"{METRICS}.before"
                    shutil.copy(self.folder.path / METRICS, kept)
                    self.watcher.note(f"the metrics so far are kept as {kept}")
                self.folder.truncate_after(-1)
            return carry, 0
        self.folder.truncate_after(found.step)
        self.watcher.note(f"resuming after step {found.step}")
        rejected = found.extra.get("rejected_in_a_row")
        if rejected is not None:
            self.rejected_in_a_row = np.asarray(rejected)
            self.rejected = np.asarray(found.extra["rejected"])
        return jax.tree.map(jax.numpy.asarray, found.tree), found.step

    def _complete(self, written: Counter[int]) -> int:
        """The last step up to which no record is missing, or -1 where there is none."""
        seeds, every, steps = len(self.loop.seeds), self.config.eval_every, 0
        while True:
            evaluated = steps % every == 0 or steps == self.config.steps
            if written[steps] != seeds * ((steps > 0) + evaluated):
                return steps - 1
            steps += 1

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
        for writer in self.writers:
            writer.write(records)

    def _time(self, done: int, length: int, seconds: float) -> None:
        line = json.dumps({"step": done, "steps": length, "seconds": seconds})
        path = self.folder.path / TIMING
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise DiskError(
                f"cannot write {path}: {error}. {checkpoint.what_to_do(error)}"
            ) from error

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
        longest = np.zeros_like(self.rejected_in_a_row)
        suspect = np.full_like(longest, -1)
        for accepted, named in zip(logs["accepted"], logs["suspect"], strict=True):
            self.rejected_in_a_row = np.where(accepted, 0, self.rejected_in_a_row + 1)
            longest = np.maximum(longest, self.rejected_in_a_row)
            suspect = np.where(named >= 0, named, suspect)
        self.rejected = np.asarray(logs["rejected"][-1])
        worst = int(np.argmax(longest))
        if longest[worst] < self.config.max_rejected:
            return None
        endless = self.loop.steps_per_epoch is None
        where = "of the batch" if endless else "of the training data"
        example = f" (example {suspect[worst]} {where})" if suspect[worst] >= 0 else ""
        return (
            f"seed {self.loop.seeds[worst]}: {longest[worst]} steps in a row were "
            f"rejected because something in them was not finite{example}. The "
            f"parameters are those of the last good step, saved in "
            f"{self.folder.path}. Look at the data and the losses; --max-rejected "
            f"sets how many are borne"
        )
