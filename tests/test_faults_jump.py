"""The data changes under a run: it notices, recovers and goes on."""

from functools import cache

import jax
import numpy as np
import pytest

import meka
from meka.lab import workloads

BATCH, JUMP, AFTER = 64, 300, 300


@cache
def trained(family: str) -> meka.Info:
    """Digits; after `JUMP` steps every label means another digit."""
    workload = workloads.load("digits")
    assert workload.data is not None
    inputs, labels = workload.data.train
    rng = np.random.default_rng(7)
    rows = rng.integers(len(labels), size=(JUMP + AFTER, BATCH))
    batches = inputs[rows], labels[rows]
    batches[1][JUMP:] = np.roll(np.arange(10), 1)[batches[1][JUMP:]]
    optimizer = getattr(meka, family)()
    step = meka.make_step(workload.losses, optimizer)

    def body(carry, batch):
        params, state, info = step(*carry, batch)
        return (params, state), info

    params = workload.init(jax.random.key(0))
    run = jax.jit(lambda carry: jax.lax.scan(body, carry, batches)[1])
    return jax.tree.map(np.asarray, run((params, optimizer.init(params))))


@pytest.mark.fault(7)
@pytest.mark.parametrize(
    "family", ["adameka", pytest.param("meka", marks=pytest.mark.slow)]
)
def test_labels_permuted_midway(family, tried):
    info = trained(family)
    loss, calm = info.observed, slice(JUMP - 100, JUMP)
    assert info.accepted.all()
    assert loss[JUMP] > 5 * loss[calm].mean()
    # λ fires at once, a thousand times what it was ...
    assert info.model_error[JUMP] > 1000 * info.model_error[calm].mean()
    # ... so the filtered loss jumps along instead of trusting its prediction ...
    believed = np.abs(info.value / loss - 1)[JUMP:]
    caught_up = int(np.argmax(believed < 0.1))
    assert caught_up <= 1
    # ... and λ is quiet again soon.
    noisy = info.model_error[JUMP:] > 10 * info.model_error[calm].max()
    quiet = int(np.flatnonzero(noisy).max()) + 1
    # The gradient's gain, which a jump of the noise lowers, is back where it was.
    usual = np.median(info.gain[calm])
    away = np.abs(np.log(info.gain[JUMP:] / usual)) > np.log(2)
    recovered = int(np.flatnonzero(away).max(initial=-1)) + 1
    # And training goes on: what was lost is learned again.
    learned = int(np.argmax(loss[JUMP:] < 0.5 * loss[JUMP]))
    assert loss[-20:].mean() < 0.1 * loss[JUMP]
    tried(
        jumps=1,
        steps_until_the_loss_is_believed=float(caught_up),
        steps_until_λ_is_quiet=float(quiet),
        steps_until_the_gain_is_back=float(recovered),
        steps_until_half_is_relearned=float(learned),
    )
