"""The improvement model and the rules, against brute force in higher precision."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import optax
import pytest
from scipy.special import ndtr

import meka
from meka import ImprovementModel

COUNT = 10_000
LARGEST = float(np.finfo(np.float32).max)


class Coefficients(NamedTuple):
    """Many models at once: a, b, s, p, q, t."""

    slope: np.ndarray
    curvature: np.ndarray
    value_variance: np.ndarray
    slope_variance: np.ndarray
    curvature_variance: np.ndarray
    third_order: np.ndarray

    def wide(self) -> "Coefficients":
        return Coefficients(*(x.astype(np.float64) for x in self))

    def has_optimum(self) -> np.ndarray:
        """Where Eq. 13 has a minimum at a finite, positive step."""
        _, b, s, p, q, t = self
        bounded = (b > 0) | (q > 0) | (t > 0)
        return bounded & ((s > 0) | ((b < 0) & (p > 0)))

    def farthest(self) -> np.ndarray:
        """How far a negative curvature is trusted."""
        a, b = self.wide()[:2]
        return np.where(b < 0, 2 * a / np.where(b < 0, -b, 1), np.inf)

    def mean(self, x: np.ndarray) -> np.ndarray:
        return x * (self.curvature * x / 2 - self.slope)

    def deviation(self, x: np.ndarray) -> np.ndarray:
        s, p, q, t = self[2:]
        return np.sqrt(2 * s + p * x**2 + q * x**4 / 4 + t * x**6)

    def take(self, rows: np.ndarray) -> "Coefficients":
        return Coefficients(*(x[rows] for x in self))


def draw(seed: int, decades: float, third_order: bool) -> Coefficients:
    """Log-uniform; a third bent downwards; some curvatures and variances zero."""
    rng = np.random.default_rng(seed)

    def magnitude(zeros: float = 0.0) -> np.ndarray:
        x = 10 ** rng.uniform(-decades, decades, COUNT)
        return np.where(rng.random(COUNT) < zeros, 0, x).astype(np.float32)

    sign = rng.choice([1, 1, -1], COUNT).astype(np.float32)
    curvature = sign * magnitude(0.05)
    t = magnitude(0.5) if third_order else np.zeros(COUNT, np.float32)
    noise = magnitude(0.15), magnitude(0.15), magnitude(0.15)
    return Coefficients(magnitude(), curvature, *noise, t)


probability_of_improvement = jax.jit(jax.vmap(meka.probability_of_improvement))
expected_improvement = jax.jit(jax.vmap(meka.expected_improvement))


def model(*coefficients: float, dtype=jnp.float32, step: int = 0) -> ImprovementModel:
    six = [jnp.asarray(x, dtype) for x in (*coefficients, 0.0)[:6]]
    return ImprovementModel._make([*six, jnp.asarray(step, jnp.int32)])


def steps_of(rule: Callable, c: Coefficients) -> np.ndarray:
    count = jnp.zeros(len(c.slope), jnp.int32)
    steps = rule(ImprovementModel._make([*map(jnp.asarray, c), count]))
    assert steps.dtype == c.slope.dtype
    return np.asarray(steps, np.float64)


def log_root(c: Coefficients) -> np.ndarray:
    """log2 of the stationary point of Eq. 13, by bisection in the exponent.

    The derivative of mean/deviation has the sign of mean' V - mean V'/2 with V the
    variance; its eight monomials are summed relative to the largest of them.
    """
    a, b, s, p, q, t = c.wide()
    with np.errstate(divide="ignore"):
        products = [  # (mean' V, then -mean V'/2), as sign, log2 of size, power
            (-1, np.log2(a) + np.log2(2 * s), 0, a),
            (1, np.log2(np.abs(b)) + np.log2(2 * s), 1, b),
            (1, np.log2(np.abs(b)) + np.log2(p / 2), 3, b),
            (1, np.log2(a) + np.log2(q / 4), 4, a),
            (2, np.log2(a) + np.log2(t), 6, a),
            (-1, np.log2(np.abs(b)) + np.log2(t / 2), 7, b),
        ]
    low = np.full(len(a), -500.0)
    high = np.where(b > 0, np.log2(a) - np.log2(np.where(b > 0, b, 1)), 500.0)
    for _ in range(80):
        middle = (low + high) / 2
        sizes = np.array([size + power * middle for _, size, power, _ in products])
        unit = np.max(sizes, axis=0)
        unit = np.where(np.isfinite(unit), unit, 0)
        signs = [factor * np.sign(x) for factor, _, _, x in products]
        total = sum(
            sign * np.exp2(size - unit) for sign, size in zip(signs, sizes, strict=True)
        )
        low = np.where(total < 0, middle, low)
        high = np.where(total < 0, high, middle)
    return (low + high) / 2


@pytest.mark.parametrize("third_order", [False, True])
@pytest.mark.parametrize("decades", [15, 37])
def test_probability_solves_eq_13_to_rounding(decades, third_order):
    c = draw(3, decades, third_order)
    steps = steps_of(probability_of_improvement, c)
    assert np.all(np.isfinite(steps))
    assert np.all(steps >= 0)
    root = np.minimum(log_root(c), np.log2(c.farthest()))
    solvable = c.has_optimum()
    normal = solvable & (root > -125.5) & (root < 127.9)
    assert normal.sum() > COUNT / 2
    error = np.log(steps[normal]) - root[normal] * np.log(2)
    assert np.max(np.abs(error)) < 1e-6
    # Outside the range of float32 the answer is its largest number, or next to zero.
    assert np.all(steps[solvable & (root > 128)] == LARGEST)
    assert np.all(steps[solvable & (root < -126)] <= 2.0**-125)


@pytest.mark.parametrize("third_order", [False, True])
def test_probability_is_a_global_minimiser_of_eq_13(third_order):
    """Nothing on a grid of steps over 70 decades, or next to it, does better."""
    c = draw(4, 15, third_order)
    steps = steps_of(probability_of_improvement, c)
    kept = c.has_optimum() & (steps < LARGEST) & (steps > 1e-37)
    kept &= steps < 0.999 * c.farthest()
    c, steps = c.take(kept).wide(), steps[kept]
    found = c.mean(steps) / c.deviation(steps)
    assert np.all(found < 0)
    nearby = np.concatenate([1 - 2.0 ** -np.arange(1, 12), 1 + 2.0 ** -np.arange(12)])
    for x in [10.0**k for k in np.arange(-35, 35, 0.25)] + [steps * k for k in nearby]:
        other = c.mean(x) / c.deviation(x)
        assert np.all(found <= other + 1e-10 * np.abs(found))


def exact(c: tuple[float, ...]) -> tuple[Callable, Callable]:
    """Mean and variance of the change in 60 digits."""
    a, b, s, p, q, t = (mp.mpf(float(x)) for x in c)
    return (
        lambda x: -a * x + b * x**2 / 2,
        lambda x: 2 * s + p * x**2 + q * x**4 / 4 + t * x**6,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_probability_against_60_digits(dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    c = draw(5, 8, third_order=True)
    free = np.log2(c.farthest()) > log_root(c)
    c = c.take(np.flatnonzero(c.has_optimum() & free)[:40])
    c = Coefficients(*(x.astype(dtype) for x in c))
    steps = steps_of(probability_of_improvement, c)
    with mp.workdps(60):
        for k, step in enumerate(steps):
            mean, variance = exact(tuple(x[k] for x in c))
            root = mp.findroot(
                lambda x, m=mean, v=variance: (
                    mp.diff(lambda y: m(y) / mp.sqrt(v(y)), x)
                    * mp.sqrt(v(x))
                    * x
                    / m(x)
                ),
                (mp.mpf(step) * (1 - mp.mpf(2) ** -20), mp.mpf(step)),
                tol=mp.mpf(10) ** -40,
            )
            assert abs(step / root - 1) < (1e-6 if dtype == "float32" else 1e-14)


@pytest.mark.parametrize(
    ("coefficients", "expected"),
    [
        # slope <= 0: nothing to gain
        ((0, 1, 1, 1, 1), 0),
        ((-1, 1, 1, 1, 1), 0),
        ((-1, -1, 1, 1, 1), 0),
        ((-1, 0, 0, 0, 0), 0),
        # all variances zero: the quadratic minimum
        ((3, 2, 0, 0, 0), 1.5),
        # a value known exactly: no optimum, the quadratic minimum
        ((3, 2, 0, 1, 0), 1.5),
        ((3, 2, 0, 0, 1), 1.5),
        ((3, 2, 0, 1, 1, 1), 1.5),
        # positive curvature: 2bs x = 2as, and (bp/2)x³ + 2bs x = 2as at x = 1
        ((3, 2, 7, 0, 0), 1.5),
        ((3, 2, 1, 2, 0), 1.0),
        # (aq/4)x⁴ + 2bs x = 2as and + 2atx⁶ - (b/2)tx⁷ at x = 1
        ((4, 2, 1, 0, 4), 1.0),
        ((4, 2, 7, 0, 0, 4), 1.0),
        # no or negative curvature, curvature variance or third order positive
        ((1, 0, 1, 1, 8), 1.0),
        ((1, 0, 1, 1, 0, 1), 1.0),
        ((1, -1, 1, 0, 16), 1.0),
        ((1, -1, 1, 2, 0, 2), 1.0),
        ((1, -2, 0, 3, 12), 1.0),  # value known exactly, slope not
        # the same where the curvature is all but certain: no further than -2a/b
        ((1, -1, 1, 1, 1e-12), 2.0),
        ((1, -1, 1, 1, 0, 1e-12), 2.0),
        # negative curvature without bound on the step, or with it only at zero
        ((3, -2, 1, 1, 0), 1.5),
        ((3, -2, 0, 0, 0), 1.5),
        ((3, -2, 0, 1, 0), 1.5),
        ((3, -2, 0, 0, 1), 1.5),
        # no curvature at all: √(2s/p), or 0 if one is 0
        ((3, 0, 2, 1, 0), 2.0),
        ((3, 0, 0, 1, 0), 0),
        ((3, 0, 2, 0, 0), 0),
        ((3, 0, 0, 0, 0), 0),
        ((3, 0, 0, 1, 1), 0),
    ],
)
def test_edges_of_probability(coefficients, expected):
    step = jax.jit(meka.probability_of_improvement)(model(*coefficients))
    np.testing.assert_allclose(step, expected, rtol=3e-7, atol=0)
    assert step.dtype == jnp.float32
    assert not step.weak_type


class Improvement(NamedTuple):
    """Expected improvement in units x = step |b|/a of 1 to 2, in float64."""

    sign: np.ndarray
    parts: list[np.ndarray]

    @classmethod
    def of(cls, c: Coefficients) -> "Improvement":
        a, b, s, p, q, t = c.wide()
        unit = a / np.abs(b)
        parts = [2 * s / (a * unit) ** 2, p / a**2]
        parts += [q * unit**2 / a**2 / 4, t * unit**4 / a**2]
        return cls(np.sign(b), parts)

    def pieces(self, x):
        mean = x * (self.sign * x / 2 - 1)
        variance = sum(c * x ** (2 * k) for k, c in enumerate(self.parts))
        certain = variance == 0
        deviation = np.sqrt(np.where(certain, 1, variance))
        score = np.where(certain, np.inf, -mean / deviation)
        density = np.exp(-(np.minimum(score, 1e100) ** 2) / 2) / np.sqrt(2 * np.pi)
        return mean, np.where(certain, 0, deviation), score, density

    def value(self, x):
        mean, deviation, score, density = self.pieces(x)
        return deviation * density - mean * ndtr(score)

    def rise(self, x):
        _, deviation, score, density = self.pieces(x)
        half = sum(k * c * x ** (2 * k - 1) for k, c in enumerate(self.parts))
        growth = half / np.where(deviation > 0, deviation, 1)
        return growth * density - (self.sign * x - 1) * ndtr(score)


@pytest.mark.parametrize("decades", [3, 15])
def test_expected_improvement_by_brute_force(decades):
    """The highest of a fine grid, its neighbourhood and its local maxima."""
    c = draw(6, decades, third_order=True)
    c = c.take(c.curvature != 0)
    steps = steps_of(expected_improvement, c)
    assert np.all(np.isfinite(steps))
    assert np.all(steps >= 0)
    normal = (steps > 1e-37) & (steps < LARGEST)
    assert normal.sum() > COUNT / 2
    c, steps = c.take(normal), steps[normal]
    curve = Improvement.of(c)
    x = steps / (c.wide().slope / np.abs(c.wide().curvature))
    assert np.all((x > 1 - 1e-6) & (x < 2 + 1e-6))
    # Maxima inside, where a rise ends; and the end itself.
    grid = np.linspace(1, 2, 513)
    best, place = curve.value(grid[-1]), np.full(len(x), 2.0)
    turns = np.zeros(len(x), int)
    rising = curve.rise(grid[0]) > 0
    for low, high in pairwise(grid):
        assert np.all(curve.value(x) >= curve.value(low) * (1 - 3e-7))
        still = curve.rise(high) > 0
        found = np.flatnonzero(rising & ~still)
        if found.size:
            part = Improvement(curve.sign[found], [v[found] for v in curve.parts])
            left, right = np.full(found.size, low), np.full(found.size, high)
            for _ in range(50):
                middle = (left + right) / 2
                up = part.rise(middle) > 0
                left = np.where(up, middle, left)
                right = np.where(up, right, middle)
            better = part.value(left) > best[found]
            # With an end that falls, only the inside counts, flat or not.
            better |= ~(curve.rise(grid[-1])[found] > 0)
            best[found] = np.where(better, part.value(left), best[found])
            place[found] = np.where(better, left, place[found])
            turns[found] += 1
        rising = still
    flat = curve.rise(grid[0]) <= 0  # certain: the quadratic minimum
    place = np.where(flat & (turns == 0) & (curve.rise(grid[-1]) <= 0), 1.0, place)
    assert turns.max() == 1
    tie = (turns == 1) & (curve.rise(grid[-1]) > 0)
    tie &= np.abs(curve.value(grid[-1]) / curve.value(x) - 1) < 1e-6
    assert tie.sum() < COUNT / 200
    error = np.abs(x / place - 1)
    assert np.max(error[~tie]) < 1e-6


def test_expected_improvement_against_60_digits():
    c = draw(7, 2, third_order=True)
    chosen = np.flatnonzero((c.curvature > 0) & (c.slope_variance > 0))[:12]
    c = c.take(chosen)
    steps = steps_of(expected_improvement, c)
    with mp.workdps(60):
        for k, step in enumerate(steps):
            mean, variance = exact(tuple(x[k] for x in c))

            def value(x, mean=mean, variance=variance):
                z = -mean(x) / mp.sqrt(variance(x))
                return mp.sqrt(variance(x)) * (mp.npdf(z) + z * mp.ncdf(z))

            end = 2 * mp.mpf(float(c.slope[k])) / mp.mpf(float(c.curvature[k]))
            grid = [end * j / 200 for j in range(1, 201)]
            best = max(value(x) for x in grid)
            assert value(mp.mpf(step)) > best * (1 - 3e-7)  # the rounding of an end


def test_expected_improvement_at_the_edges():
    rule = jax.jit(meka.expected_improvement)
    for coefficients, expected in [
        ((0, 1, 1, 1, 1), 0),
        ((-1, 1, 1, 1, 1), 0),
        ((3, 2, 0, 0, 0), 1.5),  # certain: the quadratic minimum
        ((3, 2, 1, 0, 0), 1.5),  # the noise does not depend on the step
        ((3, -2, 1, 1, 1), 3.0),  # negative curvature: the end of the interval
        ((3, -2, 0, 0, 0), 3.0),
        ((3, 2, 1, 1e12, 0), 3.0),  # noise rises faster than the mean
        ((3, 0, 2, 1, 0), 2.0),  # straight: √(2s/p)
        ((3, 0, 0, 0, 0), 0),
    ]:
        step = rule(model(*coefficients))
        np.testing.assert_allclose(step, expected, rtol=3e-7, atol=0)
        assert not step.weak_type


@pytest.mark.parametrize(
    ("coefficients", "expected"),
    [
        ((3, 2, 5, 5, 5), 1.5),
        ((3, -2, 5, 5, 5), 1.5),
        ((-3, 2, 5, 5, 5), 0),
        ((0, 2, 5, 5, 5), 0),
        ((3, 0, 2, 1, 5), 2.0),
        ((3, 0, 0, 0, 0), 0),
        ((1e37, 1e-37, 1, 1, 1), LARGEST),
    ],
)
def test_quadratic(coefficients, expected):
    np.testing.assert_allclose(meka.quadratic(model(*coefficients)), expected)


def test_constant_scaled_and_switch():
    at = [model(3, 2, 0, 0, 0, step=k) for k in range(6)]
    assert meka.constant(0.25)(at[0]) == 0.25
    schedule = meka.constant(optax.piecewise_constant_schedule(1.0, {3: 0.5}))
    with jax.numpy_dtype_promotion("standard"):  # as optax's schedules need
        assert [float(schedule(m)) for m in at] == [1, 1, 1, 0.5, 0.5, 0.5]
        assert schedule(at[0]).dtype == jnp.float32
    assert meka.scaled(meka.quadratic, 2.0)(at[0]) == 3.0
    growing = meka.scaled(meka.quadratic, lambda step: step.astype(jnp.float32))
    assert [float(growing(m)) for m in at[:3]] == [0, 1.5, 3.0]
    late = meka.switch(meka.constant(0.125), meka.quadratic, after=2)
    assert [float(late(m)) for m in at[:4]] == [0.125, 0.125, 1.5, 1.5]
    for rule in (meka.constant(0.25), growing, late):
        assert rule(at[0]).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"switch\(after=-1\)"):
        meka.switch(meka.quadratic, meka.quadratic, after=-1)


def test_model_predicts_the_distribution(rng):
    """Mean and deviation of a simulated change; 1e6 draws, 5 sigma: 1e-6 by chance."""
    a, b, s, p, q, t = 0.7, 0.4, 0.02, 0.3, 0.5, 0.1
    draws = rng.normal(size=(5, 1_000_000))
    x = 1.3
    change = -a * x + b * x**2 / 2
    change = change + np.sqrt(s) * (draws[0] - draws[1]) + x * np.sqrt(p) * draws[2]
    change = change + x**2 / 2 * np.sqrt(q) * draws[3] + x**3 * np.sqrt(t) * draws[4]
    m, step = model(a, b, s, p, q, t), jnp.asarray(x, jnp.float32)
    noise = 5 * change.std() / 1000
    assert abs(float(m.mean(step)) - change.mean()) < noise
    assert abs(float(m.deviation(step)) - change.std()) < noise
    assert abs(float(m.probability(step)) - (change < 0).mean()) < 5 * 0.5 / 1000
    gain = np.maximum(-change, 0)
    expected = float(m.expected_improvement(step))
    assert abs(expected - gain.mean()) < 5 * gain.std() / 1000


def test_model_at_the_edges():
    step = jnp.ones((), jnp.float32)
    assert model(1, 1, 0, 0, 0).probability(step) == 1
    assert model(-1, 1, 0, 0, 0).probability(step) == 0
    assert model(0, 0, 0, 0, 0).probability(step) == 0.5
    assert model(1, 1, 0, 0, 0).expected_improvement(step) == 0.5
    assert model(-1, 1, 0, 0, 0).expected_improvement(step) == 0
    # x⁶ overflows float32, x³ does not.
    far = jnp.asarray(1e8, jnp.float32)
    np.testing.assert_allclose(model(0, 0, 0, 0, 0, 1).deviation(far), 1e24, rtol=1e-6)


exponents = st.integers(-10, 10)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.tuples(
        st.floats(0.125, 8, width=32),
        st.floats(-8, 8, width=32).filter(lambda b: abs(b) > 0.01),
        *[st.floats(0.125, 8, width=32)] * 4,
    ),
    exponents,
    exponents,
)
@pytest.mark.parametrize("name", ["probability", "expected", "quadratic"])
def test_scaling_laws(name, coefficients, loss, direction):
    """A loss c times as large changes nothing, a direction c times as long divides."""
    rule = {
        "probability": probability_of_improvement,
        "expected": expected_improvement,
        "quadratic": jax.vmap(meka.quadratic),
    }[name]
    a, b, s, p, q, t = coefficients
    c, d = 2.0**loss, 2.0**direction
    other = (a * c * d, b * c * d**2, s * c**2, p * c**2 * d**2)
    other = (*other, q * c**2 * d**4, t * c**2 * d**6)
    both = Coefficients(*np.array([coefficients, other], np.float32).T)
    one, two = steps_of(rule, both)
    assert one > 0
    np.testing.assert_allclose(two * d, one, rtol=5e-7)
    if b > 0 and name == "probability":
        assert one <= a / b * (1 + 1e-6)
    if b > 0 and name == "expected":
        assert a / b * (1 - 1e-6) <= one <= 2 * a / b * (1 + 1e-6)
