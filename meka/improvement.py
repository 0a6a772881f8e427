"""How far to step: the predicted improvement along a direction, and rules on it.

Along a direction d the model predicts (Eq. 11)

    f(theta + a d) - f(theta) ~ N(-a slope + a²/2 curvature,
                                  2 value_variance + a² slope_variance
                                  + a⁴/4 curvature_variance + a⁶ third_order)

with slope = -d'm, curvature = d'Bd, value_variance = s, slope_variance = d'Pd,
curvature_variance = d'Qd and third_order = lambda |d|⁶ (App. C, off unless asked
for). A *rule* is a function from this model to a step size a >= 0.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.scipy.special import ndtr

from meka.stationary import most_probable_step
from meka.tree import Array, PyTree


class ImprovementModel(NamedTuple):
    """Six numbers that say what a step of any length is expected to do."""

    slope: Array
    curvature: Array
    value_variance: Array
    slope_variance: Array
    curvature_variance: Array
    third_order: Array | float = 0.0
    step: Array | PyTree = 0  # how many steps came before, for schedules

    def mean(self, step_size: Array) -> Array:
        """Expected change of the loss; negative is an improvement."""
        return step_size * (step_size * self.curvature / 2 - self.slope)

    def deviation(self, step_size: Array) -> Array:
        """Standard deviation of the change of the loss."""
        # Square roots first: a⁶ overflows long before a³ does.
        root = jnp.sqrt
        terms = (
            root(2 * self.value_variance),
            root(self.slope_variance) * step_size,
            root(self.curvature_variance) * step_size**2 / 2,
            root(jnp.asarray(self.third_order, step_size.dtype)) * step_size**3,
        )
        largest = jnp.maximum(
            jnp.maximum(terms[0], terms[1]), jnp.maximum(terms[2], terms[3])
        )
        unit = jnp.where(largest > 0, largest, 1)
        return largest * root(
            sum(((t / unit) ** 2 for t in terms[1:]), (terms[0] / unit) ** 2)
        )

    def probability(self, step_size: Array) -> Array:
        """Probability that the loss does not rise (Eq. 12)."""
        mean, deviation = self.mean(step_size), self.deviation(step_size)
        certain = jnp.where(mean < 0, 1.0, jnp.where(mean > 0, 0.0, 0.5))
        score = -mean / jnp.where(deviation > 0, deviation, 1)
        return jnp.where(deviation > 0, ndtr(score), certain.astype(score.dtype))

    def expected_improvement(self, step_size: Array) -> Array:
        """Expectation of the decrease of the loss, increases counted as zero."""
        mean, deviation = self.mean(step_size), self.deviation(step_size)
        score = -mean / jnp.where(deviation > 0, deviation, 1)
        noisy = -mean * ndtr(score) + deviation * _normal_density(score)
        return jnp.where(deviation > 0, noisy, jnp.maximum(-mean, 0))


Rule: TypeAlias = Callable[[ImprovementModel], Array]


def probability_of_improvement(model: ImprovementModel) -> Array:
    """The step that most probably improves the loss (Eq. 12-13).

    | slope a | curvature b | variances | step |
    |---------|-------------|-----------|------|
    | <= 0    | any         | any       | 0    |
    | > 0     | > 0         | all 0     | a/b, the quadratic minimum |
    | > 0     | > 0         | value variance s = 0, others not | 0: an exactly \
