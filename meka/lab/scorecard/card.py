"""Records as a card: rows that compete, targets, times to them and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meka.lab.optimizers import TABLE
from meka.lab.scorecard import scores
from meka.lab.scorecard.plan import BASE, SUBJECTS, TUNED, one_setting
from meka.lab.scorecard.records import Record, key

OURS = ("auto", "meka", "adameka")
"""What begins the name of an optimizer of this library."""
_START = 1e-3  # within which the losses of all runs agree before the first step


class View(NamedTuple):
    """What is compared: the training loss or the test metric, of which iterates."""

    what: str = "loss"  # or "metric"
    iterate: str = ""  # or "average_"


PLAIN, AVERAGED = View(), View(iterate="average_")
METRIC, METRIC_AVERAGED = View("metric"), View("metric", "average_")


@dataclass(frozen=True)
class Row:
    """A competitor: an optimizer at one setting, or at the best of its grid."""

    optimizer: str
    tuned: bool = False

    @property
    def name(self) -> str:
        """As it is shown."""
        return f"{self.optimizer}, tuned" if self.tuned else self.optimizer

    @property
    def ours(self) -> bool:
        """Whether it is of this library."""
        return self.optimizer.split("-")[0] in OURS

    @property
    def tunes_itself(self) -> bool:
        """Whether nobody is expected to search its rate."""
        return not self.tuned and not TABLE[self.optimizer].tuned


class Card:
    """All that can be read off the records."""

    def __init__(self, records: Mapping[str, Any]):
        """Index the records; nothing is computed yet."""
        self.settings: dict[str, Any] = records["settings"]
        self.times: dict[str, Any] = records["times"]
        self._records = {
            key(record): record
            for record in records["runs"]
            if record["optimizer"] in TABLE
        }
        present = {workload for workload, _ in self._records}
        order = [each.name for scale in ("full", "smoke") for each in SUBJECTS[scale]]
        self.workloads = [name for name in dict.fromkeys(order) if name in present]

    @cached_property
    def rows(self) -> list[Row]:
        """Those of whom there is a run: at one setting, then the tuned ones."""
        found = {record["optimizer"] for record in self._records.values()}
        grids = [
            name for name in TUNED if any(self._grid(name, w) for w in self.workloads)
        ]
        return [Row(name) for name in TABLE if name in found] + [
            Row(name, tuned=True) for name in grids
        ]

    def row(self, name: str) -> Row | None:
        """The row of this name, if there is one."""
        return next((row for row in self.rows if row.name == name), None)

    def metric(self, workload: str) -> str:
        """The test metric: accuracy, else loss, else the exact objective."""
        curves = {
            name
            for (own, _), record in self._records.items()
            if own == workload
            for name in record["curves"]
        }
        for name in ("test_accuracy", "test_loss"):
            if name in curves:
                return name
        return "train_loss"

    def record(self, row: Row, workload: str, view: View = PLAIN) -> Record | None:
        """The run behind a row; of a tuned one, the best of the grid in this view."""
        if not row.tuned:
            return self._records.get((workload, one_setting(row.optimizer)))
        grid = self._grid(row.optimizer, workload)
        return min(
            grid, key=lambda record: np.median(self._last(record, view)), default=None
        )

    def curve(self, record: Record, view: View) -> np.ndarray:
        """(evaluations, seeds), lower is better, infinite where not finite."""
        name = "train_loss"
        if view.what == "metric":
            name = self.metric(record["workload"])
        values = np.array(
            record["curves"].get(view.iterate + name, []), dtype=float
        ).reshape(-1, record["seeds"])
        values = np.where(np.isfinite(values), values, np.nan)
        if name == "test_accuracy":
            values = 1.0 - values
        return np.where(np.isnan(values), np.inf, values)

    def final(self, row: Row, workload: str, view: View = PLAIN) -> np.ndarray | None:
        """What each seed ended at, lower is better; None if it was not run."""
        record = self.record(row, workload, view)
        return None if record is None else self._last(record, view)

    def target(self, workload: str, view: View = PLAIN) -> float | None:
        """What is to be reached: the worst seed of Adam at the best of its grid.

        Of the plain iterates, also where averaged ones are compared.
        """
        final = self.final(Row(BASE, tuned=True), workload, View(view.what))
        if final is None or not np.isfinite(np.median(final)):
            return None
        return float(np.max(final[np.isfinite(final)]))

    def steps(self, row: Row, workload: str, view: View = PLAIN) -> float | None:
        """Steps to the target; infinite if never, None if it cannot be known."""
        record, target = self.record(row, workload, view), self.target(workload, view)
        if record is None or target is None:
            return None
        if record["failure"] and not record["step"]:
            return float("inf")
        return scores.time_to(record["step"], self.curve(record, view), target)

    def seconds(self, row: Row, workload: str, view: View = PLAIN) -> float | None:
        """Steps to the target times the seconds of one, measured apart."""
        steps, pace = self.steps(row, workload, view), self.pace(row, workload)
        if steps is None or not np.isfinite(steps):
            return steps if workload in self.times else None
        return None if pace is None else steps * pace

    def pace(self, row: Row, workload: str) -> float | None:
        """Seconds a step."""
        own = self.times.get(workload)
        if own is None or row.optimizer not in own["ratios"]:
            return None
        return own["seconds"] * own["ratios"][row.optimizer][1]

    def ratios(self, unit: str, view: View = PLAIN) -> dict[Row, dict[str, float]]:
        """Time to the target over the best row's, by row and workload.

        Only of workloads that have a target (and, for seconds, were timed). What was
        not run is left out.
        """
        time = self.steps if unit == "steps" else self.seconds
        found = {
            row.name: {
                workload: value
                for workload in self.workloads
                if (value := time(row, workload, view)) is not None
            }
            for row in self.rows
        }
        ratio = scores.ratios(found)
        return {row: ratio[row.name] for row in self.rows}

    def profile_ratios(self, unit: str, view: View = PLAIN) -> dict[Row, list[float]]:
        """The ratios on all workloads that count; infinite where a row was not run."""
        found = self.ratios(unit, view)
        counted = [w for w in self.workloads if any(w in own for own in found.values())]
        return {
            row: [own.get(workload, np.inf) for workload in counted]
            for row, own in found.items()
        }

    def scores(self, unit: str, view: View = PLAIN) -> dict[Row, float]:
        """The area under the profile of each row; empty if nothing can be compared.

        In seconds only of rows that were timed wherever they reach the target.
        """
        found = self.profile_ratios(unit, view)
        return {
            row: scores.area(own)
            for row, own in found.items()
            if own and (unit == "steps" or self._timed(row, view))
        }

    def _timed(self, row: Row, view: View) -> bool:
        reached = [
            workload
            for workload in self.workloads
            if workload in self.times
            and (steps := self.steps(row, workload, view)) is not None
            and np.isfinite(steps)
        ]
        return all(self.pace(row, workload) is not None for workload in reached)

    def incomplete(self, row: Row) -> list[str]:
        """The workloads on which a row was not run."""
        return [w for w in self.workloads if self.record(row, w) is None]

    def unlike(self) -> list[str]:
        """Workloads whose runs began at different losses: their data were not the same.

        As when the text came from two versions of Python.
        """
        found = []
        for workload in self.workloads:
            starts = [
                self.curve(record, PLAIN)[0]
                for (own, _), record in self._records.items()
                if own == workload and record["step"]
            ]
            if starts and not np.allclose(starts, starts[0], rtol=_START):
                found.append(workload)
        return found

    def _grid(self, optimizer: str, workload: str) -> list[Record]:
        names = [f"{optimizer}-{rate:g}" for rate in TABLE[optimizer].grid]
        found = [self._records.get((workload, name)) for name in names]
        # A lone run at the default is no grid.
        return [r for r in found if r] if sum(map(bool, found)) > 1 else []

    def _last(self, record: Record, view: View) -> np.ndarray:
        curve = self.curve(record, view)
        if not len(curve) or record["step"][-1] < record["steps"]:
            return np.full(record["seeds"], np.inf)
        return curve[-1]
