"""How far to go: from what a probe saw to a step size.

The improvement model is averaged over time, filled in where nothing was seen, and kept
from leading farther than anything it has seen. A rule reads the step size off it.
"""

from typing import NamedTuple

import jax.numpy as jnp

from meka import tree
from meka.average import Average
from meka.gaussian import Moments
from meka.improvement import ImprovementModel, Rule
from meka.probe import Probe, Scene
from meka.tree import Array

_FARTHER = 10.0  # than any step so far at most, where curvature does not say how far


class Steps(NamedTuple):
    """What is remembered of the steps so far."""

    model: Average  # and the sizes of its curvature and of its direction, squared
    direction_norm: Array
    measuring_length: Array
    longest: Array  # length of the longest step so far
    bend: Moments  # curvature as last seen, per unit of length


class Choice(NamedTuple):
    """A step size, and what it was read off."""

    step_size: Array
    model: ImprovementModel
    steps: Steps


def no_steps(zero: Array, measuring_length: Array) -> Steps:
    """Before the first step."""
    empty = ImprovementModel(zero, zero, zero, zero, zero, zero, ())
    average, bend = Average.like((empty, (zero, zero))), Moments(zero, zero)
    return Steps(average, zero, measuring_length, zero, bend)


def choose(
    rule: Rule,
    steps: Steps,
    scene: Scene,
    seen: Probe,
    *,
    value_variance: Array,
    third_order: Array,
    count: Array,
    decay: float,
    restart: Array,
) -> Choice:
    """The step size along the direction of a scene.

    Args:
      rule: reads it off the model.
      steps: the steps so far.
      scene: what is known of the direction.
      seen: what the probe saw.
      value_variance: s, of the filtered loss.
      third_order: the term of App. B.2, or zero.
      count: the number of the step.
      decay: of the average of the model (β_α).
      restart: whether the last step overshot, and the average begins anew.
    """
    longest = jnp.maximum(steps.longest, scene.observation.path.length)
    steps = steps._replace(longest=longest)
    fresh = ImprovementModel(
        seen.slope,
        seen.curvature,
        value_variance,
        seen.slope_variance,
        seen.curvature_variance,
        third_order,
        (),
    )
    # The norm of the direction that was probed: the new one, but for a lagged look.
    norm = probed = scene.norm
    if seen.seen is not True:
        probed = jnp.where(restart, norm, scene.last_norm)
    average, model = _average_model(steps, scene, seen, fresh, probed, decay, restart)
    model = model._replace(step=count)
    bend = tree.per_square(seen.curvature, probed)
    spread = tree.per_square(seen.curvature_variance, probed)
    steps = steps._replace(
        model=average,
        direction_norm=norm,
        bend=Moments(bend, tree.per_square(spread, probed)),
    )
    return Choice(rule(model).astype(norm.dtype), model, steps)


def _average_model(
    steps: Steps,
    scene: Scene,
    seen: Probe,
    fresh: ImprovementModel,
    probed: Array,
    decay: float,
    restart: Array,
) -> tuple[Average, ImprovementModel]:
    """Average the improvement model over time, and fill what was not seen.

    Where nothing moved there is nothing lagged to see: the slope is then the
    filter's along the new direction, and the curvature what it was, for a direction
    as long as the new one. Where nothing tells how far to go the model is a parabola:

    | curvature | minimum |
    |-----------|---------|
    | none seen yet, or none at all and every loss the same | the measuring length |
    | negative, or less than a tenth of its average size, as both signs were seen; \
it leads farther than ten times the longest step so far, and no third order bounds it \
| ten times that step |
    """
    norm = scene.norm
    sizes = jnp.abs(seen.curvature), probed * probed
    average = steps.model.add((fresh, sizes), decay, seen.seen, restart)
    model, (size, square) = average.mean
    if seen.seen is not True:
        longer = tree.ratio(norm * norm, square)
        unseen = model._replace(
            slope=scene.slope.mean,
            curvature=model.curvature * longer,
            value_variance=fresh.value_variance,
            slope_variance=scene.slope.variance,
            curvature_variance=model.curvature_variance * longer * longer,
        )
        now = jnp.asarray(seen.seen)
        model, size = tree.select(now, (model, size), (unseen, size * longer))
    blank = average.empty | ((model.curvature == 0) & (model.value_variance == 0))
    farthest = jnp.where(steps.longest > 0, _FARTHER * steps.longest, jnp.inf)
    length = jnp.where(blank, steps.measuring_length, farthest)
    bend = model.slope * norm / length
    unclear = (model.curvature < size / _FARTHER) & (model.third_order == 0)
    lost = blank | (unclear & (jnp.abs(model.curvature) < bend))
    return average, model._replace(curvature=jnp.where(lost, bend, model.curvature))


def third_order_term(
    floor: float | None, model_error: Array, length: Array, norm: Array
) -> Array:
    """λ|d|⁶ with λ = model_error/|δ|⁶ (App. B.2); nothing is inferred from δ = 0."""
    if floor is None:
        return jnp.zeros_like(model_error)
    largest = jnp.finfo(model_error.dtype).max
    ratio = jnp.where(length > 0, norm / jnp.where(length > 0, length, 1), 0)
    inferred = jnp.where(model_error > 0, jnp.sqrt(model_error) * ratio**3, 0)
    least = jnp.sqrt(jnp.asarray(floor, ratio.dtype)) * norm**3
    return jnp.minimum(jnp.maximum(inferred, least) ** 2, largest)
