"""Tables of a comparison or of a few runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from meka.lab.compare import Comparison, Row
from meka.lab.history import History

COMPARISON_HEAD = (
    "optimizer",
    "learning rate",
    "train loss",
    "range over seeds",
    "test accuracy",
    "steps to best Adam",
    "seconds",
    "runs",
    "seconds in all",
)


def comparison_table(comparison: Comparison) -> Table:
    """The table `meka compare` prints."""
    table = Table(
        title=f"{comparison.workload}: {comparison.steps} steps, "
        f"{comparison.seeds} seeds",
        title_justify="left",
    )
    for k, name in enumerate(COMPARISON_HEAD):
        table.add_column(name, justify="left" if k == 0 else "right")
    for row in comparison_rows(comparison):
        table.add_row(*row)
    return table


def runs_table(runs: Sequence[History]) -> Table:
    """The table `meka show` prints."""
    table = Table(title_justify="left")
    names = (
        "run",
        "workload",
        "optimizer",
        "steps",
        "train loss",
        "test accuracy",
        "step size",
        "gain",
        "rejected",
        "seconds",
    )
    for k, name in enumerate(names):
        table.add_column(name, justify="left" if k < 3 else "right")
    for run in runs:
        table.add_row(
            str(run.path),
            run.config.workload,
            run.label,
            f"{run.evals.step[-1]}/{run.config.steps}",
            f"{np.median(run.final_loss):.3g}",
            _last(run.evals, "test_accuracy", "{:.2%}"),
            _last(run.steps, "step_size", "{:.3g}"),
            _last(run.steps, "gain", "{:.3g}"),
            _last(run.steps, "rejected", "{:.0f}"),
            f"{run.seconds:.1f}",
        )
    return table


def comparison_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The rows of that table, as text."""
    return [_cells(row, comparison.target) for row in comparison.rows]


def print_verdict(console: Console, comparison: Comparison) -> None:
    """The comparison in a sentence."""
    if comparison.verdict:
        console.print(comparison.verdict, markup=False)


def _cells(row: Row, target: float | None) -> tuple[str, ...]:
    def several(value: float, low: float, high: float) -> str:
        return f"{low:.3g} to {high:.3g}" if low != high else f"{value:.3g}"

    accuracy, reached = "–", "–" if target is None else "never"
    if row.test_accuracy is not None:
        accuracy = f"{row.test_accuracy:.2%}"
    if row.steps_to_target is not None:
        reached = f"{row.steps_to_target:.0f}"
    return (
        row.optimizer,
        "–" if row.learning_rate is None else f"{row.learning_rate:g}",
        f"{row.train_loss:.3g}",
        several(row.train_loss, row.train_loss_low, row.train_loss_high),
        accuracy,
        reached,
        f"{row.seconds:.1f}",
        str(row.runs),
        f"{row.seconds_to_tune:.1f}",
    )


def _last(series, name: str, template: str) -> str:
    if name not in series or not len(series.step):
        return "–"
    return template.format(float(np.median(series[name][-1])))
