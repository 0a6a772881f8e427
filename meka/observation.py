"""What one minibatch says: value, gradient and its change, each with its noise.

``losses(params, batch) -> (n,)`` is all that is known of the model. The examples
are dealt into groups like cards, example i to group i mod k; each group's mean loss
is differentiated, and the spread of the groups gives the variances (`meka.moments`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from meka import moments, tree
from meka.checks import (
    check_batch,
    check_groups,
    check_losses,
    check_params,
    check_part,
    check_previous,
    check_sample,
)
from meka.convolutions import for_inside
from meka.gaussian import Moments
from meka.groups import (
    Look,
    Looks,
    all_groups,
    deal,
    fill,
    in_micro_batches,
    one_in,
    others,
    share,
    summarise,
    together,
)
from meka.transport import (
    Loss,
    Transport,
    difference,
    gradient_alone,
    hessian_at_current,
)
from meka.tree import Array, PyTree

Losses: TypeAlias = Callable[[PyTree, PyTree], Array]

# Noise that is measured now and then is measured on one of so many examples: the
# scatter of two groups tells as much however large they are.
_SAMPLE = 4


class Path(NamedTuple):
    """The last displacement as these examples see it, per unit of its length.

    ``slope`` is how fast the loss fell when the step began, -(g - Bδ)'δ/|δ|, and
    ``curvature`` is δ'Bδ/δ'δ. All zero where nothing moved.
    """

    length: Array
    slope: Moments
    curvature: Moments


class Observation(NamedTuple):
    """One minibatch: means, and the variances of these means."""

    value: Moments
    gradient: Moments
    change: Moments
    path: Path
    count: Array  # examples, without padding
    groups: Array  # groups that hold at least one example
    suspect: Array  # index of the first example whose loss is not finite, or -1
    measured: Array | bool = True  # false: variances of gradient and path are not known
    followed: Array | bool = True  # false: the change of the gradient is not known


class Closer(NamedTuple):
    """A look at what a glance left out, for whoever knows only now whether to."""

    wanted: Array
    look: Callable[[], Observation]


def per_example(loss: Callable[[PyTree, PyTree], Array]) -> Losses:
    """Lift the loss of one example to the losses of a batch."""
    return jax.vmap(loss, in_axes=(None, 0))


def observe(
    losses: Losses,
    params: PyTree,
    previous: PyTree,
    batch: PyTree,
    *,
    groups: int = 2,
    transport: Transport = hessian_at_current,
    diagonal: bool = False,
    mask: Array | None = None,
    micro_batches: int = 1,
    measure: Array | bool = True,
    follow: Array | bool = True,
    sample: int = 1,
) -> Observation:
    """Measure value, gradient and change of the gradient since ``previous``.

    Args:
      losses: one loss per example, shape (n,); examples must not see each other.
      params: where to measure.
      previous: the parameters of the step before (equal to params at the start).
      batch: pytree of arrays with the examples on the leading axis.
      groups: how many groups the noise is estimated from, 2 <= groups <= n.
      transport: how the change of the gradient is measured.
      diagonal: keep one variance per coordinate instead of their average.
      mask: true for real examples, false for padding, shape (n,).
      micro_batches: differentiate this many parts of the batch one after another,
        at a fraction of the memory; the result is the same up to rounding.
      measure: whether to split the batch into groups. Where false, it is
        differentiated as a whole, which is cheaper, and the variances of gradient,
        change and path are zero, to be filled in by whoever remembers them; see
        ``measured``. Micro-batches are groups anyway and always measured.
      follow: whether to measure the change of the gradient. Where false it is zero
        and costs nothing, and no noise is measured; see ``followed``. It is measured
        anyway by transports other than `difference`, which share work with the
        gradient, in micro-batches, and with ``measure=True``.
      sample: measure the change of the gradient on one of so many examples, at that
        fraction of its cost and with so much more noise. On all of them where this is
        no divisor of their number, with a mask, with ``measure=True``, and where
        ``follow`` is not ``True``.
    """
    seen = glance(
        losses,
        params,
        previous,
        batch,
        groups=groups,
        transport=transport,
        diagonal=diagonal,
        mask=mask,
        micro_batches=micro_batches,
        measure=measure,
        follow=follow,
        sample=sample,
    )
    return settle(*seen)


def settle(seen: Observation, closer: Closer | None) -> Observation:
    """What is seen after a closer look, where one is wanted."""
    if closer is None:
        return seen
    return jax.lax.cond(closer.wanted, closer.look, lambda: seen)


def glance(
    losses: Losses,
    params: PyTree,
    previous: PyTree,
    batch: PyTree,
    *,
    groups: int,
    transport: Transport,
    diagonal: bool,
    mask: Array | None,
    micro_batches: int,
    measure: Array | bool,
    follow: Array | bool,
    sample: int,
    displacement: PyTree | None = None,
) -> tuple[Observation, Closer | None]:
    """`observe`, but where ``follow`` is known only at run time.

    Then it is what the gradient alone says, without its change or noise, and a closer
    look at these, to be taken inside of a choice that is made anyway. Where a
    ``displacement`` is given, there is no look at ``previous``.
    """
    check_params(params)
    check_previous(params, previous)
    count = check_batch(batch, mask)
    check_losses(losses, params, batch, count)
    check_groups(count, groups, micro_batches)
    check_sample(sample)
    everything = measure is True or micro_batches > 1 or diagonal
    if everything or transport is not difference:
        follow = True
    # A transport that multiplies by the displacement needs it written out; for sums
    # alone it is computed where they are made, since what a choice is handed is
    # written out as well.
    handed = displacement
    if handed is None and transport is not difference:
        handed = _displacement(params, previous)
    points = (params, previous)
    look = partial(_look, losses, transport, *points, handed)
    parts = max(groups, micro_batches)
    batch, weights = fill(batch, mask, -count % parts)
    hand_out = partial(deal, parts=parts)
    shares = hand_out(weights)
    held = jnp.sum(weights.reshape(-1, groups), axis=0)

    def told(looks: Looks, values: Array, measured: Array | bool) -> Observation:
        return _observation(looks, values, weights[:count], held, measured)

    if everything:
        hands = jax.tree.map(hand_out, batch)
        if micro_batches == 1:
            looks, values = all_groups(look, hands, shares, diagonal)
        else:
            looks, values = in_micro_batches(
                look, hands, shares, groups, micro_batches, diagonal
            )
        values = values.T.ravel()[:count]  # an index means the caller's example
        return told(looks, values, True), None

    def scatters(look: Callable[..., tuple[Look, Array]], batch: PyTree) -> _Scatters:
        # Only scalars come out of the choice: gradients would be copied.
        some = _SAMPLE if share(_SAMPLE * groups, count, mask) > 1 else 1
        if measure is False:
            return _no_scatters(params)
        return jax.lax.cond(
            measure,
            for_inside(lambda: _scatters(look, one_in((batch, weights), some), groups)),
            lambda: _no_scatters(params),
        )

    given = jax.tree.map(lambda x: x[:count], (batch, weights))
    if follow is True:
        # First, while nothing else of the parameters' size is needed.
        apart = scatters(look, batch)
        if measure is not False:
            apart, given = tree.one_by_one(apart, given)
        fewer = share(sample, count, mask)
        whole, values = look(*given, fewer=fewer)
        seen = told(_around(whole, shares, apart), values, measure)
        return _on_fewer(seen, fewer), None

    whole, values = _look(losses, gradient_alone, *points, None, *given)
    nothing = _around(whole, shares, _no_scatters(params))
    seen = told(nothing, values, False)._replace(followed=False)
    if follow is False:
        return seen, None

    def closer() -> Observation:
        gradient, (data, ends) = tree.one_by_one(whole.gradient, (batch, points))
        look = partial(_look, losses, transport, *ends, None)
        apart, (data, ends) = tree.one_by_one(scatters(look, data), (data, ends))
        data = jax.tree.map(lambda x: x[:count], (data, weights))
        seen = whole._replace(gradient=gradient)
        more = for_inside(partial(_follow, losses, *ends, seen))(*data)
        return told(_around(more, shares, apart), values, measure)

    return seen, Closer(follow, closer)


def _look(
    losses, transport, params, previous, handed, batch, weights, total=None, fewer=1
) -> tuple[Look, Array]:
    """Differentiate the mean loss of one group, and look along the displacement.

    The change of the gradient is that of one in ``fewer`` examples.
    """
    mean_loss = partial(_mean_loss, losses, tree.scalar_dtype(params))
    tangent = None if handed is None else tree.cast_like(handed, params)
    loss = mean_loss(batch, weights, total)
    if fewer == 1:
        values, gradient, change = transport(loss, params, previous, tangent)
    elif tree.accelerated():
        where = params, previous, tangent
        values, gradient, change = _in_two(
            mean_loss, transport, where, (batch, weights), fewer
        )
    else:
        # Their gradient is computed once more: to put that of all together from two
        # would be one more sum over all devices, and as long on a CPU.
        (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        gradient, some = tree.one_by_one(gradient, one_in((batch, weights), fewer))
        _, _, change = transport(mean_loss(*some), params, previous, tangent)
    gradient, change = tree.widen(gradient), tree.widen(change)
    displacement = handed
    if handed is None:
        # Only now, and again for whoever else needs it: it is not to be kept.
        gradient, ends = tree.one_by_one(gradient, (params, previous))
        displacement = _displacement(*ends)
    along_change, along_gradient, square = tree.dots(
        (change, displacement), (gradient, displacement), (displacement, displacement)
    )
    length = jnp.sqrt(square)
    unit = jnp.where(length > 0, length, 1)
    slope, curvature = (along_change - along_gradient) / unit, along_change / unit
    return Look(gradient, change, slope, curvature / unit, length), values


def _in_two(mean_loss, transport, where, data, fewer) -> tuple[Array, PyTree, PyTree]:
    """Values and gradient of all examples, put together from those that tell the change
    of the gradient and the others."""
    values, gradient, change = transport(mean_loss(*one_in(data, fewer)), *where)
    (gradient, change), rest = tree.one_by_one((gradient, change), others(data, fewer))
    both = jax.value_and_grad(mean_loss(*rest), has_aux=True)
    (_, more), remaining = both(where[0])
    gradient = jax.tree.map(lambda a, b: b + (a - b) / fewer, gradient, remaining)
    return together(values, more), gradient, change


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


def _follow(losses, params, previous, seen: Look, batch, weights) -> Look:
    """What was seen, and the change of the gradient since ``previous``."""
    loss = _mean_loss(losses, tree.scalar_dtype(params), batch, weights)
    before = jax.grad(lambda p: loss(p)[0])(previous)
    change = tree.subtract(seen.gradient, tree.widen(before))
    along = tree.dot(change, _displacement(params, previous))
    unit = jnp.where(seen.length > 0, seen.length, 1)
    along = along / unit
    return seen._replace(
        change=change, slope=seen.slope + along, curvature=along / unit
    )


def _displacement(params: PyTree, previous: PyTree) -> PyTree:
    return tree.subtract(tree.widen(params), tree.widen(previous))


class _Scatters(NamedTuple):
    """Sums over groups of squared deviations from the mean, a scalar each."""

    gradient: Array
    change: Array
    slope: Array
    curvature: Array


def _scatters(look, sample: tuple[PyTree, Array], groups: int) -> _Scatters:
    """How the groups of a batch scatter about the mean of all.

    Two groups are compared in one derivative, that of their difference.
    """
    batch, weights = sample
    if groups > 2:
        hands = jax.tree.map(partial(deal, parts=groups), (batch, weights))
        looks, _ = all_groups(look, *hands, diagonal=False)
        return _Scatters(*(summary.scatter for summary in looks[:-1]))
    first = jnp.arange(weights.shape[0]) % 2 == 0
    counts = (
        jnp.sum(jnp.where(first, weights, 0)),
        jnp.sum(jnp.where(first, 0, weights)),
    )
    shares = [1 / jnp.maximum(count, 1) for count in counts]
    apart, _ = look(batch, weights * jnp.where(first, shares[0], -shares[1]), total=1)
    square = tree.dots((apart.gradient, apart.gradient), (apart.change, apart.change))
    size = tree.size(apart.gradient)
    both = counts[0] * counts[1] / jnp.maximum(counts[0] + counts[1], 1)
    found = (square[0] / size, square[1] / size, apart.slope**2, apart.curvature**2)
    return _Scatters(*(both.astype(x.dtype) * x for x in found))


def _no_scatters(params: PyTree) -> _Scatters:
    zero = jnp.zeros((), tree.scalar_dtype(params))
    return _Scatters(zero, zero, zero, zero)


def _around(whole: Look, weights: Array, scatters: _Scatters) -> Looks:
    """The summaries of groups whose joint means and scatters are known."""
    counts = jnp.sum(weights, axis=1)
    looks = summarise(moments.one_group, whole, jnp.sum(counts), diagonal=False)
    groups = jnp.sum(counts > 0)

    def filled(summary: moments.Summary, scatter: Array) -> moments.Summary:
        number = groups.astype(summary.weight.dtype)
        return summary._replace(groups=number, scatter=scatter)

    return looks._replace(
        gradient=filled(looks.gradient, scatters.gradient),
        change=filled(looks.change, scatters.change),
        slope=filled(looks.slope, scatters.slope),
        curvature=filled(looks.curvature, scatters.curvature),
    )


def _observation(looks: Looks, values, weights, held, measured) -> Observation:
    sane = jnp.isfinite(values) | (weights == 0)
    value = moments.stacked_groups(values, weights, diagonal=False)
    return Observation(
        value=value.moments(),
        gradient=looks.gradient.moments(),
        change=looks.change.moments(),
        path=Path(looks.length, looks.slope.moments(), looks.curvature.moments()),
        count=value.weight,
        groups=jnp.sum(held > 0).astype(value.weight.dtype),
        suspect=jnp.where(jnp.all(sane), -1, jnp.argmin(sane)).astype(jnp.int32),
        measured=measured,
    )


def _on_fewer(seen: Observation, fewer: int) -> Observation:
    """What is known of the change if one of so many examples was asked.

    The variances given are those of means over all of them. The slope where the step
    began is that at its end, which all examples tell, less the curvature; the mean of
    some differs from that of all by a deviation that is independent of it.
    """
    if fewer == 1:
        return seen
    change, (length, slope, curvature) = seen.change, seen.path
    more = (fewer - 1) * curvature.variance * length**2
    path = Path(
        length,
        Moments(slope.mean, slope.variance + more),
        Moments(curvature.mean, fewer * curvature.variance),
    )
    change = Moments(change.mean, fewer * change.variance)
    return seen._replace(change=change, path=path)
