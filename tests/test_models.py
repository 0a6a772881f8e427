"""The networks: shapes, sizes, independence of examples, derivatives."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka.lab import models

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def small_resnet(key: jax.Array) -> models.ResNet:
    return models.resnet32(key, widths=(8,), blocks_per_stage=1)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def filled(build: Callable[[jax.Array], Any]) -> Any:
    """The model with random numbers everywhere, without compiling its init."""

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        scale = np.prod(leaf.shape[:-1]) ** -0.5 if len(leaf.shape) > 1 else 0.5
        return jnp.asarray(np.float32(scale) * normal(11, *leaf.shape))

    return jax.tree.map(fill, eqx.filter_eval_shape(build, KEY))


apply = jax.jit(lambda model, x: model(x))


@pytest.mark.parametrize(
    ("build", "shape", "count"),
    [
        (models.mlp, (784,), 784 * 100 + 100 + 100 * 10 + 10),
        (models.cnn_3c3d, (32, 32, 3), 895_210),
        (models.resnet32, (32, 32, 3), 464_154),  # as in He et al., option A
    ],
)
def test_sizes(
    build: Callable[[jax.Array], Any], shape: tuple[int, ...], count: int
) -> None:
    model = eqx.filter_eval_shape(build, KEY)
    leaves = jax.tree.leaves(model)
    assert sum(leaf.size for leaf in leaves) == count
    assert {str(leaf.dtype) for leaf in leaves} == {"float32"}
    inputs = jax.ShapeDtypeStruct((6, *shape), jnp.float32)
    logits = eqx.filter_eval_shape(lambda m, x: m(x), model, inputs)
    assert logits.shape == (6, 10)


def test_resnet32_has_32_layers_of_weights() -> None:
    model = eqx.filter_eval_shape(models.resnet32, KEY)
    assert len([leaf for leaf in jax.tree.leaves(model) if len(leaf.shape) > 1]) == 32


CASES = [
    pytest.param(lambda key: models.mlp(key, (12, 9, 5)), (12,), id="mlp"),
    pytest.param(models.cnn_3c3d, (32, 32, 3), id="3c3d"),
    pytest.param(small_resnet, (8, 8, 3), id="resnet"),
]


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_examples_are_independent(
    build: Callable[[jax.Array], Any], shape: tuple[int, ...]
) -> None:
    model = filled(build)
    x = normal(1, 4, *shape)
    logits = apply(model, x)
    others = apply(model, np.concatenate([x[:2], 10 * normal(2, 2, *shape)]))
    np.testing.assert_allclose(others[:2], logits[:2], rtol=1e-4, atol=1e-5)
    assert not np.allclose(others[2:], logits[2:], atol=1e-2)
    # Different examples do get different answers.
    assert np.std(np.asarray(logits), axis=0).min() > 1e-3


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_second_derivatives_agree_between_modes(
    build: Callable[[jax.Array], Any], shape: tuple[int, ...]
) -> None:
    """vᵀHv by forward-over-reverse and, per example, by forward-over-forward."""
    model = filled(build)
    direction = jax.tree.map(
        lambda leaf: jnp.asarray(np.float32(0.1) * normal(3, *leaf.shape)), model
    )
    inputs = normal(4, 3, *shape)

    def losses(params: Any, x: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(params(x), axis=-1)

    @jax.jit
    def reverse(params: Any, v: Any, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda p: losses(p, x).sum())
        slope, product = jax.jvp(gradient, (params,), (v,))
        dots = [
            sum(
                jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, pair), strict=True)
            )
            for pair in ((v, slope), (v, product))
        ]
        return jnp.stack(dots)

    @jax.jit
    def forward(params: Any, v: Any, x: jax.Array) -> jax.Array:
        def along(step: jax.Array) -> jax.Array:
            return losses(jax.tree.map(lambda p, d: p + step * d, params, v), x)

        def slope(step: jax.Array) -> jax.Array:
            return jax.jvp(along, (step,), (jnp.float32(1),))[1]

        return jnp.stack(jax.jvp(slope, (jnp.float32(0),), (jnp.float32(1),)))

    expected = forward(model, direction, inputs)
    assert expected.shape == (2, 3)
    assert abs(float(expected[1].sum())) > 1e-3
    np.testing.assert_allclose(
        reverse(model, direction, inputs), expected.sum(axis=1), rtol=2e-3
    )


@pytest.mark.parametrize("size", [5, 6])
def test_max_pool_is_the_windows_maximum(size: int) -> None:
    """Value and gradient against loops, for both ways "same" padding can fall."""
    x, weights = normal(5, 2, size, size, 3), normal(6, 2, 3, 3, 3)
    before = 1 if size == 5 else 0
    value, gradient = np.zeros_like(weights), np.zeros_like(x)
    for n, row, column, channel in np.ndindex(value.shape):
        top, left = max(2 * row - before, 0), max(2 * column - before, 0)
        window = x[n, top : 2 * row - before + 3, left : 2 * column - before + 3]
        value[n, row, column, channel] = window[..., channel].max()
        best = window[..., channel].argmax()
        y, z = np.unravel_index(best, window.shape[:2])
        gradient[n, top + y, left + z, channel] += weights[n, row, column, channel]

    def pooled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        pool = models.max_pool(x)
        return jnp.vdot(weights, pool), pool

    found_gradient, found = jax.jit(jax.grad(pooled, has_aux=True))(x)
    np.testing.assert_array_equal(found, value)
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-5, atol=1e-6)


def test_group_norm_against_numpy() -> None:
    x = np.float32(100) + np.float32(0.1) * normal(7, 2, 3, 3, 16)
    norm = models.GroupNorm(16, groups=4)
    norm = eqx.tree_at(
        lambda n: (n.scale, n.shift),
        norm,
        (jnp.asarray(normal(8, 16)), jnp.asarray(normal(9, 16))),
    )
    grouped = np.asarray(x, np.float64).reshape(2, 9, 4, 4)
    mean = grouped.mean(axis=(1, 3), keepdims=True)
    variance = grouped.var(axis=(1, 3), keepdims=True)
    expected = ((grouped - mean) / np.sqrt(variance + 1e-5)).reshape(x.shape)
    expected = expected * np.asarray(norm.scale) + np.asarray(norm.shift)
    np.testing.assert_allclose(apply(norm, x), expected, atol=2e-3)
    with pytest.raises(ValueError, match="10 channels do not split into 8 groups"):
        models.GroupNorm(10)


def test_shortcut_passes_the_signal_as_is() -> None:
    block = filled(lambda key: models.PreactivationBlock(key, 8, 16, stride=2))
    block = eqx.tree_at(
        lambda b: b.convolutions[1].kernel, block, replace_fn=jnp.zeros_like
    )
    x = normal(10, 2, 6, 6, 8)
    y = apply(block, x)
    np.testing.assert_array_equal(y[..., :8], x[:, ::2, ::2])
    np.testing.assert_array_equal(y[..., 8:], np.zeros((2, 3, 3, 8)))


def test_initial_weights() -> None:
    """Glorot and He scales; 3 % is over eight standard errors for 36,000 weights."""

    @jax.jit  # what is not returned is not computed
    def build(key: jax.Array) -> Any:
        cnn, resnet = models.cnn_3c3d(key), models.resnet32(key)
        biases = [layer.bias for layer in cnn.convolutions + cnn.head.layers]
        return (
            cnn.convolutions[1].kernel,
            cnn.head.layers[1].weight,
            resnet.blocks[-1].convolutions[0].kernel,
            biases,
        )

    glorot, dense, he, biases = build(KEY)
    assert np.std(glorot) == pytest.approx((2 / (9 * (64 + 96))) ** 0.5, rel=0.03)
    assert np.std(he) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.03)
    limit = (6 / (512 + 256)) ** 0.5
    assert np.max(dense) == pytest.approx(limit, rel=1e-3)
    assert np.std(dense) == pytest.approx(limit / 3**0.5, rel=0.03)
    assert not any(np.any(bias) for bias in biases)
    assert not np.array_equal(dense, build(jax.random.key(1))[1])


def test_sizes_of_an_mlp_are_checked() -> None:
    with pytest.raises(ValueError, match="sizes"):
        models.mlp(KEY, (3,))
