"""How the groups of a batch scatter about the mean of all: noise, four scalars of it.

What is asked for is the noise alone, so two groups are compared in one derivative, that
of their difference, and nothing of the parameters' size is kept.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka import moments, tree
from meka.groups import Look, Looks, all_groups, deal, summarise
from meka.tree import Array, PyTree


class Scatters(NamedTuple):
    """Sums over groups of squared deviations from the mean, a scalar each."""

    gradient: Array
    change: Array
    slope: Array
    curvature: Array


def scatters(look, sample: tuple[PyTree, Array], groups: int) -> Scatters:
    """How the groups of these examples scatter."""
    batch, weights = sample
    if groups > 2:
        hands = jax.tree.map(partial(deal, parts=groups), (batch, weights))
        return scatters_of(all_groups(look, *hands, diagonal=False)[0])
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
    return Scatters(*(both.astype(x.dtype) * x for x in found))


def scatters_of(looks: Looks) -> Scatters:
    """How groups scatter whose summaries are there."""
    return Scatters(*(summary.scatter for summary in looks[:-1]))


def no_scatters(params: PyTree) -> Scatters:
    """What is known of noise that is not measured."""
    zero = jnp.zeros((), tree.scalar_dtype(params))
    return Scatters(zero, zero, zero, zero)


def around(whole: Look, weights: Array, scatters: Scatters) -> Looks:
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
