"""Stochastic variance reduced gradient (Johnson and Zhang, 2013).

Now and then the gradient of the whole training set is taken at a snapshot θ̃ of the
parameters. In between, a minibatch B moves the parameters θ along

    v = ∇f_B(θ) - ∇f_B(θ̃) + ∇f(θ̃),

which has the mean ∇f(θ) and a variance that vanishes as θ and θ̃ approach the same
minimum, so that a constant step size converges where plain SGD's noise stalls it. It
costs two gradient evaluations a step, as the paper notes (App. E), plus the snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
Losses = Callable[[PyTree, PyTree], jax.Array]


class SvrgState(NamedTuple):
    """The snapshot, the gradient there, and how far the run has come."""

    count: jax.Array
    snapshot: PyTree
    full_gradient: PyTree
    ready: jax.Array  # false until the first refresh; steps are plain SGD till then


def init(params: PyTree) -> SvrgState:
    """Return the state before any full gradient is known."""
    return SvrgState(
        count=jnp.zeros((), jnp.int32),
        # A buffer of its own, so that parameters and state can both be donated.
        snapshot=jax.tree.map(jnp.copy, params),
        full_gradient=jax.tree.map(jnp.zeros_like, params),
        ready=jnp.zeros((), bool),
    )


def refresh(
    params: PyTree, state: SvrgState, full_gradient: Callable[[PyTree], PyTree]
) -> SvrgState:
    """Take a snapshot: ``full_gradient(params)`` is over the whole training set."""
    gradient = jax.tree.map(
        lambda g, p: jnp.asarray(g, p.dtype), full_gradient(params), params
    )
    return state._replace(
        snapshot=jax.tree.map(jnp.copy, params),
        full_gradient=gradient,
        ready=jnp.ones((), bool),
    )


def step(
    losses: Losses,
    rate: Callable[[jax.Array], Any],
    params: PyTree,
    state: SvrgState,
    batch: PyTree,
) -> tuple[PyTree, SvrgState, jax.Array]:
    """One step; returns parameters, state and the loss of the minibatch."""
    loss, here = jax.value_and_grad(_mean(losses))(params, batch)
    there = jax.grad(_mean(losses))(state.snapshot, batch)
    learning_rate = rate(state.count)

    def move(theta: jax.Array, g: jax.Array, g0: jax.Array, full: jax.Array):
        v = jnp.where(state.ready, g - g0 + full, g)
        return theta - jnp.asarray(learning_rate, theta.dtype) * v

    params = jax.tree.map(move, params, here, there, state.full_gradient)
    return params, state._replace(count=state.count + 1), loss


def _mean(losses: Losses) -> Callable[[PyTree, PyTree], jax.Array]:
    return lambda params, batch: jnp.mean(losses(params, batch))
