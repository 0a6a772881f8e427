"""Sums of two convolutions made as one, and nothing else changed by it.

No step does so by itself: `benchmarks.variants` times what it would bring.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_convolutions import BATCH, CASES, START, case, everywhere

import meka
from benchmarks import variants
from benchmarks.dual import all_dual
from benchmarks.joined import all_joined
from meka.rewriting import rewritten

T = TypeVar("T")


def joined(function: Callable[..., T]) -> Callable[..., T]:
    return rewritten(function, all_joined)


def convolutions(function, *given) -> int:
    program = jax.make_jaxpr(function)(*given).jaxpr
    return sum(
        e.primitive.name == "conv_general_dilated" for e, _ in everywhere(program)
    )


def product(value):
    def both(x, w):
        slope = jax.grad(value, argnums=(0, 1))
        return jax.jvp(slope, (x, w), (jnp.cos(x), jnp.sin(w)))

    return both


@pytest.mark.parametrize("name", CASES)
def test_the_product_by_dual_numbers_is_the_same_with_a_third(name, x64):
    value, given = case(name)
    function = product(value)
    dual = rewritten(function, all_dual)
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, jax.jit(dual)(*given), function(*given))
    before = convolutions(function, *given)
    assert convolutions(dual, *given) == (before if name == "groups" else before // 3)


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_the_same_with_fewer_convolutions(name, x64):
    value, given = case(name)
    function = product(value)
    expected, found = function(*given), jax.jit(joined(function))(*given)
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, found, expected)
    # Of grouped features, only a change of all of them would be one.
    before, after = (
        convolutions(function, *given),
        convolutions(joined(function), *given),
    )
    assert after == (before if name == "groups" else before * 2 // 3)


def test_what_differs_or_is_needed_by_itself_is_left_alone(x64):
    def convolve(x, w, padding: Any = "SAME"):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), padding, dimension_numbers=numbers
        )

    keys = jax.random.split(jax.random.key(0), 4)
    x, y = (jax.random.normal(k, (2, 6, 6, 3)) for k in keys[:2])
    small, large = (
        jax.random.normal(k, (s, s, 3, 4))
        for k, s in zip(keys[2:], (3, 5), strict=True)
    )

    def shapes_differ(x, y):
        return convolve(x, small) + convolve(y, large)

    def padding_differs(x, y):
        return convolve(x, small, [(1, 1)] * 2) + convolve(y, large, [(2, 2)] * 2)

    def used_again(x, y):
        first = convolve(x, small)
        return first + convolve(y, small), first

    def with_itself(x, y):
        first = convolve(x, small)
        return first + first, y

    def types_differ(x, y):
        second = y.astype(jnp.float32), small.astype(jnp.float32)
        return convolve(x, small) + convolve(*second).astype(x.dtype)

    def joinable(x, y):
        return jax.jit(lambda: convolve(x, small) + convolve(y, 2 * small))()

    left = (shapes_differ, padding_differs, used_again, with_itself, types_differ)
    for function in left:
        assert convolutions(joined(function), x, y) == convolutions(function, x, y)
        jax.tree.map(
            np.testing.assert_array_equal, joined(function)(x, y), function(x, y)
        )
    assert convolutions(joined(joinable), x, y) == 1
    np.testing.assert_allclose(joined(joinable)(x, y), joinable(x, y), rtol=1e-12)


def test_what_is_printed_is_printed_and_features_may_differ():
    seen = []

    def function(x, w, y, v):
        def convolve(x, w):
            return jax.lax.conv_general_dilated(x, w, (1,), "SAME")

        jax.debug.callback(lambda z: seen.append(float(z)), x[0, 0, 0])
        return convolve(x, w) + convolve(y, v)

    shapes = (2, 3, 7), (4, 3, 3), (2, 5, 7), (4, 5, 3)
    keys = jax.random.split(jax.random.key(0), 4)
    given = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    expected = function(*given)
    np.testing.assert_allclose(
        jax.jit(joined(function))(*given), expected, rtol=1e-5, atol=1e-6
    )
    jax.effects_barrier()
    assert seen == [float(given[0][0, 0, 0])] * 2


def losses(params, batch):
    """Two layers: what the second one sees changes with the first."""
    images, labels = batch
    numbers = ("NCHW", "OIHW", "NCHW")

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers
        )

    found = convolve(jnp.tanh(convolve(images, params["w"])), params["v"])
    return (jnp.mean(found, (1, 2, 3)) - labels) ** 2


SECOND = 0.3 * jax.random.normal(jax.random.key(3), (5, 4, 3, 3))


@pytest.mark.parametrize("sample", [1, 2])
@pytest.mark.parametrize(
    "transport", [meka.hessian_at_current, meka.hessian_at_previous]
)
@pytest.mark.parametrize("variant", ["joined", "dual"])
def test_a_step_is_the_same(x64, variant, transport, sample):
    """But for the order of sums; with all examples asked at once, or in halves."""
    optimizer = meka.meka()
    given = START | {"v": SECOND}, BATCH
    start, batch = jax.tree.map(lambda x: x.astype(jnp.float64), given)

    def steps():
        step = meka.make_step(losses, optimizer, transport=transport, sample=sample)
        params, state = start, optimizer.init(start)
        for k in range(12):
            now = jax.tree.map(lambda x, k=k: x * (1 + 0.1 * k), batch)
            params, state, info = jax.jit(step)(params, state, now)
            assert info.accepted
        return params, info, convolutions(step, params, state, batch)

    as_written, told, before = steps()
    with ExitStack() as stack:
        variants.VARIANTS[variant](stack)
        params, info, after = steps()
    close = partial(np.testing.assert_allclose, rtol=1e-8)
    jax.tree.map(close, params, as_written)
    close(info.step_size, told.step_size)
    assert after < before
