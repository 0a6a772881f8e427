"""A user's workload file: fitting a line, and ways in which that goes wrong.

Tests copy it (`place`) where a user would have written it, or import what is in it.
"""

import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np

from meka.lab.data import Data
from meka.lab.workloads import Workload

SLOPES = (1.0, -2.0)

rng = np.random.default_rng(5)
inputs = rng.normal(size=(64, 2)).astype(np.float32)
noise = 0.3 * rng.normal(size=64)
targets = (inputs @ np.array(SLOPES) + noise).astype(np.float32)
data = Data((inputs, targets), (inputs[:20], targets[:20]))


def losses(params, batch):
    return 0.5 * (batch[0] @ params - batch[1]) ** 2


def many(params, batch):
    """As many lines as params has columns: a checkpoint that takes time to write."""
    return jnp.mean(jax.vmap(losses, (1, None))(params, batch), axis=0)


def broken(params, batch):
    """Not finite once training is under way."""
    return losses(params, batch) + jnp.where(params[0] > 0.1, jnp.nan, 0.0)


def hold(_):
    if pathlib.Path("hold").exists():
        pathlib.Path("held").touch()
        time.sleep(300)


def held(params, batch):
    """Wait inside the compiled step, once there is a file "hold", and say so."""
    jax.debug.callback(hold, params)
    return losses(params, batch)


def zeros(key):
    return jnp.zeros(2)


def anywhere(key):
    return jax.random.normal(key, (2,))


def manywhere(key):
    return jax.random.normal(key, (2, 20000))


def draw(key, n):
    inputs = jax.random.normal(key, (n, 2))
    return inputs, inputs @ jnp.array(SLOPES)


def shake(key, batch):
    """Fresh noise, so that what is measured depends on the random keys."""
    shift = jax.random.normal(key, batch[0].shape, batch[0].dtype)
    return batch[0] + 0.1 * shift, batch[1]


workload = Workload("lines", zeros, losses, 8, 12, data=data)
shaken = Workload("shaken lines", manywhere, many, 8, 100, data=data, augment=shake)
slow = Workload("slow lines", anywhere, held, 8, 100, data=data)
endless = Workload("endless lines", zeros, losses, 8, 12, draw=draw)
stops = Workload("broken lines", zeros, broken, 8, 60, data=data)


def place(folder: pathlib.Path) -> pathlib.Path:
    """Put this file into a folder, as lines.py."""
    shutil.copy(__file__, folder / "lines.py")
    return folder
