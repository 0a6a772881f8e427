"""Which example spoiled a step: found afterwards, by taking the step again without it.

A step whose loss is not finite names the example itself (``info.suspect``). Where every
loss is finite and a gradient or a Hessian product is not, the batch holds only sums of
those. Half of the examples, repeated to fill the batch, spoil the step again or they
do not; so a few more steps, off the fast path, lead to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def find(accepts: Callable[[PyTree], Any], batch: PyTree) -> int:
    """The first example of a batch that alone is enough for a step to be rejected.

    Args:
        accepts: whether a step on a batch of the same shape would be taken, from where
            the rejected one began: as ``lambda b: step(params, state, b)[2].accepted``.
        batch: of the rejected step.

    Returns:
        The index of the example, or -1 where no single one is to blame, as when only
        the sum of all overflows.
    """
    count = len(jax.tree.leaves(batch)[0])

    def spoils(first: int, end: int) -> bool:
        rows = first + jnp.arange(count) % (end - first)
        return not accepts(jax.tree.map(lambda x: x[rows], batch))

    first, end = 0, count
    while end - first > 1:
        middle = (first + end) // 2
        if spoils(first, middle):
            end = middle
        elif spoils(middle, end):
            first = middle
        else:
            return -1
    return first
