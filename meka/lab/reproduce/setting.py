"""At which scale an experiment runs, and where its finished pieces are kept."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from meka.lab.checkpoint import replace_file
from meka.lab.reproduce.table import SCALES, ReproduceError
from meka.lab.runfolder import environment
from meka.lab.train import Silent, Watcher

K = TypeVar("K")
T = TypeVar("T")
_DIGITS = 5  # significant digits kept of a number that was measured


class Unfinished(Exception):
    """A piece is not there, and none may be made; the message names it."""


def _silent(title: str, steps: int) -> Watcher:
    del title, steps
    return Silent()


@dataclass(frozen=True)
class Setting:
    """How large an experiment is to be.

    Attributes:
        scale: "smoke" (seconds), "desk" (two cores) or "full" (the paper's, on a GPU).
        cache: where finished pieces go; None keeps none.
        seeds: in the place of an experiment's own number of seeds.
        epochs: in the place of its own length, where that is counted in epochs.
        workloads: only these, of those it would train; empty for all.
        optimizers: only these, of those all-optimizers would train; empty for all.
        finished: make no piece, and leave out what needs one that is not there.
        data_dir: the folder of the data; None for $MEKA_DATA or the download cache.
        watch: makes a watcher from a title and a number of steps.
        spent: seconds, and those of the processor, of each piece that was read.
        missing: the pieces that were left out.
        environments: in which the pieces were made, each once.
    """

    scale: str
    cache: Path | None = None
    seeds: int | None = None
    epochs: float | None = None
    workloads: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    finished: bool = False
    data_dir: str | None = None
    watch: Callable[[str, int], Watcher] = field(default=_silent, compare=False)
    spent: list[list[float]] = field(default_factory=list, compare=False)
    missing: list[str] = field(default_factory=list, compare=False)
    environments: list[dict[str, Any]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ReproduceError(
                f"unknown scale {self.scale!r} (known: {', '.join(SCALES)})"
            )
        if self.seeds is not None and self.seeds < 1:
            raise ReproduceError(f"seeds must be at least 1, not {self.seeds}")
        if self.epochs is not None and not self.epochs > 0:
            raise ReproduceError(f"epochs must be positive, not {self.epochs}")

    def pick(self, *, smoke: T, desk: T, full: T) -> T:
        """What belongs to this scale."""
        return {"smoke": smoke, "desk": desk, "full": full}[self.scale]

    def select(self, workloads: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the workloads that were asked for."""
        if not self.workloads:
            return workloads
        found = tuple(name for name in workloads if name in self.workloads)
        if not found:
            raise ReproduceError(
                f"none of {', '.join(self.workloads)} takes part here at scale "
                f"{self.scale}; there are {', '.join(workloads)}"
            )
        return found

    def overrides(self) -> dict[str, Any]:
        """What was asked for beside the scale, for the record."""
        asked = {
            "seeds": self.seeds,
            "epochs": self.epochs,
            "workloads": list(self.workloads),
            "optimizers": list(self.optimizers),
        }
        return {name: value for name, value in asked.items() if value}

    def each(self, names: Iterable[K], make: Callable[[K], T]) -> dict[K, T]:
        """What is made of every name; without those that lack a piece.

        Raises:
            Unfinished: all of them do.
        """
        found: dict[K, T] = {}
        lacking: list[str] = []
        for name in names:
            try:
                found[name] = make(name)
            except Unfinished as error:
                lacking.append(str(error))
        if lacking and not found:
            raise Unfinished(", ".join(lacking))
        self.missing.extend(lacking)
        return found

    def piece(
        self,
        label: str,
        settings: Mapping[str, Any],
        make: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Make a part of an experiment, or read it if it was made like this before.

        ``settings`` is all that determines it, as plain values.

        Raises:
            Unfinished: it is not there, and only what is finished was asked for.
        """
        if self.cache is None:
            return plain(make())
        key = json.dumps([label, settings], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        name = "".join(c if c.isalnum() or c in "-." else "_" for c in label)
        path = self.cache / f"{name}-{digest}.json"
        if path.exists():
            made = read(path)
            self.spent.append(made.pop("took"))
            self._made_in(made.pop("environment", None))
            return made
        if self.finished:
            raise Unfinished(" ".join([*_words(settings, "workload"), label]))
        wall, cpu = time.perf_counter(), time.process_time()
        made = plain(make())
        took = [time.perf_counter() - wall, time.process_time() - cpu]
        now = plain(environment())
        self._made_in(now)
        write(path, made | {"took": plain(took), "environment": now})
        return made

    def _made_in(self, environment: dict[str, Any] | None) -> None:
        if environment is not None and environment not in self.environments:
            self.environments.append(environment)


def _words(settings: Mapping[str, Any], name: str) -> list[str]:
    return [settings[name]] if name in settings else []


def plain(value: Any, digits: int = _DIGITS) -> Any:
    """Arrays and numbers as JSON takes them: rounded, null where not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(each, digits) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, digits) for each in value]
    if hasattr(value, "dtype"):
        return plain(np.asarray(value).tolist(), digits)
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def array(values: Any) -> np.ndarray:
    """Numbers from JSON as an array, NaN where there is none."""
    return np.array(values, dtype=float)


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReproduceError(
            f"{path} is damaged ({error}); delete it, and what it held is made again"
        ) from error


def write(path: Path, value: Any) -> None:
    """Write a JSON file; a reader finds the old one or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    replace_file(path, text.encode() + b"\n")
