"""Equinox: train the arrays of a model, and lift a loss of one example to a batch."""

from importlib.resources import files

import equinox as eqx
import jax
import numpy as np
import optax

import meka


def main() -> float:
    digits = np.load(str(files("meka.lab") / "digits.npz"))
    images = digits["images"].astype(np.float32) / 16
    labels = digits["labels"].astype(np.int32)

    model = eqx.nn.MLP(64, 10, width_size=100, depth=1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: eqx.nn.MLP, example: tuple) -> jax.Array:
        image, label = example
        logits = eqx.combine(params, static)(image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    losses = meka.per_example(loss)
    optimizer = meka.meka()
    step = jax.jit(meka.make_step(losses, optimizer))
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for t in range(301):
        rows = rng.integers(1500, size=128)
        params, state, info = step(params, state, (images[rows], labels[rows]))
        if t % 100 == 0:
            print(
                f"step {t:3}  loss {info.observed:.4f}  step size {info.step_size:.4f}"
                f"  gain {info.gain:.3f}  gradient norm {info.gradient_norm:.4f}"
            )
    model = eqx.combine(params, static)
    train = float(losses(params, (images[:1500], labels[:1500])).mean())
    correct = jax.vmap(model)(images[1500:]).argmax(-1) == labels[1500:]
    print(f"train loss {train:.4f}, test accuracy {correct.mean():.1%}")
    return train


if __name__ == "__main__":
    main()
