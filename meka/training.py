"""`make_step`: the few lines most users write."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from meka import tree
from meka.activations import numbers_made
from meka.checks import (
    check_batch,
    check_losses,
    check_params,
    check_sample,
    check_wrappers,
)
from meka.observation import Losses, glance
from meka.packing import LARGE, Own
from meka.probe import ProbeFunction, current, curve, sometimes
from meka.state import Info, find_state, replace_in
from meka.transport import Transport, hessian_at_current
from meka.tree import Array, PyTree

StepFunction = Callable[..., tuple[PyTree, PyTree, Info]]

# One of so many examples tells the change of the gradient in large networks, and where
# a pass forward makes many more numbers than there are parameters: a product with the
# Hessian holds twice as many as a gradient does.
_SAMPLE_LARGE, _SAMPLE_HEAVY = 4, 2
_HEAVY, _FEW = 4, 2**20  # so many for each parameter, and not below so many
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
    sample: int | None = None,
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
        first so many), and remember the noise in between; so does `current` with the
        curvature, per unit of length. 1 is the paper. By default 8, 16 for `auto`, and
        1 where variances are kept per coordinate.
      sample: measure the change of the gradient, and the curvature, on one of so many
        examples, and reckon with so much more noise: cheaper where arithmetic is what
        takes the time, and a filter that trusts itself less. On all of them, whatever
        is said here, with a mask, with micro-batches, where noise is measured at every
        step, and in `auto`. By default 1; 4 for more than two million parameters; and 2
        where the products of a pass forward, as of a convolutional network, are over a
        million numbers and over four for each parameter.

    ``number``, the number of the step, decides where noise is measured. It is counted
    in the state by default; who maps the step over seeds passes it unmapped, since a
    mapped choice computes both alternatives.
    """
    options = groups, transport, probe, micro_batches, noise_every, sample
    return Stepper(losses, optimizer, *options).step


