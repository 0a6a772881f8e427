"""A run while it is written: what was appended since the last look, and no more."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meka.lab.config import ConfigError, RunConfig
from meka.lab.metrics import METRICS, MetricsError
from meka.lab.runfolder import CONFIG, ENVIRONMENT, SUBJECT
from meka.lab.train import TIMING

_PIECE = 1 << 24  # bytes read at a time
_MARK = 256  # bytes remembered from before the offset
_LABELS = ("kind", "step", "seed")


class Tail:
    """Reads the whole lines that were appended to a file since the last time.

    The file may not exist yet, may end in half a line, and may be cut or replaced, as
    when a run resumes from a checkpoint. Then it is read from the beginning again.
    """

    def __init__(self, path: Path):
        """Nothing is read yet."""
        self._path = path
        self._start()

    def _start(self) -> None:
        self._offset, self._inode, self._mark, self._line = 0, -1, b"", 0

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Read up to 16 MB more.

        Returns:
            Whether what was read before no longer holds; new records.

        Raises:
            MetricsError: a whole line is no record.
        """
        try:
            with open(self._path, "rb") as file:
                lost = self._offset > 0 and not self._same(file.fileno())
                if lost:
                    self._start()
                self._inode = os.fstat(file.fileno()).st_ino
                data = os.pread(file.fileno(), _PIECE, self._offset)
        except FileNotFoundError:
            lost = self._offset > 0
            self._start()
            return lost, []
        whole = data[: data.rfind(b"\n") + 1]
        records = [self._parsed(line) for line in whole.splitlines()]
        self._offset += len(whole)
        self._mark = (self._mark + whole)[-_MARK:]
        return lost, records

    def _same(self, file: int) -> bool:
        """Whether the file still continues what was read of it."""
        status = os.fstat(file)
        if status.st_ino != self._inode or status.st_size < self._offset:
            return False
        # Cut and grown again since: the bytes before the offset tell.
        before = os.pread(file, len(self._mark), self._offset - len(self._mark))
        return before == self._mark

    def _parsed(self, line: bytes) -> dict[str, Any]:
        self._line += 1
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or type(record["step"]) is not int:
                raise ValueError("a record is a table with a step")
        except (ValueError, KeyError, RecursionError) as error:
            raise MetricsError(
                f"{self._path}, line {self._line} is not a record ({error!r}); restore "
                "the file, or delete that line by hand"
            ) from error
        return record


