"""A run is a folder.

::

    config.json        what was asked for; its presence is what makes the folder a run
    environment.json   versions, device and threads it was computed with
    metrics.jsonl      one record a line, append-only: the truth about the run
    checkpoints/       see `meka.lab.checkpoint`
    run.lock           held (flock) by the one process that may write here

Metrics are strict JSON. Non-finite numbers, which JSON lacks, are the strings "nan",
"inf" and "-inf", and become numbers again on reading. A record has at least ``kind``
("step", "eval", ...) and ``step``. Since a batch of records is one write, a crash can
tear only the last line; readers drop it, and `RunFolder.resume` cuts it off.
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from meka.lab import optimizers
from meka.lab.checkpoint import replace_file, sync_directory, what_to_do

CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"
LOCK, CHECKPOINTS = "run.lock", "checkpoints"


class RunError(RuntimeError):
    """A run folder cannot be used as asked; the message says what to do."""


class RunLocked(RunError):
    """Another process is writing to the run folder."""


class ConfigError(ValueError):
    """A configuration was refused; nothing has been written."""


class MetricsError(RunError):
    """A line of metrics.jsonl, other than a torn last one, cannot be read."""


# Configuration ------------------------------------------------------------------------


_AT_LEAST_ONE = (
    "steps",
    "seeds",
    "batch_size",
    "eval_every",
    "checkpoint_every",
    "max_rejected",
)


@dataclass(frozen=True)
class RunConfig:
    """All that determines a run. Checked when made, so a bad one never exists.

    Attributes:
        workload: name of the problem, or ``file.py:name``.
        optimizer: a name of `meka.lab.optimizers.TABLE`.
        steps: how many steps to train.
        seed: the first random seed.
        seeds: how many seeds to run, counting up from ``seed``.
        batch_size: examples a step; None for the workload's own.
        learning_rate: None for the optimizer's default.
        schedule: a name of `meka.lab.optimizers.SCHEDULES`; None for the optimizer's.
        options: further options of the optimizer.
        eval_every: steps between evaluations.
        checkpoint_every: steps between checkpoints.
        data_dir: folder of the data; None for the cache.
        average: also keep and evaluate an average of the iterates.
        max_rejected: stop after this many rejected steps in a row.
    """

    workload: str
    optimizer: str
    steps: int
    seed: int = 0
    seeds: int = 1
    batch_size: int | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    eval_every: int = 100
    checkpoint_every: int = 1000
    data_dir: str | None = None
    average: bool = False
    max_rejected: int = 25

    def __post_init__(self) -> None:
        for name in ("workload", "optimizer"):
            _expect(name, getattr(self, name), str, "text")
            if not getattr(self, name):
                raise ConfigError(f"{name} must not be empty")
        for name in ("schedule", "data_dir"):
            if getattr(self, name) is not None:
                _expect(name, getattr(self, name), str, "text")
        for name in _AT_LEAST_ONE:
            if name != "batch_size" or self.batch_size is not None:
                _expect_integer(name, getattr(self, name), at_least=1)
        _expect("average", self.average, bool, "true or false")
        _expect_integer("seed", self.seed, at_least=0)
        _expect("options", self.options, dict, "a table of names and values")
        try:
            optimizers.check(
                self.optimizer,
                learning_rate=self.learning_rate,
                schedule=self.schedule,
                options=self.options,
            )
        except optimizers.OptimizerError as error:
            raise ConfigError(str(error)) from error
        # What config.json cannot give back as it was would make a resumed run another.
        if _json_round_trip(self.options) != self.options:
            raise ConfigError(
                f"options must be plain JSON values (text, numbers, true, false, null, "
                f"lists, tables), not {self.options!r}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Read a configuration, refusing unknown and missing keys by name."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration is a table, not {values!r}")
        known = {each.name: each for each in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown configuration key {key!r}{hint} "
                    f"(known: {', '.join(known)})"
                )
        for key in ("workload", "optimizer", "steps"):
            if key not in values:
                raise ConfigError(f"the configuration has no {key!r}")
        return cls(**dict(values))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values; the inverse of `from_dict`."""
        return dataclasses.asdict(self)


