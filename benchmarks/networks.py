"""The networks whose steps are timed, each with random data of the right shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from meka.lab import models
from meka.lab.transformer import next_token_losses, transformer

PyTree = Any


@dataclass(frozen=True)
class Network:
    """Parameters, losses, and batches: so many examples, others for another seed."""

    name: str
    batch_size: int
    init: Callable[[], PyTree]
    losses: Callable[[PyTree, PyTree], jax.Array]
    batch: Callable[[int, int], PyTree]
    convolutions: bool = False


def flat(network: Network) -> Network:
    """The same network with all its parameters in one array."""
    params, unravel = ravel_pytree(network.init())

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        return network.losses(unravel(params), batch)

    return replace(network, init=lambda: params, losses=losses)


def classifier(name: str, make: Callable[[jax.Array], Any], shape, convolutions):
    model, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)

    def losses(params: PyTree, batch: PyTree) -> jax.Array:
        logits = eqx.combine(params, static)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    def batch(n: int, seed: int) -> PyTree:
        keys = jax.random.split(jax.random.key(1 + seed))
        labels = jax.random.randint(keys[1], (n,), 0, 10)
        return jax.random.normal(keys[0], (n, *shape)), labels

    return Network(name, 128, lambda: model, losses, batch, convolutions)


def mlp(width: int = 100) -> Network:
    def make(key: jax.Array) -> models.MLP:
        return models.mlp(key, (784, width, 10))

    return classifier("mlp", make, (784,), False)


def decoder(width: int = 320) -> Network:
    whole = transformer(jax.random.key(0), width=width)
    model, static = eqx.partition(whole, eqx.is_inexact_array)

    def losses(params: PyTree, text: jax.Array) -> jax.Array:
        return next_token_losses(eqx.combine(params, static), text)

    def batch(n: int, seed: int) -> jax.Array:
        return jax.random.randint(jax.random.key(1 + seed), (n, 129), 0, 256)

    return Network("transformer", 32, lambda: model, losses, batch)


NETWORKS: dict[str, Callable[[], Network]] = {
    "mlp": mlp,
    "cnn": lambda: classifier("cnn", models.cnn_3c3d, (32, 32, 3), True),
    "resnet32": lambda: classifier("resnet32", models.resnet32, (32, 32, 3), True),
    "transformer": decoder,
}


def count(params: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def gradient(network: Network) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    return jax.value_and_grad(lambda p, b: jnp.mean(network.losses(p, b)))
