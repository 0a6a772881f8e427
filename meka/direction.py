"""Which way to step: a direction from the belief about the gradient (§2.3)."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from meka.gaussian import Gaussian, per_coordinate
from meka.tree import PyTree

Direction: TypeAlias = Callable[[Gaussian], PyTree]


def steepest(gradient: Gaussian) -> PyTree:
    """Meka: against the filtered gradient, -m."""
    return jax.tree.map(jnp.negative, gradient.mean)


def adam_style(epsilon: float = 1e-8) -> Direction:
    """AdaMeka: -m / (sqrt(m² + P) + epsilon), coordinate by coordinate.

    m² + P is the belief's second moment. (As printed, sqrt(m + P) is not defined
    for m < -P.) A coordinate with m = P = 0 stays where it is.
    """
    if not epsilon > 0:
        raise ValueError(f"adam_style(epsilon={epsilon}): must be positive")

    def direction(gradient: Gaussian) -> PyTree:
        return jax.tree.map(
            lambda m, p: -m / (jnp.sqrt(m * m + p.astype(m.dtype)) + epsilon),
            gradient.mean,
            per_coordinate(gradient.variance, gradient.mean),
        )

    return direction
