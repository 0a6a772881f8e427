"""The two steps of the filter, against dense algebra and the joint Gaussian."""

from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka import Gaussian, Moments, correct, predict
from meka.gaussian import average_variance, per_coordinate, quadratic_form

close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13)


def dense_filter(m, P, changes, Qs, gs, Sigmas) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 6-8 as printed, with matrices and an inverse."""
    identity = np.eye(len(m))
    for change, Q, g, Sigma in zip(changes, Qs, gs, Sigmas, strict=True):
        m, P = m + change, P + Q
        K = P @ np.linalg.inv(P + Sigma)
        m = (identity - K) @ m + K @ g
        P = (identity - K) @ P @ (identity - K).T + K @ Sigma @ K.T
    return m, P


def joint_gaussian(m, P, changes, Qs, gs, Sigmas) -> tuple[np.ndarray, np.ndarray]:
    """The last state given all observations, by one conditioning of one Gaussian.

    The stacked states x_1..x_T are x_0 + sums of changes, so their covariance blocks
    are Cov(x_i, x_j) = P + Q_1 + ... + Q_min(i,j).
    """
    steps, d = len(gs), len(m)
    means = np.concatenate(m + np.cumsum(changes, axis=0))
    prior = np.zeros((steps * d, steps * d))
    for i in range(steps):
        for j in range(steps):
            block = P + sum(Qs[: min(i, j) + 1])
            prior[i * d : (i + 1) * d, j * d : (j + 1) * d] = block
    noise = np.zeros_like(prior)
    for i in range(steps):
        noise[i * d : (i + 1) * d, i * d : (i + 1) * d] = Sigmas[i]
    gain = np.linalg.solve(prior + noise, prior).T
    mean = means + gain @ (np.concatenate(gs) - means)
    covariance = prior - gain @ prior
    return mean[-d:], covariance[-d:, -d:]


def random_model(rng, steps: int, d: int, isotropic: bool) -> tuple:
    def variances(count: int) -> np.ndarray:
        shape = (count, 1) if isotropic else (count, d)
        return np.broadcast_to(rng.gamma(1.0, size=shape), (count, d))

    return (
        rng.normal(size=d),
        variances(1)[0],
        rng.normal(size=(steps, d)),
        variances(steps),
        rng.normal(size=(steps, d)),
        variances(steps),
    )


def split(vector) -> dict:
    """A vector as a tree of leaves of several shapes."""
    return {"a": vector[0], "b": [vector[1:3], vector[3:].reshape(1, -1)]}


def run(m, P, changes, Qs, gs, Sigmas, shape) -> Gaussian:
    belief = Gaussian(split(m), shape(P))
    for change, Q, g, Sigma in zip(changes, Qs, gs, Sigmas, strict=True):
        belief = predict(belief, Moments(split(change), shape(Q)))
        belief, gain = correct(belief, Moments(split(g), shape(Sigma)))
        assert jax.tree.structure(gain) == jax.tree.structure(belief.variance)
    return belief


diagonal_filter = jax.jit(partial(run, shape=split))
isotropic_filter = jax.jit(partial(run, shape=lambda v: v[0]))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("seed", range(5))
def test_diagonal_is_the_dense_filter_and_the_joint_gaussian(seed, x64):
    model = random_model(np.random.default_rng(seed), steps=4, d=5, isotropic=False)
    m, P, changes, Qs, gs, Sigmas = model
    matrices = m, np.diag(P), changes, list(map(np.diag, Qs)), gs
    matrices = (*matrices, list(map(np.diag, Sigmas)))
    belief = diagonal_filter(*model)
    for mean, covariance in (dense_filter(*matrices), joint_gaussian(*matrices)):
        close(flat(belief.mean), mean)
        close(flat(belief.variance), np.diag(covariance))
        close(covariance, np.diag(np.diag(covariance)))


@pytest.mark.parametrize("seed", range(5))
def test_isotropic_is_diagonal_where_all_variances_agree(seed, x64):
    model = random_model(np.random.default_rng(seed), steps=4, d=5, isotropic=True)
    diagonal = diagonal_filter(*model)
    isotropic = isotropic_filter(*model)
    close(flat(isotropic.mean), flat(diagonal.mean))
    assert isotropic.variance.shape == ()
    close(np.full(5, isotropic.variance), flat(diagonal.variance))


def test_a_scalar_is_a_tree(x64):
    """The function value is filtered by the same two functions."""
    m, P, changes, Qs, gs, Sigmas = random_model(
        np.random.default_rng(7), steps=5, d=1, isotropic=False
    )
    belief = Gaussian(jnp.asarray(m[0]), jnp.asarray(P[0]))
    for t in range(5):
        belief = predict(belief, Moments(changes[t][0], Qs[t][0]))
        belief, _ = correct(belief, Moments(gs[t][0], Sigmas[t][0]))
    matrices = m, np.diag(P), changes, list(map(np.diag, Qs)), gs
    mean, covariance = joint_gaussian(*matrices, list(map(np.diag, Sigmas)))
    close(belief.mean, mean[0])
    close(belief.variance, covariance[0, 0])


@pytest.mark.parametrize("start", ["infinite prior", "first gradient"])
def test_variance_falls_as_in_the_papers_proof(start, x64):
    """Without change noise, P_t = Σ/(t+1) and the gain is 1/(t+1)."""
    sigma = np.array([1.0, 1e-3, 40.0])
    still = Moments(jnp.zeros(3), jnp.zeros(3))
    observed = Moments(jnp.zeros(3), jnp.asarray(sigma))
    variance = jnp.full(3, jnp.inf) if start == "infinite prior" else observed.variance
    belief = Gaussian(jnp.zeros(3), variance)
    first = 0 if start == "infinite prior" else 1

    def body(belief, _):
        belief, gain = correct(predict(belief, still), observed)
        return belief, (belief.variance, gain)

    _, (variances, gains) = jax.lax.scan(body, belief, None, length=1000)
    t = np.arange(first, 1000 + first)[:, None]
    close(variances, sigma / (t + 1))
    close(gains, np.broadcast_to(1 / (t + 1), (1000, 3)))


INFINITY = float("inf")


@pytest.mark.parametrize(
    ("prior", "noise", "gain", "posterior"),
    [
        (4.0, 1.0, 0.8, 0.8),
        (INFINITY, 2.0, 1.0, 2.0),
        (INFINITY, 0.0, 1.0, 0.0),
        (3.0, 0.0, 1.0, 0.0),
        (3.0, INFINITY, 0.0, 3.0),
        (0.0, 1.0, 0.0, 0.0),
    ],
)
def test_edges_of_correct(prior, noise, gain, posterior):
    belief = Gaussian(jnp.float32(1), jnp.float32(prior))
    new, found = correct(belief, Moments(jnp.float32(3), jnp.float32(noise)))
    assert found == pytest.approx(gain, rel=1e-7)
    assert new.variance == pytest.approx(posterior, rel=1e-6, abs=1e-37)
    assert new.mean == pytest.approx(1 + gain * 2, rel=1e-6)


def test_exact_prediction_meets_exact_observation():
    """The predicted variance is floored, so the observation is trusted."""
    zero = jnp.zeros((), jnp.float32)
    belief = predict(Gaussian(zero, zero), Moments(zero, zero))
    assert belief.variance == jnp.finfo(jnp.float32).tiny
    new, gain = correct(belief, Moments(jnp.float32(3), zero))
    assert (gain, new.mean, new.variance) == (1, 3, 0)


def test_a_wide_prior_does_not_freeze_the_filter():
    """(1 - K) P is exactly zero here in float32; the Joseph form is right."""
    prior, noise = jnp.float32(1e4), jnp.float32(1e-5)
    new, gain = correct(Gaussian(jnp.float32(0), prior), Moments(noise, noise))
    assert (1 - gain) * prior == 0
    assert new.variance == pytest.approx(1e-5, rel=1e-6)


variances = st.floats(0, 2.0**100, width=32) | st.just(INFINITY)


@hypothesis.settings(max_examples=200)
@hypothesis.given(
    variances,
    st.floats(0, 2.0**100, width=32),
    st.floats(0, 2.0**100, width=32),
    st.floats(-1e3, 1e3, width=32),
    st.floats(-1e3, 1e3, width=32),
)
def test_beliefs_stay_beliefs(prior, spread, noise, mean, seen):
    belief = Gaussian(jnp.float32(mean), jnp.float32(prior))
    moved = predict(belief, Moments(jnp.float32(0), jnp.float32(spread)))
    observed = Moments(jnp.float32(seen), jnp.float32(noise))
    new, gain = correct(moved, observed)
    assert moved.variance > 0
    assert 0 <= gain <= 1
    assert 0 <= new.variance <= min(moved.variance, observed.variance)
    low, high = sorted((float(moved.mean), float(observed.mean)))
    slack = 1e-6 * (abs(low) + abs(high))
    assert low - slack <= new.mean <= high + slack


def test_variances_along_directions():
    mean = {"a": jnp.zeros(2), "b": jnp.zeros((1, 1))}
    direction = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([[3.0]])}
    diagonal = {"a": jnp.array([4.0, 5.0]), "b": jnp.array([[6.0]])}
    isotropic = jnp.array(2.0)
    assert quadratic_form(diagonal, direction) == 4 + 20 + 54
    assert quadratic_form(isotropic, direction) == 28
    assert average_variance(diagonal, mean) == 5
    assert average_variance(isotropic, mean) == 2
    assert per_coordinate(diagonal, mean) is diagonal
    assert jax.tree.leaves(per_coordinate(isotropic, mean)) == [2, 2]
