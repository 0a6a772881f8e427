"""A gain for errors that last.

The Kalman gain makes the error of the gradient least at one moment. A run adds up the
gradients of many steps, and so their errors. With ρ = Q/Σ, the error of a filter with
gain K decays like exp(-Kt) and is fed noise K²Σ + Q; parameters that relax at rate a
then scatter, beside those that follow the minibatch gradient itself, by

    (K² + ρ) / (K (K + a)).

Where parameters relax quickly, a ≫ √ρ, this is least at the Kalman gain √ρ. Where they
relax slowly it is two there, and nothing is better than K = 1: averaging takes nothing
from errors that are summed anyway, and every step adds the noise of the change. In
between it is least at K = ρ/a + √(ρ²/a² + ρ). Networks have directions that relax at
every rate, down to the slowest that a run of t steps can tell, a = 1/t, so that is
taken. The filter is then used while the change of the gradient is known far better
than the gradient, as in problems with additive noise, and left alone otherwise; and
what is left alone does not have to be measured.
"""

from typing import NamedTuple

import jax.numpy as jnp

from meka.average import Average
from meka.gaussian import Gaussian
from meka.observation import Observation
from meka.tree import Array

_USEFUL = 0.5  # a gain above this saves too little to be worth a second gradient


class Lasting(NamedTuple):
    """Noise along the step, and whether the filter is of use."""

    path: Average  # variances of curvature and slope along the step
    follow: Array  # whether to measure the change of the gradient at the next step


def begin(zero: Array) -> Lasting:
    """Before the first step."""
    return Lasting(Average.like((zero, zero)), jnp.ones((), bool))


def least_gain(ratio: Array, steps: Array) -> Array:
    """The gain by which parameters scatter least, given ρ = Q/Σ and 1/a steps."""
    lag = ratio * steps
    return lag + jnp.sqrt(lag * lag + ratio)


def look_along(
    state: Lasting, decay: float, observation: Observation, noise: Array
) -> tuple[Lasting, Array]:
    """The noise of the change: as large, beside Σ, as along the step at least.

    Steps lie along directions of high curvature, where the change is noisier than it
    is on average, and an error of the gradient costs most.
    """
    change, path = observation.change, observation.path
    seen = jnp.asarray(observation.measured) & (path.length > 0)
    fresh = (path.curvature.variance, path.slope.variance)
    average = state.path.add(fresh, decay, seen)
    curvature, slope = average.mean
    ratio = jnp.where(slope > 0, curvature / jnp.where(slope > 0, slope, 1), 0)
    along = ratio * path.length**2 * noise
    return state._replace(path=average), jnp.maximum(change.variance, along)


def unlearn(
    state: Lasting,
    predicted: Gaussian,
    change_noise: Array,
    noise: Array,
    count: Array,
    observation: Observation,
) -> tuple[Lasting, Gaussian]:
    """The predicted gradient, no more certain than its errors should count.

    Args:
      state: before.
      predicted: gradient.
      change_noise: Q.
      noise: Σ.
      count: steps so far.
      observation: of this step.
    """
    ratio = jnp.where(noise > 0, change_noise / jnp.where(noise > 0, noise, 1), 0)
    gain = least_gain(ratio, (count + 1).astype(ratio.dtype))
    useful = gain < _USEFUL
    gain = jnp.where(useful, gain, 0)
    least = gain / (1 - gain) * noise
    least = jnp.maximum(predicted.variance, least)
    variance = jnp.where(useful & observation.followed, least, jnp.inf)
    # A step of no length says nothing about the next.
    follow = jnp.where(observation.path.length > 0, useful, state.follow)
    return state._replace(follow=follow), Gaussian(predicted.mean, variance)
