"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_DECADE = 10.0  # from this ratio of greatest to least on, heights are logarithms


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` characters; a gap where there is no number.

    Positive values that span a decade or more are drawn by their logarithms.
    """
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    edges = [k * len(values) // count for k in range(count + 1)]
    heights = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    known = [h for h in heights if math.isfinite(h)]
    if not known:
        return " " * count
    if min(known) > 0 and max(known) / min(known) >= _DECADE:
        heights = [math.log(h) if math.isfinite(h) else h for h in heights]
        known = [h for h in heights if math.isfinite(h)]
    low, high = min(known), max(known)
    # Scaled first: the difference of two large numbers may overflow.
    unit = max(abs(low), abs(high)) or 1.0
    span = (high / unit - low / unit) or 1.0
    top = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round((h / unit - low / unit) / span * top)]
        if math.isfinite(h)
        else " "
        for h in heights
    )


class Strip:
    """Values that keep coming, in bounded room: neighbours are averaged when full."""

    def __init__(self, room: int = 256):
        """Keep at most ``room`` values."""
        self._room, self._share = room, 1
        self.values: list[float] = []
        self._open: list[float] = []

    def add(self, values: Iterable[float]) -> None:
        """Append values."""
        for value in values:
            self._open.append(float(value))
            if len(self._open) == self._share:
                self.values.append(_mean(self._open))
                self._open = []
            if len(self.values) == self._room:
                pairs = zip(self.values[::2], self.values[1::2], strict=True)
                self.values = [_mean(pair) for pair in pairs]
                self._share *= 2


def _mean(values: Sequence[float]) -> float:
    known = [v / len(values) for v in values if math.isfinite(v)]
    return sum(known) * (len(values) / len(known)) if known else math.nan
