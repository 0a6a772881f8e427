"""The same quantities as others would compute them, in the same run.

    python -m benchmarks.peers [--model mlp|cnn|resnet32|transformer] [--json FILE]

What meka measures on a minibatch is the mean gradient, its noise (the trace of the
covariance of that mean), the Hessian-vector product along a displacement, and its
noise. The peers compute all of it, or as much of it as they offer; the last column says
how much. Peers that are not installed are left out and named: `pip install jax_privacy
torch` brings them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.experimental import aggregating

import meka
from benchmarks import networks
from benchmarks.step_cost import say
from meka import tree
from meka.lab import timing

PyTree = Any


def of_groups(network: networks.Network, groups: int) -> Callable:
    def compute(params, displacement, batch):
        previous = tree.subtract(params, displacement)
        return meka.observe(network.losses, params, previous, batch, groups=groups)

    return compute


def one_loss(network: networks.Network) -> Callable:
    """The loss of a single example, as most people write it."""
    return lambda p, example: network.losses(
        p, jax.tree.map(lambda x: x[None], example)
    )[0]


def noise_of(stacked: PyTree) -> jax.Array:
    """Trace of the covariance of the mean, from one tree per example."""
    n = jax.tree.leaves(stacked)[0].shape[0]
    return sum(
        (jnp.sum(jnp.var(x, axis=0, ddof=1)) / n for x in jax.tree.leaves(stacked)),
        jnp.zeros(()),
    )


def mean_of(stacked: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), stacked)


def naive(network: networks.Network) -> Callable:
    loss = one_loss(network)

    def compute(params, displacement, batch):
        def one(example):
            slope = jax.grad(lambda p: loss(p, example))
            return jax.jvp(slope, (params,), (displacement,))

        gradients, products = jax.vmap(one)(batch)
        return (
            mean_of(gradients),
            noise_of(gradients),
            mean_of(products),
            noise_of(products),
        )

    return compute


def privacy(network: networks.Network) -> Callable:
    from jax_privacy.clipping import clipped_grad

    size = network.batch_size
    norms = clipped_grad(
        lambda p, b: network.losses(p, b)[0],
        l2_clip_norm=float("inf"),
        normalize_by=size,
        return_grad_norms=True,
    )

    def compute(params, displacement, batch):
        mean, aux = norms(params, batch)
        # E|g|² - |E g|² is the trace of the covariance; cheap, and prone to cancel.
        spread = jnp.mean(aux.grad_norms**2) - tree.square(mean)
        return mean, spread / (size - 1)

    return compute


def optax_aggregating(network: networks.Network) -> Callable:
    loss = one_loss(network)
    optimizer = aggregating.add_mean_variance_to_opt(optax.sgd(1e-3), ema_decay=0.999)

    def compute(params, displacement, batch):
        each = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        updates, state = optimizer.update(each, optimizer.init(params), params)
        _, variance = aggregating.get_unbiased_mean_and_variance_ema(state)
        return updates, variance

    return compute


def with_torch(network: networks.Network, batch: PyTree) -> Callable[[], Any] | None:
    """torch.func on the MLP: per-sample gradients and products, on the CPU."""
    if network.name != "mlp":
        return None
    import numpy as np
    import torch
    from torch.func import functional_call, grad, jvp, vmap

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)
    )
    params = {k: v.detach() for k, v in model.named_parameters()}
    tangent = {k: 0.01 * torch.ones_like(v) for k, v in params.items()}
    images = torch.tensor(np.asarray(batch[0]))
    labels = torch.tensor(np.asarray(batch[1]), dtype=torch.long)

    def loss(p, x, y):
        logits = functional_call(model, p, (x[None],))
        return torch.nn.functional.cross_entropy(logits, y[None])

    def one(x, y):
        return jvp(lambda p: grad(loss)(p, x, y), (params,), (tangent,))

    def compute():
        gradients, products = vmap(one)(images, labels)
        found = []
        for each in (gradients, products):
            found.append({k: v.mean(0) for k, v in each.items()})
            found.append(sum(v.var(0).sum() for v in each.values()) / len(images))
        return found

    return compute


def contestants(network: networks.Network) -> tuple[list[timing.Contestant], list[str]]:
    params, batch = network.init(), network.batch(network.batch_size, 0)
    displacement = jax.tree.map(lambda x: jnp.full_like(x, 0.01), params)
    everything = "gradient, product, both noises"
    peers: list[tuple[str, Callable, str]] = [
        ("meka.observe, 2 groups", of_groups(network, 2), everything),
        ("meka.observe, 8 groups", of_groups(network, 8), everything),
        ("meka.observe, n groups", of_groups(network, network.batch_size), everything),
        ("vmap(jvp(grad))", naive(network), everything),
        ("optax aggregating", optax_aggregating(network), "gradient and its noise"),
    ]
    if importlib.util.find_spec("jax_privacy"):
        peers.append(("jax_privacy", privacy(network), "gradient and its noise"))
    else:
        say("jax_privacy is not installed: left out")
    found, notes = [], []
    for name, compute, note in peers:
        say(f"compiling {name}")
        compiled = jax.jit(compute).lower(params, displacement, batch).compile()
        held = timing.peak_bytes(compiled) / 1e6

        def step(carry, batch, compiled=compiled):
            return compiled(params, displacement, batch)

        found.append(timing.Contestant(name, step, (), batch))
        notes.append(f"{held:8.1f} MB  {note}")
    if importlib.util.find_spec("torch") and jax.default_backend() == "cpu":
        compute = with_torch(network, batch)
        if compute is not None:
            found.append(
                timing.Contestant("torch.func", lambda c, b: compute() and (), (), ())
            )
            notes.append(f"{'':8}     {everything}")
    else:
        say("torch is not installed, or the device is no CPU: left out")
    return found, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=networks.NETWORKS, default="mlp")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    found, notes = contestants(networks.NETWORKS[given.model]())
    timing.interleave(found, rounds=given.rounds)
    rows = []
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {given.model}")
    print(f"{'':26} {'ms':>9} {'x ours':>7} {'quartiles':>13}")
    for each, note in zip(found, notes, strict=True):
        row = timing.summary(each, found[0])
        rows.append({"name": each.name, **row})
        print(
            f"{each.name:26} {1e3 * row['seconds']:9.3f} {row['ratio']:7.2f} "
            f"{row['ratio_low']:6.2f}-{row['ratio_high']:<6.2f} {note}"
        )
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
