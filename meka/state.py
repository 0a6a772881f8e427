"""What an optimizer remembers, and what it tells: `State` and `Info`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka import tree
from meka.average import Average
from meka.checks import check_params
from meka.choice import Steps, no_steps
from meka.gaussian import Gaussian
from meka.improvement import ImprovementModel
from meka.lasting import Lasting, begin
from meka.tree import Array, PyTree

# Before any curvature is known, a step of this length, relative to the parameters,
# is taken to measure it (only the lagged probe ever needs to). In half precision it
# is two units in the last place, since a shorter step would round to none at all.
_MEASURING_STEP = 1e-4


class Info(NamedTuple):
    """One step in numbers for a person to read; all are scalars."""

    step_size: Array
    gain: Array  # of the gradient filter, averaged over coordinates
    value: Array  # filtered loss u
    value_variance: Array  # s
    observed: Array  # loss of this minibatch, y
    observed_variance: Array  # r, averaged over time
    gradient_norm: Array  # |m|
    gradient_variance: Array  # P, averaged over coordinates
    gradient_noise: Array  # Sigma, averaged over coordinates and time
    change_noise: Array  # Q, averaged over coordinates
    model_error: Array  # lambda
    innovation: Array  # (y - prediction)² over its expectation; near 1 is healthy
    gradient_innovation: Array  # |g - prediction|² over its expectation
    slope: Array  # as probed at this step
    curvature: Array
    model: ImprovementModel  # averaged, what the rule decided from
    improvement_probability: Array
    predicted_change: Array
    direction_norm: Array
    displacement_norm: Array  # of the step before, as it was applied
    noise_scale: Array  # examples at which gradient noise equals gradient
    suspect: Array  # example with a non-finite loss in the last rejected step, or -1
    accepted: Array  # whether this step was taken
    rejected: Array  # how many were not, so far
    overshot: Array  # how many went so far that the averaged model began anew


class Held(NamedTuple):
    """Noise as it was measured, for the steps at which it is not."""

    gradient: Array  # Sigma as it last was
    path: Average  # Q per squared length of the displacement, variance of curvature
    curvature: Array  # along the displacement, as it last was


class State(NamedTuple):
    """What the next step needs: two parameter-sized buffers and scalars."""

    count: Array
    value: Gaussian
    gradient: Gaussian
    previous_params: PyTree
    value_noise: Average
    gradient_noise: Average
    lasting: Lasting | tuple[()]
    held: Held
    steps: Steps | tuple[()]
    info: Info


def initial_state(
    params: PyTree,
    *,
    diagonal: bool,
    prior_variance: float,
    lasting: bool = False,
    steps: bool = True,
) -> State:
    """The state before the first step; infinite prior variance knows nothing."""
    # optax itself asks for the state of no parameters, as in optax.tree.map_params.
    check_params(params, allow_empty=True)
    dtype = tree.scalar_dtype(params)
    zero = jnp.zeros((), dtype)
    unknown = jnp.full((), prior_variance, dtype)
    mean = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=tree.wide(x)), params)
    noise, variance = zero, unknown
    if diagonal:
        noise = mean
        variance = jax.tree.map(lambda x: jnp.full_like(x, prior_variance), mean)
    empty = ImprovementModel(zero, zero, zero, zero, zero, zero, ())
    previous = jax.tree.map(_concrete, params)
    rounding = [float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(previous)]
    fraction = max([_MEASURING_STEP, *(2 * eps for eps in rounding)])
    length = fraction * (1 + jnp.sqrt(tree.square(previous)))
    count = jnp.zeros((), jnp.int32)
    others = {
        "model": empty._replace(step=count),
        "suspect": jnp.full((), -1, jnp.int32),
        "accepted": jnp.zeros((), bool),
        "rejected": count,
        "overshot": count,
    }
    info = Info(**{**dict.fromkeys(Info._fields, zero), **others})
    state = State(
        count=count,
        value=Gaussian(zero, unknown),
        gradient=Gaussian(mean, variance),
        previous_params=previous,
        value_noise=Average.like(zero),
        gradient_noise=Average.like(noise),
        lasting=begin(zero) if lasting else (),
        held=Held(zero, Average.like((zero, zero)), zero),
        steps=no_steps(zero, length.astype(dtype)) if steps else (),
        info=info,
    )
    # Every leaf a buffer of its own, so that parameters and state can be donated.
    return jax.tree.map(jnp.copy, state)


def _concrete(x: Array) -> Array:
    # A mere shape has no value to start from.
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros(x.shape, x.dtype)
    # Nor one of a weak type, as of jnp.full(3, 0.1): the second step and the third
    # would be compiled anew.
    x = jnp.asarray(x)
    return x.astype(x.dtype)


def find_state(state: PyTree) -> State:
    """The `State` of meka inside the state of any optax chain."""
    leaves = jax.tree.leaves(state, is_leaf=_is_ours)
    found = [x for x in leaves if isinstance(x, State)]
    if len(found) != 1:
        raise ValueError(
            f"expected one meka optimizer in the optimizer state, found {len(found)}: "
            "chain exactly one of meka.meka, meka.adameka, meka.scale_by_meka"
        )
    return found[0]


def replace_in(state: PyTree, **fields: PyTree) -> PyTree:
    """The state of an optax chain with other fields in the `State` of meka."""

    def swap(x: PyTree) -> PyTree:
        return x._replace(**fields) if isinstance(x, State) else x

    return jax.tree.map(swap, state, is_leaf=_is_ours)


def _is_ours(x: object) -> bool:
    return isinstance(x, State)