known value is most surely improved by the smallest step |
    | > 0     | > 0         | s > 0     | the one root, in (0, a/b] |
    | > 0     | <= 0        | curvature variance or third order > 0 | the one root |
    | > 0     | < 0         | neither   | no optimum exists: a/\\|b\\| |
    | > 0     | 0           | neither   | no optimum: where the slope's deviation \
overtakes the value's, √(2s/p), or 0 if one is 0 |
    """
    return most_probable_step(
        model.slope,
        model.curvature,
        model.value_variance,
        model.slope_variance,
        model.curvature_variance,
        jnp.asarray(model.third_order, model.slope.dtype),
        otherwise=_reflected_minimum(model),
    )


def quadratic(model: ImprovementModel) -> Array:
    """The minimum of the mean, a/b, blind to uncertainty.

    Under negative curvature the printed rule would step uphill; here it steps to
    a/|b|. A slope <= 0 gives 0.
    """
    return jnp.where(model.slope > 0, _reflected_minimum(model), 0)


def expected_improvement(model: ImprovementModel) -> Array:
    """The step of largest expected improvement within (0, 2a/|b|].

    The interval is where the mean predicts any improvement at all: with an
    uncertain curvature the expectation grows without bound as the step does, so
    only a bounded maximum means something. The maximum is never left of the
    quadratic minimum a/b. Under negative curvature it is the end of the interval.
    """
    unit = _reflected_minimum(model)
    safe = jnp.where(unit > 0, unit, 1)
    slope = jnp.where(model.slope > 0, model.slope, 1)
    # In units of the quadratic minimum x = alpha b/a and of the drop a²/b there.
    sign = jnp.sign(model.curvature)
    third_order = jnp.asarray(model.third_order, safe.dtype)
    spread = (
        jnp.sqrt(2 * model.value_variance) / slope / safe,
        jnp.sqrt(model.slope_variance) / slope,
        jnp.sqrt(model.curvature_variance) / slope * safe / 2,
        jnp.sqrt(third_order) / slope * safe * safe,
    )
    spread = tuple(jnp.minimum(c, jnp.finfo(c.dtype).max / 64) for c in spread)
    largest = jnp.maximum(
        jnp.maximum(spread[0], spread[1]), jnp.maximum(spread[2], spread[3])
    )
    largest = jnp.where(largest > 0, largest, 1)
    c0, c1, c2, c3 = (c / largest for c in spread)

    def evaluate(x: Array) -> tuple[Array, Array]:
        """Expected improvement and the sign-deciding part of its derivative."""
        mean, mean_slope = x * (sign * x / 2 - 1), sign * x - 1
        unit_variance = c0**2 + (c1 * x) ** 2 + (c2 * x**2) ** 2 + (c3 * x**3) ** 2
        positive = unit_variance > 0
        unit_deviation = jnp.sqrt(jnp.where(positive, unit_variance, 1))
        deviation = largest * unit_deviation
        growth = c1**2 * x + 2 * c2**2 * x**3 + 3 * c3**2 * x**5
        score = jnp.where(positive, -mean / deviation, jnp.inf)
        weight = ndtr(score)
        density = _normal_density(score)
        gain = jnp.where(positive, deviation, 0) * density - mean * weight
        slope = largest * growth / unit_deviation * density / weight - mean_slope
        return gain, slope

    grid = 1 + jnp.arange(129, dtype=safe.dtype) / 128
    best = grid[jnp.argmax(evaluate(grid)[0])]
    low, high = jnp.maximum(best - 1 / 128, 1), jnp.minimum(best + 1 / 128, 2)
    for _ in range(jnp.finfo(safe.dtype).nmant):
        middle = (low + high) / 2
        rising = evaluate(middle)[1] > 0
        low, high = jnp.where(rising, middle, low), jnp.where(rising, high, middle)
    x = jnp.where(model.curvature == 0, 1, (low + high) / 2)
    step = jnp.minimum(x * unit, jnp.finfo(unit.dtype).max)
    return jnp.where(model.slope > 0, step, 0)


def constant(step_size: float | Array | Callable[[Array], Array]) -> Rule:
    """A fixed step size, or an optax schedule of the step count."""

    def rule(model: ImprovementModel) -> Array:
        value = step_size(model.step) if callable(step_size) else step_size
        return jnp.asarray(value, model.slope.dtype)

    return rule


def scaled(rule: Rule, factor: float | Callable[[Array], Array]) -> Rule:
    """The rule's step times the paper's factor c, or a schedule of it."""

    def scaled_rule(model: ImprovementModel) -> Array:
        c = factor(model.step) if callable(factor) else factor
        return jnp.asarray(c, model.slope.dtype) * rule(model)

    return scaled_rule


def switch(first: Rule, then: Rule, after: int) -> Rule:
    """``first`` for the first ``after`` steps, ``then`` from there on (§6.3).

    The model is averaged all along, so ``then`` starts well informed.
    """
    if after < 0:
        raise ValueError(f"switch(after={after}): the number of steps must be >= 0")

    def rule(model: ImprovementModel) -> Array:
        return jnp.where(model.step < after, first(model), then(model))

    return rule


def _reflected_minimum(model: ImprovementModel) -> Array:
    """a/|b|; where b = 0, the step at which slope and value are equally uncertain."""
    bend = jnp.abs(model.curvature)
    flat = jnp.sqrt(2 * model.value_variance) / jnp.sqrt(
        jnp.where(model.slope_variance > 0, model.slope_variance, jnp.inf)
    )
    step = jnp.where(bend > 0, model.slope / jnp.where(bend > 0, bend, 1), flat)
    return jnp.clip(step, 0, jnp.finfo(step.dtype).max)


def _normal_density(score: Array) -> Array:
    return jnp.exp(-(score**2) / 2) / jnp.sqrt(2 * jnp.pi).astype(score.dtype)