@dataclass(frozen=True, eq=False)
class Stepper:
    """What `make_step` was told, and what it does."""

    losses: Losses
    optimizer: optax.GradientTransformationExtraArgs
    groups: int
    transport: Transport | None
    probe: ProbeFunction | None
    micro_batches: int
    noise_every: int | None
    sample: int | None

    def __post_init__(self) -> None:
        check_sample(1 if self.sample is None else self.sample)
        if self.noise_every is not None and self.noise_every < 1:
            raise ValueError(f"noise_every={self.noise_every}: must be at least 1")

    def step(
        self,
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        mask: Array | None = None,
        number: Array | None = None,
    ) -> tuple[PyTree, PyTree, Info]:
        """One step that chooses what to measure."""
        every, own = self.every(params, state), find_state(state)
        number = own.count if number is None else number
        measure = every == 1 or (number < every) | (number % every == 0)
        follow = not own.lasting or own.lasting.follow | measure
        return self.take(params, state, batch, mask, measure, follow)

    def every(self, params: PyTree, state: PyTree) -> int:
        """At one of how many steps noise is measured."""
        check_wrappers(state)
        diagonal = _is_diagonal(params, state)
        usual = getattr(self.optimizer, "noise_every", _NOISE_EVERY)
        every = self.noise_every or (1 if diagonal else usual)
        if diagonal and every > 1:
            raise ValueError(
                f"noise_every={every}: variances per coordinate have to be measured at "
                "every step, noise_every=1"
            )
        return every

    def _usual_sample(self, params: PyTree, batch: PyTree, mask: Array | None) -> int:
        check_params(params)
        check_losses(self.losses, params, batch, check_batch(batch, mask))
        size = tree.size(params)
        if size > LARGE:
            return _SAMPLE_LARGE
        made = numbers_made(self.losses, params, batch)
        return _SAMPLE_HEAVY if made > max(_HEAVY * size, _FEW) else 1

    def take(
        self,
        params: PyTree,
        state: PyTree,
        batch: PyTree,
        mask: Array | None,
        measure: Array | bool,
        follow: Array | bool,
        displaced: bool = False,
    ) -> tuple[PyTree, PyTree, Info]:
        """One step that is told what to measure: noise, the change of the gradient.

        There is nothing to choose at run time where it is told by ``True`` or
        ``False``, and not by an array. If ``displaced``, as `can_be_displaced` says,
        the state has the last displacement where the last parameters are otherwise.
        """
        own = find_state(state)
        optimizer, move = self.optimizer, self.move()
        look = self.probe or getattr(optimizer, "probe", current)
        sample = self.sample or self._usual_sample(params, batch, mask)
        fewer = self.every(params, state) > 1 and self.micro_batches == 1
        observation, closer = glance(
            self.losses,
            params,
            own.previous_params,
            batch,
            groups=self.groups,
            transport=move,
            diagonal=_is_diagonal(params, state),
            mask=mask,
            micro_batches=self.micro_batches,
            measure=measure,
            follow=follow,
            sample=1 if own.lasting else sample,
            displacement=own.previous_params if displaced else None,
        )
        along = curve(
            self.losses,
            params,
            batch,
            mask=mask,
            micro_batches=self.micro_batches,
            sample=sample if fewer else 1,
            afresh=measure is not True,  # seldom, and is not to need more memory
        )
        if look is current:
            look = sometimes(measure)
        updates, new_state = optax.with_extra_args_support(optimizer).update(
            tree.cast_like(observation.gradient.mean, params),
            state,
            params,
            value=observation.value.mean,
            observation=observation,
            probe=lambda scene: look(scene, along),
            closer=closer,
            displacement=own.previous_params if displaced else None,
        )
        sound = find_state(new_state).info.accepted
        if not self._vouched(params):
            sound, new_state = _checked(sound, params, state, updates, new_state)
        # The parameters wait for what is kept of them, and need not be copied.
        moved = optax.apply_updates(find_state(new_state).previous_params, updates)
        if displaced:
            last = tree.subtract(optax.apply_updates(params, updates), params)
            last = tree.select(sound, last, own.previous_params)
            moved = jax.tree.map(jnp.add, params, last)
            new_state = replace_in(new_state, previous_params=last)
        # Not moved by zero, which would turn a negative zero.
        params = tree.select(sound, moved, params)
        return params, new_state, find_state(new_state).info

    def _vouched(self, params: PyTree) -> bool:
        """Whether what is accepted needs no second look at where it leads."""
        own = isinstance(self.optimizer, Own) and self.optimizer.sound
        return own and tree.is_wide(params)

    def move(self) -> Transport:
        """How the change of the gradient is observed."""
        return self.transport or getattr(
            self.optimizer, "transport", hessian_at_current
        )

    def can_be_displaced(self, params: PyTree) -> bool:
        """Whether the last displacement is all that is needed of the last parameters.

        It then takes their place in the state of a run, and a step holds one array of
        the size of the parameters less.
        """
        exact = all(x.dtype == tree.wide(x) for x in jax.tree.leaves(params))
        return exact and self.move() is hessian_at_current


def other_end(params: PyTree, state: PyTree) -> PyTree:
    """A state with the last displacement for the last parameters, or the reverse."""
    last = tree.subtract(params, find_state(state).previous_params)
    return replace_in(state, previous_params=last)


def _is_diagonal(params: PyTree, state: PyTree) -> bool:
    return tree.same_structure(find_state(state).gradient.variance, params)


def _checked(
    accepted: Array, params: PyTree, state: PyTree, updates: PyTree, new_state: PyTree
) -> tuple[Array, PyTree]:
    """Whether the parameters are finite after the step, and the state if they are."""
    # Times one, which the compiler cannot know: it then makes the sum here and where it
    # is stored, instead of storing it twice.
    trial = optax.apply_updates(params, tree.scale(accepted, updates))
    sound = accepted & tree.is_finite(trial)
    info, before = find_state(new_state).info, find_state(state).info
    refused = before._replace(
        suspect=jnp.where(accepted, -1, info.suspect),
        accepted=jnp.zeros((), bool),
        rejected=before.rejected + 1,
    )
    return sound, tree.select(sound, new_state, replace_in(state, info=refused))
