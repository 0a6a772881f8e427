"""`auto`: the setting to start with, found by comparison (docs/research.md)."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from meka import distance, tree
from meka.gaussian import Gaussian, Moments
from meka.improvement import ImprovementModel
from meka.observation import Closer, Observation
from meka.optimizer import filter_value, refused, scale_by_meka
from meka.packing import Own
from meka.probe import Probe, Scene, lagged
from meka.state import Info, State
from meka.transport import difference
from meka.tree import Array, PyTree

# Noise is followed closely: as a network learns it falls by orders of magnitude, and
# a filter that remembers too much of it trusts its own prediction for too long.
_NOISE_DECAY, _VALUE_DECAY = 0.98, 0.999
_NOISE_EVERY = 16
# D grows through four decades in a tenth of the run, or in two hundred steps.
_DECADES, _SHARE, _WITHOUT_END = 4, 0.1, 200
# Where noise is large it hides what is left of the distance from then on. Networks bear
# steps of a twentieth of their parameters' size, so in as many steps again the length
# rises to that, if it is more than D and not more than tenfold. It falls in the second
# half of the run.
_RELATIVE, _STRETCH, _DECAY = 0.05, 10, 0.5
# What `Info` says of the step, and the filter does not know.
_OF_THE_STEP = (
    "step_size",
    "slope",
    "curvature",
    "model",
    "improvement_probability",
    "predicted_change",
)
_AVERAGING = 8  # polynomial-decay averaging (Shamir and Zhang 2013): the last tenth


class AutoState(NamedTuple):
    """The filter's state, the scale's, and the average of the iterates or ()."""

    filter: State
    scale: distance.Distance
    average: PyTree


class Automatic(Own):
    """An optimizer that says how it wants to be observed; `make_step` listens."""

    transport = staticmethod(difference)
    probe = staticmethod(lagged)
    noise_every = _NOISE_EVERY
    sound = False


def auto(total_steps: int | None = None) -> Automatic:
    """The setting to start with; there is nothing else to set.

    Adam's momentum and second moment, as long as the distance to the solution says
    (`meka.distance`), of the gradient: filtered where errors of the filter do not add
    up to more than it saves, and of the minibatch elsewhere (`meka.lasting`).

    It starts from steps of next to nothing and takes about a hundred to find their
    length: a run of twenty steps gets nowhere.

    Where that distance is little beside the parameters, steps are a twentieth of their
    mean size at the start, or ten times the distance if that is less.

    With ``total_steps``, which is the better choice where the length of the run is
    known, steps fall linearly to zero over its second half. Without, their length stays
    and an average of the iterates is kept, one more buffer: evaluate `averaged` then.

    ``info.step_size`` is the length of the step over that of the filtered gradient, and
    ``info.model`` says what is expected of a step in its direction, now and not as an
    average; ``optax.tree.get(state, "distance")`` is the scale itself.
    """
    if total_steps is not None and total_steps < 1:
        raise ValueError(f"total_steps={total_steps}: must be at least 1, or None")
    inner = scale_by_meka(
        None,  # it is asked what it sees, not how far to go
        value_decay=_VALUE_DECAY,
        noise_decay=_NOISE_DECAY,
        lasting=True,
    )
    search = _SHARE * total_steps if total_steps else _WITHOUT_END
    growth = 10 ** (_DECADES / search)

    def init(params: PyTree) -> AutoState:
        average = () if total_steps else tree.widen(params)
        begun = cast(State, inner.init(params))
        state = AutoState(begun, distance.start(params), average)
        # Every leaf a buffer of its own, so that parameters and state can be donated.
        return jax.tree.map(jnp.copy, state)

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        observation: Observation | None = None,
        probe: Callable[[Scene], Probe] | None = None,
        closer: Closer | None = None,
        **extra: object,
    ) -> tuple[PyTree, AutoState]:
        del extra

        def watched(observation: Observation | None) -> State:
            observed = {"observation": observation, "probe": probe}
            _, new = inner.update(updates, state.filter, params, **observed)
            return cast(State, new)

        if observation is None or params is None or observation.followed is True:
            seen = watched(observation)
        else:
            known = observation
            if closer is None:
                seen = _glance(state.filter, known)
            else:
                look = closer.look
                # Only what the branches do not share comes out of the choice.
                seen = jax.lax.cond(
                    closer.wanted,
                    lambda: _but_for_the_step(watched(look())),
                    lambda: _but_for_the_step(_glance(state.filter, known)),
                )
            seen = seen._replace(previous_params=tree.cast_like(params, params))
        assert observation is not None  # or the filter would have refused
        assert params is not None
        rate = _stretch(state.scale, search)
        if total_steps:
            left = 1 - state.scale.count / total_steps
            rate = rate * jnp.clip(left / _DECAY, 0, 1)
        steps, scale = distance.advance(
            state.scale,
            params,
            observation.gradient.mean,
            seen.gradient.mean,
            rate,
            growth,
        )
        accepted = seen.info.accepted & jnp.isfinite(scale.won)
        steps = jax.tree.map(lambda u: jnp.where(accepted, u, 0), steps)
        taken = _as_taken(seen, steps, state.filter.info.model)
        seen = seen._replace(info=taken._replace(accepted=accepted))
        seen = tree.select(accepted, seen, refused(state.filter, observation))
        average = state.average
        if total_steps is None:
            average = _average(average, params, steps, state.scale.count)
        new = AutoState(seen, scale, average)
        return steps, tree.select(accepted, new, state._replace(filter=seen))

    return Automatic(init, update)


def _stretch(scale: distance.Distance, search: float) -> Array:
    """The length of a step over D: more than 1 where D is small beside x0."""
    wanted = jnp.clip(_RELATIVE * scale.size / scale.distance, 1, _STRETCH)
    found = scale.count.astype(wanted.dtype) / search
    return 1 + (wanted - 1) * jnp.clip(found - 1, 0, 1)


def _glance(state: State, observation: Observation) -> State:
    """The state after a step at which only value and gradient were looked at.

    The belief about the gradient is what the minibatch says, and the value is moved by
    the slope along the step as these examples see it. Of the rest the last is kept. If
    the step is not to be accepted, it says so, and nothing else that counts.
    """
    path, gradient = observation.path, observation.gradient.mean
    curvature = state.held.curvature
    noise, moved = state.gradient_noise.mean, path.length**2
    norm = jnp.sqrt(tree.square(gradient))
    value_noise = state.value_noise.add(observation.value.variance, _VALUE_DECAY)
    y = Moments(observation.value.mean, value_noise.mean)
    climb = -path.slope.mean * path.length  # g'δ at the end of the step
    value, model_error, innovation = filter_value(
        state.value, y, rise=climb - curvature * moved / 2, spread=noise * moved
    )
    sound = jnp.isfinite(value.mean) & jnp.isfinite(value.variance) & jnp.isfinite(norm)
    sound = sound & (observation.groups >= 2)
    info = state.info._replace(
        gain=jnp.ones_like(state.info.gain),
        value=value.mean,
        value_variance=value.variance,
        observed=y.mean,
        observed_variance=y.variance,
        gradient_norm=norm,
        direction_norm=norm,
        model_error=model_error,
        innovation=innovation,
        gradient_variance=noise,
        displacement_norm=path.length,
        suspect=jnp.full((), -1, jnp.int32),
        accepted=sound,
    )
    return state._replace(
        count=state.count + 1,
        value=value,
        value_noise=value_noise,
        gradient=Gaussian(gradient, noise),
        info=info,
    )


def _but_for_the_step(state: State) -> State:
    """What the filter knows, without what `_as_taken` tells of the step."""
    nothing = dict.fromkeys(_OF_THE_STEP, ())
    return state._replace(previous_params=(), info=state.info._replace(**nothing))


def _as_taken(state: State, updates: PyTree, last: ImprovementModel) -> Info:
    """What the filter tells, and what is to be expected of the step that is taken.

    The model is of that step and of now, not an average: the slope is what the belief
    about the gradient says along it, the curvature what it last was along a step. If
    there is no step, it is the ``last``.
    """
    info = state.info
    norm = info.direction_norm
    square, rise = tree.dots((updates, updates), (updates, state.gradient.mean))
    moves = (square > 0) & (norm > 0)
    step_size = jnp.where(moves, jnp.sqrt(square) / jnp.where(moves, norm, 1), 0)
    _, spread = state.held.path.mean
    squared = norm * norm
    model = last._replace(
        slope=-rise / jnp.where(moves, step_size, 1),
        curvature=state.held.curvature * squared,
        value_variance=info.value_variance,
        slope_variance=info.gradient_variance * squared,
        curvature_variance=spread * squared * squared,
        step=state.count - 1,
    )
    model = tree.select(moves, model, last)
    return info._replace(
        step_size=step_size,
        slope=model.slope,
        curvature=model.curvature,
        model=model,
        improvement_probability=model.probability(step_size),
        predicted_change=model.mean(step_size),
    )


def _average(average: PyTree, params: PyTree, updates: PyTree, count: Array) -> PyTree:
    share = (_AVERAGING + 1) / (count + _AVERAGING + 1)

    def mix(a: Array, p: Array, u: Array) -> Array:
        reached = (p + u).astype(a.dtype)
        return a + share.astype(a.dtype) * (reached - a)

    return jax.tree.map(mix, average, params, updates)


def averaged(params: PyTree, state: PyTree) -> PyTree:
    """The average of the iterates that `auto` keeps where it knows no end."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AutoState))
    found = [x for x in leaves if isinstance(x, AutoState)]
    if len(found) != 1 or not jax.tree.leaves(found[0].average):
        raise ValueError(
            "no average of the iterates is kept here: only meka.auto() without "
            "total_steps keeps one; evaluate the parameters themselves"
        )
    return tree.cast_like(found[0].average, params)
