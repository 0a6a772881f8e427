"""Slope and curvature along a direction: the numbers a step size is chosen from.

The paper needs d'Bd along the *new* direction d but computes only Bδ along the last
step. Two ways out: `current` evaluates the new direction on this minibatch (one more
pass); `lagged` reads the last direction on the fresh examples of this step, for
nothing and without bias, since that direction did not see these examples.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from meka import moments, tree
from meka.checks import check_batch, check_losses, check_sample
from meka.convolutions import for_inside
from meka.gaussian import Moments
from meka.groups import one_in, others, share, together
from meka.observation import Losses, Observation
from meka.tree import Array, PyTree

Curve: TypeAlias = Callable[[PyTree], tuple[Moments, Moments]]


class Scene(NamedTuple):
    """What is known when a direction has been chosen and its length has not."""

    direction: PyTree
    slope: Moments  # along it, as the filter has it: -d'm and d'Pd
    observation: Observation
    last_norm: Array  # norm of the last direction, before its step size
    last_variance: Array  # variance of the slope along the last step, per length²
    norm: Array  # of the direction
    bend: Moments  # curvature along the direction before, per unit of length


class Probe(NamedTuple):
    """Slope -d'∇f, curvature d'Bd and their variances along a direction d."""

    slope: Array
    curvature: Array
    slope_variance: Array
    curvature_variance: Array
    seen: Array | bool = True  # false: nothing moved, so there was nothing to see


ProbeFunction: TypeAlias = Callable[[Scene, Curve], Probe]


def current(scene: Scene, curve: Curve) -> Probe:
    """Along the new direction, on this minibatch (the paper's Eq. 11).

    The slope and its variance are the filter's, -d'm and d'Pd; the curvature and its
    variance are measured example by example.
    """
    _, curvature = curve(scene.direction)
    return Probe(
        slope=scene.slope.mean,
        curvature=curvature.mean,
        slope_variance=scene.slope.variance,
        curvature_variance=curvature.variance,
    )


def lagged(scene: Scene, curve: Curve) -> Probe:
    """Along the last displacement, as the fresh examples of this step see it.

    Both are rescaled to the last direction before its step size. The slope's
    variance is the one the filter had when it chose that step.
    """
    del curve
    path, norm = scene.observation.path, scene.last_norm
    squared = norm * norm
    return Probe(
        slope=path.slope.mean * norm,
        curvature=path.curvature.mean * squared,
        slope_variance=scene.last_variance * squared,
        curvature_variance=path.curvature.variance * squared * squared,
        seen=(path.length > 0) & (norm > 0),
    )


def sometimes(asked: Array | bool) -> ProbeFunction:
    """`current` at some steps; at the others curvature is taken to be as it was.

    So is its variance, both per unit of length: what enters the average over time are
    as many entries as there are steps, whose slope is that of the step.
    """

    def carried(scene: Scene) -> Probe:
        (slope, variance), square = scene.slope, scene.norm * scene.norm
        bend, spread = scene.bend
        return Probe(slope, bend * square, variance, spread * square * square)

    def probe(scene: Scene, curve: Curve) -> Probe:
        if asked is False:
            return carried(scene)
        looked = jax.lax.cond(
            asked,
            for_inside(lambda: current(scene, curve)[:4]),
            lambda: carried(scene)[:4],
        )
        return Probe(*looked)

    return current if asked is True else probe


def curve(
    losses: Losses,
    params: PyTree,
    batch: PyTree,
    *,
    mask: Array | None = None,
    micro_batches: int = 1,
    sample: int = 1,
    afresh: bool = False,
) -> Curve:
    """Slopes and curvatures of a batch along any direction, with exact variances.

    The returned function maps a direction d to the moments of -d'∇f and d'Bd. Two
    nested forward-mode derivatives of t ↦ losses(params + t d, batch) give every
    example's, with no backward pass and no memory. With ``sample`` one of so many
    examples is asked, where it divides their number and there is no mask. ``afresh``
    begins once the direction is known: nothing is kept for it that was computed for the
    gradient, which saves memory and costs a pass forward. For the same reason a lone
    accelerator is then given one half of the examples after the other.
    """
    count = check_batch(batch, mask)
    check_losses(losses, params, batch, count)
    check_sample(sample)
    if (fewer := share(sample, count, mask)) > 1:
        batch, count = one_in(batch, fewer), count // fewer

    def along(direction: PyTree) -> tuple[Moments, Moments]:
        # Backwards, where the slope is -d'∇f; and the opposite of a direction that was
        # turned against the gradient needs no storing.
        tangent = tree.cast_like(jax.tree.map(jnp.negative, direction), params)
        here = params
        if afresh:
            tangent, here = tree.one_by_one(tangent, params)
        find = partial(_per_example, losses, here, tangent, micro_batches)
        halves = afresh and tree.accelerated() and micro_batches == 1 and count % 2 == 0
        slope, curvature = _in_halves(find, batch) if halves else find(batch)
        weights = jnp.ones(count) if mask is None else mask.astype(jnp.float32)
        keep = weights > 0

        def summarise(x: Array) -> Moments:
            x = jnp.where(keep, x, 0).astype(tree.scalar_dtype(params))
            return moments.stacked_groups(x, weights, diagonal=False).moments()

        return summarise(slope), summarise(curvature)

    return along


def _in_halves(find: Callable[[PyTree], tuple[Array, Array]], batch: PyTree):
    first, batch = tree.one_by_one(find(one_in(batch, 2)), batch)
    return jax.tree.map(together, first, find(others(batch, 2)))


def _per_example(losses, params, tangent, micro_batches, batch) -> tuple[Array, Array]:
    def both(part: PyTree) -> tuple[Array, Array]:
        def value(p: PyTree) -> Array:
            return losses(p, part)

        def slope(p: PyTree) -> Array:
            return jax.jvp(value, (p,), (tangent,))[1]

        return jax.jvp(slope, (params,), (tangent,))

    count = jax.tree.leaves(batch)[0].shape[0]
    if micro_batches == 1:
        return both(batch)
    padding = -count % micro_batches
    if padding:  # rows that are computed and dropped
        batch = jax.tree.map(lambda x: jnp.concatenate([x, x[:padding]]), batch)
    # Interleaved parts keep a batch that is sharded over devices where it is.
    rows = (count + padding) // micro_batches
    parts = jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(rows, micro_batches, *x.shape[1:]), 0, 1),
        batch,
    )
    slopes, curvatures = jax.lax.map(for_inside(both), parts)
    return slopes.T.ravel()[:count], curvatures.T.ravel()[:count]
