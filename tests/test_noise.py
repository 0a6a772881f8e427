"""Noise that is measured at some steps and remembered between them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meka
from meka import tree

SIZE, BATCH, STEPS, SEEDS, EVERY = 6, 16, 400, 24, 8
KEY = jax.random.key(0)
SCALES = np.linspace(0.5, 2.0, SIZE).astype(np.float32)


def losses(params, batch):
    """A linear slope and a curvature, both different for every example."""
    slope, curvature = batch
    return slope @ params + 0.5 * curvature @ (params * params)


def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key)
    slope = jax.random.normal(keys[0], (BATCH, SIZE)) * SCALES
    return slope, 1 + 0.5 * jax.random.normal(keys[1], (BATCH, SIZE))


@cache
def runs(every: int, sample: int = 1, accelerated: bool = False) -> meka.Info:
    """What SEEDS runs of a tiny constant step tell; they hardly move."""
    if accelerated:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree, "accelerated", lambda: True)
            return runs.__wrapped__(every, sample)
    optimizer = meka.meka(meka.constant(1e-4), noise_decay=0.99)
    step = meka.make_step(
        losses, optimizer, probe=meka.lagged, noise_every=every, sample=sample
    )

    def one(carry, number, key):
        params, state, info = step(*carry, draw(key), number=number)
        return (params, state), info

    def body(carry, t):
        keys = jax.vmap(lambda s: jax.random.fold_in(jax.random.key(s), t))(seeds)
        return jax.vmap(one, (0, None, 0))(carry, t, keys)

    seeds = jnp.arange(SEEDS)
    params = jnp.ones((SEEDS, SIZE))
    state = jax.vmap(optimizer.init)(params)
    return jax.jit(lambda: jax.lax.scan(body, (params, state), jnp.arange(STEPS)))()[1]


def held_to(estimates: jax.typing.ArrayLike, truth: float, bars: float = 4.5) -> None:
    """Each seed's average over time is one sample of an estimate."""
    samples = np.asarray(estimates, float).mean(axis=0)
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    assert abs(samples.mean() - truth) < bars * error
    assert error < 0.1 * truth


