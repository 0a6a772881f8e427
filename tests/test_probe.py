"""Slopes and curvatures along a direction, against Hessians written out in full."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import meka
from meka import Moments, tree
from meka.observation import Path
from meka.probe import sometimes


def losses(params, batch):
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["in"])
    return (hidden @ params["out"] - targets) ** 2


COUNT = 10


def problem() -> tuple:
    rng = np.random.default_rng(3)
    params = {"in": rng.normal(size=(2, 2)), "out": rng.normal(size=2)}
    direction = {"in": rng.normal(size=(2, 2)), "out": rng.normal(size=2)}
    batch = (rng.normal(size=(COUNT, 2)), rng.normal(size=COUNT))
    return jax.tree.map(jnp.asarray, (params, direction, batch))


@cache
def along() -> tuple[np.ndarray, np.ndarray]:
    """-d'g and d'Hd of every example."""
    params, direction, batch = problem()
    theta, unravel = ravel_pytree(params)
    d = np.asarray(ravel_pytree(direction)[0])

    def one(theta, example):
        return losses(unravel(theta), jax.tree.map(lambda x: x[None], example))[0]

    gradients = jax.jit(jax.vmap(jax.grad(one), (None, 0)))(theta, batch)
    hessians = jax.jit(jax.vmap(jax.hessian(one), (None, 0)))(theta, batch)
    return -np.asarray(gradients) @ d, np.einsum("i,nij,j->n", d, hessians, d)


@pytest.mark.parametrize("micro_batches", [1, 5, 3])  # 3 does not divide the batch
@pytest.mark.parametrize("padding", [(), (0, 4, 9)])
def test_curve_is_exact_for_every_example(padding, micro_batches, x64):
    params, direction, batch = problem()
    real = np.setdiff1d(np.arange(COUNT), padding)
    mask = np.isin(np.arange(COUNT), real)
    # Whatever the padding holds must not matter.
    batch = jax.tree.map(np.array, batch)
    for values in jax.tree.leaves(batch):
        values[np.array(padding, int)] = np.nan

    @jax.jit
    def measure(params, batch, mask, direction):
        return meka.curve(
            losses,
            params,
            batch,
            mask=mask if padding else None,
            micro_batches=micro_batches,
        )(direction)

    slope, curvature = measure(params, batch, mask, direction)
    for found, each in zip((slope, curvature), along(), strict=True):
        each = each[real]
        np.testing.assert_allclose(found.mean, each.mean(), rtol=1e-12)
        np.testing.assert_allclose(
            found.variance, each.var(ddof=1) / len(real), rtol=1e-11
        )


def test_one_half_after_the_other_sees_what_all_see(x64, monkeypatch):
    """As on a lone accelerator, where a probe is not to need more memory."""
    params, direction, batch = problem()
    whole = meka.curve(losses, params, batch, afresh=True)(direction)
    monkeypatch.setattr(tree, "accelerated", lambda: True)
    calls = []

    def counted(params, batch):
        calls.append(len(batch[1]))
        return losses(params, batch)

    halves = meka.curve(counted, params, batch, afresh=True)(direction)
    assert calls[-1] == COUNT // 2
    for found, wanted in zip(halves, whole, strict=True):
        np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-12)
        np.testing.assert_allclose(found.variance, wanted.variance, rtol=1e-11)
    odd = jax.tree.map(lambda x: x[:7], batch)  # has no halves
    meka.curve(counted, params, odd, afresh=True)(direction)
    assert calls[-1] == 7


def scene(last_norm: float, length: float) -> meka.Scene:
    direction = {"a": jnp.array([-2.0, 1.0]), "b": jnp.array(-1.0)}
    path = Path(
        jnp.asarray(length),
        Moments(jnp.asarray(0.7), jnp.asarray(0.05)),
        Moments(jnp.asarray(1.5), jnp.asarray(0.25)),
    )
    nothing = Moments(jnp.zeros(()), jnp.zeros(()))
    count = jnp.asarray(8.0)
    suspect = jnp.asarray(-1)
    seen = meka.Observation(nothing, nothing, nothing, path, count, count, suspect)
    slope = Moments(jnp.asarray(7.0), jnp.asarray(3.0))
    return meka.Scene(
        direction,
        slope,
        seen,
        jnp.asarray(last_norm),
        jnp.asarray(0.3),
        norm=jnp.asarray(3.0),
        bend=Moments(jnp.asarray(0.4), jnp.asarray(0.02)),
    )


def test_current_takes_the_filters_slope_and_the_batchs_curvature():
    given = scene(2.0, 1.0)

    def curve(direction):
        assert direction is given.direction
        return (
            Moments(jnp.asarray(99.0), jnp.asarray(99.0)),
            Moments(jnp.asarray(4.0), jnp.asarray(0.5)),
        )

    found = meka.current(given, curve)
    assert (found.slope, found.slope_variance) == (7, 3)
    assert (found.curvature, found.curvature_variance) == (4, 0.5)
    assert found.seen is True


@pytest.mark.parametrize("asked", [False, jnp.asarray(False), jnp.asarray(True)])
def test_a_probe_that_is_not_asked_carries_the_curvature_to_the_new_length(asked):
    """Per unit of length it is as it was; the slope is that of this step."""
    given = scene(2.0, 1.0)
    calls = []

    def curve(direction):
        calls.append(direction)
        return given.slope, Moments(jnp.asarray(4.0), jnp.asarray(0.5))

    found = sometimes(asked)(given, curve)
    assert (found.slope, found.slope_variance) == (7, 3)
    expected = (4.0, 0.5) if asked else (0.4 * 9, 0.02 * 81)
    assert (found.curvature, found.curvature_variance) == pytest.approx(expected)
    assert bool(calls) == (asked is not False)  # or it would cost as much as a look
    assert sometimes(True) is meka.current


def test_lagged_reads_the_last_step_rescaled_to_its_direction():
    found = meka.lagged(
        scene(2.0, 0.01), lambda direction: pytest.fail("one more pass")
    )
    assert found.slope == pytest.approx(0.7 * 2)
    assert found.curvature == pytest.approx(1.5 * 4)
    assert found.slope_variance == pytest.approx(0.3 * 4)
    assert found.curvature_variance == pytest.approx(0.25 * 16)
    assert found.seen


@pytest.mark.parametrize(("last_norm", "length"), [(0.0, 1.0), (2.0, 0.0)])
def test_lagged_saw_nothing_where_nothing_moved(last_norm, length):
    found = meka.lagged(scene(last_norm, length), lambda direction: pytest.fail("pass"))
    assert not found.seen


def test_lagged_slope_is_unbiased_where_the_minibatchs_own_is_not():
    """The direction -g of a minibatch overstates its own slope: |g|² > |∇f|².

    On f = E[ξ]'θ with gradient noise variance 1/n per coordinate, the slope along
    -g is |∇f|² on average, but the minibatch itself says |∇f|² + d/n. Fresh examples
    do not. 20000 pairs of batches; 5 standard errors: false alarm below 1e-6.
    """
    rng = np.random.default_rng(8)
    d, n, pairs = 4, 4, 20_000
    true = np.full(d, 0.5)
    first, second = true + rng.normal(size=(2, pairs, n, d)).astype(np.float32)
    step = jnp.float32(0.125)

    @jax.jit
    @jax.vmap
    def both(old, new):
        previous = jnp.zeros(d, jnp.float32)
        g = jnp.mean(old, axis=0)
        seen = meka.observe(
            lambda p, xi: xi @ p, previous - step * g, previous, new, groups=2
        )
        norm = jnp.linalg.norm(g)
        zero = jnp.zeros((), jnp.float32)
        given = meka.Scene(
            -g, Moments(g @ g, zero), seen, norm, zero, norm, Moments(zero, zero)
        )
        return meka.lagged(given, lambda _: pytest.fail("pass")).slope, norm**2

    lagged, own = (
        np.concatenate(parts)
        for parts in zip(
            *(both(a, b) for a, b in zip(*map(chunks, (first, second)), strict=True)),
            strict=True,
        )
    )
    error = 5 * lagged.std() / np.sqrt(pairs)
    assert abs(lagged.mean() - true @ true) < error
    assert abs(own.mean() - true @ true - d / n) < 5 * own.std() / np.sqrt(pairs)
    assert error < 0.1 * d / n


def chunks(x: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(part, jnp.float32) for part in np.split(x, 20)]
