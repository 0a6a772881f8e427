"""A step is accepted, or rejected and counted, or raises; never silently wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traps
from traps import PROBES, TRANSPORTS, all_finite, bits, compiled, without_verdict

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
        name = visible[sum(counts.values()) % len(visible)]
        fields, _, _ = FAULTS[name]
        now = float(params["p"][0])
        before = float(meka.find_state(state).previous_params["p"][0])
        if rng.random() < 0.5:
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
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_example_changes_no_bit_and_is_named(way, tried):
    counts = injected(way, 40, 0)
    assert min(counts.values()) > 0, counts
    tried(bad_examples=sum(counts.values()))


@pytest.mark.slow
@pytest.mark.fault(1)
@pytest.mark.parametrize("way", WAYS)
def test_many_bad_examples(way, tried):
    tried(bad_examples=sum(injected(way, 2000, 1).values()))


@pytest.mark.fault(1)
def test_where_no_example_is_to_blame_none_is_named():
    optimizer, step = compiled()
    params = traps.start()
    # Each loss is finite, and so would be the step on any of them; their spread is not.
    batch = traps.batch(constant=np.tile([1e19, -1e19], traps.COUNT // 2))
    state = optimizer.init(params)
    _, _, info = step(params, state, batch)
    assert not info.accepted
    assert info.suspect == -1
    assert culprit.find(lambda b: step(params, state, b)[2].accepted, batch) == -1
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
@pytest.mark.parametrize("family", ["meka", "adameka"])
@pytest.mark.parametrize("way", WAYS)
def test_degenerate_batches_are_finite(way, family, tried):
    """P = Q = s = 0 in most of these from the first step on; δ = 0 in the flat ones."""
    optimizer, step = compiled(*way, family=family)
    for name, fields in DEGENERATE.items():
        params, state = traps.start(), optimizer.init(traps.start())
        first = np.mean(traps.losses(params, traps.batch(**fields)))
        for number in range(6):
            params, state, info = step(params, state, traps.batch(**fields))
            assert info.accepted, (name, number)
            assert all_finite((params, info)), (name, number)
            assert all_finite(meka.find_state(state)), (name, number)
            assert info.observed <= first + 1e-5, (name, number)
        if name == "zero gradients, curved":  # zero but for rounding, here too
            np.testing.assert_allclose(params["p"], traps.start()["p"], rtol=1e-3)
        elif name.startswith("zero"):
            assert bits(params) == bits(traps.start()), name
        elif not name.startswith("one"):
            own = meka.find_state(state)
            # Zero but for rounding: how a sum is compiled is not ours to say.
            assert own.value.variance <= 1e-12 * own.value.mean**2, name
            assert own.gradient.variance <= 1e-12, name
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
