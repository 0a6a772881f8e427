"""Convolutions inside of branches and loops: in order, and otherwise as they were."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import meka
from meka.convolutions import for_inside

CASES = {
    "plain": ("NCHW", "OIHW", {}),
    "in order": ("NHWC", "HWIO", {}),
    "strides": ("NCHW", "OIHW", {"window_strides": (2, 1)}),
    "dilated": ("CHWN", "HWOI", {"rhs_dilation": (1, 2), "padding": "VALID"}),
    "transposed": ("NHWC", "HWIO", {"lhs_dilation": (2, 2), "padding": [(1, 1)] * 2}),
    "groups": ("NCHW", "OIHW", {"feature_group_count": 2}),
    "one axis": ("NCW", "OIW", {}),
    "three axes": ("NCDHW", "OIDHW", {}),
}
SIZES = {"N": 3, "C": 4, "O": 6, "I": 4, "D": 5, "H": 7, "W": 5}


def case(name):
    images, kernel, options = CASES[name]
    inner = len(images) - 2
    options = {"window_strides": (1,) * inner, "padding": "SAME"} | options
    inputs = 4 // options.get("feature_group_count", 1)
    shapes = (
        tuple(SIZES[axis] for axis in images),
        tuple({"O": 6, "I": inputs}.get(axis, 3) for axis in kernel),
    )
    keys = jax.random.split(jax.random.key(0))
    given = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def value(x, w):
        numbers = (images, kernel, images)
        found = jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)
        return jnp.sum(jnp.tanh(jax.nn.relu(found) + found))

    return value, given


def everywhere(program, nested=False):
    """All equations, and whether they are inside of a branch or a loop."""
    for equation in program.eqns:
        yield equation, nested
        within = nested or equation.primitive.name in ("cond", "scan", "while")
        for inner in core.jaxprs_in_params(equation.params):
            yield from everywhere(inner, within)


def orders(function, *given, nested=False):
    """The orders of the axes of all convolutions, or of those inside."""
    program = jax.make_jaxpr(function)(*given).jaxpr
    return [
        tuple(equation.params["dimension_numbers"])
        for equation, inside in everywhere(program)
        if equation.primitive.name == "conv_general_dilated" and inside >= nested
    ]


def in_order(numbers) -> bool:
    images, kernel, result = numbers
    rank = len(images)
    inner = tuple(range(1, rank - 1))
    first = (0, rank - 1, *inner)
    return (images, kernel, result) == (
        first,
        (rank - 1, rank - 2, *range(rank - 2)),
        first,
    )


@pytest.mark.parametrize("name", CASES)
def test_they_are_in_order_and_give_the_same(name, x64):
    value, given = case(name)
    slope = jax.grad(value, argnums=(0, 1))

    def product(x, w):
        return jax.jvp(slope, (x, w), (jnp.cos(x), jnp.sin(w)))

    for function in (value, slope, product, jax.vmap(value, (0, None))):
        more = [x[None] if function not in (value, slope, product) and k == 0 else x
                for k, x in enumerate(given)]  # fmt: skip
        expected, found = function(*more), jax.jit(for_inside(function))(*more)
        close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, found, expected)
        seen = orders(for_inside(function), *more)
        assert seen
        assert all(map(in_order, seen))


def test_there_is_something_to_put_in_order():
    """Even where the model is: its derivatives are not."""
    value, given = case("in order")
    assert all(map(in_order, orders(value, *given)))
    assert not all(map(in_order, orders(jax.grad(value, argnums=1), *given)))


def test_without_convolutions_nothing_is_touched():
    def function(x):
        return jnp.sin(x) @ x, {"kept": jnp.max(x)}

    x = jnp.ones((3, 3))
    assert str(jax.make_jaxpr(for_inside(function))(x)) == str(
        jax.make_jaxpr(function)(x)
    )


def test_what_is_printed_is_printed():
    value, given = case("plain")
    seen = []

    def told(x, w):
        jax.debug.callback(lambda y: seen.append(float(y)), x[0, 0, 0, 0])
        return value(x, w)

    jax.jit(for_inside(told))(*given)
    jax.effects_barrier()
    assert seen == [float(given[0][0, 0, 0, 0])]


def losses(params, batch):
    images, labels = batch
    numbers = ("NCHW", "OIHW", "NCHW")
    found = jax.lax.conv_general_dilated(
        images, params["w"], (1, 1), "SAME", dimension_numbers=numbers
    )
    return (jnp.mean(jnp.tanh(found), (1, 2, 3)) - labels) ** 2


START = {"w": 0.1 * jax.random.normal(jax.random.key(1), (4, 2, 3, 3))}
BATCH = (jax.random.normal(jax.random.key(2), (16, 2, 6, 6)), jnp.linspace(0, 1, 16))


@pytest.mark.parametrize("optimizer", [meka.meka(), meka.auto(100)], ids=["PI", "auto"])
@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 8, "noise_every": 1}, {"micro_batches": 4}, {"micro_batches": 2}],
    ids=str,
)
def test_every_step_has_them_in_order_where_it_matters(optimizer, options):
    if "noise_every" in options:
        options = options | {"transport": meka.hessian_at_current}
    step = meka.make_step(losses, optimizer, **options)
    state = optimizer.init(START)
    inside = orders(step, START, state, BATCH, nested=True)
    # Eight groups are in turn on a CPU and at once elsewhere, where order is no matter.
    mapped = [numbers for numbers in inside if not in_order(numbers)]
    assert len(inside) > 2
    assert len(mapped) <= (len(inside) // 2 if "groups" in options else 0)


def test_a_loop_has_them_in_order_and_takes_the_steps_of_make_step():
    optimizer = meka.auto(100)
    state = optimizer.init(START)
    many = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x, 1.1 * x]), BATCH)
    loop = jax.jit(meka.make_loop(losses, optimizer))
    found, _, _ = loop(START, state, many)
    step, params = jax.jit(meka.make_step(losses, optimizer)), START
    for k in range(3):
        batch = jax.tree.map(lambda x, k=k: x[k], many)
        params, state, _ = step(params, state, batch)
    np.testing.assert_allclose(found["w"], params["w"], rtol=1e-6)
    assert np.any(np.asarray(params["w"]) != np.asarray(START["w"]))
    compiled = loop.lower(START, state, many).compile().as_text() or ""
    labels = [line for line in compiled.splitlines() if " convolution(" in line]
    assert labels
    assert all("dim_labels=b01f_01io->b01f" in line for line in labels)
