"""Flax NNX, with the cheapest step: two gradients and no second derivative."""

from importlib.resources import files

import jax
import numpy as np
import optax
from flax import nnx

import meka


class MLP(nnx.Module):
    """One hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, 100, rngs=rngs)
        self.out = nnx.Linear(100, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """The logits of a batch of images."""
        return self.out(nnx.relu(self.hidden(images)))


def main() -> float:
    digits = np.load(str(files("meka.lab") / "digits.npz"))
    images = digits["images"].astype(np.float32) / 16
    labels = digits["labels"].astype(np.int32)
    graph, params = nnx.split(MLP(nnx.Rngs(0)), nnx.Param)

    def losses(params: nnx.State, batch: tuple) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    optimizer = meka.adameka()
    step = jax.jit(
        meka.make_step(losses, optimizer, transport=meka.difference, probe=meka.lagged)
    )
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for t in range(301):
        rows = rng.integers(1500, size=128)
        params, state, info = step(params, state, (images[rows], labels[rows]))
        if t % 100 == 0:
            print(
                f"step {t:3}  loss {info.observed:.4f}  step size {info.step_size:.5f}"
                f"  gain {info.gain:.3f}  curvature {info.curvature:.3g}"
            )
    loss = float(losses(params, (images[:1500], labels[:1500])).mean())
    correct = nnx.merge(graph, params)(images[1500:]).argmax(-1) == labels[1500:]
    print(f"train loss {loss:.4f}, test accuracy {correct.mean():.1%}")
    return loss


if __name__ == "__main__":
    main()
