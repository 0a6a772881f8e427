"""What one minibatch says: value, gradient and its change, each with its noise.

``losses(params, batch) -> (n,)`` is all that is known of the model. The examples
are dealt into groups like cards, example i to group i mod k; each group's mean loss
is differentiated, and the spread of the groups gives the variances (`meka.moments`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from meka import moments, tree
from meka.checks import (
    check_batch,
    check_groups,
    check_losses,
    check_params,
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
    share,
)
from meka.looking import displacement_between, look_at, look_back, look_in_two
from meka.scatters import Scatters, around, no_scatters, scatters
from meka.transport import Transport, difference, gradient_alone, hessian_at_current
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
        handed = displacement_between(params, previous)
    points = (params, previous)
    look = partial(look_at, losses, transport, *points, handed)
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

    def scattered(look: Callable[..., tuple[Look, Array]], batch: PyTree) -> Scatters:
        # Only scalars come out of the choice: gradients would be copied.
        some = _SAMPLE if share(_SAMPLE * groups, count, mask) > 1 else 1
        if measure is False:
            return no_scatters(params)
        return jax.lax.cond(
            measure,
            for_inside(lambda: scatters(look, one_in((batch, weights), some), groups)),
            lambda: no_scatters(params),
        )

    given = jax.tree.map(lambda x: x[:count], (batch, weights))
    if follow is True:
        fewer = share(sample, count, mask)
        if tree.accelerated() and fewer > 1 and count // fewer >= groups:
            whole, values, apart = look_in_two(
                losses, transport, *points, handed, given, fewer, groups, measure
            )
        else:
            # First, while nothing else of the parameters' size is needed.
            apart = scattered(look, batch)
            if measure is not False:
                apart, given = tree.one_by_one(apart, given)
            whole, values = look(*given, fewer=fewer)
        seen = told(around(whole, shares, apart), values, measure)
        return _on_fewer(seen, fewer), None

    whole, values = look_at(losses, gradient_alone, *points, None, *given)
    nothing = around(whole, shares, no_scatters(params))
    seen = told(nothing, values, False)._replace(followed=False)
    if follow is False:
        return seen, None

    def closer() -> Observation:
        gradient, (data, ends) = tree.one_by_one(whole.gradient, (batch, points))
        look = partial(look_at, losses, transport, *ends, None)
        apart, (data, ends) = tree.one_by_one(scattered(look, data), (data, ends))
        data = jax.tree.map(lambda x: x[:count], (data, weights))
        seen = whole._replace(gradient=gradient)
        more = for_inside(partial(look_back, losses, *ends, seen))(*data)
        return told(around(more, shares, apart), values, measure)

    return seen, Closer(follow, closer)


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
