"""Two stochastic problems whose objective and gradient are known exactly.

Each draws fresh examples without end; `objective` is the expected loss less its
minimum, so it goes to zero, and `gradient` is what the filter should find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Problem:
    """A stochastic problem: E losses(params, draw(key, n)) = objective + minimum."""

    start: jax.Array
    minimum: float
    losses: Callable[[jax.Array, jax.Array], jax.Array]
    draw: Callable[[jax.Array, int], jax.Array]
    objective: Callable[[jax.Array], jax.Array]
    gradient: Callable[[jax.Array], jax.Array]


def noisy_quadratic(
    dimension: int = 20, condition: float = 2000.0, seed: int = 0
) -> Problem:
    """f(θ, ξ) = ½ (θ − ξ)ᵀ H (θ − ξ) with ξ ~ N(0, I), the paper's section 5.

    H has eigenvalues spaced evenly in the logarithm from 1 down to 1/condition, in a
    random basis. So f(θ) − f* = ½ θᵀHθ and f* = ½ tr H; the gradient's noise has
    covariance H², wherever θ is. The start is 5 away from the minimum along every
    eigenvector.
    """
    generator = np.random.default_rng(seed)
    square = generator.standard_normal((dimension, dimension))
    basis, upper = np.linalg.qr(square)
    basis *= np.sign(np.diag(upper))  # makes it uniform over rotations
    eigenvalues = np.geomspace(1.0, 1.0 / condition, dimension)
    # A square root of H: ½‖θA‖² is never negative, whatever the rounding.
    root = jnp.asarray(basis * np.sqrt(eigenvalues), jnp.float32)

    def whiten(params: jax.Array) -> jax.Array:
        # Full float32: at the accuracy of tensor cores the noise floor would be theirs.
        return jnp.matmul(params, root, precision=lax.Precision.HIGHEST)

    def losses(params: jax.Array, batch: jax.Array) -> jax.Array:
        return 0.5 * jnp.square(whiten(params[None] - batch)).sum(-1)

    def draw(key: jax.Array, n: int) -> jax.Array:
        return jax.random.normal(key, (n, dimension), jnp.float32)

    def objective(params: jax.Array) -> jax.Array:
        return 0.5 * jnp.square(whiten(params)).sum()

    def gradient(params: jax.Array) -> jax.Array:
        return jnp.matmul(root, whiten(params), precision=lax.Precision.HIGHEST)

    start = jnp.asarray(5.0 * basis.sum(axis=1), jnp.float32)
    minimum = 0.5 * float(eigenvalues.sum())
    return Problem(start, minimum, losses, draw, objective, gradient)


def rosenbrock(shift: float = 1.0, bend: float = 0.1, spread: float = 0.5) -> Problem:
    """Rosenbrock's valley in two dimensions, seen through noisy data.

    Example i has the loss (1 + a − x)² + 100 b (y − x² − c)², where
    a ~ N(0, shift²), c ~ N(0, bend²) and b is uniform on 1 ± spread, independent.
    The expectation is Rosenbrock's function (1 − x)² + 100 (y − x²)² plus the constant
    shift² + 100 bend²: exact, while values, gradients and curvatures are all noisy,
    at the minimum (1, 1) too. (The paper does not say what noise its Figure 1 has.)
    """

    def losses(params: jax.Array, batch: jax.Array) -> jax.Array:
        x, y = params
        a, b, c = batch.T
        return jnp.square(1 + a - x) + 100 * b * jnp.square(y - x**2 - c)

    def draw(key: jax.Array, n: int) -> jax.Array:
        normal_key, uniform_key = jax.random.split(key)
        a, c = jax.random.normal(normal_key, (2, n), jnp.float32)
        b = jax.random.uniform(uniform_key, (n,), jnp.float32, 1 - spread, 1 + spread)
        return jnp.stack([shift * a, b, bend * c], axis=1)

    def objective(params: jax.Array) -> jax.Array:
        x, y = params
        return jnp.square(1 - x) + 100 * jnp.square(y - x**2)

    def gradient(params: jax.Array) -> jax.Array:
        x, y = params
        valley = y - x**2
        return jnp.stack([-2 * (1 - x) - 400 * x * valley, 200 * valley])

    start = jnp.array([-1.2, 1.0], jnp.float32)
    minimum = shift**2 + 100 * bend**2
    return Problem(start, minimum, losses, draw, objective, gradient)
