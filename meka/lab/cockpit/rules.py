"""Where each step-size rule would have put a step, long after it was taken."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from meka.lab.cockpit.follow import Run

PARTS = (
    "slope",
    "curvature",
    "value_variance",
    "slope_variance",
    "curvature_variance",
    "third_order",
)
RULES = ("probability_of_improvement", "quadratic", "expected_improvement")
_BLOCK = 512  # one shape, so that one compilation serves every run


def recorded(run: Run) -> bool:
    """Whether a run recorded what a rule decides from."""
    return all(f"model.{name}" in run.steps for name in PARTS)


def models(run: Run, rows: np.ndarray) -> np.ndarray:
    """The improvement models of some rows, (rows, seeds, 6)."""
    columns = [run.steps.pick(f"model.{name}", rows) for name in PARTS]
    return np.stack(columns, -1)


def steps(models: np.ndarray) -> np.ndarray:
    """The step of each rule for each model: (..., 6) to (..., 3)."""
    flat = models.reshape(-1, len(PARTS)).astype(np.float32)
    found = [np.zeros((0, len(RULES)))]
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        padded = np.zeros((_BLOCK, len(PARTS)), np.float32)
        padded[: len(block)] = block
        found.append(np.asarray(_compiled()(padded))[: len(block)])
    return np.concatenate(found).reshape(*models.shape[:-1], len(RULES))


@functools.cache
def _compiled() -> Callable:
    import jax
    import jax.numpy as jnp

    from meka import improvement

    def one(parts: jax.Array) -> jax.Array:
        model = improvement.ImprovementModel(*parts)
        return jnp.stack([getattr(improvement, rule)(model) for rule in RULES])

    # Compiled in haste: it sees a few hundred models at a time, and a page waits.
    return jax.jit(
        jax.vmap(one), compiler_options={"xla_backend_optimization_level": 0}
    )
