"""SGD with the paper's adaptive steps: Meka with its filters switched off."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import meka
from meka.lab.methods import Method
from meka.lab.workloads import Workload

_FORGET = 1e12  # a predicted variance that no prediction survives


def unfiltered(workload: Workload) -> Method:
    """Meka that forgets gradient and value before every minibatch: its gain is one.

    What it steps along is the minibatch gradient; noise, curvature and the rule for
    the step size are as ever.
    """
    optimizer = meka.meka()

    def step(
        params: Any, state: Any, batch: Any, number: Any = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        del number
        before = meka.find_state(state).previous_params
        seen = meka.observe(workload.losses, params, before, batch)
        nothing = jnp.asarray(_FORGET, jnp.float32)
        seen = seen._replace(change=seen.change._replace(variance=nothing))
        along = meka.curve(workload.losses, params, batch)
        updates, state = optimizer.update(
            seen.gradient.mean,
            state,
            params,
            observation=seen,
            probe=lambda scene: meka.current(scene, along),
        )
        info = meka.find_state(state).info
        logs = {"loss": info.observed, "step_size": info.step_size, "gain": info.gain}
        return params + updates, state, logs

    return Method(optimizer.init, step, lambda params, state: params)
