"""A dictionary of arrays, a loss per example, and nothing to tune."""

from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meka


def logits(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def losses(params: dict[str, jax.Array], batch: tuple) -> jax.Array:
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, images), labels
    )


def main() -> float:
    digits = np.load(str(files("meka.lab") / "digits.npz"))
    images = digits["images"].astype(np.float32) / 16
    labels = digits["labels"].astype(np.int32)

    rng = np.random.default_rng(0)
    params = {
        "w1": jnp.asarray(rng.normal(0, 0.15, (64, 100)), jnp.float32),
        "b1": jnp.zeros(100),
        "w2": jnp.asarray(rng.normal(0, 0.1, (100, 10)), jnp.float32),
        "b2": jnp.zeros(10),
    }
    run = meka.Run(losses, meka.adameka(), params)
    for t in range(301):
        rows = rng.integers(1500, size=128)
        info = run.step((images[rows], labels[rows]))
        if t % 100 == 0:
            print(
                f"step {t:3}  loss {info.observed:.4f}  step size {info.step_size:.4f}"
                f"  gain {info.gain:.3f}  noise scale {info.noise_scale:.0f}"
            )
    params = run.params
    loss = float(losses(params, (images[:1500], labels[:1500])).mean())
    correct = logits(params, images[1500:]).argmax(-1) == labels[1500:]
    print(f"train loss {loss:.4f}, test accuracy {correct.mean():.1%}")
    return loss


if __name__ == "__main__":
    main()
