"""The step size of largest probability of improvement, by a polynomial's one root.

Maximising P(improvement) over the step size (Eq. 13) means minimising mean over
deviation. With slope a, curvature b, value variance s, slope variance p, curvature
variance q and third-order coefficient t its stationary points are the roots of

    (aq/4) x⁴ + (bp/2) x³ + 2bs x - 2as + t (2a x⁶ - (b/2) x⁷) = 0.

For a > 0 exactly one root is the optimum, and right of it the polynomial is
increasing and convex (for b > 0 as long as x < 2.8 a/b), so Newton's method from
any upper bound descends to it without overshoot: a fixed number of iterations, no
branches, one fused kernel.

The inputs may span the whole range of float32, where powers of x overflow. So x is
measured in a power of two close to the root, and the coefficients are rescaled by
powers of two, which is exact: what remains are numbers near one, and the result is
right to a few units in the last place.
"""

import jax.numpy as jnp

from meka.tree import Array

_ITERATIONS = 16
_NEVER = 1e6  # log2 of "no bound from this term"


def most_probable_step(
    slope: Array,
    curvature: Array,
    value_variance: Array,
    slope_variance: Array,
    curvature_variance: Array,
    third_order: Array,
    otherwise: Array,
) -> Array:
    """The minimiser of Eq. 13, 0 for slope <= 0, ``otherwise`` where there is none."""
    a, b = slope, curvature
    s, p, q, t = value_variance, slope_variance, curvature_variance, third_order
    # Without any uncertainty the quadratic minimum is certain, and any s gives it.
    s = jnp.where((s == 0) & (p == 0) & (q == 0) & (t == 0), jnp.ones_like(s), s)
    log_scale = jnp.where(
        b > 0, _bound_convex(a, b, s, p, q, t), _bound_concave(a, b, s, p, q, t)
    )
    # Beyond the range of the dtype the answer is its largest number, or zero.
    limit = 2 * jnp.finfo(a.dtype).maxexp
    exponent = jnp.ceil(jnp.clip(log_scale, -limit, limit)).astype(jnp.int32)
    coefficients = _rescale(
        exponent,
        (-0.5, b, t, 7),
        (2.0, a, t, 6),
        (0.25, a, q, 4),
        (0.5, b, p, 3),
        (2.0, b, s, 1),
        (-2.0, a, s, 0),
    )
    z = _newton(*coefficients)
    step = jnp.minimum(jnp.ldexp(z, exponent), jnp.finfo(a.dtype).max)
    # With a value known exactly the smallest step is the surest, and leads nowhere.
    vanishes = (value_variance == 0) & ((b >= 0) | (p == 0))
    diverges = (b <= 0) & (q == 0) & (t == 0)
    step = jnp.where(vanishes | diverges, otherwise, step)
    return jnp.where(a > 0, step, jnp.zeros_like(step))


def _log2(x: Array) -> Array:
    mantissa, exponent = jnp.frexp(jnp.where(x > 0, x, 1))
    return jnp.log2(mantissa) + exponent.astype(x.dtype)


def _bound_convex(a, b, s, p, q, t) -> Array:
    """log2 of an upper bound on the root for b > 0, at most 4 times the root.

    There all terms but the constant one are positive, so each alone bounds it.
    """
    la, lb, ls = _log2(a), _log2(b), _log2(s)
    bound = la - lb
    bound = jnp.minimum(bound, jnp.where(q > 0, (3 + ls - _log2(q)) / 4, _NEVER))
    bound = jnp.minimum(
        bound, jnp.where(p > 0, (2 + la + ls - lb - _log2(p)) / 3, _NEVER)
    )
    # On (0, a/b) the third-order terms are at least 3/4 of 2at x⁶.
    bound = jnp.minimum(bound, jnp.where(t > 0, (0.416 + ls - _log2(t)) / 6, _NEVER))
    return jnp.where(s > 0, bound, -_NEVER)


def _bound_concave(a, b, s, p, q, t) -> Array:
    """log2 of an upper bound on the root for b <= 0, at most 9 times the root.

    The terms of degree >= 4 are positive, those of degree <= 3 negative. Each
    positive term alone overtakes all three negative ones where it is three times
    the largest; the smallest of these places bounds the root.
    """
    la, lb, ls = _log2(a), _log2(-b), _log2(s)
    bent = b < 0
    rising = (
        (4, la + _log2(q) - 2, q > 0),
        (6, la + _log2(t) + 1, t > 0),
        (7, lb + _log2(t) - 1, (t > 0) & bent),
    )
    falling = (
        (3, lb + _log2(p) - 1, (p > 0) & bent),
        (1, lb + ls + 1, (s > 0) & bent),
        (0, la + ls + 1, s > 0),
    )
    bound = jnp.full_like(a, _NEVER)
    for high, up, has_up in rising:
        overtakes = jnp.full_like(a, -_NEVER)
        for low, down, has_down in falling:
            at = (down - up + 1.585) / (high - low)
            overtakes = jnp.maximum(overtakes, jnp.where(has_down, at, -_NEVER))
        bound = jnp.minimum(bound, jnp.where(has_up, overtakes, _NEVER))
    return bound


def _rescale(unit: Array, *terms: tuple[float, Array, Array, int]) -> list[Array]:
    """Coefficients ``factor * x * y`` of z^power for a variable in units of 2^unit.

    All are divided by the one power of two that brings the largest near one.
    Exponents are added as integers, so nothing overflows; what underflows is too
    small to matter.
    """
    parts = []
    for factor, x, y, power in terms:
        (mx, ex), (my, ey) = jnp.frexp(x), jnp.frexp(y)
        exponent = (ex + ey).astype(jnp.int32) + power * unit
        parts.append((factor * mx * my, exponent))
    largest = jnp.full_like(unit, -(2**30))
    for mantissa, exponent in parts:
        largest = jnp.maximum(largest, jnp.where(mantissa == 0, -(2**30), exponent))
    lowest = jnp.finfo(terms[0][1].dtype).minexp
    return [
        jnp.ldexp(mantissa, jnp.clip(exponent - largest, lowest, 0))
        for mantissa, exponent in parts
    ]


def _newton(c7, c6, c4, c3, c1, c0) -> Array:
    z = jnp.ones_like(c0)
    for _ in range(_ITERATIONS):
        value = (((c7 * z + c6) * z * z + c4) * z + c3) * z * z * z + c1 * z + c0
        slope = ((7 * c7 * z + 6 * c6) * z * z + 4 * c4) * z + 3 * c3
        slope = slope * z * z + c1
        rising = slope > 0
        descent = jnp.where(rising, value / jnp.where(rising, slope, 1), 0)
        z = jnp.maximum(z - descent, 0)
    return z
