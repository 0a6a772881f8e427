"""An optax chain: meka's step, clipped, with decoupled weight decay."""

from importlib.resources import files

import jax
import numpy as np
import optax

import meka


def logits(params: list[jax.Array], images: jax.Array) -> jax.Array:
    first, second = params
    return jax.nn.relu(images @ first) @ second


def losses(params: list[jax.Array], batch: tuple) -> jax.Array:
    scores = logits(params, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1])


def main() -> float:
    digits = np.load(str(files("meka.lab") / "digits.npz"))
    images = digits["images"].astype(np.float32) / 16
    labels = digits["labels"].astype(np.int32)
    first, second = jax.random.split(jax.random.key(0))
    params = [
        jax.random.normal(first, (64, 100)) / 8,
        jax.random.normal(second, (100, 10)) / 10,
    ]

    optimizer = optax.chain(
        meka.scale_by_meka(direction=meka.adam_style()),  # first: it sees the batch
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(1e-4),
        optax.scale(-1.0),
    )
    step = jax.jit(meka.make_step(losses, optimizer))
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for t in range(301):
        rows = rng.integers(1500, size=128)
        params, state, info = step(params, state, (images[rows], labels[rows]))
        if t % 100 == 0:
            print(
                f"step {t:3}  loss {info.observed:.4f}  step size {info.step_size:.4f}"
                f"  last move {info.displacement_norm:.4f}"
            )
    loss = float(losses(params, (images[:1500], labels[:1500])).mean())
    correct = logits(params, images[1500:]).argmax(-1) == labels[1500:]
    print(f"train loss {loss:.4f}, test accuracy {correct.mean():.1%}")
    return loss


if __name__ == "__main__":
    main()
