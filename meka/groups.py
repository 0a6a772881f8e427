"""A batch in groups: dealt like cards, each looked at, and what is seen merged.

Nothing here knows what a look is made of, but for its parts: a function of some
examples and their weights returns the group's means.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka import moments
from meka.convolutions import for_inside
from meka.tree import Array, PyTree

# Up to here groups are written out one by one.
_UNROLLED_GROUPS = 4


class Look(NamedTuple):
    """One group's means."""

    gradient: PyTree
    change: PyTree
    slope: Array
    curvature: Array
    length: Array  # of the displacement, the same for all groups


class Looks(NamedTuple):
    """The summaries of everything that is seen group by group."""

    gradient: moments.Summary
    change: moments.Summary
    slope: moments.Summary
    curvature: moments.Summary
    length: Array


def fill(batch: PyTree, mask: Array | None, padding: int) -> tuple[PyTree, Array]:
    """Whole groups with weights: padding rows become copies of a real example.

    So whatever the padding holds (NaN, labels out of range) cannot reach a
    derivative, where a weight of zero would not stop it.
    """
    count = jax.tree.leaves(batch)[0].shape[0]
    weights = jnp.ones(count, jnp.float32)
    if mask is not None:
        real = mask.astype(bool)
        weights = real.astype(jnp.float32)
        source = jnp.where(real, jnp.arange(count), jnp.argmax(real))
        batch = jax.tree.map(lambda x: x[source], batch)
    if padding:
        batch = jax.tree.map(lambda x: jnp.concatenate([x, x[:padding]]), batch)
        weights = jnp.concatenate([weights, jnp.zeros(padding, jnp.float32)])
    return batch, weights


def deal(x: Array, parts: int) -> Array:
    """(n, ...) to (parts, n / parts, ...), example i to part i mod parts."""
    return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)


def share(sample: int, count: int, mask: Array | None) -> int:
    """So many examples one stands for: all do where some could not, or are padding."""
    return sample if mask is None and count % sample == 0 else 1


def one_in(batch: PyTree, one_of: int) -> PyTree:
    """Every so many-th example; strided, so that all devices of a mesh hold some."""
    return jax.tree.map(lambda x: deal(x, one_of)[0], batch)


def others(batch: PyTree, one_of: int) -> PyTree:
    """The examples that `one_in` leaves out."""

    def rest(x: Array) -> Array:
        return deal(x, one_of)[1:].reshape(-1, *x.shape[1:])

    return jax.tree.map(rest, batch)


def together(some: Array, rest: Array) -> Array:
    """What was found for `one_in` and the `others`, in the order of the batch."""
    dealt = jnp.concatenate([some, rest]).reshape(-1, *some.shape)
    return jnp.swapaxes(dealt, 0, 1).reshape(-1, *some.shape[1:])


def all_groups(look, batch, weights, diagonal) -> tuple[Looks, Array]:
    """Every group of a batch dealt as (groups, n / groups, ...).

    Many groups are mapped over on a GPU, which would wait for single ones, and taken
    in turn on a CPU, which has no fast product of stacked matrices.
    """

    def one(own: PyTree, weight: Array) -> tuple[Looks, Array]:
        found, values = look(own, weight)
        return summarise(moments.one_group, found, jnp.sum(weight), diagonal), values

    def unrolled(batch: PyTree, weights: Array) -> tuple[Looks, Array]:
        parts = [jax.tree.map(lambda x, j=j: x[j], batch) for j in range(len(weights))]
        found, values = zip(*map(one, parts, weights), strict=True)
        return reduce(partial(_merge, diagonal=diagonal), found), jnp.stack(values)

    def in_turn(batch: PyTree, weights: Array) -> tuple[Looks, Array]:
        return _in_turn(one, (batch, weights), diagonal)

    def at_once(batch: PyTree, weights: Array) -> tuple[Looks, Array]:
        looks, values = jax.vmap(look)(batch, weights)
        counts = jnp.sum(weights, axis=1)
        return summarise(moments.stacked_groups, looks, counts, diagonal), values

    if len(weights) <= _UNROLLED_GROUPS:
        return unrolled(batch, weights)
    return jax.lax.platform_dependent(batch, weights, cpu=in_turn, default=at_once)


def in_micro_batches(look, batch, weights, groups, micro_batches, diagonal):
    """The same, one micro-batch at a time.

    The cards are dealt into max(groups, micro_batches) parts, part j belonging to
    group j mod groups and to micro-batch j mod micro_batches. So either a
    micro-batch holds whole groups, or a group is made of whole micro-batches.
    """
    outer = min(groups, micro_batches)

    def regroup(x: Array) -> Array:  # parts -> (outer, parts / outer, ...)
        x = x.reshape(x.shape[0] // outer, outer, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    def whole_groups(batch, weights):
        return all_groups(look, batch, weights, diagonal)

    def pieces_of_a_group(batch, weights):
        """Average the pieces' means, by weight, into the group's mean."""

        def piece(total, data):
            own, weight = data
            one, values = for_inside(look)(own, weight)
            size = jnp.sum(weight)
            grown = jax.tree.map(lambda t, x: t + size.astype(x.dtype) * x, total, one)
            return grown, values

        shapes, _ = jax.eval_shape(look, *_first((batch, weights)))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        total, values = jax.lax.scan(piece, zero, (batch, weights))
        weight = jnp.sum(weights)
        size = jnp.maximum(weight, 1)
        mean = jax.tree.map(lambda t: t / size.astype(t.dtype), total)
        return summarise(moments.one_group, mean, weight, diagonal), values

    inner = whole_groups if groups >= micro_batches else pieces_of_a_group
    summary, values = _in_turn(inner, jax.tree.map(regroup, (batch, weights)), diagonal)
    # Back to the order of the parts, as `regroup` found them.
    values = jnp.swapaxes(values, 0, 1)
    return summary, values.reshape(-1, values.shape[-1])


def _in_turn(look, data: tuple[PyTree, Array], diagonal: bool) -> tuple[Looks, Array]:
    """What ``look`` finds in each part of the data, merged as they come."""

    def body(summary: Looks, part) -> tuple[Looks, Array]:
        found, values = for_inside(look)(*part)
        return _merge(summary, found, diagonal), values

    shapes, _ = jax.eval_shape(look, *_first(data))
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, nothing, data)


def summarise(
    summary: Callable[..., moments.Summary], look: Look, weight: Array, diagonal: bool
) -> Looks:
    """Means of one group, or of several stacked, as summaries of each quantity."""
    return Looks(
        summary(look.gradient, weight, diagonal=diagonal),
        summary(look.change, weight, diagonal=diagonal),
        summary(look.slope, weight, diagonal=False),
        summary(look.curvature, weight, diagonal=False),
        jnp.max(look.length),
    )


def _merge(a: Looks, b: Looks, diagonal: bool) -> Looks:
    gradient, change = moments.merge(
        (a.gradient, b.gradient), (a.change, b.change), diagonal=diagonal
    )
    slope, curvature = moments.merge(
        (a.slope, b.slope), (a.curvature, b.curvature), diagonal=False
    )
    length = jnp.maximum(a.length, b.length)
    return Looks(gradient, change, slope, curvature, length)


def _first(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], stacked)
