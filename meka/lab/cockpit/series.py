"""The curves of the panels, from what a run recorded.

Norms of noise are those of whole gradients, comparable with the gradient's own. With n
examples a batch, ``noise_scale`` is n tr(Sigma)/|m|², so tr(Sigma) = |m|² noise_scale/n
and the number of parameters is not needed; n is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meka.lab.cockpit.follow import Run, Table
from meka.lab.cockpit.thin import Rows

TRAILING = 50
"""Steps over which innovations are averaged: each alone is mostly chance."""

_AS_THEY_ARE = (
    "loss",
    "step_size",
    "gain",
    "gradient_norm",
    "improvement_probability",
    "model_error",
    "value_variance",
    "observed_variance",
    "noise_scale",
    "rejected",
)


def step_rows(run: Run) -> Callable[[int, int], Rows]:
    """The function from first and last row to the values between, by curve."""

    def rows(start: int, stop: int) -> Rows:
        table, found = run.steps, {}

        def column(name: str) -> np.ndarray:
            return table.column(name, start, stop)

        for name in _AS_THEY_ARE:
            if name in table:
                found[name] = column(name)
        for name in ("innovation", "gradient_innovation"):
            if name in table:
                found[name] = _trailing(table, name, start, stop)
        if _has(table, "value", "value_variance"):
            value, spread = column("value"), 2 * np.sqrt(column("value_variance"))
            found["value"] = (value, value - spread, value + spread)
        if _has(table, "curvature", "direction_norm"):
            found["curvature"] = _over(column("curvature"), column("direction_norm"))
        if _has(table, "gradient_noise", "gradient_variance"):
            ratio = column("gradient_noise") / _positive(column("gradient_variance"))
            found["noise_cut"] = ratio
            found |= _strengths(table, column, ratio, run.batch_size)
        return found

    return rows


def _strengths(
    table: Table, column: Callable, ratio: np.ndarray, n: int | None
) -> Rows:
    """Gradient against noise, before and behind the filter."""
    if not n or not _has(table, "noise_scale", "gradient_norm"):
        return {}
    share = column("noise_scale") / n  # tr(Sigma)/|m|²
    noise = column("gradient_norm") * np.sqrt(share)
    signal = 1 / _positive(share)
    return {
        "noise_norm": noise,
        "error_norm": noise / np.sqrt(_positive(ratio)),
        "signal": signal,
        "filtered_signal": signal * ratio,
    }


def _has(table: Table, *names: str) -> bool:
    return all(name in table for name in names)


def _positive(values: np.ndarray) -> np.ndarray:
    """Values to divide by; a gap where there is nothing to divide by."""
    return np.where(values > 0, values, np.nan)


def _over(values: np.ndarray, length: np.ndarray) -> np.ndarray:
    length = _positive(length)
    return values / length / length


def _trailing(table: Table, name: str, start: int, stop: int) -> np.ndarray:
    """The mean of the last `TRAILING` steps, at each step."""
    first = max(0, start - TRAILING + 1)
    values = table.column(name, first, stop)
    usable = np.isfinite(values) & (values < 1e30)
    sums = np.cumsum(np.where(usable, values, 0), axis=0)
    counts = np.cumsum(usable, axis=0)
    zero = np.zeros((1, values.shape[1]))
    sums, counts = np.concatenate([zero, sums]), np.concatenate([zero, counts])
    ends = np.arange(start, stop) - first + 1
    starts = np.maximum(ends - TRAILING, 0)
    count = counts[ends] - counts[starts]
    return (sums[ends] - sums[starts]) / np.where(count > 0, count, np.nan)
