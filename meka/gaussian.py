"""Gaussian beliefs, and the two steps of a Kalman filter on them.

The hidden state x_t, a pytree, moves and is seen through noise:

    x_t | x_{t-1} ~ N(x_{t-1} + change_t, Q_t)        (Eq. 4)
    g_t | x_t     ~ N(x_t, Sigma_t)                   (Eq. 3)

A variance is either one number for all coordinates (isotropic) or a pytree shaped
like the mean (diagonal). A scalar is a pytree, so the function value and the
gradient are filtered by the same two functions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka import tree
from meka.tree import Array, PyTree


class Moments(NamedTuple):
    """A measured mean and the variance *of that mean*."""

    mean: PyTree
    variance: PyTree


class Gaussian(NamedTuple):
    """A belief N(mean, variance); infinite variance knows nothing."""

    mean: PyTree
    variance: PyTree


def per_coordinate(variance: PyTree, like: PyTree) -> PyTree:
    """The variance as a tree of the mean's structure, by broadcasting if isotropic."""
    if tree.same_structure(variance, like):
        return variance
    return jax.tree.map(lambda _: variance, like)


def quadratic_form(
    variance: PyTree, direction: PyTree, square: Array | None = None
) -> Array:
    """``direction' diag(variance) direction``; pass |direction|² where it is known."""
    if tree.same_structure(variance, direction):
        return tree.dot(
            direction, jax.tree.map(lambda v, d: v * d, variance, direction)
        )
    return variance * (tree.square(direction) if square is None else square)


def average_variance(variance: PyTree, like: PyTree) -> Array:
    """Variance averaged over coordinates: the trace over the dimension."""
    if tree.same_structure(variance, like):
        total = sum(jnp.sum(v) for v in jax.tree.leaves(variance))
        return jnp.asarray(total) / tree.size(like)
    return variance


def predict(belief: Gaussian, change: Moments) -> Gaussian:
    """Move the belief by a noisily known change (Eq. 6).

    The predicted variance is floored at the smallest normal number, so that an
    exact prediction meeting an exact observation trusts the observation.
    """
    variance = jax.tree.map(
        lambda p, q: jnp.maximum(p + q, jnp.finfo(p.dtype).tiny),
        belief.variance,
        change.variance,
    )
    return Gaussian(jax.tree.map(jnp.add, belief.mean, change.mean), variance)


def correct(belief: Gaussian, observed: Moments) -> tuple[Gaussian, PyTree]:
    """Condition the belief on a noisy observation of the state (Eq. 7-8).

    Returns the posterior and the Kalman gain, shaped like the variance.

    | prior variance | observed variance | gain | posterior variance |
    |----------------|-------------------|------|--------------------|
    | P              | R                 | P/(P+R) | (1-K)²P + K²R   |
    | infinite       | R                 | 1    | R                  |
    | P              | 0                 | 1    | 0                  |
    | 0              | 0                 | `predict` floors the prior: 1 | 0 |
    | P              | infinite          | 0    | P                  |
    """
    gain = jax.tree.map(_gain, belief.variance, observed.variance)
    variance = jax.tree.map(_joseph, belief.variance, observed.variance)
    mean = jax.tree.map(
        lambda m, g, k: m + k.astype(m.dtype) * (g - m),
        belief.mean,
        observed.mean,
        per_coordinate(gain, belief.mean),
    )
    return Gaussian(mean, variance), gain


def _shares(prior: Array, noise: Array) -> tuple[Array, Array]:
    """The gain K and 1 - K, each without cancellation."""
    diffuse, blind = jnp.isinf(prior), jnp.isinf(noise)
    p = jnp.where(diffuse, 1, jnp.where(blind, 0, prior))
    r = jnp.where(diffuse, 0, jnp.where(blind, 1, noise))
    total = jnp.where(p + r > 0, p + r, 1)
    return p / total, r / total


def _gain(prior: Array, noise: Array) -> Array:
    return _shares(prior, noise)[0]


def _joseph(prior: Array, noise: Array) -> Array:
    """(1 - K)² P + K² R, Eq. 8: a sum of squares, so it cannot turn negative.

    Rounding may put the sum an ulp above P or R; a posterior is never wider than
    what it was made of.
    """
    gain, keep = _shares(prior, noise)
    p = jnp.where(jnp.isinf(prior), 0, prior)
    r = jnp.where(jnp.isinf(noise), 0, noise)
    return jnp.minimum(keep * keep * p + gain * gain * r, jnp.minimum(prior, noise))
