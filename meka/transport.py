"""How the gradient changed along the last displacement, on the same examples."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from meka import tree
from meka.tree import Array, PyTree

Loss: TypeAlias = Callable[[PyTree], tuple[Array, Array]]
Transport: TypeAlias = Callable[
    [Loss, PyTree, PyTree, PyTree], tuple[Array, PyTree, PyTree]
]


def hessian_at_current(
    loss: Loss, params: PyTree, previous: PyTree, displacement: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """B_t δ: the Hessian at the new parameters times the displacement (the paper)."""
    del previous
    both = jax.value_and_grad(loss, has_aux=True)
    ((_, values), gradient), (_, change) = jax.jvp(both, (params,), (displacement,))
    return values, gradient, change


def hessian_at_previous(
    loss: Loss, params: PyTree, previous: PyTree, displacement: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """B_{t-1} δ on the same examples: the Hessian at the old parameters (App. C)."""
    (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    slope_of = jax.grad(lambda p: loss(p)[0])
    _, change = jax.jvp(slope_of, (previous,), (displacement,))
    return values, gradient, change


def difference(
    loss: Loss, params: PyTree, previous: PyTree, displacement: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """∇f(θ_t) - ∇f(θ_{t-1}) on the same examples: no Taylor error, no product."""
    del displacement
    (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    gradient, previous = tree.one_by_one(gradient, previous)
    before = jax.grad(lambda p: loss(p)[0])(previous)
    return values, gradient, tree.subtract(tree.widen(gradient), tree.widen(before))


def gradient_alone(
    loss: Loss, params: PyTree, previous: PyTree, displacement: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """No look at the change, which is taken to be zero."""
    del previous, displacement
    (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return values, gradient, jax.tree.map(jnp.zeros_like, gradient)
