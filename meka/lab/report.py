"""Tables and one page to look at, from a comparison or a few runs."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from meka.lab.compare import Comparison, Row
from meka.lab.history import History

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .3rem .8rem; text-align: right;
  border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; height: auto; background: white; border-radius: 6px; }}
figcaption, footer {{ opacity: .75; font-size: .9rem; }}
.scroll {{ overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
<div class="scroll">{table}</div>
<figure><img src="data:image/png;base64,{picture}" alt="{alt}">
<figcaption>{caption}</figcaption></figure>
<footer>{footer}</footer>
</body></html>
"""

_HEAD = (
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
    for k, name in enumerate(_HEAD):
        table.add_column(name, justify="left" if k == 0 else "right")
    for row in comparison.rows:
        table.add_row(*_cells(row, comparison.target))
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


def write_page(comparison: Comparison, picture: Path, path: Path, command: str) -> None:
    """One self-contained HTML page: verdict, table and picture."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _HEAD)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(cell)}</td>" for cell in _cells(row, comparison.target)
        )
        + "</tr>"
        for row in comparison.rows
    )
    page = _PAGE.format(
        title=html.escape(f"meka compare: {comparison.workload}"),
        summary=html.escape(comparison.verdict),
        table=f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        picture=base64.b64encode(picture.read_bytes()).decode(),
        alt="Loss, accuracy, step size, gain, noise and curvature over the steps",
        caption="Median over seeds, with their range as a band; the rest of each grid "
        "is drawn faintly. The dotted line is the final loss of the best Adam.",
        footer=f"Made by <code>{html.escape(command)}</code>",
    )
    path.write_text(page, encoding="utf-8")


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
