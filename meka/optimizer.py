"""The algorithm: one `update` that reads like the paper's Algorithm 1."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from meka import tree
from meka.choice import choose, third_order_term
from meka.direction import Direction, adam_style, steepest
from meka.gaussian import (
    Gaussian,
    Moments,
    average_variance,
    correct,
    predict,
    quadratic_form,
)
from meka.improvement import Rule, probability_of_improvement
from meka.lasting import look_along, unlearn
from meka.observation import Closer, Observation, settle
from meka.overshoot import ends, forget, second_thoughts
from meka.packing import Own
from meka.probe import Probe, Scene
from meka.state import Held, Info, State, initial_state
from meka.tree import Array, PyTree

# Of the average, over measurements, of noise that is not measured at every step.
_HELD_DECAY = 0.9


def scale_by_meka(
    rule: Rule | None = probability_of_improvement,
    direction: Direction = steepest,
    *,
    value_decay: float = 0.999,
    noise_decay: float = 0.999,
    model_decay: float = 0.999,
    lasting: bool = False,
    diagonal: bool = False,
    third_order: float | None = None,
    prior_variance: float = float("inf"),
) -> optax.GradientTransformationExtraArgs:
    """The step in the sign of the gradient, as every optax ``scale_by_*``.

    For use inside ``optax.chain``, followed by ``optax.scale(-1.0)``; put it first,
    since it measures the gradient itself and ignores the updates it is given. The
    displacement it models is the one that was really applied to the parameters.

    Args:
      rule: the step size from the improvement model; None for no step at all, by
        whoever only wants to know what the filter sees.
      direction: the direction from the belief about the gradient.
      value_decay: decay of the average of r, the noise of the loss (β_r).
      noise_decay: decay of the average of Σ, the noise of the gradient (β_Σ).
      model_decay: decay of the average of the improvement model (β_α).
      lasting: choose the gain for errors that add up over the run (`meka.lasting`)
        instead of the error of the moment (the paper), and do without the filter where
        it does not pay.
      diagonal: one variance per coordinate instead of one for all.
      third_order: None leaves the third-order term of App. B.2 out; a number includes
        it with this lower bound on λ/|δ|⁶ (0 for the inferred value alone).
      prior_variance: P_0 and s_0. The default, infinity, makes the first gain
        exactly one at every scale of the loss; the paper has 10⁴.
    """
    _check_decays(
        value_decay=value_decay,
        noise_decay=noise_decay,
        model_decay=model_decay,
    )
    if lasting and diagonal:
        raise ValueError("lasting=True: needs one variance for all coordinates")
    if third_order is not None and not third_order >= 0:
        raise ValueError(f"third_order={third_order}: must be None or >= 0")
    if not prior_variance > 0:
        raise ValueError(f"prior_variance={prior_variance}: must be positive")

    def init(params: PyTree) -> State:
        return initial_state(
            params,
            diagonal=diagonal,
            prior_variance=prior_variance,
            lasting=lasting,
            steps=rule is not None,
        )

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        observation: Observation | None = None,
        probe: Callable[[Scene], Probe] | None = None,
        closer: Closer | None = None,
        displacement: PyTree | None = None,
        **extra: object,
    ) -> tuple[PyTree, State]:
        del updates, extra
        observation, probe, params = _require(observation, probe, params)
        observation = settle(observation, closer)
        _check_structure(state, observation)
        if displacement is None:
            displacement = tree.subtract(
                tree.widen(params), tree.widen(state.previous_params)
            )

        # Observe: noise is averaged over time (MeanVarEMA of Alg. 1).
        value_noise = state.value_noise.add(observation.value.variance, value_decay)
        observation, held = _hold(state.held, observation)
        gradient_noise = state.gradient_noise.add(
            observation.gradient.variance, noise_decay
        )
        y = Moments(observation.value.mean, value_noise.mean)
        g = Moments(observation.gradient.mean, gradient_noise.mean)
        change, path = observation.change, observation.path
        errors = state.lasting
        if lasting:
            errors, noise = look_along(errors, noise_decay, observation, g.variance)
            change = Moments(change.mean, noise)

        # Filter: the value first, since it is moved by the old gradient.
        predicted = predict(state.gradient, change)
        # Not g - (m + Bδ): written so, the sum would be stored for both who need it.
        surprise = tree.subtract(
            tree.subtract(g.mean, state.gradient.mean), change.mean
        )
        straight = direction is steepest and not diagonal
        pairs = _parts_of_the_norm(state, change.mean, g.mean) if straight else ()
        along, surprise_square, *parts = tree.dots(
            (state.gradient.mean, displacement), (surprise, surprise), *pairs
        )
        moved = path.length**2
        known = _finite(state.gradient.variance)
        slope_variance = quadratic_form(known, displacement, moved)
        value, model_error, innovation = filter_value(
            state.value,
            y,
            rise=along + path.curvature.mean * moved / 2,
            spread=slope_variance
            + quadratic_form(change.variance, displacement, moved) / 4,
        )
        last = ends(
            path,
            along,
            noise=tree.size(g.mean)
            * (average_variance(known, g.mean) + average_variance(g.variance, g.mean)),
            change_noise=tree.size(g.mean) * average_variance(change.variance, g.mean),
        )
        believed = predicted
        if lasting:
            errors, believed = unlearn(
                errors,
                predicted,
                change.variance,
                g.variance,
                state.count,
                observation,
            )
        gradient, gain = correct(forget(believed, last.strayed), g)

        # Aim.
        heading = direction(gradient)
        if straight:
            square = gradient_square = _norm_of_the_mix(gain, *parts)
            descent = -square
        else:
            square, descent, gradient_square = tree.dots(
                (heading, heading),
                (heading, gradient.mean),
                (gradient.mean, gradient.mean),
            )
        heading_norm = jnp.sqrt(square)

        # Probe, and step.
        steps, told = state.steps, {}
        if rule is None:
            step_size = jnp.zeros_like(heading_norm)
        else:
            scene = Scene(
                heading,
                Moments(-descent, quadratic_form(gradient.variance, heading, square)),
                observation,
                steps.direction_norm,
                tree.per_square(slope_variance, path.length),
                heading_norm,
                steps.bend,
            )
            seen = second_thoughts(probe(scene), last, scene)
            step_size, model, steps = choose(
                rule,
                steps,
                scene,
                seen,
                value_variance=value.variance,
                third_order=third_order_term(
                    third_order, model_error, path.length, heading_norm
                ),
                count=state.count,
                decay=model_decay,
                restart=last.overshot,
            )
            told = {
                "slope": seen.slope,
                "curvature": seen.curvature,
                "model": model,
                "improvement_probability": model.probability(step_size),
                "predicted_change": model.mean(step_size),
            }
        scalars = {
            "gradient_norm": jnp.sqrt(gradient_square),
            **_spreads(g, gradient, change, predicted, surprise_square),
        }
        info = state.info._replace(
            step_size=step_size,
            gain=average_variance(gain, gradient.mean),
            value=value.mean,
            value_variance=value.variance,
            observed=y.mean,
            observed_variance=y.variance,
            model_error=model_error,
            innovation=innovation,
            direction_norm=heading_norm,
            displacement_norm=path.length,
            noise_scale=tree.ratio(
                observation.count
                * scalars["gradient_noise"]
                * tree.size(gradient.mean),
                scalars["gradient_norm"] ** 2,
            ),
            suspect=jnp.full((), -1, jnp.int32),
            accepted=jnp.ones((), bool),
            overshot=state.info.overshot + last.overshot.astype(jnp.int32),
            **scalars,
            **told,
        )
        new = State(
            count=state.count + 1,
            value=value,
            gradient=gradient,
            previous_params=tree.cast_like(params, params),  # not of a weak type
            value_noise=value_noise,
            gradient_noise=gradient_noise,
            lasting=errors,
            held=held,
            steps=steps,
            info=info,
        )
        accepted = _sound(info, observation, step_size * heading_norm)
        kept = tree.select(accepted, new, refused(state, observation))
        if straight:  # read from where it is kept, instead of made twice
            heading = direction(kept.gradient)
        return _updates(accepted, heading, step_size, params), kept

    return optax.GradientTransformationExtraArgs(init, update)


def meka(
    rule: Rule = probability_of_improvement, **options
) -> optax.GradientTransformationExtraArgs:
    """Steps along the filtered gradient, as long as they most probably help.

    Use with `meka.make_step`. Options are those of `scale_by_meka`.
    """
    return _descend(scale_by_meka(rule, steepest, **options))


def adameka(
    rule: Rule = probability_of_improvement, *, epsilon: float = 1e-8, **options
) -> optax.GradientTransformationExtraArgs:
    """As `meka`, with every coordinate divided by its root second moment (§2.3)."""
    return _descend(scale_by_meka(rule, adam_style(epsilon), **options))


def _descend(ascent: optax.GradientTransformationExtraArgs) -> Own:
    return Own(*optax.chain(ascent, optax.scale(-1.0)))


def filter_value(
    belief: Gaussian, y: Moments, rise: Array, spread: Array
) -> tuple[Gaussian, Array, Array]:
    """The function value's filter, with the model error λ of App. B.1.

    f_t | f_{t-1} ~ N(f_{t-1} + rise, λ + spread) with rise = m'δ + ½ δ'Bδ and
    spread = δ'Pδ + ¼ δ'Qδ. The λ that makes y_t most likely is max(0, (y - u⁻)² - c),
    where c is the variance of y without it.
    """
    expected = belief.variance + spread + y.variance
    surprise = (y.mean - (belief.mean + rise)) ** 2
    model_error = jnp.maximum(surprise - expected, 0)
    moved = predict(belief, Moments(rise, spread + model_error))
    value, _ = correct(moved, y)
    return value, model_error, tree.ratio(surprise, expected)


def _hold(held: Held, observation: Observation) -> tuple[Observation, Held]:
    """Fill in the noise of gradient, change and curvature where it was not measured.

    That of the gradient is taken to be as it last was, and so is the curvature itself
    where the change was not measured. The other two, per unit of displacement, follow
    from the curvature of single examples: they move slowly and lie in few directions,
    so that one measurement says little, and what stands for many steps is an average
    of several.
    """
    gradient, change, path = observation.gradient, observation.change, observation.path
    if observation.measured is True:
        return observation, held
    measured = jnp.asarray(observation.measured)
    ratio = tree.per_square(change.variance, path.length)
    usable = measured & (path.length > 0) & jnp.isfinite(ratio)
    fresh = held.path.add((ratio, path.curvature.variance), _HELD_DECAY)
    known = jnp.asarray(observation.followed)
    bend = jnp.where(known, path.curvature.mean, held.curvature)
    held = Held(
        jnp.where(measured, gradient.variance, held.gradient),
        tree.select(usable, fresh, held.path),
        bend,
    )
    ratio, spread = held.path.mean
    slope = jnp.where(known, 0, bend * path.length) + path.slope.mean
    path = path._replace(
        slope=Moments(slope, path.slope.variance), curvature=Moments(bend, spread)
    )
    observation = observation._replace(
        gradient=Moments(gradient.mean, held.gradient),
        change=Moments(change.mean, ratio * path.length**2),
        path=path,
    )
    return observation, held


def _spreads(
    g: Moments, gradient: Gaussian, change: Moments, predicted: Gaussian, surprise
) -> dict[str, Array]:
    """The parts of `Info` that are averaged over coordinates."""
    noise = average_variance(g.variance, gradient.mean)
    prior = average_variance(predicted.variance, gradient.mean)
    return {
        "gradient_variance": average_variance(gradient.variance, gradient.mean),
        "gradient_noise": noise,
        "change_noise": average_variance(change.variance, gradient.mean),
        "gradient_innovation": tree.ratio(surprise / tree.size(g.mean), prior + noise),
    }


def _parts_of_the_norm(state: State, change: PyTree, observed: PyTree) -> tuple:
    """Whose inner products tell the norm of every mix of prediction and observation."""
    # Times one, which the compiler cannot know: the same sum as in the prediction would
    # be stored for both who need it, instead of summed as it comes.
    moved = tree.scale(state.count >= 0, change)
    predicted = jax.tree.map(jnp.add, state.gradient.mean, moved)
    return (predicted, predicted), (predicted, observed), (observed, observed)


def _norm_of_the_mix(gain: Array, before: Array, both: Array, seen: Array) -> Array:
    """|(1 - K) m⁻ + K g|², known before the mix itself is written anywhere."""
    keep = 1 - gain
    mixed = keep * (keep * before + 2 * gain * both) + gain * gain * seen
    return jnp.where(gain < 1, jnp.maximum(mixed, 0), seen)


def _sound(info: Info, observation: Observation, length: Array) -> Array:
    """Whether every number that decided this step is finite.

    Norms and traces of the new state are among them, so a single bad coordinate of
    the gradient or its change shows up here without another pass over it, and one of
    the parameters in the length of the last displacement. Where the step leads is
    finite if the square of its ``length`` is: that is too short to move the largest
    of numbers (`tree.is_wide`).
    """
    parts = [x for x in jax.tree.leaves(info) if jnp.issubdtype(x.dtype, jnp.inexact)]
    parts.append(length**2)
    finite = jnp.all(jnp.isfinite(jnp.stack([x.astype(length.dtype) for x in parts])))
    return finite & (observation.groups >= 2) & (info.step_size >= 0)


def refused(state: State, observation: Observation) -> State:
    """The state after a step that was not taken: as it was, and one more count."""
    info = state.info._replace(
        suspect=observation.suspect,
        accepted=jnp.zeros((), bool),
        rejected=state.info.rejected + 1,
    )
    return state._replace(info=info)


def _updates(accepted, heading, step_size, params) -> PyTree:
    """The step, or none."""
    step = jnp.where(accepted, -step_size, 0)
    return jax.tree.map(
        lambda d, p: jnp.where(accepted, step.astype(d.dtype) * d, 0).astype(p.dtype),
        heading,
        params,
    )


def _finite(variance: PyTree) -> PyTree:
    """Zero for the infinite prior, which no displacement has met yet."""
    return jax.tree.map(lambda v: jnp.where(jnp.isinf(v), 0, v), variance)


def _require(observation, probe, params):
    if observation is None or probe is None:
        raise ValueError(
            "meka needs to see the minibatch, not only its gradient: update() got no "
            "`observation` and `probe`. Let meka.make_step do it:\n\n"
            "    step = jax.jit(meka.make_step(losses, optimizer))\n"
            "    params, state, info = step(params, state, batch)\n\n"
            "or pass observation=meka.observe(losses, params, previous, batch) and "
            "probe=lambda scene: meka.current(scene, meka.curve(losses, params, batch))"
        )
    if params is None:
        raise ValueError("meka needs params: optimizer.update(grads, state, params, …)")
    return observation, probe, params


def _check_structure(state: State, observation: Observation) -> None:
    if not tree.same_structure(state.gradient.variance, observation.gradient.variance):
        raise ValueError(
            "the optimizer and the observation disagree on variances: one is diagonal, "
            "the other isotropic. Pass the same diagonal=… to both (make_step does)."
        )


def _check_decays(**decays: float) -> None:
    for name, decay in decays.items():
        if not 0 <= decay < 1:
            raise ValueError(f"{name}={decay}: must be in [0, 1)")
