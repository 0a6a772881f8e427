"""What `meka scorecard` and `python -m meka.lab.scorecard` have in common.

Nothing heavy is imported until the request has been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from meka.lab.scorecard.plan import Run

_BROKEN = 1  # exit code where a run could not be made
_TIMED = 60.0  # seconds a workload
_STANDARD = {"scale": "desk", "seeds": None, "steps_scale": 1.0}


@dataclass(frozen=True)
class Scorecard:
    """Score every optimizer at one setting for all workloads, beside tuned ones.

    Trains, times and reports; with some of --train, --timing and --report only those.
    Called again with the same folder it finishes what is missing.
    """

    out: Path
    """The folder for runs, records, table, pictures and page."""
    scale: Literal["smoke", "desk", "full"] | None = None
    """Seconds, two cores (the default) or a GPU; else as the folder was begun."""
    optimizers: tuple[str, ...] = ()
    """Only these; by default all of `meka optimizers`."""
    workloads: tuple[str, ...] = ()
    """Only these of the scale's."""
    seeds: int | None = None
    """By default 3."""
    jobs: int = 1
    """How many processes train at a time."""
    data_dir: Path | None = None
    """Where the data is; by default $MEKA_DATA or the download cache."""
    steps_scale: float | None = None
    """Multiply every length by this."""
    train: bool = False
    """Train what is missing."""
    timing: bool = False
    """Measure what a step costs; wants a machine that does nothing else."""
    report: bool = False
    """Write table, pictures and page of what is there."""
    merge: tuple[Path, ...] = ()
    """Take in the records of these folders; of a run in several, the last counts."""
    seconds: float | None = None
    """Stop training after so long, and keep what is finished."""

    def run(self, console: Console) -> int:
        """Make the scorecard."""
        return make(
            self, lambda text: console.print(text, markup=False, highlight=False)
        )


def make(asked: Scorecard, say: Callable[[str], None]) -> int:
    """Do what was asked; returns the exit code."""
    from meka.lab.scorecard.plan import ScorecardError, plan

    if asked.jobs < 1:
        raise ScorecardError(f"--jobs must be at least 1, not {asked.jobs}")
    _plan(asked, _STANDARD | _given(asked), plan)  # refuses names before jax is loaded
    from meka.lab.scorecard import records, runner

    parts = [_read(folder) for folder in asked.merge]
    if asked.scale == "desk":
        parts = [records.at_desk(part) for part in parts]
    before = records.read(asked.out)
    known = [part for part in (before, *parts) if part is not None]
    settings = (known[0]["settings"] if known else _STANDARD) | _given(asked)
    if asked.scale is None and any(p["settings"]["scale"] == "full" for p in known):
        settings["scale"] = "full"
    planned = _plan(asked, settings, plan)
    settings["seeds"] = planned[0].config.seeds
    found = records.merge([records.empty(settings), *known])
    found["commands"] = list(dict.fromkeys([*found["commands"], _command(asked)]))
    found = records.gather(found, asked.out, planned)
    records.save(found, asked.out)

    def keep() -> None:
        records.save(records.gather(found, asked.out, planned), asked.out)

    chosen = asked.train or asked.timing or asked.report
    everything = not chosen and not asked.merge
    broken: list[Run] = []
    try:
        if asked.train or everything:
            have = {records.key(record) for record in found["runs"]}
            missing = [run for run in planned if run.key not in have]
            say(f"{len(missing)} of {len(planned)} runs to train")
            broken = runner.train(
                missing,
                asked.out,
                jobs=asked.jobs,
                seconds=asked.seconds,
                say=say,
                keep=keep,
            )
        if asked.timing or everything:
            limit = 1.0 if settings["scale"] == "smoke" else _TIMED
            runner.time_steps(planned, found["times"], asked.out, say=say, limit=limit)
    except runner.Stopped as stopped:
        say(f"{stopped}; what is finished is kept, the same command goes on")
        return stopped.exit_code
    finally:
        found = records.gather(found, asked.out, planned)
        say(f"records: {records.save(found, asked.out)}")
    if asked.report or not chosen:
        _report(found, asked.out, say)
    for run in broken:
        say(f"could not be made: {' '.join(run.key)}")
    return _BROKEN if broken else 0


def _plan(asked: Scorecard, settings: dict[str, Any], plan: Callable) -> list[Run]:
    return plan(
        settings["scale"],
        optimizers=asked.optimizers,
        workloads=asked.workloads,
        seeds=settings["seeds"],
        steps_scale=settings["steps_scale"],
        data_dir=None if asked.data_dir is None else str(asked.data_dir),
    )


def _given(asked: Scorecard) -> dict[str, Any]:
    values = {name: getattr(asked, name) for name in _STANDARD}
    return {name: value for name, value in values.items() if value is not None}


def _read(folder: Path) -> dict[str, Any]:
    from meka.lab.scorecard import records
    from meka.lab.scorecard.plan import ScorecardError

    found = records.read(folder)
    if found is None:
        raise ScorecardError(f"{folder} holds no {records.RECORDS} to merge")
    return found


def _report(found: dict[str, Any], out: Path, say: Callable[[str], None]) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        say("no page: that needs matplotlib; --report makes it where that is installed")
        return
    from meka.lab.scorecard import page

    say(f"page: {page.write(found, out)}")


def _command(asked: Scorecard) -> str:
    """What was asked, without the names of folders."""
    words = ["meka", "scorecard"]
    for field in fields(asked):
        value = getattr(asked, field.name)
        if value == field.default:
            continue
        words.append("--" + field.name.replace("_", "-"))
        if isinstance(value, tuple):
            words += ["DIR" if isinstance(each, Path) else each for each in value]
        elif not isinstance(value, bool):
            words.append("DIR" if isinstance(value, Path) else f"{value}")
    return " ".join(words)
