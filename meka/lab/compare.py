"""Honest comparison: every optimizer over its grid, the cost of tuning included."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meka.lab import history, optimizers, workloads
from meka.lab.config import ConfigError, RunConfig
from meka.lab.history import History
from meka.lab.runfolder import is_run, read_config
from meka.lab.train import TrainingStopped, Watcher, train


@dataclass(frozen=True)
class Row:
    """One optimizer at its best learning rate."""

    optimizer: str
    learning_rate: float | None
    train_loss: float  # median over seeds, at the end
    train_loss_low: float
    train_loss_high: float
    test_accuracy: float | None
    test_accuracy_low: float | None
    test_accuracy_high: float | None
    steps_to_target: float | None  # median; None if never reached
    seconds: float
    seconds_to_tune: float  # all runs of the grid
    runs: int


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison and what came out."""

    workload: str
    steps: int
    seeds: int
    target: float | None  # the loss of the best Adam, if one took part and converged
    rows: list[Row]
    best: dict[str, History]
    grid: dict[str, list[History]]
    verdict: str


def plan(
    workload: str,
    names: Sequence[str],
    *,
    steps: int,
    seeds: int,
    seed: int = 0,
    tune: bool = True,
    eval_every: int | None = None,
    schedule: str | None = None,
    average: bool = False,
    data_dir: str | None = None,
) -> list[RunConfig]:
    """The runs of a comparison; refuses unknown names before anything is written."""
    configs = []
    for name in dict.fromkeys(names):
        if name not in optimizers.TABLE:
            optimizers.check(name)
        entry = optimizers.TABLE[name]
        rates: Sequence[float | None] = entry.grid if tune and entry.grid else (None,)
        takes = schedule is None or schedule in entry.schedules
        configs += [
            RunConfig(
                workload=workload,
                optimizer=name,
                steps=steps,
                seed=seed,
                seeds=seeds,
                learning_rate=rate if rate is not None else entry.default,
                schedule=schedule if takes else None,
                eval_every=max(1, steps // 40) if eval_every is None else eval_every,
                checkpoint_every=max(1, steps),
                average=average,
                data_dir=data_dir,
            )
            for rate in rates
        ]
    if not configs:
        raise ConfigError("name at least one optimizer to compare")
    return configs


def compare(
    configs: Sequence[RunConfig],
    out: Path,
    *,
    watch: Callable[[RunConfig, int, int], Watcher],
) -> Comparison:
    """Run what was planned, or finish what was begun, and sum it up."""
    first = configs[0]
    workload = workloads.load(first.workload, first.data_dir)
    workloads.check(workload)
    if workload.data is None:  # endless: there is no full gradient to take
        able = [c for c in configs if not optimizers.TABLE[c.optimizer].finite]
        if not able:
            raise ConfigError(f"{workload.name} has no finite data for these")
        configs = able
    paths = [Path(out) / "runs" / _folder(config) for config in configs]
    for config, path in zip(configs, paths, strict=True):
        if is_run(path):
            _refuse_another(config, path)
    runs = []
    for number, (config, path) in enumerate(zip(configs, paths, strict=True)):
        watcher = watch(config, number, len(configs))
        try:
            train(config, path, resume=is_run(path), watcher=watcher, workload=workload)
        except TrainingStopped as reason:  # a result too, as it stands
            watcher.note(f"stopped: {reason}")
        runs.append(history.read(path))
    return summarise(runs)


def summarise(runs: Sequence[History]) -> Comparison:
    """Best run of each optimizer, and how soon each reached the best Adam's loss."""
    grid: dict[str, list[History]] = {}
    for run in runs:
        grid.setdefault(run.config.optimizer, []).append(run)
    best = {
        name: min(members, key=lambda run: np.median(run.final_loss))
        for name, members in grid.items()
    }
    target = None
    if "adam" in best and np.isfinite(np.median(best["adam"].final_loss)):
        target = float(np.median(best["adam"].final_loss))
    rows = [_row(best[name], grid[name], target) for name in grid]
    rows.sort(key=lambda row: row.train_loss)
    config = runs[0].config
    return Comparison(
        workload=config.workload,
        steps=config.steps,
        seeds=config.seeds,
        target=target,
        rows=rows,
        best=best,
        grid=grid,
        verdict=_verdict(rows),
    )


def save(comparison: Comparison, out: Path) -> None:
    """Write the numbers as results.json."""
    content = {
        "workload": comparison.workload,
        "steps": comparison.steps,
        "seeds": comparison.seeds,
        "target_loss": comparison.target,
        "verdict": comparison.verdict,
        "optimizers": [asdict(row) for row in comparison.rows],
        "grid": {
            name: [
                {
                    "learning_rate": run.config.learning_rate,
                    "train_loss": run.final_loss.tolist(),
                }
                for run in members
            ]
            for name, members in comparison.grid.items()
        },
    }
    text = json.dumps(_plain(content), indent=2, allow_nan=False) + "\n"
    (Path(out) / "results.json").write_text(text, encoding="utf-8")


def _row(run: History, members: Sequence[History], target: float | None) -> Row:
    loss = run.final_loss
    accuracy = None
    if "test_accuracy" in run.evals:
        accuracy = run.evals["test_accuracy"][-1]
    return Row(
        optimizer=run.config.optimizer,
        learning_rate=run.config.learning_rate if len(members) > 1 else None,
        train_loss=float(np.median(loss)),
        train_loss_low=float(np.min(loss)),
        train_loss_high=float(np.max(loss)),
        test_accuracy=None if accuracy is None else float(np.median(accuracy)),
        test_accuracy_low=None if accuracy is None else float(np.min(accuracy)),
        test_accuracy_high=None if accuracy is None else float(np.max(accuracy)),
        steps_to_target=_steps_to(run, target),
        seconds=run.seconds,
        seconds_to_tune=sum(member.seconds for member in members),
        runs=len(members),
    )


def _steps_to(run: History, target: float | None) -> float | None:
    """Median over seeds of the first evaluation at or below the target."""
    if target is None:
        return None
    loss = run.evals["train_loss"]
    reached = np.isfinite(loss) & (loss <= target)
    first = np.where(reached.any(0), run.evals.step[reached.argmax(0)], np.inf)
    median = float(np.median(first))
    return median if np.isfinite(median) else None


def _verdict(rows: Sequence[Row]) -> str:
    """Whether what was not tuned ends within the spread of what was."""
    ours = [r for r in rows if r.optimizer in ("auto", "meka", "adameka")]
    tuned = [r for r in rows if r.runs > 1]
    if not ours or not tuned:
        return ""
    sentences = []
    for row in ours:
        behind = [t for t in tuned if row.train_loss > t.train_loss_high]
        if not np.isfinite(row.train_loss):
            what = "did not converge"
        elif not behind:
            what = "ends at or below the spread of every tuned optimizer's best"
        else:
            names = ", ".join(
                f"{t.optimizer} ({t.train_loss:.3g}, best of {t.runs})" for t in behind
            )
            what = f"ends above the spread of {names}"
        sentences.append(
            f"{row.optimizer}, one run and nothing tuned, {what}: "
            f"train loss {row.train_loss:.3g}."
        )
    return " ".join(sentences)


def _folder(config: RunConfig) -> str:
    rate = "" if config.learning_rate is None else f"-{config.learning_rate:g}"
    return f"{config.optimizer}{rate}"


def _refuse_another(config: RunConfig, path: Path) -> None:
    """Refuse a folder whose run is not the planned one: its numbers would mislead."""
    asked, found = config.to_dict(), read_config(path).to_dict()
    # Where the data lies and how often the run is saved make no difference.
    free = ("data_dir", "checkpoint_every")
    names = [n for n in asked if n not in free and asked[n] != found[n]]
    if names:
        differences = ", ".join(f"{n} {found[n]!r}, not {asked[n]!r}" for n in names)
        raise ConfigError(
            f"{path} holds a run of another comparison ({differences}); "
            "choose another folder with --out"
        )


def _plain(value: Any) -> Any:
    """Non-finite numbers, which JSON lacks, by name, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value
