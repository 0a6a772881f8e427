"""A step is accepted, or rejected and counted, or raises; it is never silently wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traps
from traps import PROBES, RULES, TRANSPORTS, all_finite, bits, compiled, without_verdict

import meka
from meka.lab import culprit

WAYS = list(itertools.product(TRANSPORTS, PROBES))

# What one example can be, and where that is looked at: by these transports, probes.
FAULTS = {
    "loss is nan": ({"constant": np.nan}, TRANSPORTS, PROBES),
    "loss is infinite": ({"constant": -np.inf}, TRANSPORTS, PROBES),
    "gradient": ({"kink": 1, "at": "now"}, TRANSPORTS, PROBES),
    "product": ({"kink": 3, "at": "now"}, ("hessian_at_current",), ("current",)),
    "earlier gradient": (
        {"kink": 1, "at": "before"},
        ("hessian_at_previous", "difference"),
        (),
    ),
    "earlier product": ({"kink": 3, "at": "before"}, ("hessian_at_previous",), ()),
}


def injected(way, steps: int, seed: int) -> dict[str, int]:
    """Steps with faults at random; the faulty ones leave every bit as it was.

    Returns how many faults of which kind were rejected.
    """
    optimizer, step = compiled(*way)
    rng = np.random.default_rng(seed)
    params, state = traps.start(), optimizer.init(traps.start())
    visible = [name for name, (_, t, p) in FAULTS.items() if way[0] in t or way[1] in p]
    counts = dict.fromkeys(visible, 0)
    for number in range(steps):
        good = traps.batch(rng, bend=[1.0, 2.0, 0.5])
        name = visible[rng.integers(len(visible))]
        fields, _, _ = FAULTS[name]
        now = float(params["p"][0])
        before = float(meka.find_state(state).previous_params["p"][0])
        # Where nothing has moved yet, before is now, and that is another fault.
        if rng.random() < 0.5 and now != before:
            row = int(rng.integers(traps.COUNT))
            at = {"now": now, "before": before}.get(str(fields.get("at")), 0.0)
            bad = traps.changed(good, row, **(fields | {"at": at}))
            same, kept, info = step(params, state, bad)
            assert not info.accepted, (name, number)
            assert info.rejected == meka.find_state(state).info.rejected + 1
            assert bits(same) == bits(params), (name, number)
            assert bits(without_verdict(kept)) == bits(without_verdict(state)), name
            if "loss" in name:
                assert info.suspect == row
            else:
                assert info.suspect == -1
                found = culprit.find(
                    lambda b, p=params, s=state: step(p, s, b)[2].accepted, bad
                )
                assert found == row, (name, number)
            state = kept
            counts[name] += 1
        params, state, info = step(params, state, good)
        assert info.accepted
        assert all_finite((params, info))
        assert info.step_size >= 0
    assert meka.find_state(state).info.rejected == sum(counts.values())
    return counts


@pytest.mark.fault(1)
@pytest.mark.makes_nan
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_example_changes_no_bit_and_is_named(way, tried):
    counts = injected(way, 40, 0)
    assert min(counts.values()) > 0, counts
    tried(bad_examples=sum(counts.values()))


@pytest.mark.slow
@pytest.mark.fault(1)
@pytest.mark.makes_nan
@pytest.mark.parametrize("way", WAYS)
def test_many_bad_examples(way, tried):
    tried(bad_examples=sum(injected(way, 2000, 1).values()))


@pytest.mark.fault(1)
@pytest.mark.makes_nan
def test_where_no_example_is_to_blame_none_is_named():
    optimizer, step = compiled()
    params = traps.start()
    # Each loss is finite, and their sum is not.
    batch = traps.batch(constant=3e38)
    state = optimizer.init(params)
    _, _, info = step(params, state, batch)
    assert not info.accepted
    assert culprit.find(lambda b: step(params, state, b)[2].accepted, batch) in (-1, 0)
    # Nor is anyone where the second half is bad in company alone.
    halves = {"left": [0, 1, 2, 3], "right": [4, 5, 6, 7]}
    seen = []

    def only_all_together(batch):
        rows = sorted(set(batch.tolist()))
        seen.append(rows)
        return rows in halves.values()

    assert culprit.find(only_all_together, jnp.arange(8)) == -1
    assert seen == list(halves.values())
    for row in range(7):
        assert culprit.find(lambda b, row=row: row not in b, jnp.arange(7)) == row


# Degenerate batches -------------------------------------------------------------------


@pytest.mark.fault(3)
@pytest.mark.parametrize(
    ("rows", "message"),
    [(0, "the batch is empty"), (1, "a batch of one example has no second group")],
)
def test_too_few_examples_raise(rows, message, tried):
    optimizer, _ = compiled()
    batch = {name: values[:rows] for name, values in traps.batch().items()}
    step = meka.make_step(traps.losses, optimizer)
    with pytest.raises(ValueError, match=message):
        step(traps.start(), optimizer.init(traps.start()), batch)
    tried(degenerate_batches=1)


DEGENERATE = {
    "all examples identical": {"linear": [1.0, -1.0, 0.5], "bend": 1.0},
    "identical, no curvature": {"linear": [1.0, -1.0, 0.5]},
    "zero gradients": {"constant": 3.0},
    "zero everything": {},
    "zero gradients, curved": {"bend": 2.0, "linear": [-1.4, 2.0, -0.8]},
    "one slope among zeros": {"linear": np.eye(traps.COUNT, traps.SIZE)},
}


@pytest.mark.fault(3)
@pytest.mark.parametrize("way", WAYS)
def test_degenerate_batches_are_finite(way, tried):
    """P = Q = s = 0 in most of these from the first step on; δ = 0 in the flat ones."""
    optimizer, step = compiled(*way)
    for name, fields in DEGENERATE.items():
        params, state = traps.start(), optimizer.init(traps.start())
        first = np.mean(traps.losses(params, traps.batch(**fields)))
        for number in range(6):
            params, state, info = step(params, state, traps.batch(**fields))
            assert info.accepted, (name, number)
            assert all_finite((params, info)), (name, number)
            assert all_finite(meka.find_state(state)), (name, number)
            assert info.observed <= first + 1e-5, (name, number)
        if name.startswith("zero"):
            assert bits(params) == bits(traps.start()), name
        elif not name.startswith("one"):
            own = meka.find_state(state)
            assert own.value.variance == own.gradient.variance == 0, name
        tried(degenerate_batches=1)


@pytest.mark.fault(3)
def test_a_ragged_last_batch_is_its_real_examples(rng, tried):
    optimizer, _ = compiled()
    step = jax.jit(meka.make_step(traps.losses, optimizer))
    state = optimizer.init(traps.start())
    whole = traps.batch(rng, bend=1.0)
    for real in range(traps.COUNT + 1):
        mask = np.arange(traps.COUNT) < real
        filled = {name: values.copy() for name, values in whole.items()}
        for name in ("constant", "linear"):
            filled[name][real:] = np.nan
        params, _, info = step(traps.start(), state, filled, mask)
        assert bool(info.accepted) == (real >= 2), real
        assert all_finite((params, info))
        if real >= 2:
            mean = np.mean(traps.losses(traps.start(), whole)[:real])
            np.testing.assert_allclose(info.observed, mean, rtol=1e-5)
        tried(degenerate_batches=1)


# Extremes -----------------------------------------------------------------------------


@pytest.mark.fault(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["meka", "adameka"])
def test_any_scale_is_finite_or_rejected(family, dtype, tried):
    optimizer, step = compiled(family=family)
    rng = np.random.default_rng(4)
    accepted = 0
    decades = np.linspace(-30, 30, 41)
    cases = [(10.0**d, 10.0**c, 0.0) for d in decades for c in (d, 0, -d)]
    cases += [(1.0, 1.0, sign * 10.0**c) for c in range(20, 39) for sign in (-1, 1)]
    for slope, bend, constant in cases:
        params = traps.start(dtype=dtype)
        state = optimizer.init(params)
        for _ in range(4):
            batch = traps.batch(rng, constant=constant)
            batch["linear"] = np.float32(slope) * (1 + batch["linear"])
            batch["bend"] += np.float32(bend)
            new, new_state, info = step(params, state, batch)
            assert np.isfinite(info.step_size)
            assert info.step_size >= 0
            if info.accepted:
                assert all_finite((new, info))
                own = meka.find_state(new_state)
                assert own.gradient.variance >= 0
                assert own.value.variance >= 0
                accepted += 1
            else:
                assert bits(new) == bits(params)
                assert bits(without_verdict(new_state)) == bits(without_verdict(state))
            params, state = new, new_state
            tried(steps=1)
    # Most of it is not out of range at all: rejecting everything would be no feat.
    assert accepted > 2 * len(cases), accepted


# Curvature that is not positive -------------------------------------------------------

LANDSCAPES = {
    "saddle": {"bend": [1.0, -1.0, -0.5], "quartic": 0.01},
    "saddle without a floor": {"bend": [1.0, -1.0, 0.5]},
    "negative everywhere": {"bend": -1.0, "quartic": 1e-3},
    "no curvature at all": {"linear": [1.0, -2.0, 0.5]},
    "cubic well": {"linear": -1.0, "cubic": 2.0, "quartic": 0.1},
    "upside-down cubic": {"linear": 1.0, "cubic": -2.0, "quartic": 0.1},
    "double well": {"bend": -1.0, "quartic": 1.0},
    "flat at the start": {"quartic": 1.0},
}


@pytest.mark.fault(6)
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("rule", RULES)
def test_curvature_that_is_not_positive(rule, probe, tried):
    """Every step is finite; the first ones move; the loss ends no higher than before.

    With exact losses no step may raise it by more than a fraction of its range so far;
    with noise the last is compared with the first.
    """
    optimizer, step = compiled(probe=probe, rule=rule)
    for (name, fields), noisy in itertools.product(LANDSCAPES.items(), (False, True)):
        rng = np.random.default_rng(6) if noisy else None
        params = traps.start(0.1, 0.2, -0.1)
        state = optimizer.init(params)
        exact = traps.batch(**fields)
        values, moved = [float(np.mean(traps.losses(params, exact)))], 0
        for _ in range(60):
            params, state, info = step(params, state, traps.batch(rng, **fields))
            assert info.accepted, (name, noisy)
            assert all_finite((params, info)), (name, noisy)
            assert info.step_size >= 0
            moved += bool(info.step_size > 0)
            values.append(float(np.mean(traps.losses(params, exact))))
            if abs(values[-1]) > 1e12:
                break  # down a slope without a floor
        assert moved > 0.9 * (len(values) - 1) or not noisy, (name, noisy, moved)
        assert moved >= 1
        scale = max(abs(values[0]), values[0] - min(values))
        assert values[-1] <= values[0] + 0.1 * scale, (name, noisy, values)
        assert max(values) <= values[0] + 0.5 * scale, (name, noisy, values)
        tried(steps=len(values) - 1)
