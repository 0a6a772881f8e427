"""Mean and variance of the mean, from groups of examples, merged in any order.

Split n examples into k groups and let x_j be the mean over group j of w_j examples.
Each x_j has variance sigma²/w_j, so with W = sum w_j

    mean = sum_j w_j x_j / W
    variance of the mean = sum_j w_j (x_j - mean)² / ((k - 1) W)

is unbiased for every k >= 2 and for unequal groups. k = n is the per-example
estimate of the paper. The sums are centred, never E[x²] - E[x]², and two summaries
merge exactly (Chan et al. 1979), which is what micro-batches need.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka import tree
from meka.gaussian import Moments
from meka.tree import Array, PyTree


class Summary(NamedTuple):
    """Weight, mean and centred scatter of some groups; groups of weight 0 are none."""

    weight: Array
    groups: Array
    mean: PyTree
    scatter: PyTree

    def moments(self) -> Moments:
        """The mean and the variance of that mean; zero variance for one group."""
        freedom = jnp.maximum(self.groups - 1, 1) * jnp.maximum(self.weight, 1)
        variance = jax.tree.map(lambda s: s / freedom.astype(s.dtype), self.scatter)
        return Moments(self.mean, variance)


def one_group(mean: PyTree, weight: Array, *, diagonal: bool) -> Summary:
    """The summary of a single group: no scatter yet."""
    dtype = tree.scalar_dtype(mean)
    scatter = jnp.zeros((), dtype)
    if diagonal:
        scatter = jax.tree.map(jnp.zeros_like, mean)
    weight = weight.astype(dtype)
    return Summary(weight, (weight > 0).astype(dtype), mean, scatter)


def stacked_groups(means: PyTree, weights: Array, *, diagonal: bool) -> Summary:
    """The summary of group means stacked on a leading axis."""
    dtype = tree.scalar_dtype(means)
    weights = weights.astype(dtype)
    total = jnp.sum(weights)
    shares = weights / jnp.maximum(total, 1)
    mean = jax.tree.map(lambda x: _contract(shares, x), means)
    # Once more, about that mean: what is equal then has exactly its own mean.
    mean = jax.tree.map(lambda x, m: m + _contract(shares, x - m[None]), means, mean)
    centred = jax.tree.map(lambda x, m: x - m[None], means, mean)
    if diagonal:
        scatter = jax.tree.map(lambda c: _contract(weights, c * c), centred)
    else:
        weighted = jax.tree.map(lambda c: _by_row(weights, c) * c, centred)
        scatter = tree.dot(weighted, centred) / tree.size(mean)
    return Summary(total, jnp.sum((weights > 0).astype(dtype)), mean, scatter)


def merge(*pairs: tuple[Summary, Summary], diagonal: bool) -> list[Summary]:
    """The summaries of two disjoint sets of groups, for quantities of one structure."""
    steps = [tree.subtract(b.mean, a.mean) for a, b in pairs]
    squares = [] if diagonal else tree.dots(*((step, step) for step in steps))
    merged = []
    for k, ((a, b), step) in enumerate(zip(pairs, steps, strict=True)):
        weight = a.weight + b.weight
        share = b.weight / jnp.maximum(weight, 1)
        mean = jax.tree.map(
            lambda m, s, share=share: m + share.astype(m.dtype) * s, a.mean, step
        )
        between = a.weight * share
        if diagonal:
            extra = jax.tree.map(
                lambda s, between=between: between.astype(s.dtype) * s * s, step
            )
        else:
            extra = between * squares[k] / tree.size(step)
        scatter = jax.tree.map(lambda x, y, z: x + y + z, a.scatter, b.scatter, extra)
        merged.append(Summary(weight, a.groups + b.groups, mean, scatter))
    return merged


def _by_row(weights: Array, x: Array) -> Array:
    return weights.astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))


def _contract(weights: Array, x: Array) -> Array:
    return jnp.sum(_by_row(weights, x) * x, axis=0)