@pytest.mark.parametrize("every", [1, EVERY])
def test_the_noise_of_the_gradient_is_unbiased(every):
    """tr Σ/d: the slopes' variance plus, at parameters of one, the curvatures'."""
    truth = float(np.mean(SCALES**2 + 0.25)) / BATCH
    held_to(runs(every).gradient_noise[STEPS // 2 :], truth)


@pytest.mark.parametrize("every", [1, EVERY])
def test_the_noise_of_the_change_is_unbiased(every):
    """Q/|δ|² is the variance of the curvatures, 0.25, over n and the dimension."""
    info = runs(every)
    lengths = np.asarray(info.displacement_norm[1:], float)
    held_to(info.change_noise[1:] / lengths**2, 0.25 / BATCH / SIZE)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("transport", [meka.hessian_at_current, meka.difference])
def test_some_examples_tell_the_change_and_all_the_gradient(
    transport, accelerated, monkeypatch
):
    """On a lone accelerator the gradient is put together from some and the others."""
    monkeypatch.setattr(tree, "accelerated", lambda: accelerated)
    params, previous = jnp.ones(SIZE), jnp.zeros(SIZE)
    batch = draw(jax.random.key(3))

    def observe(batch, **options):
        options |= {"measure": jnp.asarray(False), "transport": transport}
        return meka.observe(losses, params, previous, batch, **options)

    seen, all_of_them = observe(batch, sample=4), observe(batch)
    quarter = observe(jax.tree.map(lambda x: x[::4], batch))
    np.testing.assert_allclose(seen.gradient.mean, all_of_them.gradient.mean, rtol=1e-5)
    np.testing.assert_allclose(seen.change.mean, quarter.change.mean, rtol=1e-5)
    np.testing.assert_allclose(
        seen.path.curvature.mean, quarter.path.curvature.mean, rtol=1e-5
    )
    assert seen.value == all_of_them.value
    nan = tuple(x.at[5].set(jnp.nan) for x in batch)
    assert observe(nan, sample=4).suspect == 5  # as the caller counts
    # Where a quarter of the examples is none, or some are padding, all are asked.
    mask = jnp.arange(BATCH) < 12
    assert observe(batch, sample=4, mask=mask).change.mean.tolist() == (
        observe(batch, mask=mask).change.mean.tolist()
    )
    odd = jax.tree.map(lambda x: x[:14], batch)
    ours, theirs = observe(odd, sample=4), observe(odd)
    assert ours.change.mean.tolist() == theirs.change.mean.tolist()
    with pytest.raises(ValueError, match="sample=0: must be at least 1"):
        observe(batch, sample=0)


@pytest.mark.parametrize("accelerated", [False, True])
def test_fewer_examples_know_less_of_the_change_and_say_so(accelerated):
    """Q is so many times as large; the gradient's noise is what it was."""
    info = runs(EVERY, 4, accelerated)
    lengths = np.asarray(info.displacement_norm[1:], float)
    held_to(info.change_noise[1:] / lengths**2, 4 * 0.25 / BATCH / SIZE)
    truth = float(np.mean(SCALES**2 + 0.25)) / BATCH
    held_to(info.gradient_noise[STEPS // 2 :], truth)


@pytest.mark.parametrize("accelerated", [False, True])
def test_the_slope_where_the_step_began_is_as_noisy_as_it_says(
    accelerated, monkeypatch
):
    """Curvature of some examples and gradient of all, over many batches."""
    monkeypatch.setattr(tree, "accelerated", lambda: accelerated)
    params, previous = jnp.ones(SIZE), jnp.zeros(SIZE)

    def look(key):
        seen = meka.observe(
            losses, params, previous, draw(key), measure=jnp.asarray(True), sample=4
        )
        return seen.path, seen.change.mean

    paths, changes = jax.jit(jax.vmap(look))(jax.random.split(KEY, 4000))
    for part in (paths.slope, paths.curvature):
        spread = np.var(np.asarray(part.mean, float))
        assert abs(np.mean(part.variance) / spread - 1) < 0.1
    np.testing.assert_allclose(np.mean(changes, axis=0), np.ones(SIZE), atol=0.02)
    assert abs(np.mean(paths.curvature.mean) - 1) < 0.01


@pytest.mark.parametrize("groups", [2, 3, 5])
def test_who_tells_the_change_on_an_accelerator_tells_its_noise(
    groups, x64, monkeypatch
):
    """Group by group, which need not be of one size."""
    monkeypatch.setattr(tree, "accelerated", lambda: True)
    params, previous = jnp.ones(SIZE), jnp.zeros(SIZE)
    batch = jax.tree.map(lambda x: x.astype(jnp.float64), draw(jax.random.key(3)))

    def observe(**options):
        options = {"sample": 2, "groups": groups} | options
        return meka.observe(losses, params, previous, batch, **options)

    seen = observe(measure=jnp.asarray(True))
    half = jax.tree.map(lambda x: x[::2], batch)
    told = meka.observe(losses, params, previous, half, groups=groups)
    # Of all examples the gradient, of half of them the change and both noises: that of
    # a mean of twice as many is half as large.
    everyone = observe(measure=jnp.asarray(False), sample=1)
    close = partial(np.testing.assert_allclose, rtol=1e-12)
    close(seen.gradient.mean, everyone.gradient.mean)
    close(seen.value.mean, everyone.value.mean)
    close(seen.change.mean, told.change.mean)
    close(seen.path.curvature.mean, told.path.curvature.mean)
    close(seen.change.variance, told.change.variance)
    close(seen.path.curvature.variance, told.path.curvature.variance)
    close(seen.gradient.variance, told.gradient.variance / 2)
    close(seen.groups, groups)


def test_fewer_examples_than_groups_tell_no_noise_by_themselves(monkeypatch):
    """On an accelerator: two examples of four, in three groups."""
    monkeypatch.setattr(tree, "accelerated", lambda: True)
    params, previous = jnp.ones(SIZE), jnp.zeros(SIZE)
    batch = jax.tree.map(lambda x: x[:4], draw(jax.random.key(3)))
    seen = meka.observe(
        losses, params, previous, batch, groups=3, sample=2, measure=jnp.asarray(True)
    )
    assert seen.groups == 3
    assert seen.gradient.variance > 0
    assert seen.change.variance > 0


def test_measured_at_the_first_steps_and_then_now_and_then():
    """Between measurements what is remembered does not change, and then it does."""
    info = runs(EVERY)
    lengths = np.asarray(info.displacement_norm)[1:]  # nothing moved before the first
    ratio = np.asarray(info.change_noise)[1:] / lengths**2
    moved = ~np.isclose(ratio[1:], ratio[:-1], rtol=1e-3).all(axis=1)
    at = np.flatnonzero(moved) + 2
    assert set(range(2, EVERY)) <= set(at)
    assert set(at[at >= EVERY]) == set(range(EVERY, STEPS, EVERY))


def test_the_gradient_itself_is_that_of_the_whole_batch():
    """Whether or not its noise is measured."""
    params, previous = jnp.ones(SIZE), jnp.zeros(SIZE)
    batch = draw(jax.random.key(3))
    observe = jax.jit(
        lambda measure: meka.observe(losses, params, previous, batch, measure=measure)
    )
    split, whole = observe(jnp.asarray(True)), observe(jnp.asarray(False))
    for one, other in ((split.gradient, whole.gradient), (split.change, whole.change)):
        np.testing.assert_allclose(one.mean, other.mean, rtol=1e-5)
        assert one.variance > 0
        assert other.variance == 0
    assert split.value == whole.value
    assert split.groups == whole.groups == 2
    assert bool(split.measured)
    assert not bool(whole.measured)
    np.testing.assert_allclose(
        split.path.curvature.mean, whole.path.curvature.mean, rtol=1e-5
    )


def test_where_both_are_needed_for_nothing_only_one_is_computed():
    """A mapped choice computes both; with the step's number given it is no choice."""
    optimizer = meka.meka()
    step = meka.make_step(losses, optimizer)
    params = jnp.ones((3, SIZE))
    state = jax.vmap(optimizer.init)(params)
    batch = jax.vmap(draw)(jax.random.split(jax.random.key(0), 3))

    def text(number, axis):
        mapped = jax.vmap(lambda p, s, b, n: step(p, s, b, number=n), (0, 0, 0, axis))
        return str(jax.make_jaxpr(mapped)(params, state, batch, number))

    assert "cond" in text(jnp.int32(0), None)
    assert "cond" not in text(jnp.zeros(3, jnp.int32), 0)


def test_variances_per_coordinate_are_measured_at_every_step():
    optimizer = meka.meka(diagonal=True)
    params, batch = jnp.ones(SIZE), draw(jax.random.key(0))
    state = optimizer.init(params)
    step = meka.make_step(losses, optimizer)
    assert "cond" not in str(jax.make_jaxpr(step)(params, state, batch))
    step = meka.make_step(losses, optimizer, noise_every=8)
    with pytest.raises(ValueError, match="noise_every=1"):
        step(params, state, batch)
    with pytest.raises(ValueError, match="noise_every=0: must be at least 1"):
        meka.make_step(losses, optimizer, noise_every=0)
