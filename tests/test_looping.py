"""Many steps in one call, in turn and in blocks that have nothing to choose."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meka
from meka.automatic import AutoState
from meka.lab.timing import peak_bytes
from meka.looping import in_blocks
from meka.training import Stepper

COUNT, WIDTH = 32, 5
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "auto": (meka.auto(200), {}),
    "PI on a sample": (meka.meka(), {"sample": 4}),
}


def losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.square(hidden @ params["out"] - batch["y"])


def start(optimizer) -> tuple[Any, Any]:
    """Parameters and state; `auto` has found a length, at which it looks at the change
    of the gradient in its last steps here, and not before."""
    rng = np.random.default_rng(3)
    shapes = {"in": (WIDTH, 7), "out": (7,)}
    params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
    state = optimizer.init(params)
    if isinstance(state, AutoState):
        scale = state.scale._replace(distance=jnp.asarray(0.1))
        state = state._replace(scale=scale)
    return params, state


def stream(steps: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, COUNT, WIDTH))
    y = np.sin(x.sum(-1)) + 0.3 * rng.normal(size=(steps, COUNT))
    return {"x": jnp.asarray(x), "y": jnp.asarray(y)}


def stepper(optimizer, **options) -> Stepper:
    usual: dict[str, Any] = {
        "groups": 2,
        "transport": None,
        "probe": None,
        "micro_batches": 1,
    }
    usual |= {"noise_every": None, "sample": 1}
    return Stepper(losses, optimizer, **(usual | options))


def assert_same(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)


def in_blocks_of(own: Stepper, carry, data) -> tuple[Any, float]:
    """What comes of it, and the bytes that are held at once."""
    call = jax.jit(partial(in_blocks, own)).lower(carry, data).compile()
    return call(carry, data), peak_bytes(call)


def test_a_loop_and_blocks_take_the_steps_of_make_step(x64):
    """A beginning, whole blocks and a rest, a sample of each batch."""
    optimizer, options = SETTINGS["PI on a sample"]
    carry, batches = start(optimizer), stream(27)
    loop = jax.jit(meka.make_loop(losses, optimizer, **options))
    looped = loop.lower(*carry, batches).compile()
    expected = looped(*carry, batches)
    found, held = in_blocks_of(stepper(optimizer, **options), carry, (batches, None))
    assert_same(expected, found)
    assert held < 1.3 * peak_bytes(looped)  # no copy of all the batches


def test_blocks_of_auto_take_the_steps_of_make_step(x64):
    """Some look at the change of the gradient; all are padded, the last not finite."""
    optimizer, options = SETTINGS["auto"]
    step = meka.make_step(losses, optimizer, **options)
    masks = jnp.arange(COUNT) < jnp.arange(48)[:, None] % 3 + COUNT - 3
    batches = stream(48)
    batches["y"] = batches["y"].at[-1, 2].set(jnp.nan)
    carry, data = start(optimizer), (batches, masks)

    def one(carry, part):
        params, state, info = step(*carry, *part)
        lasting: Any = meka.find_state(state).lasting
        return (params, state), (info, lasting.follow)

    turns = jax.jit(partial(jax.lax.scan, one)).lower(carry, data).compile()
    carried, (infos, followed) = turns(carry, data)
    assert not np.any(followed[16:32])
    assert np.all(followed[32:])
    assert list(infos.rejected[-2:]) == [0, 1]
    found, held = in_blocks_of(stepper(optimizer, **options), carry, data)
    assert_same((*carried, infos), found)
    assert held < 1.3 * peak_bytes(turns)


@pytest.mark.parametrize("name", ["auto", "PI on a sample"])
def test_blocks_have_nothing_to_choose(name):
    """What the steps of a block are to be is chosen once, and nothing inside of them,
    but for `auto` where it looks at the change of the gradient."""
    optimizer, options = SETTINGS[name]
    own, carry, batches = stepper(optimizer, **options), start(optimizer), stream(32)
    jaxpr = jax.make_jaxpr(lambda c, b: in_blocks(own, c, (b, None)))(carry, batches)
    found = [e for e in inside(jaxpr.jaxpr) if e.primitive.name == "cond"]
    assert len(found) == (2 if name == "auto" else 1)
    steps = [list(inside(b.jaxpr, deep=True)) for b in found[-1].params["branches"]]
    assert all(e.primitive.name != "cond" for branch in steps for e in branch)
    assert any(e.primitive.name == "dot_general" for branch in steps for e in branch)


def test_noise_at_every_step_leaves_no_choice():
    optimizer = meka.meka()
    loop = meka.make_loop(losses, optimizer, noise_every=1, groups=4)
    jaxpr = jax.make_jaxpr(loop)(*start(optimizer), stream(8))
    assert all(e.primitive.name != "cond" for e in inside(jaxpr.jaxpr, deep=True))


def inside(jaxpr, *, deep: bool = False):
    """Equations of scans and calls; of choices and loops without an end as well if
    ``deep``."""
    for equation in jaxpr.eqns:
        yield equation
        if deep or equation.primitive.name not in ("cond", "while"):
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                if hasattr(inner, "eqns"):
                    yield from inside(inner, deep=deep)


def test_batches_that_are_not_stacked_are_refused():
    optimizer = meka.auto(10)
    loop = meka.make_loop(losses, optimizer)
    params, state = start(optimizer)
    batches = stream(3)
    with pytest.raises(ValueError, match="stacked along a leading axis"):
        loop(params, state, batches, jnp.ones((2, COUNT), bool))
    with pytest.raises(ValueError, match=r"make_step"):
        loop(params, state, stream(0))
    with pytest.raises(ValueError, match=r"\(\)"):
        loop(params, state, batches | {"weight": jnp.ones(())})
