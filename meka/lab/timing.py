"""Seconds per step of several contestants, interleaved in one process.

A machine that is busy or throttles slows everything that runs at that moment, so the
contestants take turns in short bursts, in a fresh order every round, and what is
compared is the ratio to the first of them *within a round*. The first rounds warm up.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

PyTree = Any
CYCLE = 8


@dataclass
class Contestant:
    """A compiled step ``carry, batch -> carry`` with donated carry."""

    name: str
    step: Callable[[PyTree, PyTree], PyTree]
    carry: PyTree
    batch: PyTree
    steps_per_call: int = 1
    calls: int = 1
    seconds: list[float] = field(default_factory=list)

    def burst(self) -> float:
        """Seconds per step over one burst of calls."""
        carry = self.carry
        began = time.perf_counter()
        for _ in range(self.calls):
            carry = self.step(carry, self.batch)
        jax.block_until_ready(carry)
        spent = time.perf_counter() - began
        self.carry = carry
        return spent / (self.calls * self.steps_per_call)


def interleave(
    contestants: list[Contestant],
    *,
    rounds: int = 30,
    warm_up: int = 3,
    burst_seconds: float = 0.05,
    limit_seconds: float = float("inf"),
    cycle: int = CYCLE,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Time all contestants; their ``seconds`` hold one figure a round.

    After ``limit_seconds`` no further round begins, once there are five.
    """
    began = time.perf_counter()
    order = list(contestants)
    dice = random.Random(0)
    for each in order:
        each.burst()  # touches all memory once
        # Whole cycles of steps that differ: noise is measured at every eighth.
        calls = max(1, cycle // each.steps_per_call)
        wanted = burst_seconds / (each.burst() * each.steps_per_call)
        each.calls = calls * max(1, round(wanted / calls))
    for number in range(-warm_up, rounds):
        dice.shuffle(order)
        for each in order:
            seconds = each.burst()
            if number >= 0:
                each.seconds.append(seconds)
        progress(number + 1)
        if number >= 4 and time.perf_counter() - began > limit_seconds:
            break


def summary(each: Contestant, base: Contestant) -> dict[str, float]:
    """Median and quartiles of the seconds, and of the ratios round by round."""
    seconds, ratio = np.array(each.seconds), np.array(each.seconds) / base.seconds
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    least, ratio_middle, most = np.percentile(ratio, (25, 50, 75))
    return {
        "seconds": float(middle),
        "seconds_low": float(low),
        "seconds_high": float(high),
        "ratio": float(ratio_middle),
        "ratio_low": float(least),
        "ratio_high": float(most),
    }


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """What a compiled step holds at once: arguments, results and work space."""
    stats = compiled.memory_analysis()
    assert stats is not None
    shared = stats.alias_size_in_bytes  # donated arguments that became results
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - shared
    return int(held + stats.temp_size_in_bytes)
