"""A run is a folder.

::

    config.json        what was asked for; its presence is what makes the folder a run
    environment.json   versions, device and threads it was computed with
    subject.json       what is trained: parameters, examples, batch size
    metrics.jsonl      one record a line, append-only: the truth about the run
    checkpoints/       see `meka.lab.checkpoint`
    run.lock           held (flock) by the one process that may write here

A crash can tear only the last line of the metrics; `RunFolder.resume` cuts it off.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from meka.lab.checkpoint import replace_file, sync_directory, what_to_do
from meka.lab.config import RunConfig
from meka.lab.metrics import METRICS, encoded, lines

CONFIG, ENVIRONMENT, SUBJECT = "config.json", "environment.json", "subject.json"
LOCK, CHECKPOINTS = "run.lock", "checkpoints"


class RunError(RuntimeError):
    """A run folder cannot be used as asked; the message says what to do."""


class RunLocked(RunError):
    """Another process is writing to the run folder."""


class DiskError(RunError):
    """The disk refused what a run had to write; what was there before is intact."""

    exit_code = 4


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

    def describe(self, subject: Mapping[str, Any]) -> None:
        """Say what is trained, for whoever reads the folder without the workload."""
        file = self.path / SUBJECT
        try:
            if not file.exists():
                _write_json(file, dict(subject))
        except OSError as error:
            raise RunError(f"cannot write {file}: {what_to_do(error)}") from error

    def append(self, records: Iterable[dict[str, Any]], *, sync: bool = False) -> None:
        """Append records in one write; with ``sync``, wait until the disk has them.

        Raises:
            DiskError: the disk refused; the file is as it was before.
        """
        data = "".join([encoded(record) + "\n" for record in records]).encode()
        size = os.fstat(self._metrics).st_size
        try:
            written = os.write(self._metrics, data)
            while written < len(data):
                written += os.write(self._metrics, data[written:])
            if sync:
                os.fsync(self._metrics)
        except OSError as error:
            os.ftruncate(self._metrics, size)
            raise DiskError(
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
        for record, after in lines(path):
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
