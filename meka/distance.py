"""A scale for steps from the whole run: how far the solution is from the start.

A gradient g at x says that the solution lies at least <g, x0 - x> / |g| from the
start x0 on its far side. Weighted sums of both over the run make a lower bound D on
the distance that grows quickly from a tiny guess and then stays (Mishchenko and Defazio
2023, "Prodigy", with Adam's moments).

Here the direction is the filtered gradient's, with Nesterov's look ahead, and the
distance is judged by the raw gradient. The filter remembers its errors, and the
parameters drift along them, so <m, x0 - x> is positive by their square alone; a fresh
minibatch knows nothing of that. And D may grow by a factor a step at most: a step that
is too long is followed by a gradient that points back at the start, which makes D grow
further still. Small steps first tell what the large ones need to know.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka import tree
from meka.tree import Array, PyTree

# A first guess that is too small for any use, and grows; so small a step has to be
# seen, though, by parameters that are rounded to a share of their size.
_GUESS, _SHARE = 1e-6, 1e-4
_MOMENTUM, _SECOND, _EPSILON = 0.9, 0.999, 1e-8  # Adam's
_MEMORY = _SECOND**0.5


class Distance(NamedTuple):
    """What the scale is made of; four buffers of the size of the parameters."""

    count: Array
    distance: Array  # D
    won: Array  # weighted sum of <g, x0 - x>
    pull: PyTree  # weighted sum of g
    start: PyTree  # x0
    momentum: PyTree
    second: PyTree
    size: Array  # mean |x0|


def start(params: PyTree) -> Distance:
    """Before the first step."""
    wide = tree.widen(params)
    zero = jax.tree.map(jnp.zeros_like, wide)
    none = jnp.zeros((), tree.scalar_dtype(params))
    guess = jnp.maximum(none + _GUESS, _visible(params))
    count = jnp.zeros((), jnp.int32)
    size = tree.dot(wide, jax.tree.map(jnp.sign, wide)) / max(tree.size(wide), 1)
    return Distance(count, guess, none, zero, wide, zero, zero, size)


def _visible(params: PyTree) -> Array:
    """A step that changes the largest parameter, if a ten-thousandth of it does."""

    def one(x: Array) -> Array:
        share = min(4 * float(jnp.finfo(x.dtype).eps), _SHARE)
        largest = jnp.max(jnp.abs(x), initial=0).astype(tree.scalar_dtype(params))
        return share * jnp.where(jnp.isfinite(largest), largest, 0)

    sizes = [one(x) for x in jax.tree.leaves(params)]
    return jnp.max(jnp.stack(sizes)) if sizes else jnp.zeros(())


def advance(
    state: Distance,
    params: PyTree,
    gradient: PyTree,
    filtered: PyTree,
    rate: Array,
    growth: float,
    nesterov: bool = True,
) -> tuple[PyTree, Distance]:
    """The step to take, and the state after it.

    Args:
      state: before the step.
      params: where the gradients were taken.
      gradient: of the minibatch.
      filtered: the belief about the whole gradient.
      rate: where the run is in its schedule, 1 for full steps.
      growth: the most by which the distance may grow, as a factor.
      nesterov: step along the momentum as it will be after this gradient.
    """
    count, distance = state.count + 1, state.distance
    age = count.astype(distance.dtype)
    correction = jnp.sqrt(1 - _SECOND**age) / (1 - _MOMENTUM**age)
    length = distance * rate.astype(distance.dtype) * correction
    weight = length * distance / _GUESS

    back = tree.subtract(state.start, tree.widen(params))
    pull = _mix(_MEMORY, state.pull, weight, gradient)
    # The same but for a factor, so that it is summed as it comes and not stored first.
    lean = _mix(1, state.pull, weight / _MEMORY, gradient)
    along, total = tree.dots((gradient, back), (lean, jax.tree.map(jnp.sign, lean)))
    total = _MEMORY * total
    won = _MEMORY * state.won + weight * along
    bound = jnp.where(total > 0, won / jnp.where(total > 0, total, 1), 0)

    # Both moments carry D, so that what was seen at a tiny D is soon outweighed.
    fresh = (1 - _MOMENTUM) * distance
    momentum = _mix(_MOMENTUM, state.momentum, fresh, filtered)
    ahead = _mix(_MOMENTUM, momentum, fresh, filtered) if nesterov else momentum
    fresh = (1 - _SECOND) * distance**2
    second = _mix(_SECOND, state.second, fresh, jax.tree.map(jnp.square, gradient))
    floor = distance * _EPSILON
    updates = jax.tree.map(
        lambda m, v, p: (
            -length.astype(m.dtype) * m / (jnp.sqrt(v) + floor.astype(m.dtype))
        ).astype(p.dtype),
        ahead,
        second,
        params,
    )
    distance = jnp.clip(bound, distance, growth * distance)
    new = Distance(
        count, distance, won, pull, state.start, momentum, second, state.size
    )
    return updates, new


def _mix(keep: float, old: PyTree, weight: Array, new: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: keep * x + weight.astype(y.dtype) * y, old, new)
