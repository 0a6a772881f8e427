"""When a step went too far, what chose it is not to be trusted.

The step size comes from averages over a thousand steps, and the gradient from a
parabola that is taken to hold along the whole step. Where curvature rises steeply
both are wrong at once, and are believed: the new curvature is one entry among many,
and no noise says that the gradient was predicted badly. So the slopes at the two ends
of the last step are compared with each other and with the parabola. Noise is taken to
lie along the step with all of its coordinates, so in ordinary training, where it is
spread over many, neither comparison ever speaks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meka.gaussian import Gaussian, Moments
from meka.observation import Path
from meka.probe import Probe, Scene
from meka.tree import Array

_CLEARLY = 3.0  # standard deviations


class Ends(NamedTuple):
    """The last step δ from one end to the other, and whether it was as expected."""

    fall: Array  # -m'δ/|δ|, the slope as believed where it began
    secant: Moments  # the curvature that leads from this to what was seen at the end
    overshot: Array  # it ended steeper uphill than it began downhill
    strayed: Array  # so it did, or it ended on no parabola


def ends(path: Path, along: Array, noise: Array, change_noise: Array) -> Ends:
    """Compare the ends of the last step.

    Args:
      path: the step, as the new examples see it.
      along: m'δ with the belief that chose it.
      noise: variances of m and g, summed over coordinates.
      change_noise: the same of the change of the gradient.
    """
    length = path.length
    bend = path.curvature.mean * length * length
    climb = bend - path.slope.mean * length  # g'δ, whichever the transport
    doubt = _CLEARLY * jnp.sqrt(noise) * length
    overshot = (along < 0) & (climb + along > doubt)
    doubt = _CLEARLY * jnp.sqrt(noise + change_noise) * length
    strayed = overshot | (jnp.abs(climb - along - bend) > doubt)
    unit = jnp.where(length > 0, length, 1)
    secant = Moments((climb - along) / unit / unit, noise / unit / unit)
    return Ends(-along / unit, secant, overshot, strayed)


def forget(belief: Gaussian, strayed: Array) -> Gaussian:
    """A belief that knows nothing, where the step left what it knew."""
    variance = jax.tree.map(lambda v: jnp.where(strayed, jnp.inf, v), belief.variance)
    return Gaussian(belief.mean, variance)


def second_thoughts(seen: Probe, ends: Ends, scene: Scene) -> Probe:
    """What was seen; after an overshoot, what the last step should have known.

    That is the slope where it began and the secant's curvature, both carried over
    from the norm of its direction to that of the new one, so that the step size is
    what the last should have been.
    """
    square = scene.norm * scene.norm
    last = jnp.where(scene.last_norm > 0, scene.last_norm, 1)
    instead = Probe(
        slope=ends.fall / last * square,
        curvature=ends.secant.mean * square,
        slope_variance=scene.slope.variance,
        curvature_variance=ends.secant.variance * square * square,
    )
    pairs = zip(instead[:4], seen[:4], strict=True)
    chosen = (jnp.where(ends.overshot, a, b) for a, b in pairs)
    return Probe(*chosen, seen=seen.seen)
