"""One look at some examples: gradient, its change, and both along the last step.

All may be asked for their gradient and fewer of them for its change. `meka.observation`
decides who is asked what, and makes moments of what they say.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meka import tree
from meka.checks import check_part
from meka.groups import Look, all_groups, deal, fill, one_in, others, together
from meka.scatters import Scatters, no_scatters, scatters_of
from meka.transport import Loss, gradient_alone
from meka.tree import Array, PyTree


def look_at(
    losses, transport, params, previous, handed, batch, weights, total=None, fewer=1
) -> tuple[Look, Array]:
    """Differentiate the mean loss of one group, and look along the displacement.

    The change of the gradient is that of one in ``fewer`` examples. Also every
    example's loss.
    """
    points = params, previous, handed
    move = partial(_differentiate, losses, transport, *points)
    if fewer == 1:
        values, gradient, change = move(batch, weights, total)
    else:
        # Their gradient is computed once more: to put that of all together from two
        # would be one more sum over all devices, and as long on a CPU.
        alone = partial(_differentiate, losses, gradient_alone, *points)
        values, gradient, _ = alone(batch, weights, total)
        gradient, some = tree.one_by_one(gradient, one_in((batch, weights), fewer))
        _, _, change = move(*some)
    return _along(gradient, change, *points), values


def look_in_two(
    losses,
    transport,
    params: PyTree,
    previous: PyTree,
    handed: PyTree,
    data: tuple[PyTree, Array],
    fewer: int,
    groups: int,
    measure: Array | bool,
) -> tuple[Look, Array, Scatters]:
    """The same on a lone accelerator, and how groups of examples scatter.

    The gradient of all is put together from that of those who tell its change and that
    of the others, one after the other, which takes less memory. Where noise is measured
    the former are asked group by group, and no one is asked twice.
    """
    points = params, previous, handed
    some, rest = one_in(data, fewer), others(data, fewer)
    count = some[1].shape[0]

    def in_groups() -> tuple[Array, PyTree, PyTree, Scatters]:
        whole = fill(some[0], None, -count % groups)
        hands = jax.tree.map(partial(deal, parts=groups), whole)
        look = partial(look_at, losses, transport, *points)
        looks, values = all_groups(look, *hands, diagonal=False)
        means = looks.gradient.mean, looks.change.mean
        return values.T.ravel()[:count], *means, scatters_of(looks)

    def at_once() -> tuple[Array, PyTree, PyTree, Scatters]:
        found = _differentiate(losses, transport, *points, *some)
        return *found, no_scatters(params)

    split = measure is not False
    found = jax.lax.cond(measure, in_groups, at_once) if split else at_once()
    (values, gradient, change, apart), rest = tree.one_by_one(found, rest)
    more, remaining, _ = _differentiate(losses, gradient_alone, *points, *rest)
    gradient = jax.tree.map(lambda a, b: b + (a - b) / fewer, gradient, remaining)
    return _along(gradient, change, *points), together(values, more), apart


def look_back(losses, params, previous, seen: Look, batch, weights) -> Look:
    """What was seen, and the change of the gradient since ``previous``."""
    loss = _mean_loss(losses, tree.scalar_dtype(params), batch, weights)
    before = jax.grad(lambda p: loss(p)[0])(previous)
    change = tree.subtract(seen.gradient, tree.widen(before))
    along = tree.dot(change, displacement_between(params, previous))
    unit = jnp.where(seen.length > 0, seen.length, 1)
    along = along / unit
    return seen._replace(
        change=change, slope=seen.slope + along, curvature=along / unit
    )


def displacement_between(params: PyTree, previous: PyTree) -> PyTree:
    """What was added to the previous parameters."""
    return tree.subtract(tree.widen(params), tree.widen(previous))


def _differentiate(
    losses, transport, params, previous, handed, batch, weights, total=None
) -> tuple[Array, PyTree, PyTree]:
    """Every example's loss, and gradient and change of their mean."""
    loss = _mean_loss(losses, tree.scalar_dtype(params), batch, weights, total)
    tangent = None if handed is None else tree.cast_like(handed, params)
    values, gradient, change = transport(loss, params, previous, tangent)
    return values, tree.widen(gradient), tree.widen(change)


def _mean_loss(losses, dtype, batch, weights, total: Any = None) -> Loss:
    """The mean loss by weight, or by ``total``, and every example's."""
    if total is None:
        total = jnp.maximum(jnp.sum(weights), 1)

    def loss(p: PyTree) -> tuple[Array, Array]:
        values = losses(p, batch).astype(dtype)
        check_part(values.shape, weights.shape)
        mean = jnp.sum(weights.astype(dtype) * values)
        return mean / jnp.asarray(total).astype(dtype), values

    return loss


def _along(gradient, change, params, previous, handed) -> Look:
    displacement = handed
    if handed is None:
        # Only now, and again for whoever else needs it: it is not to be kept.
        gradient, ends = tree.one_by_one(gradient, (params, previous))
        displacement = displacement_between(*ends)
    along_change, along_gradient, square = tree.dots(
        (change, displacement), (gradient, displacement), (displacement, displacement)
    )
    length = jnp.sqrt(square)
    unit = jnp.where(length > 0, length, 1)
    slope, curvature = (along_change - along_gradient) / unit, along_change / unit
    return Look(gradient, change, slope, curvature / unit, length)