class Table:
    """Records as numbers: steps down, seeds across; a column for every name."""

    def __init__(self, seeds: int):
        """An empty table; the first record names the columns."""
        self._seeds = seeds
        self.names: tuple[str, ...] = ()
        self._index: dict[str, int] = {}
        self._step = np.zeros(0, np.int64)
        self._data = np.zeros((0, 0, seeds), np.float32)
        self._size = 0
        self._open: list[Mapping[str, Any]] = []  # seeds of the step being read

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: str) -> bool:
        """Whether there is a column of this name."""
        return name in self._index

    @property
    def step(self) -> np.ndarray:
        """The step of each row."""
        return self._step[: self._size]

    def column(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of one column, (rows, seeds)."""
        stop = self._size if stop is None else stop
        return self._data[start:stop, self._index[name]].astype(float)

    def pick(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Chosen rows of one column, (rows, seeds)."""
        return self._data[rows, self._index[name]].astype(float)

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; a row is whole when every seed has one."""
        rows: list[list[Mapping[str, Any]]] = []
        for record in records:
            if self._open and self._open[0]["step"] != record["step"]:
                rows.append(self._open)
                self._open = []
            self._open.append(record)
            if len(self._open) == self._seeds:
                rows.append(self._open)
                self._open = []
        if not rows:
            return
        if not self.names:
            self.names = tuple(n for n, v in rows[0][0].items() if _is_number(n, v))
            self._index = {name: k for k, name in enumerate(self.names)}
        block = np.full((len(rows), self._seeds, len(self.names)), np.nan)
        for k, row in enumerate(rows):
            for j, record in enumerate(row):
                block[k, j] = [float(record.get(n, np.nan)) for n in self.names]
        self._grow(len(rows))
        new = slice(self._size, self._size + len(rows))
        self._step[new] = [row[0]["step"] for row in rows]
        with np.errstate(over="ignore"):
            self._data[new] = block.transpose(0, 2, 1)
        self._size += len(rows)

    def _grow(self, more: int) -> None:
        if self._size + more <= len(self._step):
            return
        room = max(2 * len(self._step), self._size + more, 256)
        step = np.zeros(room, np.int64)
        data = np.zeros((room, len(self.names), self._seeds), np.float32)
        if self._size:
            step[: self._size] = self.step
            data[: self._size] = self._data[: self._size]
        self._step, self._data = step, data


def _is_number(name: str, value: Any) -> bool:
    if name in _LABELS:
        return False
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


class Run:
    """A run folder that is, was or will be written.

    Attributes:
        path: the folder.
        config: what was asked for; None while there is no run.
        environment: with what it was computed.
        subject: what is trained: parameters, examples, batch size.
        steps, evals: what was recorded.
        timing: step and seconds per step of each chunk.
        generation: changes when what was read before no longer holds.
        problem: why the folder cannot be read, if so.
        changed: wall-clock time of the last change of the metrics.
    """

    def __init__(self, path: Path):
        """Nothing is read yet."""
        self.path = Path(path)
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.config: RunConfig | None = None
        self.environment: dict[str, Any] = {}
        self.subject: dict[str, Any] = {}
        self.problem: str | None = None
        self.changed = 0.0
        self._metrics, self._clock = Tail(self.path / METRICS), Tail(self.path / TIMING)
        self._empty(1)

    def _empty(self, seeds: int) -> None:
        self.generation += 1
        self.steps, self.evals = Table(seeds), Table(seeds)
        self.timing: list[tuple[int, float]] = []

    @property
    def batch_size(self) -> int | None:
        """Examples a step, where the run says so."""
        own = None if self.config is None else self.config.batch_size
        return own or self.subject.get("batch_size")

    @property
    def last_step(self) -> int:
        """The last step that was recorded."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def finished(self) -> bool:
        """Whether every step was taken and the end evaluated."""
        if self.config is None or not len(self.evals):
            return False
        return int(self.evals.step[-1]) >= self.config.steps

    def poll(self) -> bool:
        """Look for news, up to 16 MB of it; whether there was any."""
        if self.problem is not None:
            return False
        if self.config is None and not self._opened():
            return self.problem is not None
        try:
            lost, records = self._metrics.read()
        except MetricsError as error:
            self.problem = str(error)
            return True
        if lost:
            # Another run may have taken the folder.
            self.config = None
            if not self._opened():
                return True
        self.steps.add(r for r in records if r.get("kind") == "step")
        self.evals.add(r for r in records if r.get("kind") == "eval")
        if records:
            self.changed = (self.path / METRICS).stat().st_mtime
        return self._time() or bool(records) or lost

    def read_all(self) -> None:
        """Read all there is now."""
        while self.poll():
            pass

    def _time(self) -> bool:
        try:
            lost, records = self._clock.read()
        except MetricsError:  # timing is not worth an error
            return False
        if lost:
            self.timing = []
        for record in records:
            # A resumed run takes some steps again.
            while self.timing and self.timing[-1][0] >= record["step"]:
                self.timing.pop()
            seconds, steps = record.get("seconds", np.nan), record.get("steps", 0)
            if steps:
                self.timing.append((record["step"], seconds / steps))
        return bool(records)

    def _opened(self) -> bool:
        """Read what the run is, once it is there."""
        try:
            content = json.loads((self.path / CONFIG).read_bytes())
            self.config = RunConfig.from_dict(content)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (ValueError, ConfigError, RecursionError) as error:
            self.problem = f"{self.path / CONFIG} cannot be used: {error}"
            return False
        self.environment = _json_or_nothing(self.path / ENVIRONMENT)
        self.subject = _json_or_nothing(self.path / SUBJECT)
        self._empty(self.config.seeds)
        return True


def _json_or_nothing(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
