"""`meka.Run`: the steps of `make_step`, chosen by the host and in few arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_looping import assert_same, losses, start, stream

import meka
from meka import packing
from meka.packing import Flattener, Packer

EVERY = 8


def in_turn(optimizer, batches, masks=None, **options) -> tuple[Any, Any, meka.Info]:
    """What `make_step` does, and all that it tells."""
    step = meka.make_step(losses, optimizer, **options)

    def one(carry, part):
        *carry, info = step(*carry, *part)
        return tuple(carry), info

    carry = start(optimizer)
    (params, state), infos = jax.jit(
        lambda carry, data: jax.lax.scan(one, carry, data)
    )(carry, (batches, masks))
    return params, state, infos


def step_by_step(run: meka.Run, batches, masks=None) -> list[meka.Info]:
    def cut(k: int, data):
        return jax.tree.map(lambda x: x[k], data)

    steps = len(jax.tree.leaves(batches)[0])
    return [run.step(cut(k, batches), cut(k, masks)).fetch() for k in range(steps)]


def stacked(infos: list[meka.Info]) -> meka.Info:
    return jax.tree.map(lambda *x: np.stack(x), *infos)


@pytest.fixture(params=["as they are", "flat"])
def arranged(request, monkeypatch) -> str:
    """Parameters as they are, or in a vector, as on a GPU."""
    flat = request.param == "flat"
    monkeypatch.setattr(packing, "_is_better_flat", lambda params: flat)
    return request.param


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (meka.meka(), {}),
        (meka.adameka(), {"noise_every": 3, "sample": 4}),
        (meka.meka(), {"noise_every": 1, "groups": 4}),
    ],
    ids=["PI", "adameka on a sample", "noise at every step"],
)
def test_a_run_takes_the_steps_of_make_step(x64, arranged, optimizer, options):
    """To rounding, and tells the same of each; padded batches among them."""
    masks = jnp.arange(32) < jnp.arange(21)[:, None] % 3 + 30
    batches = stream(21)
    params, state = start(optimizer)
    run = meka.Run(losses, optimizer, params, **options)
    infos = step_by_step(run, batches, masks)
    assert_same(
        in_turn(optimizer, batches, masks, **options),
        (run.params, run.state, stacked(infos)),
    )
    assert jax.tree.structure(run.params) == jax.tree.structure(params)
    assert jax.tree.structure(run.state) == jax.tree.structure(state)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(run.state)] == shapes


def test_a_run_of_auto_follows_the_gradient_where_it_pays(x64, arranged):
    """As `make_step` does, but that what is learnt where noise is measured is heeded
    some steps later: the first of these is number 16."""
    optimizer = meka.auto(200)
    batches = stream(48)
    run = meka.Run(losses, optimizer, *start(optimizer))
    infos = stacked(step_by_step(run, batches))
    *_, expected = in_turn(optimizer, batches)
    first = slice(0, 17)
    assert_same(*(jax.tree.map(lambda x: x[first], i) for i in (expected, infos)))
    ours, theirs = infos.observed, np.asarray(expected.observed)
    np.testing.assert_allclose(ours[:35], theirs[:35], rtol=0.01)  # until it follows
    assert ours[35:].mean() == pytest.approx(theirs[35:].mean(), rel=0.1)
    kinds = {(True, True), (False, False), (False, True)}
    assert set(run._steps) == kinds  # measures, looks at the gradient alone, follows


def test_a_loop_in_vectors_takes_the_steps_of_make_step(x64, monkeypatch):
    """And gives parameters and state back as they were given."""
    monkeypatch.setattr(packing, "_is_better_flat", lambda params: True)
    optimizer, batches = meka.meka(), stream(12)
    loop = jax.jit(meka.make_loop(losses, optimizer))
    found = loop(*start(optimizer), batches)
    assert_same(in_turn(optimizer, batches), found)
    structures = map(jax.tree.structure, start(optimizer))
    assert [*structures] == [jax.tree.structure(x) for x in found[:2]]
    text = loop.lower(*start(optimizer), batches).as_text()
    assert "tensor<42xf64>" in text  # 5 x 7 and 7 parameters


def test_what_is_given_stays_and_what_is_shown_is_not_overwritten(arranged):
    optimizer = meka.meka()
    params, state = start(optimizer)
    kept = jax.tree.map(np.array, (params, state))
    run, batches = meka.Run(losses, optimizer, params, state), stream(6)
    step_by_step(run, batches)
    shown = run.params, run.state
    copies = jax.tree.map(np.array, shown)
    step_by_step(run, batches)
    assert_same(kept, (params, state))
    assert_same(copies, shown)
    assert np.any(np.asarray(shown[0]["in"]) != np.asarray(run.params["in"]))


@pytest.mark.parametrize("optimizer", [meka.meka(), meka.auto(200)], ids=["PI", "auto"])
def test_a_run_goes_on_from_another(x64, arranged, optimizer):
    batches = stream(40)
    head, tail = (
        jax.tree.map(lambda x, s=s: x[s], batches)
        for s in (slice(0, 19), slice(19, 40))
    )
    whole, part = (meka.Run(losses, optimizer, *start(optimizer)) for _ in range(2))
    step_by_step(part, head)
    rest = meka.Run(losses, optimizer, part.params, part.state)
    step_by_step(whole, batches)
    step_by_step(rest, tail)
    assert_same((whole.params, whole.state), (rest.params, rest.state))


def test_a_step_that_is_not_finite_is_refused_and_told(arranged):
    optimizer = meka.meka()
    run, batches = meka.Run(losses, optimizer, *start(optimizer)), stream(3)
    batches["y"] = batches["y"].at[1, 2].set(jnp.nan)
    first = run.step(jax.tree.map(lambda x: x[0], batches))
    before = jax.tree.map(np.array, run.params)
    bad = run.step(jax.tree.map(lambda x: x[1], batches))
    assert_same(before, run.params)
    assert (first.accepted, bad.accepted) == (True, False)
    assert (bad.suspect, bad.rejected) == (2, 1)
    good = run.step(jax.tree.map(lambda x: x[2], batches))
    assert good.accepted
    assert np.isfinite(good.value)


def test_first_steps_that_are_refused_are_made_up_for():
    """Noise is measured at each of the first steps that are taken."""
    optimizer = meka.meka()
    run, batches = meka.Run(losses, optimizer, *start(optimizer)), stream(40)
    batches["y"] = batches["y"].at[:3].set(jnp.nan)
    noise = stacked(step_by_step(run, batches)).gradient_noise
    fresh = np.flatnonzero(np.diff(noise[3:]))  # averaged, so it moves if it is new
    assert run._number == int(meka.find_state(run.state).count) == 37
    assert set(range(3)) <= set(fresh)


def test_only_a_step_that_measures_chooses_anything(arranged):
    """A GPU waits for each choice."""
    optimizer = meka.meka()
    run, batches = meka.Run(losses, optimizer, *start(optimizer)), stream(20)
    step_by_step(run, batches)
    batch = jax.tree.map(lambda x: x[0], batches)
    texts = {
        kind: step.lower(run._scalars, run._arrays, batch, None).as_text()
        for kind, step in run._steps.items()
    }
    assert "stablehlo.case" in texts[True, True]
    assert "stablehlo.case" not in texts[False, True]
    assert len(run.compiled(batch)) == 2


def test_few_arrays_are_handed_over(monkeypatch):
    """Scalars in a vector a dtype; parameters, too, where they are flat."""
    monkeypatch.setattr(packing, "_is_better_flat", lambda params: True)
    run = meka.Run(losses, meka.meka(), start(meka.meka())[0])
    assert len(run._scalars) == 3
    assert len(run._arrays) == 3  # parameters, those before, the gradient


def test_a_reading_has_the_fields_of_info_and_says_so():
    run = meka.Run(losses, meka.meka(), start(meka.meka())[0])
    reading = run.step(jax.tree.map(lambda x: x[0], stream(1)))
    jax.block_until_ready(reading)
    assert_same(meka.find_state(run.state).info, reading.fetch())
    assert reading.step_size == reading.fetch().step_size
    assert "step_size" in repr(reading)
    with pytest.raises(AttributeError, match="nothing of 'learning_rate', but of step"):
        _ = reading.learning_rate


def test_optimizers_that_may_see_shapes_get_the_arrays_as_they_are(monkeypatch):
    """A chain with a mask by name, or a transport of the user's own."""
    monkeypatch.setattr(packing, "_is_better_flat", lambda params: True)
    params, _ = start(meka.meka())
    seen = []

    def transport(loss, params, previous, displacement):
        seen.append(set(params))
        return meka.hessian_at_current(loss, params, previous, displacement)

    run = meka.Run(losses, meka.meka(), params, transport=transport)
    run.step(jax.tree.map(lambda x: x[0], stream(1)))
    assert seen
    assert all(each == {"in", "out"} for each in seen)


