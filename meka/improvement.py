"""How far to step: the predicted improvement along a direction, and rules on it.

Along a direction d the model predicts (Eq. 11)

    f(theta + a d) - f(theta) ~ N(-a slope + a²/2 curvature,
                                  2 value_variance + a² slope_variance
                                  + a⁴/4 curvature_variance + a⁶ third_order)

with slope = -d'm, curvature = d'Bd, value_variance = s, slope_variance = d'Pd,
curvature_variance = d'Qd and third_order = lambda |d|⁶ (App. B.2, off unless asked
for). A *rule* is a function from this model to a step size a >= 0.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.scipy.special import ndtr
from jax.typing import ArrayLike

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

    With value variance s, slope variance p, curvature variance q, third order t:

    | slope a | curvature b | variances | step |
    |---------|-------------|-----------|------|
    | <= 0    | any  | any               | 0                             |
    | > 0     | > 0  | s > 0, or all 0   | the one root, in (0, a/b]     |
    | > 0     | > 0  | s = 0, others not | a/b: no optimum exists, the smaller a \
step the surer it is |
    | > 0     | 0    | s > 0, and q or t > 0 | the one root              |
    | > 0     | < 0  | s or p > 0, and q or t > 0 | the one root, at most -2a/b |
    | > 0     | < 0  | any others        | -a/b: no optimum exists       |
    | > 0     | 0    | any others        | √(2s/p), where the slope's deviation \
overtakes the value's, or 0 if one is 0: no optimum exists |

    The bound under negative curvature is that of `expected_improvement`. Without it
    the step goes to infinity as q goes to zero: a curvature that is certain here would
    be trusted at any distance.
    """
    step = most_probable_step(
        model.slope,
        model.curvature,
        model.value_variance,
        model.slope_variance,
        model.curvature_variance,
        jnp.asarray(model.third_order, model.slope.dtype),
        otherwise=_reflected_minimum(model),
    )
    concave = (model.curvature < 0) & (model.slope > 0)
    bend = jnp.where(concave, -model.curvature / 2, 1)
    farthest = jnp.where(concave, model.slope / bend, jnp.inf)
    return jnp.minimum(step, farthest)


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
    quadratic minimum a/b, so it is sought in x = alpha |b|/a from 1 to 2: where the
    expectation first stops rising, or at the end if that is higher still. Under
    negative curvature it is the end.
    """
    sign = jnp.sign(model.curvature)
    a = jnp.where(model.slope > 0, model.slope, 1)
    b = jnp.where(sign == 0, 1, jnp.abs(model.curvature))
    noise = _Noise.of(model, a, b)

    def rise(x: Array) -> Array:
        """The derivative of the expectation, over the probability of improvement."""
        score = noise.score(x * (sign * x / 2 - 1), x)
        return noise.growth(x) * _normal_density(score) / ndtr(score) - (sign * x - 1)

    def expectation(x: Array) -> Array:
        mean = x * (sign * x / 2 - 1)
        score = noise.score(mean, x)
        fall = noise.drop * mean * ndtr(score)
        return noise.level * noise.deviation(x) * _normal_density(score) - fall

    # There is at most one maximum inside. The first point of a grid beyond which the
    # expectation falls gives eight more bits of it at a time.
    bits = 8
    fractions = jnp.arange(1, 2**bits + 1, dtype=a.dtype) / 2**bits
    end = jnp.full_like(a, 2)
    inside = jnp.any(rise(1 + fractions) <= 0)
    low = jnp.ones_like(a)
    for level in range(-(-jnp.finfo(a.dtype).nmant // bits)):
        width = 2.0 ** -(bits * level)
        falls = rise(low + width * fractions) <= 0
        low = low + width * (fractions[jnp.argmax(falls)] - 1 / 2**bits)
    higher = (rise(end) > 0) & (expectation(end) > expectation(low))
    x = jnp.where(inside, jnp.where(higher, end, low), end)
    step = jnp.where(sign == 0, 1, x) * _reflected_minimum(model)
    step = jnp.minimum(step, jnp.finfo(step.dtype).max)
    return jnp.where(model.slope > 0, step, 0)


class _Noise(NamedTuple):
    """Deviation of the change in units of a²/b, for steps x in units of a/b.

    It is 2^e √(c₀² + c₁²x² + c₂²x⁴ + c₃²x⁶), the largest of c near one. Powers of two
    are kept apart, since the ratio of noise to signal, and of one noise to another,
    may exceed the range of the dtype.
    """

    parts: list[Array]  # c
    rates: list[Array]  # 2^e c²
    shrink: Array  # 2^-e, at most 2^20
    drop: Array  # 2^-max(e, 0)
    level: Array  # 2^min(e, 0)

    @classmethod
    def of(cls, model: ImprovementModel, a: Array, b: Array) -> "_Noise":
        third_order = jnp.asarray(model.third_order, a.dtype)
        terms = (
            _power_product(jnp.sqrt(2 * model.value_variance), (b, 1), (a, -2)),
            _power_product(jnp.sqrt(model.slope_variance), (a, -1)),
            _power_product(jnp.sqrt(model.curvature_variance) / 2, (b, -1)),
            _power_product(jnp.sqrt(third_order), (a, 1), (b, -2)),
        )
        none = jnp.full_like(a, -(2**20), dtype=jnp.int32)
        largest = none
        for mantissa, exponent in terms:
            largest = jnp.maximum(largest, jnp.where(mantissa > 0, exponent, none))
        one = jnp.ones_like(a)
        return cls(
            parts=[_times_power(m, e - largest) for m, e in terms],
            rates=[_times_power(m * m, 2 * e - largest) for m, e in terms[1:]],
            shrink=_times_power(one, jnp.minimum(-largest, 20)),
            drop=_times_power(one, -jnp.maximum(largest, 0)),
            level=_times_power(one, jnp.minimum(largest, 0)),
        )

    def deviation(self, x: Array) -> Array:
        """Over 2^e."""
        c0, c1, c2, c3 = self.parts
        return jnp.sqrt(c0**2 + (c1 * x) ** 2 + (c2 * x**2) ** 2 + (c3 * x**3) ** 2)

    def growth(self, x: Array) -> Array:
        """The derivative of the deviation."""
        w1, w2, w3 = self.rates
        deviation = self.deviation(x)
        rate = w1 * x + 2 * w2 * x**3 + 3 * w3 * x**5
        return rate / jnp.where(deviation > 0, deviation, 1)

    def score(self, mean: Array, x: Array) -> Array:
        """The expected decrease over its deviation; beyond a million is certain."""
        deviation = self.deviation(x)
        return -mean / jnp.where(deviation > 0, deviation, 1) * self.shrink


def _power_product(x: Array, *powers: tuple[Array, int]) -> tuple[Array, Array]:
    """x times powers of others, as a mantissa of order one and a binary exponent."""
    mantissa, exponent = jnp.frexp(x)
    for base, power in powers:
        m, e = jnp.frexp(base)
        mantissa, exponent = mantissa * m**power, exponent + power * e
    return mantissa, exponent.astype(jnp.int32)


def _times_power(x: Array, exponent: Array) -> Array:
    """x 2^exponent, within the range of the dtype."""
    limits = jnp.finfo(x.dtype)
    return jnp.ldexp(x, jnp.clip(exponent, limits.minexp, limits.maxexp - 8))


def constant(step_size: float | Array | Callable[[Array], ArrayLike]) -> Rule:
    """A fixed step size, or an optax schedule of the step count."""

    def rule(model: ImprovementModel) -> Array:
        value = step_size(model.step) if callable(step_size) else step_size
        return jnp.asarray(value, model.slope.dtype)

    return rule


def scaled(rule: Rule, factor: float | Array | Callable[[Array], ArrayLike]) -> Rule:
    """The rule's step times the paper's factor c, or a schedule of it."""

    def scaled_rule(model: ImprovementModel) -> Array:
        c = factor(model.step) if callable(factor) else factor
        return jnp.asarray(c, model.slope.dtype) * rule(model)

    return scaled_rule


def switch(first: Rule, then: Rule, after: int) -> Rule:
    """``first`` for the first ``after`` steps, ``then`` from there on (§7.1).

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
