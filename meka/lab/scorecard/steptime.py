"""Seconds a step of every optimizer on one workload, interleaved in one process.

Runs that share a machine cannot be timed, so steps are timed apart: one seed, through
the bench's own loop, the optimizers taking turns, medians of the ratio to Adam's turn
of the same round. What is timed is the run itself past its first quarter, over again if
it ends: what a step costs may depend on the noise between batches, and those that come
back every few steps are soon known by heart. Where an optimizer also looks at all data
now and then (SVRG), that is spread over the steps between. Evaluation and compilation
are not counted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meka.lab.config import RunConfig
from meka.lab.scorecard.plan import BASE

_LENGTH = 24  # steps a call
_WARM = 4  # a fourth of the run is trained first: what a step costs may depend on it
_ROUNDS = 30
_COMPILERS = 8  # threads


@dataclasses.dataclass(frozen=True)
class Order:
    """What to time."""

    workload: str
    steps: int
    optimizers: Sequence[str]
    path: str
    data_dir: str | None
    seconds: float


def measure(order: Order) -> dict[str, Any]:
    """Adam's seconds a step, and the ratios of all to it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meka.lab import optimizers, timing, workloads
    from meka.lab.runfolder import environment

    workload = _on_device(workloads.load(order.workload, order.data_dir))
    names = [
        name
        for name in dict.fromkeys([BASE, *order.optimizers])
        if workload.data is not None or not optimizers.TABLE[name].finite
    ]
    # Compiling takes most of the time, and can be done side by side.
    with ThreadPoolExecutor(_COMPILERS) as pool:
        loops = list(pool.map(lambda name: _begin(workload, order.steps, name), names))
    loops = [(loop, _warmed(loop, carry, order.steps)) for loop, carry in loops]
    length = max(1, min(_LENGTH, order.steps - order.steps // _WARM))
    contestants = [
        timing.Contestant(
            name,
            _Course(loop, carry, order.steps, length),
            jax.tree.map(jnp.copy, carry),
            None,
            steps_per_call=length,
        )
        for name, (loop, carry) in zip(names, loops, strict=True)
    ]
    timing.interleave(contestants, rounds=_ROUNDS, limit_seconds=order.seconds)
    base = contestants[0]
    unit = float(np.median(base.seconds))
    ratios = {}
    for each, (loop, _) in zip(contestants, loops, strict=True):
        ratio = np.array(each.seconds) / base.seconds
        ratio = ratio + _refreshing(loop, each.carry) / unit
        ratios[each.name] = np.percentile(ratio, (25, 50, 75)).tolist()
    return {
        "left_out": [name for name in order.optimizers if name not in names],
        "seconds": unit,
        "ratios": ratios,
        "rounds": len(base.seconds),
        "device": environment()["device"],
    }


class _Course:
    """A run from its first quarter to its end, so many steps a call, and over again."""

    def __init__(self, loop: Any, carry: Any, steps: int, length: int):
        self._loop, self._warm, self._length = loop, carry, length
        self._begin, self._end = steps // _WARM, steps
        self._at = self._begin

    def __call__(self, carry: Any, _: Any) -> Any:
        import jax
        import jax.numpy as jnp

        if self._at + self._length > self._end:
            self._at, carry = self._begin, jax.tree.map(jnp.copy, self._warm)
        carry, _ = self._loop.advance(carry, self._at, self._length)
        self._at += self._length
        return carry


def _on_device(workload: Any) -> Any:
    """The data laid out once, for all optimizers."""
    import jax
    import jax.numpy as jnp

    if workload.data is None:
        return workload
    data = type(workload.data)(*jax.tree.map(jnp.asarray, tuple(workload.data)))
    return dataclasses.replace(workload, data=data)


def _begin(workload: Any, steps: int, name: str) -> tuple[Any, Any]:
    from meka.lab.train import make_loop

    config = RunConfig(
        workload=workload.name, optimizer=name, steps=steps, eval_examples=1
    )
    loop = make_loop(config, workload)
    carry = loop.start()
    if loop.method.refresh is not None:
        carry = loop.refresh(carry)
    carry, _ = loop.advance(carry, 0, 1)
    return loop, carry


def _warmed(loop: Any, carry: Any, steps: int) -> Any:
    from meka.lab.loop import CHUNK

    done, end = 1, steps // _WARM
    while done < end:
        length = min(CHUNK, end - done)
        carry, _ = loop.advance(carry, done, length)
        done += length
    return carry


def _refreshing(loop: Any, carry: Any) -> float:
    """Seconds a step spent looking at all data."""
    import jax
    import numpy as np

    if loop.method.refresh is None:
        return 0.0
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(loop.refresh(carry).state)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)) / loop.method.refresh_every


def main() -> int:
    """Time what the standard input orders, and write it."""
    from meka.lab.reproduce import setting as files

    order = Order(**json.loads(sys.stdin.read()))
    found = measure(order)
    files.write(Path(order.path), files.plain(found))
    for name, (_, ratio, _) in sorted(found["ratios"].items(), key=lambda x: x[1][1]):
        print(f"    {ratio:6.2f} x Adam's  {name}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