def test_flat_and_packed_trees_come_back_with_every_dtype():
    params = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": jnp.ones(2, jnp.bfloat16),
        "c": jnp.float32(7),
    }
    flattener = Flattener(params)
    flat = flattener.flat(params)
    assert {k: v.shape for k, v in flat.vectors.items()} == {
        "float32": (7,),
        "bfloat16": (2,),
    }
    assert_same(params, flattener.restore(flat))
    tree = (params, jnp.int32(3), jnp.zeros((), bool), jax.random.key(0))
    packer = Packer(tree)
    vectors, arrays = packer.pack(tree)
    assert sorted(v.dtype.name for v in vectors) == ["bool", "float32", "int32"]
    assert len(arrays) == 3
    again = packer.unpack((vectors, arrays))
    assert_same(tree[:3], again[:3])
    assert jnp.issubdtype(again[3].dtype, jax.dtypes.prng_key)


def test_steps_are_there_to_be_looked_into():
    optimizer, batches = meka.auto(100), stream(4)
    run = meka.Run(losses, optimizer, *start(optimizer), noise_every=2)
    step_by_step(run, batches)
    steps = run.compiled(jax.tree.map(lambda x: x[0], batches))
    assert {"noise"} < set(steps) <= {"noise", "change", "gradient"}
    for step in steps.values():
        memory = step.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes > 0
