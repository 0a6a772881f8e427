"""`make_loop`: many steps in one call."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from meka.convolutions import for_inside
from meka.observation import Losses
from meka.packing import flattener
from meka.probe import ProbeFunction
from meka.state import Info, find_state
from meka.training import Stepper
from meka.transport import Transport
from meka.tree import Array, PyTree

Loop = Callable[..., tuple[PyTree, PyTree, Info]]


def make_loop(
    losses: Losses,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    groups: int = 2,
    transport: Transport | None = None,
    probe: ProbeFunction | None = None,
    micro_batches: int = 1,
    noise_every: int | None = None,
    sample: int | None = None,
) -> Loop:
    """``loop(params, state, batches, masks=None) -> (params, state, infos)``.

    As many steps as there are batches, which are stacked along a leading axis, as are
    masks and what is told of the steps. A pure function, to be jitted by its user;
    the arguments are those of `make_step`, and so are the steps.

    It is there to be fast on a GPU, where it takes whole blocks of ``noise_every``
    steps (8, or 16 for `auto`) that measure noise at the first and have nothing to
    choose at the others: a choice has the host wait and what follows launched anew. So
    give it multiples of that many batches. For `auto` it is settled at the first as
    well whether the others look at the change of the gradient. Inside of it, small
    parameters lie in one vector. Elsewhere it is a scan of `make_step`.

    Not to be mapped over seeds: a mapped choice computes all alternatives.
    """
    options = groups, transport, probe, micro_batches, noise_every, sample

    def loop(
        params: PyTree, state: PyTree, batches: PyTree, masks: Array | None = None
    ) -> tuple[PyTree, PyTree, Info]:
        _check_steps(batches, masks)
        flat = flattener(optimizer, params, transport, probe)
        if not flat:
            stepper = Stepper(losses, optimizer, *options)
            return _loop(stepper, (params, state), (batches, masks))
        stepper = Stepper(flat.of_flat(losses), optimizer, *options)
        carry = flat.carry(optimizer, params, state)
        params, state, infos = _loop(stepper, carry, (batches, masks))
        return flat.restore(params), flat.restore(state), infos

    return loop


def _loop(stepper: Stepper, carry, data) -> tuple[PyTree, PyTree, Info]:
    if stepper.every(*carry) == 1:  # there is nothing to choose
        return in_turn(stepper, carry, data)
    return jax.lax.platform_dependent(
        carry, data, cpu=partial(in_turn, stepper), default=partial(in_blocks, stepper)
    )


def in_turn(stepper: Stepper, carry, data) -> tuple[PyTree, PyTree, Info]:
    """Step by step: on a CPU a choice is free, and slow what is inside of it."""

    def one(carry, part):
        params, state, info = for_inside(stepper.step)(*carry, *part)
        return (params, state), info

    carry, infos = jax.lax.scan(one, carry, data)
    return *carry, infos


def in_blocks(stepper: Stepper, carry, data) -> tuple[PyTree, PyTree, Info]:
    """Block by block, and what is left of the steps as a shorter one."""
    every, steps = stepper.every(*carry), _count(data)
    whole, parts = steps - steps % every, []
    if whole:
        carry, infos = jax.lax.scan(
            lambda carry, begin: _block(stepper, carry, data, begin, every),
            carry,
            jnp.arange(0, whole, every),
        )
        parts.append(jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), infos))
    if whole < steps:
        carry, infos = _block(stepper, carry, data, whole, steps - whole)
        parts.append(infos)
    return *carry, jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _block(
    stepper: Stepper, carry, data, begin: Array | int, steps: int
) -> tuple[tuple[PyTree, PyTree], Info]:
    """Steps of which the first measures noise, or all at the beginning of a run."""

    def take(carry, k, measure: Array | bool, follow: bool):
        # Taken out one by one, since a slice would be a copy of all of them.
        batch, mask = jax.tree.map(lambda x: x[begin + k], data)
        params, state = carry
        own, look = find_state(state), follow
        if own.lasting and follow:
            # Known only at run time, the second gradient waits for the first, and is
            # not computed beside it in twice the memory.
            look = own.count >= 0
        params, state, info = stepper.take(params, state, batch, mask, measure, look)
        return (params, state), info

    def measured(k, now):
        carry, told = now
        carry, info = take(carry, k, jnp.ones((), bool), True)
        return carry, jax.tree.map(lambda all, x: all.at[k].set(x), told, info)

    def others(carry, told, follow: bool):
        carry, infos = jax.lax.scan(
            lambda carry, k: take(carry, k, False, follow), carry, jnp.arange(1, steps)
        )
        return carry, jax.tree.map(lambda all, x: all.at[1:].set(x), told, infos)

    _, info = jax.eval_shape(lambda carry: take(carry, 0, False, True), carry)
    told = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), info)
    beginning = find_state(carry[1]).count < stepper.every(*carry)
    first = jnp.where(beginning, steps, 1)
    carry, told = jax.lax.fori_loop(0, first, measured, (carry, told))
    if steps == 1:
        return carry, told
    kinds = {True: ~beginning}
    if lasting := find_state(carry[1]).lasting:
        kinds = {True: ~beginning & lasting.follow, False: ~beginning & ~lasting.follow}
    # One after the other: a choice between two that both do something copies the carry.
    for follow, chosen in kinds.items():
        some = partial(others, follow=follow)
        carry, told = jax.lax.cond(chosen, some, lambda *same: same, carry, told)
    return carry, told


def _count(data: PyTree) -> int:
    return jax.tree.leaves(data)[0].shape[0]


def _check_steps(batches: PyTree, masks: Array | None) -> None:
    shapes = [jnp.shape(x) for x in jax.tree.leaves((batches, masks))]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "a loop takes batches, and masks if any, stacked along a leading axis, as "
            f"many as it is to take steps; these have the shapes {shapes}. A single "
            "batch is for make_step."
        )
