"""Few points that keep every spike.

Rows are gathered in buckets of equal width, a power of two. Of each bucket three
numbers are kept: the median of all its values, over steps and seeds, the least and the
greatest. The line through the medians is what is typical; the band between the others
holds everything that happened, however briefly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

POINTS = 360
"""The most points of a curve."""


class Curve(NamedTuple):
    """Middle, least and greatest of each bucket."""

    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray


Rows = Mapping[str, np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Values (rows, seeds) by name, or a triple of them: middle, low edge, high edge."""


def width_for(rows: int, points: int = POINTS) -> int:
    """The bucket width: the least power of two that needs at most ``points``."""
    width = 1
    while -(-rows // width) > points:
        width *= 2
    return width


class Thinner:
    """Curves of rows that keep coming; a bucket that is full is never looked at again.

    Args:
        rows: from first and last row to the values of the rows between.
        points: the most points of a curve.
    """

    def __init__(self, rows: Callable[[int, int], Rows], points: int = POINTS):
        """No rows yet."""
        self._rows, self._points = rows, points
        self.width = 1
        self._full = 0  # buckets whose curve will not change
        self._parts: dict[str, list[Curve]] = {}

    def update(self, size: int) -> dict[str, Curve]:
        """The curves of the first ``size`` rows."""
        width = width_for(size, self._points)
        if width != self.width or size < self._full * width:
            self.width, self._full, self._parts = width, 0, {}
        full = size // width
        if full > self._full:
            new = self._buckets(self._full * width, full * width)
            for name, curve in new.items():
                self._parts.setdefault(name, []).append(curve)
            self._full = full
        last = self._buckets(full * width, size) if size > full * width else {}
        names = dict.fromkeys([*self._parts, *last])
        return {
            name: _joined([*self._parts.get(name, []), *_one(last.get(name))])
            for name in names
        }

    def _buckets(self, start: int, stop: int) -> dict[str, Curve]:
        width = min(self.width, stop - start)
        curves = {}
        for name, values in self._rows(start, stop).items():
            parts = values if isinstance(values, tuple) else (values,) * 3
            middle, low, high = (_usable(x, width) for x in parts)
            curves[name] = Curve(_middle(middle), _least(low), -_least(-high))
        return curves


def _usable(values: np.ndarray, width: int) -> np.ndarray:
    """Buckets down, values across; what overflowed or diverged is a gap."""
    values = values.reshape(len(values) // width, -1)
    return np.where(np.isfinite(values) & (np.abs(values) < 1e30), values, np.nan)


def _middle(values: np.ndarray) -> np.ndarray:
    ranked = np.sort(values, axis=1)  # NaN last
    count = np.isfinite(values).sum(1)
    place = np.maximum(count - 1, 0)[:, None]
    lower = np.take_along_axis(ranked, place // 2, 1)
    upper = np.take_along_axis(ranked, (place + 1) // 2, 1)
    return ((lower + upper) / 2)[:, 0]


def _least(values: np.ndarray) -> np.ndarray:
    return np.fmin.reduce(values, axis=1)


def _joined(parts: list[Curve]) -> Curve:
    return Curve(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _one(curve: Curve | None) -> list[Curve]:
    return [] if curve is None else [curve]
