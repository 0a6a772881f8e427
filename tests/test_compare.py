"""Comparisons: what the table says is what the runs say, in both directions."""

import io
import json
import math
import os
import signal
from pathlib import Path

import lines
import numpy as np
import pytest
from rich.console import Console

from meka.lab import compare, history, plots, tables
from meka.lab.config import ConfigError, RunConfig
from meka.lab.optimizers import TABLE, OptimizerError
from meka.lab.runfolder import RunError, RunFolder
from meka.lab.train import TIMING, Interrupted, Silent, TrainingStopped

NAN, INF = math.nan, math.inf


def written(folder: Path, optimizer: str, losses, *, rate=None, accuracy=None):
    """A run folder with these training losses: evaluations down, seeds across."""
    losses = np.asarray(losses, float)
    config = RunConfig(
        "digits",
        optimizer,
        10 * (len(losses) - 1),
        seeds=losses.shape[1],
        learning_rate=rate,
        eval_every=10,
    )
    path = folder / f"{optimizer}-{rate}"
    with RunFolder.create(path, config) as run:
        for k, row in enumerate(losses):
            records = [
                {"kind": "eval", "step": 10 * k, "seed": seed, "train_loss": float(x)}
                for seed, x in enumerate(row)
            ]
            if accuracy is not None:
                records = [r | {"test_accuracy": accuracy} for r in records]
            run.append(records)
            run.append(
                {"kind": "step", "step": 10 * k + 1, "seed": seed, "loss": float(x)}
                for seed, x in enumerate(row)
            )
    seconds = [0.7, 0.02, 0.02]  # the first with compilation
    text = "".join(f'{{"step":0,"steps":10,"seconds":{x}}}\n' for x in seconds)
    (path / TIMING).write_text(text + '{"step":')
    return history.read(path)


def falling(last: float, seeds: int = 3) -> list[list[float]]:
    """Losses 2, 1, 0.5, last; each seed a little above the one before."""
    return [[x * (1 + 0.1 * k) for k in range(seeds)] for x in (2, 1, 0.5, last)]


# History ------------------------------------------------------------------------------


def test_history_is_what_the_folder_says(tmp_path):
    run = written(tmp_path, "adam", falling(0.1), rate=0.01, accuracy=0.9)
    assert run.evals.step.tolist() == [0, 10, 20, 30]
    np.testing.assert_allclose(run.evals["train_loss"], falling(0.1))
    np.testing.assert_allclose(run.final_loss, [0.1, 0.11, 0.12])
    assert run.label == "adam 0.01"
    # The median pace leaves out compilation, and a torn line.
    assert run.seconds == pytest.approx(30 * 0.002)


def test_history_of_a_run_that_is_being_written(tmp_path):
    run = written(tmp_path, "sgd", falling(0.1), rate=0.1)
    file = run.path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-5]) + lines[-5][:7])  # amid a step's seeds
    seen = history.read(run.path)
    assert len(seen.evals.step) == len(seen.evals["train_loss"]) == 3
    file.write_bytes(b"")
    with pytest.raises(RunError, match="has not been evaluated yet"):
        history.read(run.path)


# The summary --------------------------------------------------------------------------


def test_rows_hold_the_best_of_each_grid_and_the_cost_of_finding_it(tmp_path):
    result = compare.summarise(
        [
            written(tmp_path, "meka", falling(0.05), accuracy=0.97),
            written(tmp_path, "adam", falling(0.4), rate=0.001, accuracy=0.8),
            written(tmp_path, "adam", falling(0.1), rate=0.01, accuracy=0.95),
            written(tmp_path, "adam", falling(0.3), rate=0.1, accuracy=0.85),
        ]
    )
    ours, adam = result.rows
    assert (ours.optimizer, adam.optimizer) == ("meka", "adam")  # the best first
    assert adam.learning_rate == 0.01
    assert (adam.runs, ours.runs) == (3, 1)
    assert adam.train_loss == pytest.approx(0.11)
    assert adam.train_loss_low == pytest.approx(0.1)
    assert adam.train_loss_high == pytest.approx(0.12)
    assert adam.test_accuracy == 0.95
    assert adam.seconds_to_tune == pytest.approx(3 * adam.seconds)
    assert result.target == pytest.approx(0.11)
    assert result.best["adam"].config.learning_rate == 0.01
    assert [run.config.learning_rate for run in result.grid["adam"]] == [
        0.001,
        0.01,
        0.1,
    ]


