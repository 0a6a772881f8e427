"""How much a pass forward makes, and what follows from it for a step."""

import jax
import jax.numpy as jnp
import pytest

import meka
from meka.activations import numbers_made
from meka.training import Stepper

BATCH = 64


def dense(params, x):
    return x @ params


def test_products_are_counted_wherever_they_are():
    x, params = jnp.ones((5, 3)), jnp.ones((3, 3))
    assert numbers_made(dense, params, x) == 15
    assert numbers_made(jnp.sin, x) == 0

    def loop(params, x):
        return jax.lax.scan(lambda c, _: (dense(params, c), None), x, None, length=7)

    def choice(params, x):
        more = lambda: dense(params, dense(params, x))  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, more, lambda: dense(params, x))

    def inner(params, x):
        return jax.jit(jax.checkpoint(dense))(params, x).sum()

    assert numbers_made(loop, params, x) == 7 * 15
    assert numbers_made(choice, params, x) == 2 * 15
    assert numbers_made(inner, params, x) == 15


def filtered(params, images):
    """One kernel over images: many numbers, few parameters."""
    found = jax.lax.conv_general_dilated(images, params["kernel"], (1, 1), "SAME")
    return jnp.mean(jnp.tanh(found) ** 2, axis=(1, 2, 3)) + jnp.sum(params["bias"] ** 2)


def images(side: int) -> tuple:
    key = jax.random.key(0)
    kernel = jax.random.normal(key, (16, 1, 3, 3))
    params = {"kernel": kernel, "bias": jnp.ones(4)}
    return params, jax.random.normal(key, (BATCH, 1, side, side))


@pytest.mark.parametrize(("side", "usual"), [(8, 1), (40, 2)])
def test_half_of_the_examples_tell_the_change_where_they_hold_most(side, usual):
    """Small images make 65,536 numbers, which nobody minds; large ones 1.6 million."""
    params, batch = images(side)
    assert numbers_made(filtered, params, batch) == BATCH * 16 * side**2
    optimizer = meka.meka(meka.constant(0.1))

    def change(sample):
        step = jax.jit(meka.make_step(filtered, optimizer, sample=sample))
        carry = params, optimizer.init(params)
        for _ in range(3):
            *carry, info = step(*carry, batch)
        return info.gradient_innovation

    found = {sample: float(change(sample)) for sample in (None, 1, 2)}
    assert found[None] == found[usual] != found[3 - usual]


def test_large_networks_ask_a_quarter():
    options = (meka.meka(), 2, None, None, 1, None, None)
    stepper = Stepper(lambda p, x: (x @ p).sum(-1), *options)
    large, small = jnp.zeros((1500, 1500)), jnp.zeros((1000, 1000))
    assert stepper._usual_sample(large, jnp.zeros((8, 1500)), None) == 4
    assert stepper._usual_sample(small, jnp.zeros((8, 1000)), None) == 1
