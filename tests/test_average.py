"""Averages over time are unbiased from the first entry on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka.average import Average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_is_the_weighted_mean_of_its_history(decay, rng):
    entries = rng.normal(size=(30, 3)).astype(np.float32) + 100
    average = Average.like({"x": jnp.zeros(3, "f4"), "y": jnp.zeros((), "f4")})
    for t, row in enumerate(entries):
        average = average.add({"x": jnp.asarray(row), "y": jnp.asarray(row[0])}, decay)
        weights = decay ** np.arange(t + 1)[::-1]
        expected = weights @ entries[: t + 1] / weights.sum()
        np.testing.assert_allclose(average.mean["x"], expected, rtol=1e-5)
        np.testing.assert_allclose(average.mean["y"], expected[0], rtol=1e-5)


def test_a_constant_stays_what_it_is():
    average = Average.like(jnp.zeros((), jnp.float32))
    for _ in range(5):
        average = average.add(jnp.float32(3.7), 0.999)
        assert average.mean == pytest.approx(3.7, rel=1e-6)


def test_empty_and_unseen():
    average = Average.like(jnp.zeros((), jnp.float32))
    assert average.empty
    assert average.mean == 0
    same = average.add(jnp.float32(5), 0.9, seen=jnp.asarray(False))
    assert same.empty
    assert same.mean == 0
    filled = same.add(jnp.float32(5), 0.9, seen=jnp.asarray(True))
    assert not filled.empty
    again = filled.add(jnp.float32(-1), 0.9, seen=jnp.asarray(False))
    assert again.mean == pytest.approx(5)


def test_restarted_it_knows_only_what_came_since():
    average = Average.like(jnp.zeros((), jnp.float32)).add(jnp.float32(100), 0.9)
    average = average.add(jnp.float32(5), 0.9, restart=jnp.asarray(True))
    assert average.mean == pytest.approx(5)
    average = average.add(jnp.float32(6), 0.9, restart=jnp.asarray(False))
    assert average.mean == pytest.approx((0.9 * 5 + 6) / 1.9)


def test_what_is_not_seen_ages():
    """Entries of every third step weigh what they would weigh if the rest were there.

    So the horizon is counted in steps, not in entries.
    """
    decay, average = 0.9, Average.like(jnp.zeros((), jnp.float32))
    entries = np.random.default_rng(0).normal(size=60)
    for t, entry in enumerate(entries):
        average = average.add(jnp.float32(entry), decay, seen=jnp.asarray(t % 3 == 0))
    weights = np.where(np.arange(60) % 3 == 0, decay ** -np.arange(60.0), 0)
    want = np.sum(weights * entries) / np.sum(weights)
    assert average.mean == pytest.approx(want, rel=1e-5)


def test_dtypes_are_kept_and_never_weak(x64):
    entry = {"a": jnp.zeros(2, jnp.float32), "b": jnp.zeros((), jnp.float64)}
    average = Average.like(entry)
    new = average.add(entry, 0.9)
    for old, now in zip(jax.tree.leaves(average), jax.tree.leaves(new), strict=True):
        assert (old.dtype, old.shape) == (now.dtype, now.shape)
        assert not old.weak_type
        assert not now.weak_type
    assert average.weight.dtype == jnp.float64
