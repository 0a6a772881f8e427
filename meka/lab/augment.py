"""Random crops and flips inside the compiled step.

A pure function of its key: the run derives the key from seed and step number, so
there is no generator to checkpoint and a resumed run sees the same images.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def crop_and_flip(key: jax.Array, images: jax.Array, pad: int = 4) -> jax.Array:
    """Shift each image by up to `pad` pixels and mirror it with probability 1/2.

    images: (n, height, width, channels). Equal to padding each side with zeros (the
    mean of normalised images) and cropping at random, independently per example, as
    in He et al. (2016).
    """
    n, height, width, _ = images.shape
    corner_key, flip_key = jax.random.split(key)
    corner = jax.random.randint(corner_key, (n, 2), 0, 2 * pad + 1)
    flip = jax.random.bernoulli(flip_key, shape=(n, 1))
    rows = corner[:, :1] + jnp.arange(height)[None]
    columns = jnp.arange(width)[None]
    columns = corner[:, 1:] + jnp.where(flip, width - 1 - columns, columns)
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    # Crop and flip are one gather: each is a choice of rows and columns.
    examples = jnp.arange(n)[:, None, None]
    return padded[examples, rows[:, :, None], columns[:, None, :]]
