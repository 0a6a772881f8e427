"""The summary as tables of texts, for the page, for Markdown and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SCORES = {
    "loss_steps": "steps",
    "loss_seconds": "seconds",
    "averaged_loss_steps": "steps, averaged",
    "averaged_loss_seconds": "seconds, averaged",
    "metric_steps": "steps to test metric",
    "metric_seconds": "seconds to test metric",
}
SCORE_HEAD = ("optimizer", *SCORES.values(), "reached", "failed", "not run")
WORKLOAD_HEAD = (
    "optimizer",
    "rate",
    "train loss",
    "averaged",
    "test metric",
    "averaged",
    "steps to target",
    "averaged",
    "seconds to target",
    "averaged",
    "step / Adam's",
    "failure",
)


def score_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line a competitor: its scores, and on how many workloads it got there."""
    lines = []
    for row in summary["rows"]:
        cells = row["workloads"].values()
        reached = sum(isinstance(cell["loss_steps"], int | float) for cell in cells)
        failed = sum(bool(cell["failure"]) for cell in cells)
        lines.append(
            (
                row["name"],
                *(_number(row["scores"][name], "{:.3f}") for name in SCORES),
                f"{reached} of {len(summary['workloads'])}",
                str(failed or ""),
                ", ".join(row["not_run"]),
            )
        )
    return lines


def workload_rows(summary: dict[str, Any], workload: str) -> list[tuple[str, ...]]:
    """A line a competitor on one workload, the lowest training loss first."""
    accuracy = summary["workloads"][workload]["metric"] == "test_accuracy"
    unit = summary["workloads"][workload]["adam_seconds_per_step"]
    metric = "{:.2%}" if accuracy else "{:.4g}"
    found = [
        (row["name"], row["workloads"][workload])
        for row in summary["rows"]
        if workload in row["workloads"]
    ]
    found.sort(key=lambda pair: _sortable(pair[1]["loss"][0]))
    return [
        (
            name,
            "–" if cell["learning_rate"] is None else f"{cell['learning_rate']:g}",
            _number(cell["loss"][0], "{:.3g}", "not finite"),
            _number(cell["averaged_loss"][0], "{:.3g}", "not finite"),
            _number(cell["metric"][0], metric, "not finite"),
            _number(cell["averaged_metric"][0], metric, "not finite"),
            _number(cell["loss_steps"], "{:.0f}"),
            _number(cell["averaged_loss_steps"], "{:.0f}"),
            _number(cell["loss_seconds"], "{:.3g}"),
            _number(cell["averaged_loss_seconds"], "{:.3g}"),
            _number(
                unit and cell["seconds_per_step"] and cell["seconds_per_step"] / unit,
                "{:.2f}",
            ),
            cell["failure"] or "",
        )
        for name, cell in found
    ]


def caption(summary: dict[str, Any], workload: str) -> str:
    """What the table of a workload is about, in a line."""
    about = summary["workloads"][workload]
    target = _number(about["target_loss"], "{:.4g}", "none: no tuned Adam was run")
    form = "{:.2%}" if about["metric"] == "test_accuracy" else "{:.4g}"
    metric = _number(about["target_metric"], form)
    names = {"train_loss": "exact objective", "test_loss": "test loss"}
    name = names.get(about["metric"], "test accuracy")
    seeds = f"{about['seeds']} seed{'s' if about['seeds'] > 1 else ''}"
    return (
        f"{about['steps']} steps, {seeds}. Target: train loss {target}; "
        f"test metric ({name}) {metric}."
    )


def markdown(summary: dict[str, Any]) -> str:
    """All tables."""
    parts = ["## Scores", "", _markdown(SCORE_HEAD, score_rows(summary))]
    parts += ["## Claims", ""]
    claims = [
        ("yes" if c["holds"] else "no", c["name"], c["says"], c["found"])
        for c in summary["claims"]
    ]
    parts.append(_markdown(("", "claim", "says", "found"), claims))
    for workload in summary["workloads"]:
        parts += [f"## {workload}", "", caption(summary, workload), ""]
        parts.append(_markdown(WORKLOAD_HEAD, workload_rows(summary, workload)))
    return "\n".join(parts)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: Any, form: str, none: str = "–") -> str:
    if value is None:
        return none
    return value if isinstance(value, str) else form.format(value)


def _sortable(value: float | None) -> float:
    return float("inf") if value is None else value
