"""Variances of means from groups: exact, unbiased, and merged in any order."""

from functools import partial, reduce

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka import moments


def tree_of(rows: np.ndarray) -> dict:
    """Five coordinates as two leaves."""
    return {"a": jnp.asarray(rows[..., :3]), "b": jnp.asarray(rows[..., 3:])}


def expected(means: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By the formula in the module's own words, groups of weight 0 left out."""
    means, weights = means[weights > 0], weights[weights > 0]
    mean = weights @ means / weights.sum()
    scatter = weights @ (means - mean) ** 2
    return mean, scatter / ((len(weights) - 1) * weights.sum())


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    st.lists(st.integers(0, 5), min_size=6, max_size=6).filter(
        lambda w: sum(x > 0 for x in w) >= 2
    ),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_stacked_and_merged_in_any_order(weights, random, diagonal):
    rng = np.random.default_rng(random.randrange(2**32))
    means = rng.normal(size=(len(weights), 5)).astype(np.float32)
    w = np.array(weights, np.float32)
    stacked = moments.stacked_groups(tree_of(means), jnp.asarray(w), diagonal=diagonal)
    order = list(range(len(weights)))
    random.shuffle(order)
    ones = [
        moments.one_group(tree_of(means[j]), jnp.asarray(w[j]), diagonal=diagonal)
        for j in order
    ]
    middle = len(ones) // 2

    def merge(a: moments.Summary, b: moments.Summary) -> moments.Summary:
        return moments.merge((a, b), diagonal=diagonal)[0]

    merged = merge(reduce(merge, ones[:middle]), reduce(merge, ones[middle:]))
    mean, variance = expected(means.astype(float), w.astype(float))
    for summary in (stacked, merged):
        found = summary.moments()
        np.testing.assert_allclose(flat(found.mean), mean, rtol=1e-5, atol=1e-6)
        want = variance if diagonal else variance.mean(keepdims=True)
        np.testing.assert_allclose(flat(found.variance), want, rtol=2e-5, atol=1e-9)
        assert float(summary.groups) == np.sum(w > 0)
        assert float(summary.weight) == np.sum(w)


@jax.jit
def estimates(means: jax.Array, weights: jax.Array) -> jax.Array:
    """The variance of the mean, for every row of group means."""
    summary = partial(moments.stacked_groups, diagonal=False)
    return jax.vmap(lambda m: summary(m, weights).moments().variance)(means)


@pytest.mark.parametrize("mask", ["whole", "masked"])
def test_unbiased_for_every_number_of_groups(mask):
    """k = 2..n, equal groups or not, over 40000 batches of a skewed distribution.

    Each of the 22 averages is held to 5 standard errors of itself, so a false alarm
    has probability below 22 * 6e-7 = 1.3e-5 (and the seed is fixed).
    """
    n, batches = 12, 40_000
    real = np.ones(n, bool)
    if mask == "masked":
        real[[1, 4, 5, 10]] = False
    x = np.random.default_rng(11).exponential(size=(batches, n)).astype(np.float32)
    truth = 1.0 / real.sum()
    for k in range(2, n + 1):
        groups = [np.flatnonzero(real[j::k]) * k + j for j in range(k)]
        weights = np.array([len(g) for g in groups], np.float32)
        means = np.stack(
            [x[:, g].mean(axis=1) if len(g) else np.zeros(batches) for g in groups], 1
        )
        # In parts: past 2^15 numbers jaxlib 0.10.2 miscompiles this sum on the CPU.
        parts = np.split(means.astype(np.float32), 16)
        estimate = np.concatenate([estimates(part, weights) for part in parts])
        estimate = estimate.astype(float)
        error = estimate.std() / np.sqrt(batches)
        assert abs(estimate.mean() - truth) < 5 * error, k
        assert error < 0.02 * truth


def test_centred_sums_survive_a_large_mean(rng):
    """Mean 100, deviation 0.01 in float32: E[x²] - E[x]² turns negative here."""
    x = (100 + 0.01 * rng.normal(size=(64, 500))).astype(np.float32)
    found = moments.stacked_groups(jnp.asarray(x), jnp.ones(64), diagonal=True)
    variance = np.asarray(found.moments().variance)
    assert np.all(variance > 0)
    np.testing.assert_allclose(
        variance, x.astype(float).var(axis=0, ddof=1) / 64, rtol=1e-2
    )
    naive = np.mean(x**2, axis=0) - np.mean(x, axis=0) ** 2
    assert np.any(naive < 0)


def test_one_group_and_no_group_have_no_variance():
    one = moments.one_group(jnp.float32(3), jnp.float32(4), diagonal=False)
    assert one.moments() == (3, 0)
    none = moments.one_group(jnp.float32(3), jnp.float32(0), diagonal=False)
    assert none.groups == 0
    (both,) = moments.merge((none, one), diagonal=False)
    assert (both.groups, both.weight, both.mean, both.scatter) == (1, 4, 3, 0)
