"""One small problem whose faults are all data: one compiled step meets them all.

Example i has the loss

    constant + linear'p + ½ bend'p² + ⅙ cubic'p³ + ¼ quartic'p⁴ + trap(p₀ - at)

with the vectors of that example. The trap is √|x| (``kink`` 1), whose gradient is not
finite at x = 0, or √|x|³ (``kink`` 3), whose gradient is and whose Hessian is not; both
are zero there, so the loss itself shows nothing.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meka

COUNT, SIZE = 8, 3
VECTORS = ("linear", "bend", "cubic", "quartic")
TRANSPORTS = ("hessian_at_current", "hessian_at_previous", "difference")
PROBES = ("current", "lagged")
RULES = ("probability_of_improvement", "expected_improvement", "quadratic")

Batch = dict[str, np.ndarray]


def losses(params, batch):
    p = params["p"]
    terms = (p, p**2 / 2, p**3 / 6, p**4 / 4)
    total = batch["constant"]
    for name, term in zip(VECTORS, terms, strict=True):
        coefficients = batch[name].astype(p.dtype)
        total = total + (coefficients @ term).astype(total.dtype)
    for kink in (1, 3):
        # Away from the trap the argument is a constant, with no derivative at all.
        x = jnp.where(batch["kink"] == kink, p[0] - batch["at"].astype(p.dtype), 1)
        total = total + jnp.sqrt(jnp.abs(x)).astype(total.dtype) ** kink - 1
    return total + (batch["kink"] > 0)


def start(*values: float, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {"p": jnp.array(values or (0.7, -1.0, 0.4), dtype)}


def batch(rng: np.random.Generator | None = None, **fields: Any) -> Batch:
    """Examples with these fields, broadcast; with rng, noise of 0.3 on the slopes."""
    made: Batch = {name: np.zeros((COUNT, SIZE), np.float32) for name in VECTORS}
    made |= {name: np.zeros(COUNT, np.float32) for name in ("constant", "at")}
    made["kink"] = np.zeros(COUNT, np.int32)
    for name, value in fields.items():
        made[name] = made[name] + np.asarray(value, made[name].dtype)
    if rng is not None:
        made["linear"] += 0.3 * rng.normal(size=(COUNT, SIZE)).astype(np.float32)
    return made


def changed(batch: Batch, row: int, **fields: Any) -> Batch:
    """The same with other values in one example."""
    batch = {name: values.copy() for name, values in batch.items()}
    for name, value in fields.items():
        batch[name][row] = value
    return batch


@cache
def compiled(
    transport: str = "hessian_at_current",
    probe: str = "current",
    rule: str = "probability_of_improvement",
    family: str = "meka",
):
    """An optimizer, and its step."""
    optimizer = getattr(meka, family)(getattr(meka, rule))
    step = meka.make_step(
        losses,
        optimizer,
        transport=getattr(meka, transport),
        probe=getattr(meka, probe),
    )
    return optimizer, jax.jit(step)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def without_verdict(state: Any) -> Any:
    """The state, but for the three fields that report a rejected step."""
    info = meka.find_state(state).info
    zero = jnp.zeros((), jnp.int32)
    blank = info._replace(suspect=zero, accepted=zero, rejected=zero)
    return jax.tree.map(
        lambda x: x._replace(info=blank) if isinstance(x, meka.State) else x,
        state,
        is_leaf=lambda x: isinstance(x, meka.State),
    )


def all_finite(tree: Any) -> bool:
    return all(
        np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree)
    )
