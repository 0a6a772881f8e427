"""Extreme numbers and landscapes: finite or rejected, and never off to infinity."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traps

import meka


def unchanged(new: Any, old: Any) -> jax.Array:
    """Whether two trees of numbers are the same, in a compiled step."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return jnp.all(jnp.stack([jnp.array_equal(a, b) for a, b in pairs]))


@cache
def steps(family: str, rule: str, probe: str):
    """Many cases at once, each from its own parameters through its own batches.

    Returns parameters, information, whether all of the state is finite, and whether a
    rejected step left everything as it was, for every case and step.
    """
    optimizer = getattr(meka, family)(getattr(meka, rule))
    step = meka.make_step(traps.losses, optimizer, probe=getattr(meka, probe))

    def body(carry, batch):
        params, state = carry
        new, after, info = step(params, state, batch)
        own = meka.find_state(after)
        finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((new, own))]
        kept = unchanged(
            (new, traps.without_verdict(after)), (params, traps.without_verdict(state))
        )
        sound = jnp.where(info.accepted, jnp.all(jnp.stack(finite)), kept)
        widths = own.gradient.variance, own.value.variance
        return (new, after), (new["p"], info, sound, widths)

    def run(params, batches):
        return jax.lax.scan(body, (params, optimizer.init(params)), batches)[1]

    return jax.jit(jax.vmap(run))


def stacked(cases: list[list[traps.Batch]]) -> traps.Batch:
    """Cases down, steps across."""
    return {
        name: np.stack([[batch[name] for batch in case] for case in cases])
        for name in cases[0][0]
    }


# Extremes -----------------------------------------------------------------------------


def extremes(rng: np.random.Generator, count: int) -> list[list[traps.Batch]]:
    """Slopes of 1e-30 to 1e30, curvatures beside, against and without them; losses to
    1e38 of either sign."""
    decades = np.linspace(-30, 30, count)
    scales = [(10.0**d, 10.0**c, 0.0) for d in decades for c in (d, 0, -d)]
    constants = np.linspace(20, 38, count)
    scales += [(1.0, 1.0, sign * 10.0**c) for c in constants for sign in (-1, 1)]
    scales += [(10.0**c, 1.0, 10.0**c) for c in constants]
    cases = []
    for slope, bend, constant in scales:
        case = [traps.batch(rng, constant=constant) for _ in range(5)]
        for batch in case:
            batch["linear"] = np.float32(slope) * (1 + batch["linear"])
            batch["bend"] += np.float32(bend)
        cases.append(case)
    return cases


def survive_extremes(family: str, dtype: str, count: int) -> int:
    cases = extremes(np.random.default_rng(4), count)
    start = jnp.asarray([0.7, -1.0, 0.4], dtype)
    params = {"p": jnp.broadcast_to(start, (len(cases), traps.SIZE))}
    run = steps(family, "probability_of_improvement", "current")
    p, info, sound, widths = run(params, stacked(cases))
    assert np.isfinite(np.asarray(p, np.float64)).all()
    assert np.all(sound)
    assert np.isfinite(info.step_size).all()
    assert np.all(info.step_size >= 0)
    for width in widths:
        assert np.all(np.asarray(width) >= 0)  # infinite before anything is known
    # Most of it is not out of range at all: rejecting everything would be no feat.
    accepted = int(np.sum(info.accepted))
    assert accepted > 0.3 * info.accepted.size
    assert accepted < info.accepted.size
    return info.accepted.size


@pytest.mark.fault(4)
def test_any_scale_is_finite_or_rejected(tried):
    tried(steps=survive_extremes("adameka", "float16", 31))


@pytest.mark.slow
@pytest.mark.fault(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["meka", "adameka"])
def test_any_of_many_scales_is_finite_or_rejected(family, dtype, tried):
    tried(steps=survive_extremes(family, dtype, 1001))


# Curvature that is not positive -------------------------------------------------------

LANDSCAPES = {
    "saddle": {"bend": [1.0, -1.0, -0.5], "quartic": 0.01},
    "saddle without a floor": {"bend": [1.0, -1.0, 0.5]},
    "negative everywhere": {"bend": -1.0},
    "no curvature at all": {"linear": [1.0, -2.0, 0.5]},
    "cubic well": {"linear": -1.0, "cubic": 2.0, "quartic": 0.1},
    "upside-down cubic": {"linear": 1.0, "cubic": -2.0, "quartic": 0.1},
    "double well": {"bend": -1.0, "quartic": 1.0},
    "flat at the start": {"quartic": 1.0},
}
LENGTH = 150
SLACK = 0.25  # of the one that starts at its minimum, where noise can only raise it
BOTTOM = -1e9  # of a slope without a floor: from here on there is nothing to show
# Where curvature rises steeply, `lagged` learns of it too late (docs/sharp_edges.md).
STEEP = {
    "saddle",
    "cubic well",
    "upside-down cubic",
    "double well",
    "flat at the start",
}


