"""How the training loop drives an optimizer: `Method`, and the builders of methods.

A builder's keyword-only parameters are the options a user may give. jax is imported
only when something is built.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PyTree = Any
Losses = Callable[[PyTree, PyTree], Any]
Rate = Callable[[Any], Any]
Transport = Literal["hessian_at_current", "hessian_at_previous", "difference"]
ProbeName = Literal["current", "lagged"]


@dataclass(frozen=True)
class Method:
    """An optimizer as the training loop drives it. All functions are pure.

    Attributes:
        init: state from parameters.
        step: parameters, state, a minibatch and the number of the step (None: as
            counted in the state) to new parameters, new state and scalars to log,
            among them "loss", the mean over the minibatch.
        evaluate: the parameters to evaluate, from parameters and state.
        refresh_every: steps between calls of ``refresh``, the first before step one.
        refresh: new state from parameters, state and a function that takes parameters
            to the gradient of the loss over the whole training set.
    """

    init: Callable[[PyTree], PyTree]
    step: Callable[..., tuple[PyTree, PyTree, dict[str, Any]]]
    evaluate: Callable[[PyTree, PyTree], PyTree]
    refresh_every: int | None = None
    refresh: Callable[[PyTree, PyTree, Callable[[PyTree], PyTree]], PyTree] | None = (
        None
    )


@dataclass(frozen=True)
class Plan:
    """What a builder may know about the run."""

    steps: int
    learning_rate: float | None
    schedule: str
    steps_per_epoch: int | None = None

    def rate(self, warmup: int = 0) -> Rate:
        """Return the learning rate, by the number of steps done; 1 if there is none."""
        import jax.numpy as jnp
        import optax

        peak = 1.0 if self.learning_rate is None else self.learning_rate
        rest = max(self.steps - warmup, 1)
        shape = {
            "constant": optax.constant_schedule(peak),
            "linear": optax.linear_schedule(peak, 0.0, rest),
            "cosine": optax.cosine_decay_schedule(peak, rest),
        }[self.schedule]
        if warmup:
            rise = optax.linear_schedule(peak / warmup, peak, warmup)
            shape = optax.join_schedules([rise, shape], [warmup])
        # Compiled, the end of a decay may come out a rounding error below zero.
        return lambda count: jnp.maximum(shape(count), 0.0)


class Driven(NamedTuple):
    """State of an optax optimizer, and how many steps it has done."""

    count: Any
    inner: Any


def drive(
    losses: Losses,
    optimizer: Any,
    step_size: Callable[[Any, Any], Any] | None = None,
    evaluate: Callable[[PyTree, PyTree], PyTree] | None = None,
) -> Method:
    """Make an optax optimizer a `Method`.

    ``step_size(count, state)`` is the step size to log, of the state after the step.
    """
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> Driven:
        # Copies, because some keep the first parameters: those and the parameters must
        # not share a buffer if both are donated. The dtype makes them strongly typed.
        state = jax.tree.map(
            lambda x: jnp.array(x, dtype=jnp.asarray(x).dtype, copy=True),
            optimizer.init(params),
        )
        return Driven(jnp.zeros((), jnp.int32), state)

    def step(
        params: PyTree, state: Driven, batch: PyTree, number: Any = None
    ) -> tuple[PyTree, Driven, dict[str, Any]]:
        value, gradient = jax.value_and_grad(
            lambda params: jnp.mean(losses(params, batch))
        )(params)
        # optax mixes dtypes; a user who asks for strictness means their own code.
        with jax.numpy_dtype_promotion("standard"):
            updates, inner = optimizer.update(
                gradient, state.inner, params, value=value
            )
            params = optax.apply_updates(params, updates)
            size = None if step_size is None else step_size(state.count, inner)
        scalars = {"loss": value}
        if size is not None:
            scalars["step_size"] = jnp.asarray(size, jnp.float32)
        return params, Driven(state.count + 1, inner), scalars

    if evaluate is None:
        return Method(init, step, _themselves)
    return Method(init, step, lambda params, state: evaluate(params, state.inner))


def _themselves(params: PyTree, state: PyTree) -> PyTree:
    """Evaluate the parameters that are trained, as most optimizers do."""
    del state
    return params


def rival(
    path: str,
    step_size: Callable[[Any], Any] | None,
    losses: Losses,
    plan: Plan,
    **options: Any,
) -> Method:
    """Build ``optax.<path>``. Its step size is the rate times ``step_size(state)``."""
    import optax
    import optax.contrib

    rate = plan.rate()
    optimizer = operator.attrgetter(path)(optax)(rate, **options)
    measure = step_size and (lambda count, state: rate(count) * step_size(state))
    return drive(losses, optimizer, measure)


def mechanic(losses: Losses, plan: Plan) -> Method:
    """Build Mechanic around Adam."""
    import optax
    from optax import contrib

    # It learns the scale of Adam's updates; the rate only gives them a shape in time.
    rate = plan.rate()
    optimizer = contrib.mechanize(optax.adam(rate))
    return drive(losses, optimizer, lambda count, state: rate(count) * state.s.sum())


def distance_over_gradients(state: Any) -> Any:
    """DoG's step size."""
    import optax

    gradients = optax.tree.get(state, "sum_sq_norm_grads")
    return optax.tree.get(state, "max_dist") / (gradients + 1e-8) ** 0.5


def distance_over_weighted_gradients(state: Any) -> Any:
    """DoWG's step size."""
    import optax

    gradients = optax.tree.get(state, "weighted_sq_norm_grads")
    return optax.tree.get(state, "estim_sq_dist") / (gradients**0.5 + 1e-4)


