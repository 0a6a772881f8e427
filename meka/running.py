"""`Run`: a training run, step by step, as fast as one call a step can be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meka import tree
from meka.observation import Losses
from meka.packing import Packer, flattener
from meka.probe import ProbeFunction
from meka.state import Info, find_state
from meka.training import Stepper, other_end
from meka.transport import Transport
from meka.tree import Array, PyTree

# Of steps, by whether they measure noise, and look at the change of the gradient.
_KINDS = {(True, True): "noise", (False, True): "change", (False, False): "gradient"}
_LATER = 2  # steps, until the host looks at what the device has found out


class Reading:
    """What a step told: the fields of `Info`, fetched when one is looked at.

    Looking waits for the step to end; a reading that nobody looks at costs nothing.
    """

    def __init__(self, scalars: list[Array], places: Info) -> None:
        self._scalars, self._places = scalars, places
        self._info: Info | None = None

    def fetch(self) -> Info:
        """All of it, as NumPy scalars."""
        if self._info is None:
            found = jax.device_get(self._scalars)
            self._info = jax.tree.map(lambda place: place(found), self._places)
        assert self._info is not None
        return self._info

    def block_until_ready(self) -> "Reading":
        """Wait for the step to end, as of an array of jax."""
        jax.block_until_ready(self._scalars)
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in Info._fields:
            raise AttributeError(
                f"a step tells nothing of {name!r}, but of {', '.join(Info._fields)}"
            )
        return getattr(self.fetch(), name)

    def __repr__(self) -> str:
        return repr(self.fetch())


class Run:
    """A training run: parameters, state, and the steps that move them.

        run = meka.Run(losses, meka.auto(total_steps=len(data)), params)
        for batch in data:
            info = run.step(batch)  # info.step_size, info.gain, ... if you look
        params = run.params

    It takes the steps of `make_step` in less time. The host knows what is to be
    measured and calls a step that measures just that, where a compiled `make_step`
    chooses on the device, and a GPU waits for each choice. Between steps the state's
    scalars lie in a few vectors, and on a GPU so do the parameters; and memory is used
    again for the next step.

    For `auto` it is settled where noise is measured, at every sixteenth step, whether
    the steps up to the next look at the change of the gradient.

    Args:
      losses: one loss per example, shape (n,).
      optimizer: as for `make_step`.
      params: to start from; they are copied.
      state: to go on with; by default the optimizer's beginning.
      groups: as for `make_step`, and so are the others.
      transport: see `make_step`.
      probe: see `make_step`.
      micro_batches: see `make_step`.
      noise_every: see `make_step`.
      sample: see `make_step`.
    """

    def __init__(
        self,
        losses: Losses,
        optimizer: optax.GradientTransformationExtraArgs,
        params: PyTree,
        state: PyTree | None = None,
        *,
        groups: int = 2,
        transport: Transport | None = None,
        probe: ProbeFunction | None = None,
        micro_batches: int = 1,
        noise_every: int | None = None,
        sample: int | None = None,
    ) -> None:
        state = optimizer.init(params) if state is None else state
        self._whole: Callable[[PyTree], PyTree] = lambda carry: carry
        if flat := flattener(optimizer, params, transport, probe):
            losses = flat.of_flat(losses)
            params, state = jax.jit(partial(flat.carry, optimizer))(params, state)
            self._whole = flat.restore
        options = groups, transport, probe, micro_batches, noise_every, sample
        self._stepper = Stepper(losses, optimizer, *options)
        self._every = self._stepper.every(params, state)
        self._displaced = self._stepper.can_be_displaced(params)
        if self._displaced:
            state = jax.jit(other_end)(params, state)
        self._packer = Packer((params, state))
        self._scalars, self._arrays = jax.jit(self._packer.pack)((params, state))
        self._places: Any = find_state(self._packer.places()[1])
        self._steps: dict[tuple[bool, bool], jax.stages.Wrapped] = {}
        self._show: Callable[..., PyTree] | None = None
        own = find_state(state)
        self._number = int(own.count)
        self._follow = bool(own.lasting.follow) if own.lasting else True
        self._told: tuple[list[Array], int] = [], 0
        self._due = -1  # the number of the step before which that is looked at

    def step(self, batch: PyTree, mask: Array | None = None) -> Reading:
        """Take a step, and tell of it."""
        if self._number == self._due:
            self._look()
        measure = self._number < self._every or self._number % self._every == 0
        kind = measure, measure or self._follow
        take = self._steps.get(kind) or self._steps.setdefault(kind, self._step(*kind))
        self._scalars, self._arrays = take(self._scalars, self._arrays, batch, mask)
        self._number += 1
        if measure and self._wants_to_know():
            # Looked at some steps later, so that the device has not to wait for it.
            self._told = self._scalars, self._number
            self._due = self._number + _LATER
        return Reading(self._scalars, self._places.info)

    @property
    def params(self) -> PyTree:
        """The parameters, as they were given; a copy."""
        return self._seen(0)

    @property
    def state(self) -> PyTree:
        """The optimizer's state, as `init` returns it; a copy.

        Where the run keeps the last displacement instead of the previous parameters
        (`hessian_at_current` in single precision), these are told from it, and another
        run that goes on from here takes the same steps to rounding.
        """
        return self._seen(1)

    def compiled(
        self, batch: PyTree, mask: Array | None = None
    ) -> dict[str, jax.stages.Compiled]:
        """The kinds of steps taken so far, compiled for such a batch.

        By what they look at: "noise", "change", or the "gradient" alone. To be looked
        into: `memory_analysis`, `cost_analysis`, `as_text`.
        """
        carry = self._scalars, self._arrays
        return {
            _KINDS[kind]: step.lower(*carry, batch, mask).compile()
            for kind, step in self._steps.items()
        }

    def _seen(self, which: int) -> PyTree:
        if self._show is None:

            def show(scalars, arrays, which):
                params, state = self._packer.unpack((scalars, arrays))
                if self._displaced:
                    state = other_end(params, state)
                carry = params, state
                # Copies, since what is kept here is overwritten by the next step.
                return jax.tree.map(jnp.copy, self._whole(carry[which]))

            self._show = jax.jit(show, static_argnums=2)
        return self._show(self._scalars, self._arrays, which)

    def _wants_to_know(self) -> bool:
        """Whether the device knows what the host has to: see `_look`."""
        ended = self._number == self._every > 1
        return ended or bool(self._places.lasting)

    def _look(self) -> None:
        """See what the host cannot know: steps that were refused, what `auto` wants."""
        (told, then), self._due = self._told, -1
        if then <= self._every + 1:
            # Noise is measured at each of the first steps, not counting those refused.
            taken = int(self._places.count(told))
            self._number -= then - taken if taken < self._every else 0
        if self._places.lasting:
            self._follow = bool(self._places.lasting.follow(told))

    def _step(self, measure: bool, follow: bool) -> jax.stages.Wrapped:
        """A compiled step that measures noise, or the gradient's change, or neither."""
        stepper, packer = self._stepper, self._packer

        def take(scalars, arrays, batch, mask):
            params, state = packer.unpack((scalars, arrays))
            # An array, since True would have the whole batch split at a step that
            # measures. A compiler for GPUs sees through it and leaves no choice; on a
            # CPU a choice costs nothing, and what is inside of it shares no memory
            # with what comes after.
            count = find_state(state).count
            yes = count >= 0 if tree.alone() else jnp.ones((), bool)
            params, state, _ = stepper.take(
                params,
                state,
                batch,
                mask,
                yes if measure and self._every > 1 else measure,
                yes if follow and find_state(state).lasting else follow,
                self._displaced,
            )
            return packer.pack((params, state))

        return jax.jit(take, donate_argnums=1)
