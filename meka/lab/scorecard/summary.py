"""A card as plain values: what results.json, the tables and the page show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from meka.lab.reproduce.setting import plain
from meka.lab.scorecard import claims
from meka.lab.scorecard.card import (
    AVERAGED,
    METRIC,
    METRIC_AVERAGED,
    PLAIN,
    Card,
    Row,
    View,
)

VIEWS = {
    "loss": PLAIN,
    "averaged_loss": AVERAGED,
    "metric": METRIC,
    "averaged_metric": METRIC_AVERAGED,
}
UNITS = ("steps", "seconds")


def summarise(card: Card) -> dict[str, Any]:
    """Scores, ends, times and failures of every row, and the claims."""
    scores = {
        f"{name}_{unit}": card.scores(unit, view)
        for name, view in VIEWS.items()
        for unit in UNITS
    }
    ratios = {unit: card.ratios(unit) for unit in UNITS}
    rows = [
        {
            "name": row.name,
            "optimizer": row.optimizer,
            "tuned": row.tuned,
            "ours": row.ours,
            "tunes_itself": row.tunes_itself,
            "scores": {name: own.get(row) for name, own in scores.items()},
            "not_run": card.incomplete(row),
            "workloads": {
                workload: _cell(card, row, workload)
                | {
                    f"ratio_{unit}": _or_never(ratios[unit][row].get(workload))
                    for unit in UNITS
                }
                for workload in card.workloads
                if card.record(row, workload) is not None
            },
        }
        for row in ranked(card)
    ]
    return plain(
        {
            "settings": card.settings,
            "workloads": {name: _workload(card, name) for name in card.workloads},
            "rows": rows,
            "claims": [asdict(check) for check in claims.checks(card)],
        }
    )


def ranked(card: Card) -> list[Row]:
    """The rows, the best score in steps first."""
    scores = card.scores("steps")
    return sorted(card.rows, key=lambda row: -scores.get(row, 0.0))


def _workload(card: Card, name: str) -> dict[str, Any]:
    record = next(r for row in card.rows if (r := card.record(row, name)))
    times = card.times.get(name, {})
    return {
        "steps": record["steps"],
        "seeds": record["seeds"],
        "metric": card.metric(name),
        "target_loss": card.target(name),
        "target_metric": _shown(card, name, card.target(name, METRIC)),
        "adam_seconds_per_step": times.get("seconds"),
        "timed_on": times.get("device"),
    }


def _cell(card: Card, row: Row, workload: str) -> dict[str, Any]:
    """How a row fared on a workload."""
    record = card.record(row, workload)
    assert record is not None
    found: dict[str, Any] = {
        "learning_rate": record["learning_rate"],
        "schedule": record["schedule"],
        "failure": record["failure"],
        "seconds_per_step": card.pace(row, workload),
    }
    for name, view in VIEWS.items():
        final = card.final(row, workload, view)
        assert final is not None
        found[name] = _spread(card, workload, view, final)
        found[f"{name}_steps"] = _or_never(card.steps(row, workload, view))
        found[f"{name}_seconds"] = _or_never(card.seconds(row, workload, view))
    if row.tuned:
        best = card.record(row, workload, METRIC)
        found["learning_rate_metric"] = best and best["learning_rate"]
    return found


def _spread(card: Card, workload: str, view: View, final: np.ndarray) -> list[Any]:
    """Median, lowest and highest over seeds, as the metric is usually given."""
    numbers = (float(np.median(final)), float(np.min(final)), float(np.max(final)))
    if view.what != "metric":
        return list(numbers)
    return [_shown(card, workload, number) for number in numbers]


def _shown(card: Card, workload: str, number: float | None) -> float | None:
    """Accuracy in the place of the error it is compared by."""
    if number is None or card.metric(workload) != "test_accuracy":
        return number
    return 1.0 - number if np.isfinite(number) else None


def _or_never(time: float | None) -> float | str | None:
    return "never" if time is not None and np.isinf(time) else time
