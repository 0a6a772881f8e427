"""Few passes over the parameters, and nothing lost by them.

A run keeps the last displacement in the place of the last parameters; norms of a mix
are known before it is made; and what is accepted is not looked through once more.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_looping import assert_same, losses, start, stream
from test_running import in_turn, stacked, step_by_step

import meka
from meka.lab.timing import peak_bytes

CHAIN = optax.chain(
    meka.scale_by_meka(),
    optax.clip_by_global_norm(0.05),
    optax.add_decayed_weights(1e-2),
    optax.scale(-0.5),
)


def single(tree: Any) -> Any:
    """In float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def part(batches: Any, k: int) -> Any:
    return jax.tree.map(lambda x: x[k], batches)


def test_a_run_shows_the_parameters_before_the_last_step():
    """To the last bit, but for those that changed by more than half."""
    optimizer = meka.meka()
    run, batches = meka.Run(losses, optimizer, single(start(optimizer)[0])), stream(24)
    assert run._displaced
    exact = []
    for k in range(24):
        before = run.params
        run.step(part(single(batches), k))
        shown = meka.find_state(run.state).previous_params
        now = run.params
        for old, found, new in zip(*map(jax.tree.leaves, (before, shown, now))):  # noqa: B905
            np.testing.assert_allclose(found, old, rtol=1e-6, atol=1e-7)
            near = (np.sign(new) == np.sign(old)) & (abs(new) <= 2 * abs(old))
            near &= abs(old) <= 2 * abs(new)
            exact.append(np.asarray(found)[near] == np.asarray(old)[near])
    exact = np.concatenate(exact)
    assert exact.all()
    assert exact.size > 800


def test_a_refused_step_leaves_what_follows_as_it_was():
    optimizer, batches = meka.meka(), single(stream(24))
    runs = [
        meka.Run(losses, optimizer, single(start(optimizer)[0]), noise_every=1)
        for _ in range(2)
    ]
    bad = part(batches, 0) | {"y": jnp.full(32, jnp.nan)}
    for k in range(24):
        if k in (0, 5, 17):
            before = jax.tree.map(np.asarray, (runs[0]._arrays, runs[0].params))
            assert not runs[0].step(bad).accepted
            assert_bits(before, (runs[0]._arrays, runs[0].params))
        infos = [run.step(part(batches, k)).fetch() for run in runs]
        assert_bits(*(info._replace(rejected=0) for info in infos))
    assert [int(info.rejected) for info in infos] == [3, 0]
    assert_bits(runs[0].params, runs[1].params)


def assert_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (CHAIN, {}),
        (meka.adameka(), {"probe": meka.lagged}),
        (meka.meka(), {"transport": meka.difference, "probe": meka.lagged}),
        (meka.meka(), {"transport": meka.hessian_at_previous}),
        (meka.meka(diagonal=True), {}),
    ],
    ids=["chain", "adameka", "difference", "previous", "diagonal"],
)
def test_whatever_a_run_keeps_its_steps_are_those_of_make_step(x64, optimizer, options):
    """The last parameters themselves, where the transport differentiates there."""
    batches = stream(19)
    run = meka.Run(losses, optimizer, *start(optimizer), **options)
    needs = options.get("transport", meka.hessian_at_current)
    assert run._displaced == (needs is meka.hessian_at_current)
    infos = step_by_step(run, batches)
    expected = in_turn(optimizer, batches, **options)
    assert_same(expected, (run.params, run.state, stacked(infos)))


def test_a_displacement_that_would_be_rounded_is_not_kept():
    """Of parameters in half precision it is known in single precision."""
    optimizer, batches = meka.meka(), single(stream(12))
    params = single(start(optimizer)[0])
    params["in"] = params["in"].astype(jnp.bfloat16)
    run = meka.Run(losses, optimizer, params)
    assert not run._displaced
    step_by_step(run, batches)
    shown = meka.find_state(run.state)
    assert shown.previous_params["in"].dtype == jnp.bfloat16
    assert shown.info.displacement_norm > 0


def noisy(params, batch):
    return jnp.sum((params["w"] - batch) ** 2 * jnp.arange(1, 41), axis=1)


@pytest.mark.parametrize("noise", [1e-3, 1.0, 30.0])
def test_norms_are_those_of_the_belief_itself(noise):
    """With a gain of nearly one, of half, and of next to nothing."""
    optimizer = meka.meka(meka.constant(1e-3))
    params = {"w": jnp.ones(40)}
    step = jax.jit(meka.make_step(noisy, optimizer))
    state, rng, gains = optimizer.init(params), np.random.default_rng(1), []
    for _ in range(60):
        batch = jnp.asarray(noise * rng.normal(size=(16, 40)), jnp.float32)
        params, state, info = step(params, state, batch)
        belief = np.asarray(meka.find_state(state).gradient.mean["w"], np.float64)
        norm = np.linalg.norm(belief)
        np.testing.assert_allclose(info.gradient_norm, norm, rtol=1e-5)
        np.testing.assert_allclose(info.direction_norm, norm, rtol=1e-5)
        gains.append(float(info.gain))
    assert gains[0] == 1
    assert min(gains) < (0.1 if noise > 10 else 1)


