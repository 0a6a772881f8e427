"""Trains and times what is planned and not there yet, by worker processes.

A worker takes several runs of one workload. One that ends early leaves what it had
done; if it died of a run, that run is given up, and another worker takes the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meka.lab.interrupts import collected
from meka.lab.reproduce import setting as files
from meka.lab.scorecard import records, steptime, worker
from meka.lab.scorecard.plan import Run, ScorecardError

GROUP = 6  # runs a worker takes: enough to share its start, few enough to balance
_LOOK = 0.2  # seconds between two looks at the workers
_KEEP = 20.0  # seconds between two savings of what is finished
LOGS = "logs"


class Stopped(Exception):
    """It was asked to stop, or its time was up; what is finished is kept."""

    def __init__(self, message: str, exit_code: int):
        """Remember why, and the exit code that goes with it."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class _Busy:
    process: subprocess.Popen[bytes]
    runs: list[Run]
    log: Path


def train(
    runs: Sequence[Run],
    out: Path,
    *,
    jobs: int,
    seconds: float | None,
    say: Callable[[str], None],
    keep: Callable[[], None],
) -> list[Run]:
    """Train; returns the runs that a worker died of.

    ``keep`` is called now and then, to save what is finished.
    """
    waiting = groups(runs)
    busy: list[_Busy] = []
    broken: list[Run] = []
    done: dict[tuple[str, str], Run] = {}
    began = kept = time.monotonic()
    with collected() as received:
        try:
            while waiting or busy:
                while waiting and len(busy) < jobs:
                    busy.append(_start(waiting.pop(0), out))
                time.sleep(_LOOK)
                ended = [b for b in busy if b.process.poll() is not None]
                for run in [run for each in busy for run in each.runs]:
                    if run.key not in done and _finished(run, out):
                        done[run.key] = run
                        say(f"[{len(done)}/{len(runs)}] {_result(run, out)}")
                for each in ended:
                    busy.remove(each)
                    left = [run for run in each.runs if run.key not in done]
                    if left:
                        broken.append(left[0])
                        say(
                            f"    {' '.join(left[0].key)} failed with exit code "
                            f"{each.process.returncode}, see {each.log}: "
                            f"{_last(each.log)}"
                        )
                        waiting += [left[1:]] if left[1:] else []
                if time.monotonic() - kept > _KEEP:
                    keep()
                    kept = time.monotonic()
                if received:
                    raise Stopped(_by(received[0]), 128 + received[0])
                if seconds is not None and time.monotonic() - began > seconds:
                    raise Stopped(f"stopped after {seconds:g} seconds", 0)
        finally:
            _end(busy)
    return broken


def groups(runs: Sequence[Run], size: int = GROUP) -> list[list[Run]]:
    """Runs of one workload, a few at a time; the largest workloads first."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.config.workload, []).append(run)
    parts = []
    for own in reversed(list(found.values())):
        count = -(-len(own) // size)
        parts += [own[k::count] for k in range(count)]
    return parts


def environment(out: Path) -> dict[str, str]:
    """Of a worker: compiled code is kept, and a GPU is shared."""
    mine = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(out.resolve() / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    return mine | dict(os.environ)


def time_steps(
    runs: Sequence[Run],
    times: Mapping[str, Any],
    out: Path,
    *,
    say: Callable[[str], None],
    limit: float,
) -> None:
    """Time the steps that were not timed yet, one workload after the other.

    After ``limit`` seconds of a workload no further round begins, once there are five.
    """
    asked: dict[str, list[str]] = {}
    for run in runs:
        asked.setdefault(run.config.workload, []).append(run.config.optimizer)
    data_dir = runs[0].config.data_dir
    steps = {run.config.workload: run.config.steps for run in runs}
    for workload, names in asked.items():
        known = times.get(workload, {"ratios": {}, "left_out": []})
        if set(names) <= {*known["ratios"], *known["left_out"]}:
            continue
        say(f"timing the steps of {workload}")
        path = out / records.TIMES / f"{workload}.json"
        names = list(dict.fromkeys(names))
        order = steptime.Order(
            workload, steps[workload], names, str(path), data_dir, limit
        )
        log = out / LOGS / f"times-{workload}.txt"
        with collected() as received:
            process = _spawn("steptime", json.dumps(asdict(order)), log, out)
            try:
                while process.poll() is None and not received:
                    time.sleep(_LOOK)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if received:
            raise Stopped(_by(received[0]), 128 + received[0])
        if process.returncode:
            raise ScorecardError(
                f"the steps of {workload} could not be timed, see {log}: {_last(log)}"
            )


def _start(runs: list[Run], out: Path) -> _Busy:
    log = out / LOGS / f"{'-'.join(runs[0].key)}.txt"
    process = _spawn("worker", worker.order(runs, out), log, out)
    return _Busy(process, runs, log)


def _spawn(module: str, order: str, log: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start a module of this package, what it says goes to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", f"meka.lab.scorecard.{module}"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=environment(out),
            # Ctrl-C is for the parent, which then asks once: a second signal would
            # end a run before it has saved.
            start_new_session=True,
        )
    assert process.stdin is not None
    process.stdin.write(order.encode())
    process.stdin.close()
    return process


def _by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"


def _finished(run: Run, out: Path) -> bool:
    return (records.folder(out, run) / records.RECORD).exists()


def _result(run: Run, out: Path) -> str:
    record = files.read(records.folder(out, run) / records.RECORD)
    return f"{' '.join(run.key)}: {records.word(record)}"


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing was said"


def _end(busy: Sequence[_Busy]) -> None:
    """Ask the workers to save and stop, and wait for them."""
    for each in busy:
        each.process.terminate()
    for each in busy:
        try:
            each.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
