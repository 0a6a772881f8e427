"""Steps under jit, scan, vmap and donation, in every dtype, on padded batches."""

import subprocess
import sys
import textwrap
from functools import cache
from itertools import product
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meka

COUNT, STEPS = 6, 25


def losses(params, batch):
    """Logistic regression, or its hinge, times a factor."""
    margin = batch["y"] * (batch["x"] @ params["w"] + params["b"])
    value = jnp.where(batch["hinge"], jax.nn.relu(1 - margin), jax.nn.softplus(-margin))
    return value * batch["scale"]


def stream(seed: int = 0) -> dict[str, np.ndarray]:
    """Batches stacked on a leading axis."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(STEPS, COUNT, 3))
    score = x @ [2.0, -1.0, 0.5] + rng.logistic(size=(STEPS, COUNT))
    return {
        "x": x.astype(np.float32),
        "y": np.sign(score).astype(np.float32),
        "hinge": np.zeros((STEPS, COUNT), bool),
        "scale": np.ones((STEPS, COUNT), np.float32),
    }


def first(batches: dict, t: int = 0) -> dict:
    return jax.tree.map(lambda x: jnp.asarray(x[t]), batches)


def halved(batch: dict, dtype: str) -> dict:
    """Its numbers in another precision."""
    return {
        k: v.astype(dtype) if v.dtype == jnp.float32 else v for k, v in batch.items()
    }


def everything() -> dict:
    return jax.tree.map(lambda x: jnp.concatenate(jnp.asarray(x)), stream())


def start(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {"w": jnp.array([-1.0, 1.0, 0.25], dtype), "b": jnp.array(0.1, dtype)}


CONFIGURATIONS: dict[str, tuple] = {
    "meka": (meka.meka(), {}),
    "adameka": (
        meka.adameka(diagonal=True),
        {"transport": meka.difference, "probe": meka.lagged, "groups": COUNT},
    ),
}


def make(name: str):
    optimizer, options = CONFIGURATIONS[name]
    return optimizer, meka.make_step(losses, optimizer, **options)


def train(name: str, params, batches):
    optimizer, step = make(name)

    def body(carry, batch):
        params, state, info = step(*carry, batch)
        return (params, state), (params, info)

    (_, state), history = jax.lax.scan(body, (params, optimizer.init(params)), batches)
    return *history, state


@cache
def trainer(name: str):
    return jax.jit(lambda params, batches: train(name, params, batches))


def close(found, want, rtol: float) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_trains(name):
    path, infos, _ = trainer(name)(start(), stream())
    assert infos.accepted.all()
    after = jnp.mean(losses(jax.tree.map(lambda x: x[-1], path), everything()))
    assert after < 0.6 * jnp.mean(losses(start(), everything()))
    assert np.all(np.asarray(infos.gain) >= 0)
    assert np.all(np.asarray(infos.gain) <= 1)
    for variance in ("value_variance", "gradient_variance", "gradient_noise"):
        assert np.all(np.asarray(getattr(infos, variance)) > 0)
    for size in ("change_noise", "model_error", "step_size", "innovation"):
        assert np.all(np.asarray(getattr(infos, size)) >= 0)
    moved = np.asarray(path["w"][1:] - path["w"][:-1])
    assert np.all(np.isfinite(moved))


@pytest.mark.parametrize(
    "optimizer", [meka.meka(diagonal=True), meka.auto(9), meka.auto()]
)
def test_types_do_not_change_from_step_to_step(optimizer):
    """Parameters of a weak type become strong with the first step, as with optax; were
    the state to follow one step later, a third step would be compiled."""
    weak = {"w": jnp.full(3, 0.5), "b": jnp.asarray(0.1)}
    state = optimizer.init(weak)
    step = meka.make_step(losses, optimizer)
    params, later, _ = jax.eval_shape(step, weak, state, first(stream()))
    assert all(x.weak_type for x in jax.tree.leaves(weak))
    assert not any(x.weak_type for x in jax.tree.leaves((state, params, later)))


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.floats(-8, 8))
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_scale_of_the_loss_does_not_matter(name, exponent):
    """Loss times c: the same parameters; gradients times c, variances times c²."""
    c = np.float32(2.0**exponent)
    batches = stream()
    path, infos, state = trainer(name)(start(), batches)
    scaled = {**batches, "scale": batches["scale"] * c}
    same, others, other_state = trainer(name)(start(), scaled)
    rtol = 3e-3 if name == "adameka" else 1e-3
    close(same, path, rtol)
    ours, theirs = meka.find_state(state), meka.find_state(other_state)
    gradient = jax.tree.map(lambda x: x * c, ours.gradient.mean)
    size = float(infos.gradient_norm[-1] * c)
    for x, y in zip(
        jax.tree.leaves(theirs.gradient.mean), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=10 * rtol * size)
    for power, fields in {
        1: ("value", "gradient_norm", "predicted_change"),
        2: ("value_variance", "gradient_variance", "gradient_noise", "change_noise"),
        0: ("gain", "improvement_probability", "noise_scale", "displacement_norm"),
    }.items():
        for field in fields:
            want = np.asarray(getattr(infos, field)) * c**power
            found = np.asarray(getattr(others, field))
            np.testing.assert_allclose(
                found, want, rtol=30 * rtol, atol=rtol * np.max(np.abs(want))
            )
    steps = np.asarray(infos.step_size) / (c if name == "meka" else 1)
    np.testing.assert_allclose(others.step_size, steps, rtol=30 * rtol)


@hypothesis.settings(max_examples=5)
@hypothesis.given(st.permutations(range(COUNT)))
def test_the_order_of_examples_does_not_matter_for_single_groups(order):
    path, _, _ = trainer("adameka")(start(), stream())
    shuffled = jax.tree.map(lambda x: x[:, list(order)], stream())
    same, _, _ = trainer("adameka")(start(), shuffled)
    close(same, path, 2e-3)


@pytest.mark.skipif(
    jax.config.values["jax_debug_nans"], reason="jax_debug_nans keeps what is donated"
)
def test_donated_buffers_and_one_compilation():
    optimizer, options = CONFIGURATIONS["meka"]
    traces = []

    def counted(params, batch):
        traces.append(1)
        return losses(params, batch)

    step = meka.make_step(counted, optimizer, **options)
    donating = jax.jit(step, donate_argnums=(0, 1))
    want, _, _ = trainer("meka")(start(), stream())
    after_first = 0
    for init in (optimizer.init, jax.jit(optimizer.init)):
        params = start()
        state = init(params)
        for t in range(4):
            old = params["w"]
            params, state, _ = donating(params, state, first(stream(), t))
            assert old.is_deleted()
            after_first = after_first or len(traces)
        close(params, jax.tree.map(lambda x: x[3], want), 1e-5)
    assert len(traces) == after_first


def avals(tree) -> list[tuple]:
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


TRANSPORTS = (meka.hessian_at_current, meka.hessian_at_previous, meka.difference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_states_and_dtypes_do_not_change_from_step_to_step(dtype, request):
    """By abstract evaluation, for every combination: nothing can recompile."""
    if dtype == "float64":
        request.getfixturevalue("x64")
    batch = halved(first(stream()), dtype)
    rules = (
        meka.probability_of_improvement,
        meka.scaled(meka.expected_improvement, 0.5),
        meka.switch(meka.constant(0.1), meka.quadratic, 3),
    )
    combinations = product(TRANSPORTS, (meka.current, meka.lagged), (False, True))
    for k, (transport, probe, diagonal) in enumerate(combinations):
        rule = rules[k % len(rules)]
        optimizer = meka.adameka(rule, diagonal=diagonal, third_order=0.0)
        step = meka.make_step(losses, optimizer, transport=transport, probe=probe)
        params = start(dtype)
        state = optimizer.init(params)
        assert not any(weak for _, _, weak in avals(state))
        new_params, new_state, info = jax.eval_shape(step, params, state, batch)
        assert avals(new_params) == avals(params)
        assert avals(new_state) == avals(state)
        assert jax.tree.structure(new_state) == jax.tree.structure(state)
        own = meka.find_state(new_state)
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        scalars = jax.tree.leaves((own.value, own.value_noise, own.steps, info))
        kinds = {x.dtype for x in scalars if jnp.issubdtype(x.dtype, jnp.floating)}
        assert kinds == {jnp.dtype(wide)}
        assert {x.dtype for x in jax.tree.leaves(own.previous_params)} == {
            jnp.dtype(dtype)
        }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_not_stuck_at_the_measuring_step(dtype):
    """A first step of 1e-4 rounds to none in bfloat16, and so would every other."""
    optimizer = meka.meka()
    step = jax.jit(meka.make_step(losses, optimizer, probe=meka.lagged))
    params = start(dtype)
    state = optimizer.init(params)
    for t in range(8):
        batch = halved(first(stream(), t), dtype)
        params, state, info = step(params, state, batch)
    assert info.displacement_norm > 0
    assert info.value < 0.9 * losses(start(), everything()).mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_parameters_train(dtype):
    optimizer, step = make("meka")
    step = jax.jit(step)
    params = start(dtype)
    state = optimizer.init(params)
    infos = []
    for t in range(15):
        params, state, info = step(params, state, halved(first(stream(), t), dtype))
        infos.append(info)
    assert all(x.dtype == jnp.dtype(dtype) for x in jax.tree.leaves(params))
    assert all(info.accepted for info in infos)
    want, _, _ = trainer("meka")(start(), stream())
    close(
        jax.tree.map(lambda x: x.astype(jnp.float32), params),
        jax.tree.map(lambda x: x[14], want),
        0.25 if dtype == "bfloat16" else 0.05,
    )
    assert float(infos[-1].value) < float(infos[0].value)


def test_mixed_precision_leaves_keep_their_own():
    optimizer = meka.adameka(diagonal=True)
    params = {**start(), "b": jnp.asarray(0.1, jnp.float16)}

    def mixed(params, batch):
        return losses({**params, "b": params["b"].astype(jnp.float32)}, batch)

    step = meka.make_step(mixed, optimizer, probe=meka.lagged)
    state = optimizer.init(params)
    new, new_state, _ = jax.eval_shape(step, params, state, first(stream()))
    assert avals(new) == avals(params)
    assert avals(new_state) == avals(state)


# Starts where every example has the same loss, so that nothing seems uncertain.


@pytest.mark.parametrize("hinge", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_parameters_that_start_at_zero_move(name, hinge):
    """All losses log 2 (or 1 and straight): the value is certain, the step is not 0."""
    zero = jax.tree.map(jnp.zeros_like, start())
    batches = stream()
    batches = {**batches, "hinge": np.full_like(batches["hinge"], hinge)}
    _, infos, _ = trainer(name)(zero, batches)
    assert infos.accepted.all()
    assert infos.observed_variance[0] == 0
    assert infos.step_size[0] > 0
    assert infos.displacement_norm[1] > 0
    # The hinge is straight: its first steps only measure, then they grow.
    assert infos.value[-3:].mean() < (0.97 if hinge else 0.9) * infos.value[0]


# Padding.


@cache
def masked_step():
    return jax.jit(make("adameka")[1])


def padded(batch: dict, mask: np.ndarray) -> dict:
    """Garbage where the mask is false."""
    garbage = {"x": np.nan, "y": np.inf, "scale": np.nan, "hinge": True}
    batch = {name: np.array(values) for name, values in batch.items()}
    for name, values in batch.items():
        values[~mask] = garbage[name]
    return batch


def test_garbage_in_padding_does_not_matter_and_equals_the_short_batch():
    optimizer, _ = make("adameka")
    mask = np.array([True, True, True, True, False, False])
    short = meka.make_step(
        losses,
        optimizer,
        **{**CONFIGURATIONS["adameka"][1], "groups": 4},
    )
    short = jax.jit(short)
    params = want = start()
    state, want_state = optimizer.init(params), optimizer.init(params)
    for t in range(3):
        batch = first(stream(), t)
        params, state, info = masked_step()(params, state, padded(batch, mask), mask)
        few = jax.tree.map(lambda x: x[:4], batch)
        want, want_state, want_info = short(want, want_state, few)
        assert info.accepted
        assert info.suspect == -1
        # The second step's curvature is a difference over a very short distance.
        close(params, want, 1e-5 if t < 1 else 1e-3)
        close(info.noise_scale, want_info.noise_scale, 1e-3)


@pytest.mark.parametrize("real", [0, 1])
def test_too_much_padding_is_rejected(real):
    optimizer, _ = make("adameka")
    params, batch = start(), first(stream())
    state = optimizer.init(params)
    mask = np.arange(COUNT) < real
    same, _, info = masked_step()(params, state, padded(batch, mask), mask)
    assert (bool(info.accepted), int(info.rejected)) == (False, 1)
    close(same, params, 0)


def test_a_bad_example_among_padding_is_found():
    optimizer, _ = make("adameka")
    mask = np.arange(COUNT) < 4
    batch = padded(first(stream()), mask)
    batch["y"][2] = np.nan
    _, _, info = masked_step()(start(), optimizer.init(start()), batch, mask)
    assert (bool(info.accepted), int(info.suspect)) == (False, 2)


# What it takes to use it.


def test_import_loads_jax_and_optax_and_nothing_else():
    code = """
        import sys
        import jax, optax
        before = {name.partition(".")[0] for name in sys.modules}
        import meka
        after = {name.partition(".")[0] for name in sys.modules}
        assert after - before <= {"meka"}, after - before
        assert not any(name.startswith("meka.lab") for name in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_public_names_exist():
    assert set(meka.__all__) <= set(dir(meka))
    for optimizer in (meka.meka(), meka.adameka(), meka.scale_by_meka()):
        assert isinstance(optimizer, optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize(("parameters", "asked"), [(2**21, 8), (2**21 + 1, 2)])
def test_in_large_networks_some_of_the_examples_tell_the_change(parameters, asked):
    """One in four; in smaller ones, where that saves nothing, all of them."""
    told = []

    def transport(loss, params, previous, displacement):
        found = meka.hessian_at_current(loss, params, previous, displacement)
        told.append(found[0].shape[0])
        return found

    optimizer = meka.meka()
    step = meka.make_step(
        lambda p, x: x * jnp.sum(p**2), optimizer, transport=transport
    )
    params = jax.ShapeDtypeStruct((parameters,), jnp.float32)
    state = jax.eval_shape(optimizer.init, params)
    jax.eval_shape(step, params, state, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert told[-1] == asked
