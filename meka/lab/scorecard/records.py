"""What a scorecard knows, in one small file that can be carried away and merged.

records.json::

    settings   scale, seeds and steps_scale: the same for all that is merged
    runs       one record a run: how it was made, its curves, why it failed if it did
    times      by workload: what a step of each optimizer costs, and where
    commands   what made it

Numbers are rounded to four digits, and null where they are not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meka.lab.reproduce import setting as files
from meka.lab.scorecard.plan import BASE, SUBJECTS, ScorecardError, setting
from meka.lab.scorecard.plan import Run as Planned

RECORDS = "records.json"
RECORD = "record.json"  # of one run, in its folder
RUNS, TIMES = "runs", "times"
MOST = 41  # evaluations kept of a run
_DIGITS = 4

Record = dict[str, Any]
Records = dict[str, Any]


def empty(settings: Mapping[str, Any]) -> Records:
    """No runs yet."""
    return {"settings": dict(settings), "runs": [], "times": {}, "commands": []}


def key(record: Record) -> tuple[str, str]:
    """What a record is of: workload, and optimizer with rate."""
    return record["workload"], setting(record["optimizer"], record["learning_rate"])


def folder(out: Path, run: Planned) -> Path:
    """Where a run is kept."""
    return out.joinpath(RUNS, *run.key)


def describe(run: Planned) -> Record:
    """The part of a record that is known before the run."""
    names = ("workload", "optimizer", "learning_rate", "schedule", "steps", "seeds")
    record = {name: getattr(run.config, name) for name in names}
    return record | {"failure": None, "step": [], "curves": {}}


def from_run(run: Planned, path: Path, failure: str | None) -> Record:
    """The record of a run folder."""
    from meka.lab import history
    from meka.lab.runfolder import ENVIRONMENT

    found = history.read(path)
    rows = len(found.evals.step)
    keep = np.unique(np.linspace(0, rows - 1, min(rows, MOST)).astype(int))
    test = "test_accuracy" if "test_accuracy" in found.evals else "test_loss"
    curves = {
        name: values[keep]
        for name, values in found.evals.values.items()
        if name.removeprefix("average_") in ("train_loss", test)
    }
    lost = int(np.sum(~np.isfinite(found.evals["train_loss"][-1])))
    if failure is None and 2 * lost >= run.config.seeds:
        failure = (
            f"diverged: the loss of {lost} of {run.config.seeds} seeds is not finite "
            "at the end"
        )
    return files.plain(
        describe(run)
        | {
            "failure": failure,
            "step": found.evals.step[keep],
            "curves": curves,
            "environment": files.read(path / ENVIRONMENT),
        },
        _DIGITS,
    )


def word(record: Record) -> str:
    """How a run ended, in a few words."""
    if record["failure"]:
        return f"FAILED, {record['failure']}"
    losses = record["curves"]["train_loss"][-1]
    return "train loss " + " ".join(f"{x:.3g}" for x in losses if x is not None)


def read(out: Path) -> Records | None:
    """What a folder knows: its records.json, and the records of its runs."""
    path = out / RECORDS
    records = files.read(path) if path.exists() else None
    if records is not None and not {"settings", "runs", "times"} <= set(records):
        raise ScorecardError(f"{path} is no file of a scorecard")
    return records


def gather(records: Records, out: Path, planned: Iterable[Planned]) -> Records:
    """The records with those of the runs and times that are in the folder."""
    runs = [
        files.read(path)
        for run in planned
        if (path := folder(out, run) / RECORD).exists()
    ]
    times = {path.stem: files.read(path) for path in (out / TIMES).glob("*.json")}
    return merge([records, records | {"runs": runs, "times": times, "commands": []}])


def save(records: Records, out: Path) -> Path:
    """Write records.json; a reader finds the old one or all of the new one."""
    path = out / RECORDS
    files.write(path, records)
    return path


def at_desk(part: Records) -> Records:
    """What belongs to "desk" of records that were made at "full"."""
    if part["settings"]["scale"] != "full":
        return part
    names = {subject.name for subject in SUBJECTS["desk"]}
    return part | {
        "settings": part["settings"] | {"scale": "desk"},
        "runs": [run for run in part["runs"] if run["workload"] in names],
        "times": {k: v for k, v in part["times"].items() if k in names},
    }


def merge(parts: Sequence[Records]) -> Records:
    """One of several: of what is in more than one, the last counts.

    Refuses what cannot be compared: other seeds, another length. The workloads of
    "desk" are the same at "full", so these two go together, and make "full".
    """
    first = parts[0]
    settings = dict(first["settings"])
    runs: dict[tuple[str, str], Record] = {}
    times: dict[str, Any] = {}
    commands: dict[str, None] = {}
    for part in parts:
        refuse_other(first["settings"], part["settings"])
        if part["settings"]["scale"] == "full":
            settings["scale"] = "full"
        runs |= {key(record): record for record in part["runs"]}
        for workload, own in part["times"].items():
            times[workload] = _merged_times(times.get(workload), own)
        commands |= dict.fromkeys(part.get("commands", ()))
    by_workload: dict[str, Record] = {}
    for record in runs.values():
        other = by_workload.setdefault(record["workload"], record)
        if any(record[name] != other[name] for name in ("steps", "seeds")):
            raise ScorecardError(
                f"{record['workload']}: {key(record)[1]} was trained for "
                f"{record['steps']} steps from {record['seeds']} seeds, "
                f"{key(other)[1]} for {other['steps']} from {other['seeds']}; "
                "they cannot be compared"
            )
    return {
        "settings": settings,
        "runs": list(runs.values()),
        "times": times,
        "commands": list(commands),
    }


def _merged_times(before: Any, now: Any) -> Any:
    """Times of a workload are ratios to Adam's, so they can be added on one device."""
    if before is None or before["device"] != now["device"]:
        return now
    return now | {
        "seconds": before["seconds"],
        "ratios": before["ratios"]
        | {k: v for k, v in now["ratios"].items() if k != BASE},
    }


def refuse_other(settings: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Refuse records of another scorecard."""
    names = [name for name in settings if settings[name] != found.get(name)]
    if {settings["scale"], found.get("scale")} == {"desk", "full"}:
        names.remove("scale")
    if names:
        differences = ", ".join(
            f"{name} {found.get(name)!r}, not {settings[name]!r}" for name in names
        )
        raise ScorecardError(
            f"these records are of another scorecard ({differences}); choose another "
            "folder with --out"
        )
