"""Haiku, in epochs whose ragged last batch is padded and masked."""

from importlib.resources import files

import haiku as hk
import jax
import numpy as np
import optax

import meka

BATCH = 128


def main() -> float:
    digits = np.load(str(files("meka.lab") / "digits.npz"))
    images = digits["images"].astype(np.float32) / 16
    labels = digits["labels"].astype(np.int32)

    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([100, 10])(x)))
    params = model.init(jax.random.key(0), images[:1])

    def losses(params: hk.Params, batch: tuple) -> jax.Array:
        logits = model.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])

    optimizer = meka.adameka()
    step = jax.jit(meka.make_step(losses, optimizer))
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for epoch in range(20):
        order = rng.permutation(1500)
        for start in range(0, 1500, BATCH):
            rows = order[start : start + BATCH]
            mask = np.arange(BATCH) < len(rows)
            rows = np.resize(rows, BATCH)  # any filling will do: the mask hides it
            batch = images[rows], labels[rows]
            params, state, info = step(params, state, batch, mask)
        if epoch % 5 == 4:
            print(
                f"epoch {epoch + 1:2}  loss {info.value:.4f} "
                f"± {info.value_variance**0.5:.4f}  step size {info.step_size:.4f}"
            )
    loss = float(losses(params, (images[:1500], labels[:1500])).mean())
    correct = model.apply(params, images[1500:]).argmax(-1) == labels[1500:]
    print(f"train loss {loss:.4f}, test accuracy {correct.mean():.1%}")
    return loss


if __name__ == "__main__":
    main()