@pytest.mark.float32
@pytest.mark.parametrize("kind", ["ours", "in a chain"])
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(jnp.float32, 1e34), (jnp.float16, 1e-2)],
    ids=["single", "half"],
)
def test_a_step_past_the_largest_number_is_refused(kind, dtype, rate):
    """All that decides it is finite; only the parameters would not be."""
    rule = meka.constant(rate)
    optimizer: Any = meka.meka(rule)
    if kind == "in a chain":
        optimizer = optax.chain(meka.scale_by_meka(rule), optax.scale(-1.0))
    largest = float(jnp.finfo(dtype).max)
    params = {"w": jnp.full(4, 0.9995 * largest, dtype)}
    steep, start = 1e-3 * largest / rate, params["w"]

    def uphill(params, batch):
        return -steep * batch * jnp.sum((params["w"] - start).astype(jnp.float32))

    batch = jnp.linspace(0.5, 1.5, 8)
    state = optimizer.init(params)
    same, kept, info = jax.jit(meka.make_step(uphill, optimizer))(params, state, batch)
    assert (info.accepted, info.rejected) == (False, 1)
    assert_bits(params, same)
    assert meka.find_state(kept).count == 0


def test_single_precision_beside_double_is_not_stepped_past_its_largest(x64):
    """The length of the step, in double precision, would be finite."""
    optimizer = meka.meka(meka.constant(1e34))
    start = jnp.full(4, 0.9995 * float(jnp.finfo(jnp.float32).max), jnp.float32)
    params = {"w": start, "v": jnp.ones(2, jnp.float64)}

    def uphill(params, batch):
        moved = params["w"].astype(jnp.float64) - start.astype(jnp.float64)
        return -30 * batch * jnp.sum(moved) + 0 * jnp.sum(params["v"])

    batch = jnp.linspace(0.5, 1.5, 8)
    step = jax.jit(meka.make_step(uphill, optimizer))
    same, _, info = step(params, optimizer.init(params), batch)
    assert (info.accepted, info.rejected) == (False, 1)
    assert_bits(params, same)


@pytest.mark.parametrize("optimizer", [meka.meka(), meka.adameka()])
def test_what_never_moves_may_be_as_large_as_it_likes(optimizer):
    """A mask that a model keeps among its parameters, say."""
    params = {"w": jnp.ones(40), "mask": jnp.full(3, float(jnp.finfo(jnp.float32).min))}
    run, rng = meka.Run(noisy, optimizer, params), np.random.default_rng(1)
    step, state = jax.jit(meka.make_step(noisy, optimizer)), optimizer.init(params)
    found = params
    for _ in range(20):
        batch = jnp.asarray(rng.normal(size=(16, 40)), jnp.float32)
        assert run.step(batch).accepted
        found, state, info = step(found, state, batch)
        assert info.accepted
    for reached in (run.params, found):
        assert_bits(reached["mask"], params["mask"])
        assert jnp.linalg.norm(reached["w"]) < jnp.linalg.norm(params["w"])


def test_a_run_by_the_papers_rule_holds_half_more_than_adam():
    """At most, whatever a step looks at; as benchmarks.step_cost counts it."""
    rng = np.random.default_rng(0)
    shapes = {"a": (784, 100), "b": (100,), "c": (100, 10), "d": (10,)}
    params = {
        k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()
    }
    images = jnp.asarray(rng.normal(size=(128, 784)), jnp.float32)
    batch = images, jnp.asarray(rng.integers(0, 10, 128))

    def entropy(params, batch):
        hidden = jax.nn.relu(batch[0] @ params["a"] + params["b"])
        logits = hidden @ params["c"] + params["d"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    adam = optax.adam(1e-3)

    def step(carry, batch):
        params, state = carry
        gradient = jax.grad(lambda p: jnp.mean(entropy(p, batch)))(params)
        updates, state = adam.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    carry = params, adam.init(params)
    held = peak_bytes(jax.jit(step, donate_argnums=0).lower(carry, batch).compile())
    for options in ({}, {"transport": meka.difference, "probe": meka.lagged}):
        run = meka.Run(entropy, meka.meka(), params, **options)
        for _ in range(9):
            run.step(batch)
        for kind, ours in run.compiled(batch).items():
            assert peak_bytes(ours) < 1.5 * held, (options, kind)
