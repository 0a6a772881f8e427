"""`make_step`: the few lines most users write."""

from collections.abc import Callable

import jax.numpy as jnp
import optax

from meka import tree
from meka.checks import check_wrappers
from meka.observation import Losses, observe
from meka.probe import ProbeFunction, current, curve
from meka.state import Info, find_state, replace_info
from meka.transport import Transport, hessian_at_current
from meka.tree import Array, PyTree

StepFunction = Callable[..., tuple[PyTree, PyTree, Info]]

# Noise moves slowly, and measuring it costs as much as the gradient does on small
# convolutional networks (docs/speed.md).
_NOISE_EVERY = 8


def make_step(
    losses: Losses,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    groups: int = 2,
    transport: Transport | None = None,
    probe: ProbeFunction | None = None,
    micro_batches: int = 1,
    noise_every: int | None = None,
    sample: int = 1,
) -> StepFunction:
    """``step(params, state, batch, mask=None, number=None) -> (params, state, info)``.

    A pure function, to be jitted, scanned or mapped over seeds by its user. A step
    in which anything is not finite is rejected: parameters and state come back bit
    for bit as they were, but for the count in ``info.rejected``.

    Args:
      losses: one loss per example, shape (n,).
      optimizer: `meka.meka`, `meka.adameka`, or a chain with `meka.scale_by_meka`.
      groups: how many groups of examples the noise is estimated from.
      transport: how the change of the gradient is observed: `hessian_at_current` (the
        default), `hessian_at_previous` or `difference` (the default of `auto`).
      probe: where slope and curvature come from: `current` (the default) or `lagged`
        (the default of `auto`).
      micro_batches: differentiate the batch in this many parts, to save memory.
      noise_every: split the batch into groups at this many steps (and at each of the
        first so many), and remember the noise in between; 1 is the paper. By default
        8, 16 for `auto`, and 1 where variances are kept per coordinate.
      sample: measure the change of the gradient, and the curvature, on one of so many
        examples, and reckon with so much more noise: cheaper where arithmetic is what
        takes the time, and a filter that trusts itself less. On all of them, whatever
        is said here, with a mask, with micro-batches, where noise is measured at every
        step, and in `auto`.

    ``number``, the number of the step, decides where noise is measured. It is counted
    in the state by default; who maps the step over seeds passes it unmapped, since a
    mapped choice computes both alternatives.
    """
    move: Transport = transport or getattr(optimizer, "transport", hessian_at_current)
    look: ProbeFunction = probe or getattr(optimizer, "probe", current)
    usual: int = getattr(optimizer, "noise_every", _NOISE_EVERY)
    optimizer = optax.with_extra_args_support(optimizer)
    if noise_every is not None and noise_every < 1:
        raise ValueError(f"noise_every={noise_every}: must be at least 1")

    def step(
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        mask: Array | None = None,
        number: Array | None = None,
    ) -> tuple[PyTree, PyTree, Info]:
        check_wrappers(state)
        own = find_state(state)
        diagonal = tree.same_structure(own.gradient.variance, params)
        every = noise_every or (1 if diagonal else usual)
        if diagonal and every > 1:
            raise ValueError(
                f"noise_every={every}: variances per coordinate have to be measured at "
                "every step, noise_every=1"
            )
        number = own.count if number is None else number
        measure = every == 1 or (number < every) | (number % every == 0)
        observation = observe(
            losses,
            params,
            own.previous_params,
            batch,
            groups=groups,
            transport=move,
            diagonal=diagonal,
            mask=mask,
            micro_batches=micro_batches,
            measure=measure,
            follow=not own.lasting or own.lasting.follow | measure,
            sample=sample,
        )
        along = curve(
            losses,
            params,
            batch,
            mask=mask,
            micro_batches=micro_batches,
            sample=sample if every > 1 and micro_batches == 1 else 1,
        )
        updates, new_state = optimizer.update(
            tree.cast_like(observation.gradient.mean, params),
            state,
            params,
            value=observation.value.mean,
            observation=observation,
            probe=lambda scene: look(scene, along),
        )
        return _keep_sound(params, state, updates, new_state)

    return step


def _keep_sound(params, state, updates, new_state) -> tuple[PyTree, PyTree, Info]:
    """Apply the updates, or nothing at all if the step or its result is not finite."""
    new_params = optax.apply_updates(params, updates)
    info = find_state(new_state).info
    sound = info.accepted & tree.is_finite(new_params)
    before = find_state(state).info
    refused = before._replace(
        suspect=jnp.where(info.accepted, -1, info.suspect),
        accepted=jnp.zeros((), bool),
        rejected=before.rejected + 1,
    )
    old_state = replace_info(state, refused)
    params = tree.select(sound, new_params, params)
    state = tree.select(sound, new_state, old_state)
    return params, state, tree.select(sound, info, refused)