def nadamw(
    losses: Losses,
    plan: Plan,
    *,
    weight_decay: float = 1e-4,
    warmup_steps: int | None = None,
) -> Method:
    """Build NAdamW, warmed up."""
    import optax

    rate = plan.rate(plan.steps // 20 if warmup_steps is None else warmup_steps)
    optimizer = optax.nadamw(rate, weight_decay=weight_decay)
    return drive(losses, optimizer, lambda count, _: rate(count))


def schedule_free_adamw(
    losses: Losses,
    plan: Plan,
    *,
    b1: float = 0.9,
    weight_decay: float = 0.0,
    warmup_steps: int | None = None,
) -> Method:
    """Build Schedule-Free AdamW, evaluated at its average."""
    from optax import contrib

    warmup = plan.steps // 20 if warmup_steps is None else warmup_steps
    rate = plan.rate(warmup)
    optimizer = contrib.schedule_free_adamw(
        plan.learning_rate or 0.0,
        warmup_steps=warmup or None,
        b1=b1,
        weight_decay=weight_decay,
    )
    return drive(
        losses,
        optimizer,
        lambda count, _: rate(count),
        lambda params, state: contrib.schedule_free_eval_params(state, params),
    )


def svrg(losses: Losses, plan: Plan, *, refresh_every: int | None = None) -> Method:
    """Build SVRG with a snapshot every so many steps, by default an epoch."""
    import jax.numpy as jnp

    from meka.lab import svrg as variance_reduction

    rate = plan.rate()

    def step(
        params: PyTree,
        state: variance_reduction.SvrgState,
        batch: PyTree,
        number: Any = None,
    ) -> tuple[PyTree, variance_reduction.SvrgState, dict[str, Any]]:
        step_size = jnp.asarray(rate(state.count), jnp.float32)
        params, state, loss = variance_reduction.step(
            losses, rate, params, state, batch
        )
        return params, state, {"loss": loss, "step_size": step_size}

    # A snapshot an epoch; where an epoch has no length, about as many as MNIST has.
    every = refresh_every or plan.steps_per_epoch or 500
    return Method(
        variance_reduction.init, step, _themselves, every, variance_reduction.refresh
    )


def ours(
    family: str,
    rule: str,
    losses: Losses,
    plan: Plan,
    *,
    groups: int | None = None,
    transport: Transport | None = None,
    probe: ProbeName | None = None,
    micro_batches: int | None = None,
    noise_every: int | None = None,
    scale: float = 1.0,
    diagonal: bool | None = None,
    decay: float | None = None,
    value_decay: float | None = None,
    noise_decay: float | None = None,
    model_decay: float | None = None,
    third_order: float | None = None,
    prior_variance: float | None = None,
) -> Method:
    """Build meka or adameka. None leaves an option to the library's default.

    A constant step needs no probe, so it takes the one that costs nothing.
    """
    import meka

    if probe is None and rule == "constant":
        probe = "lagged"

    if rule == "constant":
        chosen = meka.constant(plan.rate())
    elif plan.schedule == "constant":
        chosen = getattr(meka, rule)
    else:
        chosen = meka.scaled(getattr(meka, rule), plan.rate())
    if scale != 1:
        chosen = meka.scaled(chosen, scale)
    optimizer = getattr(meka, family)(
        rule=chosen,
        **_given(
            diagonal=diagonal,
            value_decay=decay if value_decay is None else value_decay,
            noise_decay=decay if noise_decay is None else noise_decay,
            model_decay=decay if model_decay is None else model_decay,
            third_order=third_order,
            prior_variance=prior_variance,
        ),
    )
    stepper = meka.make_step(
        losses,
        optimizer,
        **_given(
            groups=groups,
            micro_batches=micro_batches,
            noise_every=noise_every,
            transport=transport and getattr(meka, transport),
            probe=probe and getattr(meka, probe),
        ),
    )

    return Method(optimizer.init, _stepping(stepper), _themselves)


def auto(
    losses: Losses,
    plan: Plan,
    *,
    groups: int | None = None,
    transport: Transport | None = None,
    micro_batches: int | None = None,
    noise_every: int | None = None,
) -> Method:
    """Build meka.auto; a run without a schedule has no known end."""
    import meka

    ends = plan.schedule != "constant"
    optimizer = meka.auto(plan.steps if ends else None)
    stepper = meka.make_step(
        losses,
        optimizer,
        **_given(
            groups=groups,
            micro_batches=micro_batches,
            noise_every=noise_every,
            transport=transport and getattr(meka, transport),
        ),
    )
    step = _stepping(stepper, lambda state: {"distance": state.scale.distance})
    evaluate = _themselves if ends else meka.averaged
    return Method(optimizer.init, step, evaluate)


def _stepping(
    stepper: Callable[..., Any], more: Callable[[Any], dict[str, Any]] = lambda _: {}
) -> Callable[..., tuple[PyTree, PyTree, dict[str, Any]]]:
    """A step of the library's as the loop wants it."""

    def step(
        params: PyTree, state: PyTree, batch: PyTree, number: Any = None
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        params, state, info = stepper(params, state, batch, number=number)
        scalars = _scalars(info)
        logs = {"loss": scalars.pop("observed"), **scalars, **more(state)}
        return params, state, logs

    return step


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _scalars(info: Any, prefix: str = "") -> dict[str, Any]:
    """The numbers of a NamedTuple by name, those of an inner one as ``outer.inner``."""
    found: dict[str, Any] = {}
    for name, value in info._asdict().items():
        if hasattr(value, "_asdict"):
            found |= _scalars(value, f"{prefix}{name}.")
        elif hasattr(value, "dtype"):
            found[prefix + name] = value
    return found