def test_steps_to_the_best_adam(tmp_path):
    result = compare.summarise(
        [
            written(tmp_path, "adam", [[2.0], [1.0], [0.5], [0.4]], rate=0.01),
            written(tmp_path, "sgd", [[2.0], [1.0], [0.6], [0.5]], rate=0.1),
            # A seed that is there early, one later, one that rises again.
            written(tmp_path, "meka", [[2, 2, 2], [0.3, 1, 0.4], [1, 0.2, 1], [1] * 3]),
        ]
    )
    reached = {row.optimizer: row.steps_to_target for row in result.rows}
    assert reached == {"adam": 30, "sgd": None, "meka": 10}
    shown = {row.optimizer: row for row in cells(result)}
    assert [shown[name].reached for name in reached] == ["30", "never", "10"]


def test_without_adam_there_is_nothing_to_reach(tmp_path):
    result = compare.summarise([written(tmp_path, "sgd", falling(0.1), rate=0.1)])
    assert result.target is None
    assert [row.reached for row in cells(result)] == ["–"]


class Cells:
    def __init__(self, line: str):
        parts = [part.strip() for part in line.strip("│ \n").split("│")]
        self.optimizer, self.loss, self.reached = parts[0], parts[2], parts[5]


def cells(result: compare.Comparison) -> list[Cells]:
    """The rows of the table as it is printed."""
    console = Console(width=160, file=io.StringIO())
    with console.capture() as capture:
        console.print(tables.comparison_table(result))
    lines = capture.get().splitlines()
    return [Cells(line) for line in lines if line.startswith("│")]


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (0.05, "ends at or below the spread of every tuned optimizer's best"),
        (0.105, "ends at or below the spread of every tuned optimizer's best"),
        (0.2, "ends above the spread of adam (0.11, best of 2): train loss 0.22."),
        (NAN, "did not converge"),
        (INF, "did not converge"),
    ],
)
def test_the_verdict_says_so_or_says_that_it_does_not(tmp_path, ours, sentence):
    result = compare.summarise(
        [
            written(tmp_path, "meka", falling(ours)),
            written(tmp_path, "adam", falling(0.1), rate=0.01),
            written(tmp_path, "adam", falling(0.4), rate=0.1),
        ]
    )
    assert result.verdict.startswith("meka, one run and nothing tuned, ")
    assert sentence in result.verdict
    if not math.isfinite(ours):
        assert "at or below" not in result.verdict
        assert result.rows[-1].optimizer == "meka"


def test_no_verdict_without_both_sides(tmp_path):
    run = written(tmp_path, "meka", falling(0.1))
    assert compare.summarise([run]).verdict == ""


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_diverged_run_does_not_win(tmp_path, bad):
    result = compare.summarise(
        [
            written(tmp_path, "adam", falling(bad), rate=0.1),
            written(tmp_path, "adam", falling(0.1), rate=0.01),
            written(tmp_path, "sgd", falling(bad), rate=1.0),
        ]
    )
    assert [row.optimizer for row in result.rows] == ["adam", "sgd"]
    assert result.rows[0].learning_rate == 0.01
    assert result.rows[1].train_loss == INF
    assert result.rows[1].steps_to_target is None


def test_where_adam_diverges_nobody_has_reached_it(tmp_path):
    runs = [
        written(tmp_path, "adam", falling(NAN), rate=0.1),
        written(tmp_path, "meka", falling(0.1)),
    ]
    result = compare.summarise(runs)
    assert result.target is None
    assert [row.steps_to_target for row in result.rows] == [None, None]


def strict(path: Path):
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_diverged_runs_are_drawn_and_saved(tmp_path):
    runs = [
        written(tmp_path, "adam", [[NAN] * 2] * 3, rate=0.1),
        written(tmp_path, "adam", [[2, 2], [INF, 1e38], [NAN, 1e39]], rate=0.01),
        written(tmp_path, "meka", [[NAN] * 2] * 3),
    ]
    result = compare.summarise(runs)
    compare.save(result, tmp_path)
    content = strict(tmp_path / "results.json")
    assert content["target_loss"] is None
    assert {row["train_loss"] for row in content["optimizers"]} == {"inf"}
    assert content["grid"]["adam"][1]["train_loss"] == ["inf", 1e39]
    picture = tmp_path / "new" / "diverged.png"
    plots.overview([runs[0], runs[2]], picture, title="diverged", faint=runs)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# The plan -----------------------------------------------------------------------------


