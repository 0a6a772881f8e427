"""A finished or running run as arrays: steps down, seeds across."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meka.lab.config import RunConfig
from meka.lab.metrics import columns
from meka.lab.runfolder import RunError, read_config
from meka.lab.train import TIMING


@dataclass(frozen=True)
class Series:
    """Records of one kind: ``step`` (t,), and every column as (t, seeds)."""

    step: np.ndarray
    values: dict[str, np.ndarray]

    def __contains__(self, name: str) -> bool:
        """Whether something of this name was recorded."""
        return name in self.values

    def __getitem__(self, name: str) -> np.ndarray:
        """The column of this name."""
        return self.values[name]


@dataclass(frozen=True)
class History:
    """What a run folder says."""

    path: Path
    config: RunConfig
    steps: Series
    evals: Series
    seconds_per_step: float

    @property
    def label(self) -> str:
        """A short name for tables and legends."""
        rate = self.config.learning_rate
        return self.config.optimizer + (f" {rate:g}" if rate is not None else "")

    @property
    def final_loss(self) -> np.ndarray:
        """Training loss of each seed at the end; infinite where it is not a number."""
        loss = self.evals["train_loss"][-1]
        return np.where(np.isfinite(loss), loss, np.inf)

    @property
    def seconds(self) -> float:
        """Time spent in steps, without compilation."""
        return self.seconds_per_step * self.config.steps


def read(path: Path) -> History:
    """Read a run folder."""
    config = read_config(path)
    evals = _series(path, "eval")
    if not len(evals.step):
        raise RunError(f"{path} has not been evaluated yet: there is nothing to show")
    return History(path, config, _series(path, "step"), evals, _pace(path))


def _series(path: Path, kind: str) -> Series:
    found = columns(path, kind)
    if not found:
        return Series(np.zeros(0, int), {})
    seeds = np.unique(found["seed"])
    # A run that is being written may be in the middle of a step's seeds.
    whole = len(found["step"]) // len(seeds) * len(seeds)
    shaped = {
        name: values[:whole].reshape(-1, len(seeds))
        for name, values in found.items()
        if name not in ("step", "seed") and values.ndim == 1
    }
    return Series(found["step"][: whole : len(seeds)].astype(int), shaped)


def _pace(path: Path) -> float:
    """Median seconds a step, which compilation and pauses do not touch."""
    file = path / TIMING
    if not file.exists():
        return float("nan")
    rates = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            rates.append(record["seconds"] / record["steps"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a crash; timing is not worth an error
    return float(np.median(rates)) if rates else float("nan")
