"""Times to a target, performance profiles and the area under them.

As AlgoPerf scores (Dahl et al., 2023, after Dolan and Moré, 2002): the time an entry
needs to a target on a workload, over the best time of any entry there, is its ratio;
the profile ρ(τ) is the share of workloads where the ratio is at most τ; the score is
the area under it from 1 to 4, over 3, so that it lies between 0 and 1. An entry that
never reaches the target has an infinite ratio.

AlgoPerf integrates 100 points by trapezoids; the profile is a step function, whose area
is exact here. What else differs is in docs/scorecard.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LAST = 4.0
"""Where the profile ends."""


def time_to(step: Sequence[int], values: np.ndarray, target: float) -> float:
    """The first evaluated step at or below the target, median over seeds.

    ``values`` is (evaluations, seeds). Infinite if the median seed never gets there;
    the start, before any step, does not count, and nothing is interpolated.
    """
    after = np.asarray(step) > 0
    steps, reached = np.asarray(step)[after], np.asarray(values)[after] <= target
    if not len(steps):
        return float("inf")
    first = np.where(reached.any(0), steps[reached.argmax(0)], np.inf)
    return float(np.median(first))


def ratios(
    times: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, float]]:
    """Times by entry and workload, over the best of each workload.

    Where nobody reaches the target all ratios are infinite.
    """
    workloads = dict.fromkeys(name for own in times.values() for name in own)
    best = {
        name: min(own.get(name, np.inf) for own in times.values()) for name in workloads
    }
    return {
        entry: {
            name: own[name] / best[name] if np.isfinite(own[name]) else np.inf
            for name in own
        }
        for entry, own in times.items()
    }


def profile(own: Sequence[float], taus: Any) -> np.ndarray:
    """ρ(τ): the share of the ratios that are at most τ."""
    return np.mean(np.asarray(own)[:, None] <= np.asarray(taus)[None], axis=0)


def area(own: Sequence[float], last: float = LAST) -> float:
    """The area under the profile from 1 to ``last``, over its length; exact.

    A workload with ratio r adds a step that begins at r.
    """
    return float(np.mean(np.maximum(last - np.asarray(own), 0.0) / (last - 1.0)))