def walk(rng: np.random.Generator, fields: dict, noise: str) -> list[traps.Batch]:
    """Batches of one landscape, as its examples see it."""
    batches = [traps.batch(None, **fields) for _ in range(LENGTH)]
    for batch in batches:
        if noise != "none":
            batch["linear"] += 0.3 * rng.normal(size=(traps.COUNT, traps.SIZE))
        if noise == "everything":
            for name in ("bend", "cubic", "quartic"):
                batch[name] *= 1 + 0.5 * rng.normal(size=(traps.COUNT, 1))
    return batches


def descend(rule: str, probe: str, noise: str, seeds: int) -> tuple[np.ndarray, ...]:
    """Exact losses, start included, and steps, (landscapes, seeds, steps)."""
    cases = [
        walk(np.random.default_rng(seed), fields, noise)
        for fields in LANDSCAPES.values()
        for seed in range(seeds)
    ]
    start = jnp.asarray([0.1, 0.2, -0.1], jnp.float32)
    params = {"p": jnp.broadcast_to(start, (len(cases), traps.SIZE))}
    p, info, sound, _ = steps("meka", rule, probe)(params, stacked(cases))
    assert np.all(sound)
    shape = (len(LANDSCAPES), seeds, LENGTH)
    path = np.concatenate(
        [np.broadcast_to(start, (len(cases), 1, traps.SIZE)), np.asarray(p)], axis=1
    ).reshape(*shape[:2], LENGTH + 1, traps.SIZE)
    values = [
        np.stack([value(fields, path[k, j]) for j in range(seeds)])
        for k, fields in enumerate(LANDSCAPES.values())
    ]
    flat = (np.asarray(x).reshape(shape) for x in (info.step_size, info.accepted))
    return np.stack(values), *flat


def value(fields: dict, path: np.ndarray) -> np.ndarray:
    """The exact loss, in double precision."""
    path = path.astype(np.float64)
    terms = zip(traps.VECTORS, (1, 2, 3, 4), (1, 2, 6, 4), strict=True)
    total = np.zeros(len(path))
    for name, power, by in terms:
        total += (path**power / by) @ np.broadcast_to(fields.get(name, 0.0), traps.SIZE)
    return total


def survive_landscapes(rule: str, probe: str, noise: str, seeds: int) -> dict:
    """Steps are finite and positive, none is rejected; the loss ends where it may.

    Without a floor that is true until the loss is a long way down. Where slopes are
    noisy and curvatures exact, a curvature that crosses zero is believed and the loss
    may rise a long way too; but the parameters stay where it can come back.
    """
    values, sizes, accepted = descend(rule, probe, noise, seeds)
    counted, highest = 0, 0.0
    for k, name in enumerate(LANDSCAPES):
        if probe == "lagged" and name in STEEP:
            continue
        for j in range(seeds):
            loss, where = values[k, j], (name, j)
            down = np.flatnonzero(loss < BOTTOM)
            end = int(down[0]) if len(down) else LENGTH
            assert accepted[k, j, :end].all(), where
            assert np.isfinite(loss[: end + 1]).all(), where
            assert np.isfinite(sizes[k, j, :end]).all(), where
            # A lagged slope is measured on fresh examples, and may be negative.
            if probe == "current":
                assert (sizes[k, j, :end] > 0).all(), where
            if noise != "slopes":
                assert loss[end] < loss[0] + SLACK, where
            counted += end
            highest = max(highest, float(loss[: end + 1].max()))
    assert counted > 0
    return {"steps": counted, f"highest_loss_with_noise_in_{noise}": highest}


@pytest.mark.fault(6)
@pytest.mark.parametrize("noise", ["none", "slopes", "everything"])
def test_curvature_that_is_not_positive(noise, tried):
    tried(**survive_landscapes("probability_of_improvement", "current", noise, 5))


@pytest.mark.slow
@pytest.mark.fault(6)
@pytest.mark.parametrize("noise", ["none", "everything"])
@pytest.mark.parametrize("probe", traps.PROBES)
@pytest.mark.parametrize("rule", traps.RULES)
def test_curvature_that_is_not_positive_by_every_rule(rule, probe, noise, tried):
    tried(**survive_landscapes(rule, probe, noise, 20))
