"""One minibatch, against per-example gradients and Hessians written out in full."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import meka

TRANSPORTS: dict[str, Callable] = {
    "hessian_at_current": meka.hessian_at_current,
    "hessian_at_previous": meka.hessian_at_previous,
    "difference": meka.difference,
}


def losses(params, batch):
    """A small network with a smooth, non-convex loss."""
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["in"] + params["bias"][None])
    return (hidden @ params["out"] - targets) ** 2 + jnp.cos(params["shift"])


class Case(NamedTuple):
    count: int
    groups: int
    mask: tuple[int, ...] = ()  # rows that are padding
    micro_batches: int = 1


CASES = [
    Case(8, 2),
    Case(8, 8),
    Case(9, 4),  # ragged and unrolled
    Case(11, 6),  # ragged and mapped
    Case(8, 4, mask=(5, 6, 7)),  # one group of one, a batch cut short
    Case(9, 3, mask=(0, 4, 7)),
    Case(7, 7, mask=(2,)),
    Case(10, 2, mask=(1, 3, 5, 8), micro_batches=4),
    Case(10, 6, mask=(9,), micro_batches=3),
]


def problem(count: int, dtype: Any = float) -> tuple:
    """The first so many of twelve examples, and two places to look from."""
    rng = np.random.default_rng(12)
    params = {
        "in": rng.normal(size=(2, 2)),
        "bias": rng.normal(size=2),
        "out": rng.normal(size=2),
        "shift": rng.normal(),
    }
    previous = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=np.shape(x)), params)
    batch = (rng.normal(size=(12, 2)), rng.normal(size=12))
    batch = jax.tree.map(lambda x: x[:count], batch)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, previous, batch))


@cache
def materialised() -> list[list[np.ndarray]]:
    """Values, gradients (n, d) and Hessians (n, d, d) of all examples, twice."""
    params, previous, batch = problem(12)
    _, unravel = ravel_pytree(params)

    def one(theta, example):
        return losses(unravel(theta), jax.tree.map(lambda x: x[None], example))[0]

    @jax.jit
    def all_of(theta):
        derivatives = one, jax.grad(one), jax.hessian(one)
        return [jax.vmap(f, (None, 0))(theta, batch) for f in derivatives]

    return [
        [np.asarray(x) for x in all_of(ravel_pytree(place)[0])]
        for place in (params, previous)
    ]


def oracle(case: Case, transport: str, diagonal: bool) -> dict[str, Any]:
    params, previous, _ = problem(case.count)
    here, there = ([x[: case.count] for x in place] for place in materialised())
    delta = np.asarray(ravel_pytree(params)[0] - ravel_pytree(previous)[0])
    changes = {
        "hessian_at_current": here[2] @ delta,
        "hessian_at_previous": there[2] @ delta,
        "difference": here[1] - there[1],
    }[transport]
    real = np.setdiff1d(np.arange(case.count), case.mask)
    values, gradients, changes = here[0][real], here[1][real], changes[real]
    owners = real % case.groups

    def grouped(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = x.mean(axis=0)
        parts = [x[owners == j] for j in np.unique(owners)]
        scatter = sum(len(p) * (p.mean(axis=0) - mean) ** 2 for p in parts)
        return mean, np.asarray(scatter) / ((len(parts) - 1) * len(real))

    length = np.linalg.norm(delta)
    gradient, change = grouped(gradients), grouped(changes)
    slope = grouped((changes - gradients) @ delta / length)
    curvature = grouped(changes @ delta / length**2)

    def shaped(v: np.ndarray) -> np.ndarray:
        return v if diagonal else v.mean()

    return {
        "value": values.mean(),
        "value_variance": values.var(ddof=1) / len(values),
        "gradient": gradient[0],
        "gradient_variance": shaped(gradient[1]),
        "change": change[0],
        "change_variance": shaped(change[1]),
        "length": length,
        "slope": slope[0],
        "slope_variance": slope[1],
        "curvature": curvature[0],
        "curvature_variance": curvature[1],
        "count": len(real),
        "groups": len(np.unique(owners)),
        "suspect": -1,
    }


def flattened(seen: meka.Observation, diagonal: bool) -> dict[str, np.ndarray]:
    def vector(tree) -> jax.Array:
        return ravel_pytree(tree)[0]

    def variance(tree) -> jax.Array:
        return vector(tree) if diagonal else tree

    found = {
        "value": seen.value.mean,
        "value_variance": seen.value.variance,
        "gradient": vector(seen.gradient.mean),
        "gradient_variance": variance(seen.gradient.variance),
        "change": vector(seen.change.mean),
        "change_variance": variance(seen.change.variance),
        "length": seen.path.length,
        "slope": seen.path.slope.mean,
        "slope_variance": seen.path.slope.variance,
        "curvature": seen.path.curvature.mean,
        "curvature_variance": seen.path.curvature.variance,
        "count": seen.count,
        "groups": seen.groups,
        "suspect": seen.suspect,
    }
    return {key: np.asarray(value) for key, value in found.items()}


def assert_same(found: dict, want: dict, rtol: float = 1e-11) -> None:
    for key, value in want.items():
        size = np.max(np.abs(value))
        np.testing.assert_allclose(
            found[key], value, rtol=rtol, atol=rtol * size, err_msg=key
        )


def look(case: Case, transport: str, diagonal: bool) -> dict[str, np.ndarray]:
    params, previous, batch = problem(case.count)
    mask = np.ones(case.count, bool)
    mask[list(case.mask)] = False

    def observe(params, previous, batch, mask):
        return meka.observe(
            losses,
            params,
            previous,
            batch,
            groups=case.groups,
            transport=TRANSPORTS[transport],
            diagonal=diagonal,
            mask=mask if case.mask else None,
            micro_batches=case.micro_batches,
        )

    # Whatever the padding holds must not matter.
    rows = np.flatnonzero(~mask)
    batch = jax.tree.map(np.array, batch)
    for values in jax.tree.leaves(batch):
        values[rows] = np.nan
    return flattened(jax.jit(observe)(params, previous, batch, mask), diagonal)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_is_what_it_says(transport, x64):
    case = Case(9, 5)
    assert_same(look(case, transport, True), oracle(case, transport, True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_masks_and_micro_batches(case, x64):
    transport = list(TRANSPORTS)[case.count % 3]
    diagonal = case.groups % 2 == 0
    assert_same(look(case, transport, diagonal), oracle(case, transport, diagonal))


def test_every_nesting_gives_the_moments_of_one_batch(x64):
    rng = np.random.default_rng(1)
    params = {"a": jnp.ones(2), "b": jnp.ones(())}
    previous = {"a": jnp.full(2, 0.5), "b": jnp.zeros(())}
    batch = jnp.asarray(rng.normal(size=(9, 2)))
    mask = jnp.asarray(np.arange(9) != 6)

    def nested(groups: int, micro_batches: int) -> meka.Observation:
        return meka.observe(
            lambda p, x: jnp.exp(x @ p["a"]) * (1 + p["b"]),
            params,
            previous,
            batch,
            groups=groups,
            micro_batches=micro_batches,
            transport=meka.difference,
            mask=mask,
        )

    every = [(k, m) for k in (2, 8) for m in (1, 2, 4, 8)]
    found = jax.jit(lambda: {pair: nested(*pair) for pair in every})()
    for (k, _), seen in found.items():
        assert_same(flattened(seen, False), flattened(found[k, 1], False))


def test_nothing_moved():
    """At the start the change and the path are zero, and everything is finite."""
    params, _, batch = problem(8, np.float32)
    every = jax.jit(
        lambda p, b: [
            meka.observe(losses, p, p, b, transport=t) for t in TRANSPORTS.values()
        ]
    )
    for seen in every(params, batch):
        assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(seen.change))
        assert all(x == 0 for x in jax.tree.leaves(seen.path.curvature))
        assert seen.path.length == 0
        assert seen.path.slope.mean == 0
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(seen))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="groups are stacked there")
def test_a_group_per_example_takes_the_memory_of_a_few():
    """Not that of all the gradients at once."""

    def losses(params, batch):
        return jnp.square(jnp.tanh(batch @ params)).sum(axis=1)

    params, batch = jnp.ones((300, 200)), jnp.ones((64, 300))

    def work(groups: int) -> float:
        seen = jax.jit(partial(meka.observe, losses, groups=groups, diagonal=True))
        stats = seen.lower(params, params, batch).compile().memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes / params.nbytes

    assert work(64) < 2 * work(2) < 64


@jax.jit
def per_example_observation(params, previous, batch):
    return meka.observe(losses, params, previous, batch, groups=8, diagonal=True)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.permutations(range(8)))
def test_order_of_examples_does_not_matter_for_single_groups(order):
    params, previous, batch = problem(8, np.float32)
    shuffled = jax.tree.map(lambda x: x[np.array(order)], batch)
    first, second = (
        flattened(per_example_observation(params, previous, b), diagonal=True)
        for b in (batch, shuffled)
    )
    assert_same(second, first, rtol=1e-5)


def test_variances_are_those_of_the_mean():
    """Σ is the covariance of the batch gradient itself: over 4000 batches of 6.

    The batch gradient's spread and the average estimate agree within 5 standard
    errors (relative error of each about √(2/4000)): false alarm below 1e-6.
    """
    rng = np.random.default_rng(5)
    data = rng.normal(size=(4000, 6)).astype(np.float32) * 3 + 1

    @jax.vmap
    def look(row):
        p = jnp.float32(2)
        seen = meka.observe(lambda p, b: b * p, p, p, row, groups=3)
        return seen.value, seen.gradient

    value, gradient = jax.jit(look)(data)
    tolerance = 5 * np.sqrt(2 / 4000 + 2 / 2 / 4000)
    for seen, truth in ((value, 4 * 9 / 6), (gradient, 9 / 6)):
        assert np.var(seen.mean) == pytest.approx(truth, rel=tolerance)
        assert np.mean(seen.variance) == pytest.approx(truth, rel=tolerance)


def test_suspect_is_the_callers_index():
    params, _, batch = problem(9, np.float32)
    broken = (batch[0], batch[1].at[5].set(np.inf).at[7].set(np.nan))
    look = jax.jit(
        lambda b, m: meka.observe(losses, params, params, b, groups=4, mask=m).suspect
    )
    everyone = np.ones(9, bool)
    assert look(batch, everyone) == -1
    assert look(broken, everyone) == 5
    assert look(broken, np.arange(9) != 5) == 7


def test_per_example_lifts_a_single_loss(x64):
    params, previous, batch = problem(8)

    def loss(params, example):
        return losses(params, jax.tree.map(lambda x: x[None], example))[0]

    one = jax.jit(lambda: meka.observe(losses, params, previous, batch))()
    two = jax.jit(
        lambda: meka.observe(meka.per_example(loss), params, previous, batch)
    )()
    assert_same(flattened(two, False), flattened(one, False))


@jax.jit
def diagonal_observation(params, previous, batch):
    return meka.observe(losses, params, previous, batch, diagonal=True)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_moments_are_kept_in_float32_or_wider(dtype):
    everything = problem(8, dtype)
    seen = diagonal_observation(*everything)
    numbers = seen._replace(
        suspect=seen.count, measured=seen.count, followed=seen.count
    )
    kinds = {x.dtype for x in jax.tree.leaves(numbers)}
    assert kinds == {jnp.dtype(jnp.float32)}
    assert not any(x.weak_type for x in jax.tree.leaves(seen))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), everything)
    found, want = (
        ravel_pytree(x.gradient.mean)[0] for x in (seen, diagonal_observation(*exact))
    )
    error = jnp.linalg.norm(found - want) / jnp.linalg.norm(want)
    assert error < 10 * float(jnp.finfo(dtype).eps)
