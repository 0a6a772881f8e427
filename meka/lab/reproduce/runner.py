"""Run experiments into a folder: data, figure, verdict and one page for all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meka.lab.reproduce import setting as files
from meka.lab.reproduce.setting import Setting, Unfinished, plain
from meka.lab.reproduce.table import Experiment, ReproduceError
from meka.lab.reproduce.verdict import Verdict

DATA, VERDICT = "data.json", "verdict.json"
CACHE = "cache"


def reproduce(
    experiments: Sequence[Experiment],
    setting: Setting,
    out: Path,
    *,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Verdict]:
    """Run what is not there yet, judge and draw all, and write the page.

    A folder holds one scale. What was interrupted goes on where it stopped.
    """
    from meka.lab.reproduce import page

    out = Path(out)
    for experiment in experiments:
        _refuse_another(experiment, setting, out)
    verdicts = {}
    try:
        for number, experiment in enumerate(experiments, 1):
            title = f"[{number}/{len(experiments)}] {experiment.name}"
            try:
                record = _data(
                    experiment,
                    setting,
                    out,
                    command,
                    lambda s, t=title: say(f"{t}: {s}"),
                )
            except Unfinished:
                say(f"{title}: nothing of it is finished")
                continue
            verdict = _conclude(experiment, record, out)
            verdicts[experiment.name] = verdict
            say(f"{title}: {verdict.word}")
            for check in verdict.checks:
                say(f"    {'ok' if check.holds else 'NO'}  {check.name}: {check.found}")
    finally:
        if any(out.glob(f"*/{VERDICT}")):
            page.write(out, command)
    return verdicts


def _data(
    experiment: Experiment,
    setting: Setting,
    out: Path,
    command: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The record of an experiment: read where it is complete, else made."""
    path = out / experiment.name / DATA
    if path.exists() and not (record := files.read(path)).get("missing"):
        say(f"its data is complete at scale {setting.scale}, so it is not run again")
        return record
    how = "reading what is finished" if setting.finished else "running"
    say(f"{how} at scale {setting.scale}")
    wall, cpu = time.perf_counter(), time.process_time()
    load = None if setting.finished else os.getloadavg()[0]
    own = replace(
        setting,
        cache=out / CACHE / experiment.name,
        spent=[],  # by calls that were interrupted
        missing=[],
        environments=[],
    )
    data = experiment.run(own)
    before = [sum(seconds) for seconds in zip(*own.spent, strict=True)] or [0.0, 0.0]
    environments = own.environments or [_environment()]
    record = {
        "experiment": experiment.name,
        "scale": setting.scale,
        "asked": setting.overrides(),
        "seconds": time.perf_counter() - wall + before[0],
        "cpu_seconds": time.process_time() - cpu + before[1],
        "load_before": load,
        "command": command,
        "environment": environments[0],
        "data": data,
    }
    if len(environments) > 1:
        record["other_environments"] = environments[1:]
    if own.missing:
        record["missing"] = own.missing
        say(f"not finished, so left out: {', '.join(own.missing)}")
    record = plain(record)
    files.write(path, record)
    return record


def _conclude(experiment: Experiment, record: dict[str, Any], out: Path) -> Verdict:
    from meka.lab.reproduce import drawing

    folder = out / experiment.name
    verdict = experiment.verdict(record["data"], record["scale"])
    drawing.save(experiment.figure, record["data"], folder)
    files.write(folder / VERDICT, verdict.to_dict())
    return verdict


def _refuse_another(experiment: Experiment, setting: Setting, out: Path) -> None:
    path = out / experiment.name / DATA
    if not path.exists():
        return
    record = files.read(path)
    if (record["scale"], record["asked"]) != (setting.scale, setting.overrides()):
        raise ReproduceError(
            f"{path} was made at scale {record['scale']} with {record['asked'] or {}}, "
            f"not {setting.scale} with {setting.overrides()}; choose another folder "
            "with --out, or delete it"
        )


def _environment() -> dict[str, Any]:
    from meka.lab.runfolder import environment

    return environment()