def test_the_plan_is_every_grid_once():
    configs = compare.plan("digits", ["adam", "meka", "adam"], steps=400, seeds=3)
    assert [(c.optimizer, c.learning_rate) for c in configs] == [
        *(("adam", rate) for rate in TABLE["adam"].grid),
        ("meka", None),
    ]
    assert {(c.steps, c.seeds, c.eval_every) for c in configs} == {(400, 3, 10)}
    untuned = compare.plan("digits", ["adam", "meka"], steps=9, seeds=1, tune=False)
    assert [(c.optimizer, c.learning_rate) for c in untuned] == [
        ("adam", TABLE["adam"].default),
        ("meka", None),
    ]


def test_the_plan_refuses_what_cannot_be():
    with pytest.raises(OptimizerError, match="did you mean 'adam'"):
        compare.plan("digits", ["adamm"], steps=1, seeds=1)
    with pytest.raises(ConfigError, match="at least one optimizer"):
        compare.plan("digits", [], steps=1, seeds=1)
    with pytest.raises(ConfigError, match="eval_every must be at least 1"):
        compare.plan("digits", ["adam"], steps=1, seeds=1, eval_every=0)
    with pytest.raises(ConfigError, match="steps must be at least 1"):
        compare.plan("digits", ["adam"], steps=0, seeds=1)


# Running ------------------------------------------------------------------------------


class Witness(Silent):
    def __init__(self, log: list, config: RunConfig):
        self.log, self.optimizer = log, config.optimizer

    def step(self, done, logs, seconds):
        self.log.append((self.optimizer, done))

    def note(self, message):
        self.log.append((self.optimizer, message))


class Stop(Witness):
    def step(self, done, logs, seconds):
        super().step(done, logs, seconds)
        if (self.optimizer, done) == ("adam", 6):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def place(tmp_path):
    lines.place(tmp_path)
    return tmp_path


def test_an_interrupted_comparison_is_finished_and_nothing_is_run_twice(place):
    configs = compare.plan(
        f"{place / 'lines.py'}:workload",
        ["sgd", "adam"],
        steps=12,
        seeds=2,
        tune=False,
        eval_every=6,
    )
    log: list = []
    with pytest.raises(Interrupted):
        compare.compare(configs, place / "out", watch=lambda c, *_: Stop(log, c))
    assert log == [("sgd", 6), ("sgd", 12), ("adam", 6)]
    log.clear()
    result = compare.compare(
        configs, place / "out", watch=lambda c, *_: Witness(log, c)
    )
    assert log == [
        ("sgd", "resuming after step 12"),
        ("adam", "resuming after step 6"),
        ("adam", 12),
    ]
    assert {row.optimizer for row in result.rows} == {"sgd", "adam"}
    assert all(run.evals.step.tolist() == [0, 6, 12] for run in result.best.values())
    compare.save(result, place / "out")
    content = strict(place / "out" / "results.json")
    assert content["steps"] == 12
    assert [row["optimizer"] for row in content["optimizers"]] == ["sgd", "adam"]
    # Another comparison does not pass the old runs off as its own.
    longer = compare.plan(
        configs[0].workload, ["sgd"], steps=24, seeds=2, tune=False, eval_every=6
    )
    with pytest.raises(ConfigError, match=r"another comparison \(steps 12, not 24\)"):
        compare.compare(longer, place / "out", watch=lambda c, *_: Witness(log, c))


def test_a_run_that_stops_is_a_result_too(place, monkeypatch):
    def stopped(config, path, **_):
        run = written(place, config.optimizer, falling(0.5), rate=config.learning_rate)
        path.parent.mkdir(parents=True, exist_ok=True)
        run.path.rename(path)
        if config.optimizer == "meka":
            raise TrainingStopped("too many were rejected")

    monkeypatch.setattr(compare, "train", stopped)
    spec = f"{place / 'lines.py'}:workload"
    configs = compare.plan(spec, ["meka", "sgd"], steps=30, seeds=3, tune=False)
    log: list = []
    result = compare.compare(
        configs, place / "out", watch=lambda c, *_: Witness(log, c)
    )
    assert log == [("meka", "stopped: too many were rejected")]
    assert {row.optimizer for row in result.rows} == {"meka", "sgd"}
