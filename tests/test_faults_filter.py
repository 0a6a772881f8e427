"""A million random steps of the filter in float32, held against double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpmath import mp

from meka.gaussian import Gaussian, Moments, correct, predict
from meka.optimizer import filter_value

FILTERS = STEPS = 1000
TINY = float(np.finfo(np.float32).tiny)


def magnitudes(rng: np.random.Generator, shape, decades: float) -> np.ndarray:
    """Over many orders of magnitude, and one in a hundred exactly zero."""
    x = 10.0 ** rng.uniform(-decades, decades, shape)
    return np.where(rng.random(shape) < 0.01, 0, x).astype(np.float32)


def inputs(seed: int, decades: float):
    """Changes with their variances, observations with theirs: steps down, filters."""
    rng = np.random.default_rng(seed)
    shape = STEPS, FILTERS
    spread, noise = (magnitudes(rng, shape, decades) for _ in range(2))
    change = (np.sqrt(spread) * rng.normal(size=shape)).astype(np.float32)
    truth = np.cumsum(change.astype(np.float64), axis=0)
    seen = (truth + np.sqrt(noise) * rng.normal(size=shape)).astype(np.float32)
    return change, spread, seen, noise


@jax.jit
def filtered(change, spread, seen, noise):
    """Prior variance, gain, posterior mean and variance at every step."""

    def step(belief, given):
        change, spread, seen, noise = given
        prior = predict(belief, Moments(change, spread))
        belief, gain = correct(prior, Moments(seen, noise))
        return belief, (prior.variance, gain, *belief)

    start = Gaussian(jnp.zeros(FILTERS, "f4"), jnp.full(FILTERS, jnp.inf, "f4"))
    return jax.lax.scan(step, start, (change, spread, seen, noise))[1]


def in_double(change, spread, seen, noise):
    """The same, written down again for NumPy."""
    mean, variance, out = np.zeros(FILTERS), np.full(FILTERS, np.inf), []
    for c, q, g, r in zip(
        *(x.astype(np.float64) for x in (change, spread, seen, noise)), strict=True
    ):
        mean, prior = mean + c, np.maximum(variance + q, TINY)
        known = np.isfinite(prior)
        gain = np.where(known, prior / np.where(known, prior + r, 1), 1)
        mean = mean + gain * (g - mean)
        variance = np.where(known, gain * r, r)
        out.append((prior, gain, mean, variance))
    return [np.array(x) for x in zip(*out, strict=True)]


def relative(found, wanted, floor: float = 0.0) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted)
    scale = np.maximum(np.abs(wanted), floor)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(found - wanted) / scale
    return float(np.max(np.where(found == wanted, 0, error)))


@pytest.mark.fault(5)
@pytest.mark.float32
@pytest.mark.parametrize("decades", [2, 6, 15])
def test_a_million_filter_steps(decades, tried):
    given = inputs(decades, decades)
    prior, gain, mean, variance = (np.asarray(x) for x in filtered(*given))
    noise = given[3]
    assert np.isfinite(np.stack([gain, mean, variance])).all()
    assert np.all(variance >= 0)
    assert np.all(variance <= np.minimum(prior, noise))
    assert np.all((gain >= 0) & (gain <= 1))
    wanted = in_double(*given)
    # Variances and gains are sums and quotients of positive numbers: a few roundings
    # however long the run. What is next to the end of the range may be flushed to zero.
    errors = {
        "largest_relative_error_of_P": relative(variance, wanted[3], 1e-37),
        "largest_relative_error_of_gain": relative(gain, wanted[1], 1e-30),
    }
    assert max(errors.values()) < 2e-6
    # The mean is a sum of terms that cancel: measured by the largest of them.
    size = np.maximum.accumulate(np.abs(given[2].astype(np.float64)), axis=0)
    error = np.max(np.abs(mean - wanted[2]) / np.maximum(size, 1e-30))
    assert error < 2e-5
    tried(steps=gain.size, largest_error_of_mean_over_data=float(error), **errors)


@pytest.mark.fault(5)
@pytest.mark.float32
def test_the_filter_of_the_value_against_60_digits(tried):
    """One step of it, with λ, from random beliefs."""
    rng = np.random.default_rng(5)
    count = 300
    s, r, spread = (magnitudes(rng, count, 8) for _ in range(3))
    u, y, rise = (
        (rng.choice([-1, 1], count) * magnitudes(rng, count, 4)).astype(np.float32)
        for _ in range(3)
    )
    value, errors, _ = jax.jit(jax.vmap(filter_value_of))(u, s, y, r, rise, spread)
    variance, errors = np.asarray(value.variance), np.asarray(errors)
    assert np.all(variance >= 0)
    assert np.all(errors >= 0)
    worst = 0.0
    with mp.workdps(60):
        for k in range(count):
            S, R, C, U, Y, D = (mp.mpf(float(x[k])) for x in (s, r, spread, u, y, rise))
            surprise, expected = (Y - U - D) ** 2, S + C + R
            error = max(surprise - expected, mp.mpf(0))
            prior = max(S + C + error, mp.mpf(TINY))
            exact = prior * R / (prior + R)
            # λ is a difference: its rounding is that of the larger of the two.
            scale = max(surprise, expected) + (abs(Y) + abs(U) + abs(D)) ** 2
            assert abs(mp.mpf(float(errors[k])) - error) < 4e-6 * scale
            found = mp.mpf(float(variance[k]))
            slack = 4e-6 * scale * (exact / prior) ** 2 + 4e-6 * exact + mp.mpf(1e-37)
            assert abs(found - exact) < slack
            if exact > 1e-37 and error == 0:
                worst = max(worst, float(abs(found / exact - 1)))
    tried(steps=count, largest_relative_error_of_s=worst)


def filter_value_of(u, s, y, r, rise, spread):
    return filter_value(Gaussian(u, s), Moments(y, r), rise, spread)