def _expect(name: str, value: Any, kind: type, words: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {words}, not {value!r}")


def _expect_integer(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < at_least:
        raise ConfigError(f"{name} must be at least {at_least}, not {value}")


def _json_round_trip(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None


# Environment --------------------------------------------------------------------------

_PACKAGES = ("meka", "jax", "jaxlib", "optax", "numpy")


def environment() -> dict[str, Any]:
    """Return what the bits of a run depend on beside its configuration.

    Names no host and no user: a run folder can be given away.
    """
    import jax

    device = jax.devices()[0]
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: _version(name) for name in _PACKAGES},
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        # XLA's CPU pool has one thread for each core the process may use.
        "threads": len(os.sched_getaffinity(0)),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "x64": bool(jax.config.values["jax_enable_x64"]),
        "matmul_precision": str(jax.config.values["jax_default_matmul_precision"]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {before.get(name)!r} and is now {value!r}: "
        f"bits may differ from an uninterrupted run"
        for name, value in now.items()
        if name != "python" and before.get(name) != value
    ]


# Metrics ------------------------------------------------------------------------------

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run folder (or of a metrics file), a line at a time."""
    for record, _ in _lines(_metrics_file(path)):
        yield record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run folder (or of a metrics file).

    A torn last line is dropped: it is what a crash leaves, or a run that is writing.

    Raises:
        MetricsError: any other line is not a record; names the line.
    """
    return list(iterate_metrics(path))


def columns(path: Path, kind: str = "step") -> dict[str, np.ndarray]:
    """Return the records of one kind as arrays by name, for plots.

    A number missing from some records is NaN there. Values that are lists, all of one
    length, give two-dimensional arrays; text gives arrays of objects.
    """
    records = [record for record in iterate_metrics(path) if record["kind"] == kind]
    names = dict.fromkeys(name for record in records for name in record)
    names.pop("kind", None)
    return {name: _column([each.get(name) for each in records]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    if any(isinstance(value, str | dict) for value in values):
        return np.array(values, dtype=object)
    shaped = next((value for value in values if value is not None), None)
    missing = [math.nan] * len(shaped) if isinstance(shaped, list) else math.nan
    return np.array([missing if value is None else value for value in values])


def _metrics_file(path: Path) -> Path:
    return path / METRICS if path.is_dir() else path


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole record with the offset at which its line ends."""
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line.decode(), parse_constant=_refuse_constant)
                record = {name: _decoded(value) for name, value in record.items()}
                if (
                    not isinstance(record["kind"], str)
                    or type(record["step"]) is not int
                ):
                    raise ValueError("kind must be text and step a whole number")
            except (AttributeError, KeyError, ValueError, RecursionError) as error:
                raise MetricsError(
                    f"{path}, line {number} is not a record ({error!r}). The file was "
                    f"changed or damaged; restore it, or delete that line by hand"
                ) from error
            yield record, end


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def _encoded(record: dict[str, Any]) -> str:
    if not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        raise ValueError(f"a record needs a kind (text) and a step (int): {record!r}")
    try:
        return _dumps(record)
    except ValueError:  # something is not finite; rare, so the other way stays fast
        return _dumps({name: _named(value) for name, value in record.items()})


def _dumps(record: dict[str, Any]) -> str:
    return json.dumps(
        record, allow_nan=False, separators=(",", ":"), default=_plain, sort_keys=False
    )


def _plain(value: Any) -> Any:
    """Return a NumPy or jax number, or an array of them, as Python numbers."""
    if type(value) is np.float32:  # nearly all of them, so this first
        return float(str(value))
    if not hasattr(value, "dtype"):
        raise TypeError(f"a metric must be a number, text or a list, not {value!r}")
    array = np.asarray(value)
    if array.dtype.kind not in "fV" or array.dtype == np.float64:
        return array.tolist()
    # The shortest decimal that gives the same number in its own precision.
    return [_plain(each) for each in array] if array.ndim else float(str(array[()]))


def _named(value: Any) -> Any:
    """Return non-finite numbers by name."""
    if hasattr(value, "dtype"):
        value = _plain(value)
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# The folder ---------------------------------------------------------------------------


class RunFolder:
    """An open run folder: locked, and ready to append to. Close it, or use ``with``.

    Attributes:
        path: the folder.
        config: its configuration.
        warnings: on resuming, why the bits may differ from an uninterrupted run's.
    """

    def __init__(
        self, path: Path, config: RunConfig, lock: int, warnings: Iterable[str] = ()
    ):
        """Use `create` or `resume`."""
        self.path = path
        self.config = config
        self.warnings = tuple(warnings)
        self._lock = lock
        self._metrics = os.open(
            path / METRICS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644
        )
        sync_directory(path)
        self._cut_torn_line()

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunFolder:
        """Start a run in a new or empty folder.

        Raises:
            RunError: the folder holds something, or cannot be written.
        """
        path = Path(path)
        _refuse_occupied(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _acquire(path)
            try:
                _refuse_occupied(path)  # again: another may have begun in between
                _write_json(path / ENVIRONMENT, environment())
                # Last, because config.json is what makes the folder a run.
                _write_json(path / CONFIG, config.to_dict())
                return cls(path, config, lock)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise RunError(
                f"cannot start a run in {path}: {error}. {what_to_do(error)}"
            ) from error

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Open a run to go on with it. A torn last line of its metrics is cut off.

        Raises:
            RunError: there is no run, or its configuration cannot be read.
            RunLocked: another process has it open.
        """
        path = Path(path)
        if not is_run(path):
            raise RunError(
                f"{path} holds no run to resume (no {CONFIG}); "
                f"start one without resuming"
            )
        try:
            lock = _acquire(path)
            try:
                config = read_config(path)
                return cls(path, config, lock, _compare_environment(path))
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise RunError(
                f"cannot resume the run in {path}: {error}. {what_to_do(error)}"
            ) from error

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints of this run live."""
        return self.path / CHECKPOINTS

    def append(self, records: Iterable[dict[str, Any]], *, sync: bool = False) -> None:
        """Append records in one write; with ``sync``, wait until the disk has them.

        Raises:
            RunError: the disk refused; the file is as it was before.
        """
        data = "".join([_encoded(record) + "\n" for record in records]).encode()
        size = os.fstat(self._metrics).st_size
        try:
            written = os.write(self._metrics, data)
            while written < len(data):
                written += os.write(self._metrics, data[written:])
            if sync:
                os.fsync(self._metrics)
        except OSError as error:
            os.ftruncate(self._metrics, size)
            raise RunError(
                f"cannot write {self.path / METRICS}: {error}. {what_to_do(error)} "
                f"The records before are intact."
            ) from error

    def truncate_after(self, step: int) -> int:
        """Drop the records of later steps, as on resuming from ``step``.

        Returns:
            How many records were dropped.
        """
        path = self.path / METRICS
        kept, dropped, prefix, end = [], 0, 0, 0
        for record, after in _lines(path):
            if record["step"] > step:
                dropped += 1
            else:
                kept.append((end, after))
                if not dropped:
                    prefix = after
            end = after
        if not kept or kept[-1][1] <= prefix:
            os.ftruncate(self._metrics, prefix)
            os.fsync(self._metrics)
        else:  # not in the order of steps, as when seeds run one after another
            data = path.read_bytes()
            replace_file(path, b"".join(data[start:stop] for start, stop in kept))
            os.close(self._metrics)
            self._metrics = os.open(path, os.O_RDWR | os.O_APPEND)
        return dropped

    def close(self) -> None:
        """Close the metrics and release the lock. May be called twice."""
        if self._lock >= 0:
            os.close(self._metrics)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut_torn_line(self) -> None:
        data = (self.path / METRICS).read_bytes()
        os.ftruncate(self._metrics, data.rfind(b"\n") + 1)


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (Path(path) / CONFIG).is_file()


def read_config(path: Path) -> RunConfig:
    """Return the configuration of a run folder, which need not be open."""
    file = Path(path) / CONFIG
    try:
        return RunConfig.from_dict(json.loads(file.read_bytes()))
    except FileNotFoundError:
        raise RunError(f"{path} holds no run (no {CONFIG})") from None
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be used: {error}. Restore it, or start another run"
        ) from error


def _refuse_occupied(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; choose another folder for the run")
    if is_run(path):
        raise RunError(
            f"{path} already holds a run; resume it (--resume) or choose another folder"
        )
    # What a run killed before it began may have left does not count.
    remains = (LOCK, ENVIRONMENT)
    others = sorted(
        each.name
        for each in (path.iterdir() if path.is_dir() else ())
        if each.name not in remains and ".json.tmp-" not in each.name
    )
    if others:
        raise RunError(
            f"{path} is not empty (it has {others[0]}); "
            f"choose another folder for the run"
        )


def _acquire(path: Path) -> int:
    """Lock a run folder, until the process closes the lock or ends, however it ends."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise RunLocked(
            f"{path} is in use by process {holder}; wait for it, stop it, or choose "
            f"another folder"
        ) from None
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def _compare_environment(path: Path) -> list[str]:
    """Compare with the environment the run began in; remember it if it is another."""
    file, now = path / ENVIRONMENT, environment()
    try:
        before = json.loads(file.read_bytes())
        resumed = list(before.pop("resumed", []))
    except (OSError, AttributeError, TypeError, ValueError) as error:
        return [f"{file} cannot be read ({error}): bits may differ, nobody can tell"]
    differences = _differences(before, now)
    if differences and now not in resumed:
        _write_json(file, {**before, "resumed": [*resumed, now]})
    return differences
