"""One network from four libraries: the same numbers, whatever holds the parameters."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meka

SIZES = (6, 12, 3)
Weights = list[tuple[np.ndarray, np.ndarray]]  # per layer: (inputs, outputs), bias
Apply = Callable[[Any, jax.Array], jax.Array]


class Model(NamedTuple):
    params: Any
    apply: Apply
    read: Callable[[Any], Weights]


def plain(weights: Weights) -> Model:
    params = [{"w": jnp.asarray(w), "b": jnp.asarray(b)} for w, b in weights]

    def apply(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        first, second = params
        return jnp.tanh(x @ first["w"] + first["b"]) @ second["w"] + second["b"]

    return Model(params, apply, lambda p: [(q["w"], q["b"]) for q in p])


def equinox(weights: Weights) -> Model:
    model = eqx.nn.MLP(
        SIZES[0], SIZES[2], SIZES[1], 1, activation=jnp.tanh, key=jax.random.key(0)
    )
    values = [jnp.asarray(v) for w, b in weights for v in (w.T, b)]
    model = eqx.tree_at(
        lambda m: [v for layer in m.layers for v in (layer.weight, layer.bias)],
        model,
        values,
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return Model(
        params,
        lambda p, x: jax.vmap(eqx.combine(p, static))(x),
        lambda p: [(layer.weight.T, layer.bias) for layer in p.layers],
    )


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(*SIZES[:2], param_dtype=jnp.float64, rngs=rngs)
        self.second = nnx.Linear(*SIZES[1:], param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def flax(weights: Weights) -> Model:
    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    names = ("first", "second")
    for name, (w, b) in zip(names, weights, strict=True):
        params[name]["kernel"][...] = jnp.asarray(w)
        params[name]["bias"][...] = jnp.asarray(b)
    return Model(
        params,
        lambda p, x: nnx.merge(graph, p)(x),
        lambda p: [(p[n]["kernel"][...], p[n]["bias"][...]) for n in names],
    )


def haiku(weights: Weights) -> Model:
    def network(x: jax.Array) -> jax.Array:
        x = jnp.tanh(hk.Linear(SIZES[1], name="first")(x))
        return hk.Linear(SIZES[2], name="second")(x)

    model = hk.without_apply_rng(hk.transform(network))
    params = {
        name: {"w": jnp.asarray(w), "b": jnp.asarray(b)}
        for name, (w, b) in zip(("first", "second"), weights, strict=True)
    }
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, SIZES[0])))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    return Model(
        params,
        model.apply,
        lambda p: [(p[n]["w"], p[n]["b"]) for n in ("first", "second")],
    )


class Run(NamedTuple):
    infos: list[meka.Info]
    weights: Weights
    structure: bool  # whether the parameters came back as what they were


def train(
    make: Callable[[Weights], Model],
    optimizer: optax.GradientTransformationExtraArgs,
    **options: Any,
) -> Run:
    rng = np.random.default_rng(3)
    weights = [
        (rng.normal(0, n**-0.5, (n, k)), rng.normal(0, 0.1, k))
        for n, k in itertools.pairwise(SIZES)
    ]
    teacher = rng.normal(size=(SIZES[0], SIZES[2]))
    model = make(weights)

    def losses(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    step = jax.jit(meka.make_step(losses, optimizer, **options))
    params, state, infos = model.params, optimizer.init(model.params), []
    for _ in range(50):
        x = rng.normal(size=(32, SIZES[0]))
        labels = np.argmax(x @ teacher + rng.normal(0, 0.5, (32, SIZES[2])), axis=1)
        params, state, info = step(params, state, (x, labels))
        infos.append(jax.device_get(info))
    same = jax.tree.structure(params) == jax.tree.structure(model.params)
    return Run(infos, jax.device_get(model.read(params)), same)


def assert_close(found: Any, expected: Any, name: str, *, rtol: float) -> None:
    others = jax.tree.leaves(expected)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, x), y in zip(leaves, others, strict=True):
        where = name + jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-10, err_msg=where)


CHEAP = {"groups": 8, "transport": meka.difference, "probe": meka.lagged}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param(meka.meka(), {}, id="meka", marks=pytest.mark.slow),
        pytest.param(meka.adameka(), {}, id="adameka"),
        pytest.param(
            meka.adameka(diagonal=True),
            CHEAP,
            id="diagonal-cheap",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_framework_gives_the_same_numbers(
    optimizer: optax.GradientTransformationExtraArgs, options: dict[str, Any]
) -> None:
    # Double precision, so that what rounding could excuse is far below the tolerance.
    expected = train(plain, optimizer, **options)
    assert expected.infos[-1].observed < 0.7 * expected.infos[0].observed
    assert expected.infos[-1].rejected == 0
    for make in (equinox, flax, haiku):
        found = train(make, optimizer, **options)
        assert found.structure, make.__name__
        for t, (a, b) in enumerate(zip(found.infos, expected.infos, strict=True)):
            assert_close(a, b, f"{make.__name__}, step {t}: info", rtol=1e-7)
        assert_close(found.weights, expected.weights, make.__name__, rtol=1e-8)
