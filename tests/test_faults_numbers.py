"""Extreme numbers and landscapes: finite or rejected, and never off to infinity."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import traps
from test_reference import chosen

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


def survive_extremes(family: str, dtype: str, count: int, probe: str) -> int:
    cases = extremes(np.random.default_rng(4), count)
    start = jnp.asarray([0.7, -1.0, 0.4], dtype)
    params = {"p": jnp.broadcast_to(start, (len(cases), traps.SIZE))}
    run = steps(family, "probability_of_improvement", probe)
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
    tried(steps=survive_extremes("adameka", "float16", 31, "current"))


@pytest.mark.slow
@pytest.mark.fault(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("probe", traps.PROBES)
@pytest.mark.parametrize("family", ["meka", "adameka"])
def test_any_of_many_scales_is_finite_or_rejected(family, probe, dtype, tried):
    tried(steps=survive_extremes(family, dtype, 1001, probe))


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
START = (0.1, 0.2, -0.1)
SLACK = 0.25  # of the one that starts at its minimum, where noise can only raise it
BOTTOM = -1e9  # of a slope without a floor: from here on there is nothing to show


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


@cache
def walks(probe: str, rules: tuple[str, ...]):
    """Every landscape and seed with one transport, rule and direction of many."""
    transports = [getattr(meka, name) for name in traps.TRANSPORTS]
    directions = [meka.steepest, meka.adam_style()]

    def run(transport, rule, direction, batches):
        optimizer = optax.chain(
            meka.scale_by_meka(
                chosen(rule, [getattr(meka, name) for name in rules]),
                chosen(direction, directions),
            ),
            optax.scale(-1.0),
        )
        step = meka.make_step(
            traps.losses,
            optimizer,
            transport=chosen(transport, transports),
            probe=getattr(meka, probe),
        )

        def body(carry, batch):
            params, state, info = step(*carry, batch)
            return (params, state), (params["p"], info.step_size, info.accepted)

        params = {"p": jnp.asarray(START, jnp.float32)}
        return jax.lax.scan(body, (params, optimizer.init(params)), batches)[1]

    return jax.jit(jax.vmap(run, in_axes=(None, None, None, 0)))


def descend(way, probe: str, noise: str, seeds: int, rules: tuple[str, ...]):
    """Exact losses, start included, steps, and whether they were taken.

    By landscape, seed and step.
    """
    cases = [
        walk(np.random.default_rng(seed), fields, noise)
        for fields in LANDSCAPES.values()
        for seed in range(seeds)
    ]
    found = walks(probe, rules)(*way, stacked(cases))
    shape = (len(LANDSCAPES), seeds, LENGTH)
    p, sizes, accepted = (np.asarray(x).reshape(*shape, *x.shape[2:]) for x in found)
    path = np.concatenate([np.broadcast_to(START, (*shape[:2], 1, 3)), p], axis=2)
    values = [
        np.stack([value(fields, path[k, j]) for j in range(seeds)])
        for k, fields in enumerate(LANDSCAPES.values())
    ]
    return np.stack(values), sizes, accepted


def value(fields: dict, path: np.ndarray) -> np.ndarray:
    """The exact loss, in double precision."""
    path = path.astype(np.float64)
    terms = zip(traps.VECTORS, (1, 2, 3, 4), (1, 2, 6, 4), strict=True)
    total = np.zeros(len(path))
    for name, power, by in terms:
        total += (path**power / by) @ np.broadcast_to(fields.get(name, 0.0), traps.SIZE)
    return total


def survive_landscapes(
    ways: list[tuple[int, int, int]],
    probe: str,
    noise: str,
    seeds: int,
    rules: tuple[str, ...] = traps.RULES[:1],
) -> dict:
    """Steps are finite and positive, none is rejected; the loss ends where it may.

    Without a floor that is true until the loss is a long way down. A `lagged` slope
    is measured on fresh examples and may be negative: then one step is zero, but
    never the next as well, unless the minimum is reached.

    With noise two exceptions are counted. By `hessian_at_previous`, whose gradient is
    off wherever curvature changes, and by the rules that are blind to how uncertain a
    curvature is, the loss may end above its start. And by these rules it may be thrown
    so high that squares overflow: then all later steps are rejected, nothing moves.
    """
    runs = [descend(way, probe, noise, seeds, rules) for way in ways]
    values, sizes, accepted = map(np.concatenate, zip(*runs, strict=True))
    counted, highest, high, stuck = 0, 0.0, 0, 0
    for k, j in np.ndindex(values.shape[:2]):
        way, landscape = divmod(k, len(LANDSCAPES))
        loss, where = values[k, j], (ways[way], list(LANDSCAPES)[landscape], j)
        transport, rule, _ = ways[way]
        down = np.flatnonzero(loss < BOTTOM)
        end = int(down[0]) if len(down) else LENGTH
        taken = accepted[k, j, :end]
        assert np.isfinite(loss[: end + 1]).all(), where
        assert np.isfinite(sizes[k, j, :end]).all(), where
        assert np.all(loss[1 : end + 1][~taken] == loss[:end][~taken]), where
        zero = taken & (sizes[k, j, :end] <= 0)
        if probe == "current":
            assert not zero.any(), where
        else:
            again = np.flatnonzero(zero[1:] & zero[:-1]) + 1
            assert np.all(loss[again] <= loss.min() + 1e-6), where
        above = loss[end] > loss[0] + SLACK
        blind = noise != "none" and rule > 0
        assert blind or taken.all(), where
        assert blind or (noise != "none" and transport == 1) or not above, where
        stuck += not taken.all()
        high += above
        counted += end
        highest = max(highest, float(loss[: end + 1].max()))
    return {
        "steps": counted,
        "walks": values.shape[0] * seeds,
        "walks_that_end_high": int(high),
        "walks_with_rejected_steps": int(stuck),
        f"highest_loss_with_noise_in_{noise}": highest,
    }


def ways(rule: int = 0) -> list:
    """Both directions with each transport, by number."""
    return [(i, rule, j) for i in range(len(traps.TRANSPORTS)) for j in range(2)]


@pytest.mark.fault(6)
@pytest.mark.parametrize("noise", ["none", "slopes", "everything"])
@pytest.mark.parametrize("probe", traps.PROBES)
def test_curvature_that_is_not_positive(probe, noise, tried):
    """Every transport and direction, by the rule that is the default."""
    tried(**survive_landscapes(ways(), probe, noise, 4))


@pytest.mark.slow
@pytest.mark.fault(6)
@pytest.mark.parametrize("noise", ["slopes", "everything"])
@pytest.mark.parametrize("probe", traps.PROBES)
def test_curvature_that_is_not_positive_many_times(probe, noise, tried):
    tried(**survive_landscapes(ways(), probe, noise, 20))


@pytest.mark.slow
@pytest.mark.fault(6)
@pytest.mark.parametrize("noise", ["none", "slopes", "everything"])
@pytest.mark.parametrize("probe", traps.PROBES)
@pytest.mark.parametrize("rule", traps.RULES[1:])
def test_curvature_that_is_not_positive_by_other_rules(rule, probe, noise, tried):
    tried(
        **survive_landscapes(
            ways(traps.RULES.index(rule)), probe, noise, 20, traps.RULES
        )
    )


@pytest.mark.fault(6)
def test_a_curvature_averaged_over_both_signs_is_no_reason_to_leap():
    """-0.18, -0.18 and 0.36 are next to nothing on average; the step was 700 long."""
    batches = walk(np.random.default_rng(1012), LANDSCAPES["double well"], "slopes")
    optimizer, step = traps.compiled()
    params = traps.start(*START)
    state = optimizer.init(params)
    longest = 0.0
    for batch in batches[:10]:
        batch = {name: x.astype(traps.batch()[name].dtype) for name, x in batch.items()}
        new, state, info = step(params, state, batch)
        moved = float(jnp.linalg.norm(new["p"] - params["p"]))
        if info.model.curvature > 0 and longest > 0:
            assert moved <= 10 * longest * 1.00001
        longest, params = max(longest, moved), new
    assert longest < 10


@pytest.mark.fault(6)
def test_where_nothing_moved_the_curvature_is_that_of_the_new_direction():
    """A lagged slope was uphill, so nothing moved, and nothing lagged is seen.

    The new direction is far longer than the first; per squared length the curvature
    is 2 along either.
    """
    optimizer, step = traps.compiled(probe="lagged", rule="quadratic")
    params = traps.start(0.0, 0.0, 0.0)
    state = optimizer.init(params)
    noise = np.repeat([1.0, -1.0], traps.COUNT // 2)[:, None]
    for pull in (-0.01, 0.03, -1.0):
        batch = traps.batch(bend=2.0, linear=noise + np.array([pull, 0.0, 0.0]))
        params, state, info = step(params, state, batch)
        assert (info.step_size == 0) == (pull > 0)
    assert info.direction_norm > 0.1
    assert info.displacement_norm == 0
    curvature = info.model.curvature / info.direction_norm**2
    assert curvature == pytest.approx(2.0, rel=1e-3)
