"""Run with eight virtual devices: is a spread-out run the run of one device?

Prints a line of JSON: the largest differences, and what each compiled step sends.
"""

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import meka

STEPS, BATCH, WIDTH = 12, 64, 64


@functools.cache
def on(*axes: str | None) -> NamedSharding:
    kind = jax.sharding.AxisType.Auto
    return NamedSharding(jax.make_mesh((8,), ("x",), axis_types=(kind,)), jax.P(*axes))


def losses(params, batch):
    images, labels = batch
    hidden = jnp.tanh(images @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def start():
    rng = np.random.default_rng(0)
    return {
        "w1": jnp.asarray(rng.normal(size=(32, WIDTH)) / 6, jnp.float32),
        "b1": jnp.zeros(WIDTH, jnp.float32),
        "w2": jnp.asarray(rng.normal(size=(WIDTH, 8)) / 8, jnp.float32),
        "b2": jnp.zeros(8, jnp.float32),
    }


def batch_of(number: int):
    rng = np.random.default_rng([1, number])
    images = rng.normal(size=(BATCH, 32)).astype(np.float32)
    return images, (images[:, :8].argmax(1)).astype(np.int32)


def shardings(spread_params: bool):
    """Each parameter cut into eight along its longest axis, or copied everywhere."""

    def one(x):
        axes: list = [None] * x.ndim
        if spread_params:
            axes[int(np.argmax(x.shape))] = "x"
        return on(*axes)

    return jax.tree.map(one, start())


def place(optimizer, state, where):
    """The state's parameter-sized parts where the parameters are, the rest copied."""
    return optax.tree.map_params(
        optimizer,
        jax.device_put,
        state,
        where,
        transform_non_params=lambda x: jax.device_put(x, on()),
    )


def train(optimizer, step, where=None):
    params = start()
    state = optimizer.init(params)
    put = jnp.asarray
    if where is not None:
        params = jax.device_put(params, where)
        state = place(optimizer, state, where)
        put = lambda x: jax.device_put(x, on("x"))  # noqa: E731
    first = jax.tree.map(put, batch_of(0))
    compiled = jax.jit(step).lower(params, state, first).compile()
    for number in range(STEPS):
        batch = jax.tree.map(put, batch_of(number))
        params, state = compiled(params, state, batch)[:2]
    return params, compiled.as_text() or ""


def run_through(optimizer, where) -> dict[str, jax.Array]:
    """The parameters after as many steps of `meka.Run`."""
    params = jax.device_put(start(), where)
    state = place(optimizer, optimizer.init(start()), where)
    run = meka.Run(losses, optimizer, params, state)
    for number in range(STEPS):
        batch = jax.tree.map(lambda x: jax.device_put(x, on("x")), batch_of(number))
        # One at a time: on two cores, devices that wait for each other in several steps
        # at once may wait for ever.
        jax.block_until_ready(run.step(batch))
    return run.params


def traffic(text: str) -> dict[str, list[int]]:
    """Sizes, in numbers, of what each kind of collective makes."""
    found: dict[str, list[int]] = {}
    pattern = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)\("
    for shapes, kind in re.findall(pattern, text):
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n] or [1]))
            for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)
        ]
        found.setdefault(kind, []).extend(sizes)
    return found


def ours(optimizer=None, **options):
    optimizer = optimizer or meka.adameka()
    return optimizer, meka.make_step(losses, optimizer, **options)


def under_way():
    """`auto` with a length found: from nothing, a few steps lead nowhere."""
    optimizer = meka.auto(20 * STEPS)

    def init(params):
        state: Any = optimizer.init(params)
        return state._replace(scale=state.scale._replace(distance=jnp.asarray(1e-2)))

    return type(optimizer)(init, optimizer.update)


def adam():
    optimizer = optax.adam(1e-3)

    def step(params, state, batch):
        gradient = jax.grad(lambda p: jnp.mean(losses(p, batch)))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, step


def furthest(one, other) -> float:
    """The largest difference between parameters."""
    return max(
        float(np.max(np.abs(np.asarray(one[k]) - np.asarray(other[k])))) for k in one
    )


def main() -> None:
    result: dict = {"size": sum(x.size for x in jax.tree.leaves(start()))}
    settings = {
        "default": {},
        "steepest": {"optimizer": meka.meka()},
        "difference, lagged": {
            "transport": meka.difference,
            "probe": meka.lagged,
            "noise_every": 1,
        },
        "auto": {"optimizer": under_way()},
    }
    for name, options in settings.items():
        expected, _ = train(*ours(**options))
        for kind in (False, True):
            label = f"{name}, {'spread' if kind else 'copied'} parameters"
            found, text = train(*ours(**options), where=shardings(kind))
            difference = furthest(found, expected)
            kept = all(
                found[k].sharding.is_equivalent_to(shardings(kind)[k], found[k].ndim)
                for k in found
            )
            if name in ("default", "steepest"):
                run = run_through(ours(**options)[0], shardings(kind))
                difference = max(difference, furthest(run, expected))
            result[label] = {
                "difference": difference,
                "moved": furthest(expected, start()),
                "kept": kept,
                "sent": traffic(text),
            }
    for kind in (False, True):
        _, text = train(*adam(), where=shardings(kind))
        label = f"adam, {'spread' if kind else 'copied'} parameters"
        result[label] = {"sent": traffic(text)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
