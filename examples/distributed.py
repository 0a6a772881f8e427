"""Several processes, one training run: each feeds its share of every batch.

Start it once per process, here two on one machine:

    python examples/distributed.py --processes 2 --process 0 --out run &
    python examples/distributed.py --processes 2 --process 1 --out run

Process 0 saves a checkpoint now and then. If a process dies the others end with an
error; started again, all go on from the last checkpoint.
"""

import argparse
from importlib.resources import files
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import meka
from meka.lab import checkpoint

BATCH = 128


def losses(params, batch):
    images, labels = batch
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def start() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (64, 64)) / 8,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(keys[1], (64, 10)) / 8,
        "b2": jnp.zeros(10),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--coordinator", default="127.0.0.1:9911")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps to a checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()

    if given.processes > 1:
        # Who does not answer for ten seconds is dead, and the others end.
        jax.distributed.initialize(
            given.coordinator,
            given.processes,
            given.process,
            initialization_timeout=60,
            heartbeat_timeout_seconds=10,
        )
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((jax.device_count(),), ("examples",), axis_types=(kind,))
    spread, copied = (NamedSharding(mesh, jax.P(*a)) for a in (("examples",), ()))

    digits = np.load(str(files("meka.lab") / "digits.npz"))
    images = digits["images"].reshape(-1, 64).astype(np.float32) / 16
    labels = digits["labels"].astype(np.int32)

    def batch_of(number: int):
        """The whole batch is a function of the step; this process holds its share."""
        rows = np.random.default_rng([0, number]).integers(1500, size=BATCH)
        rows = np.split(rows, given.processes)[given.process]
        return tuple(
            jax.make_array_from_process_local_data(spread, x[rows])
            for x in (images, labels)
        )

    optimizer = meka.adameka()
    step = jax.jit(meka.make_step(losses, optimizer), donate_argnums=(0, 1))
    params = start()
    carry = params, optimizer.init(params)
    found = checkpoint.latest(given.out, carry)
    done = 0
    if found is not None:
        carry, done = found.tree, found.step
        print(f"going on after step {done}", flush=True)
    carry = jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(copied, np.asarray(x)), carry
    )
    while done < given.steps:
        params, state, info = step(*carry, batch_of(done))
        carry, done = (params, state), done + 1
        if done % given.every == 0 or done == given.steps:
            loss = float(info.value)  # waits for everybody
            if given.process == 0:
                checkpoint.save(given.out, done, jax.tree.map(np.asarray, carry))
            print(f"step {done}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
