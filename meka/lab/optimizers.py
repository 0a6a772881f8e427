"""The optimizers of the bench: one table of names, grids and builders.

`TABLE` can be read, and a choice checked, without importing jax; `make` builds what the
training loop drives. A row is a builder, whose keyword-only parameters are the options
a user may give, and the grid it is tuned over: the paper's (App. F) for its own
baselines, nothing for what tunes itself.

Rivals run at their published defaults. They log their loss, and their step size where
they have a single one, and nothing that would cost them time.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

PyTree = Any
Losses = Callable[[PyTree, PyTree], Any]
Rate = Callable[[Any], Any]
Transport = Literal["hessian_at_current", "hessian_at_previous", "difference"]
ProbeName = Literal["current", "lagged"]

SCHEDULES = ("constant", "linear", "cosine")
"""Shapes of the learning rate over a run; the last two decay to zero."""


class OptimizerError(ValueError):
    """An optimizer was asked for that does not exist, or not like this."""


@dataclass(frozen=True)
class Method:
    """An optimizer as the training loop drives it. All functions are pure.

    Attributes:
        init: state from parameters.
        step: parameters, state and a minibatch to new parameters, new state and scalars
            to log, among them "loss", the mean over the minibatch.
        evaluate: the parameters to evaluate, from parameters and state.
        refresh_every: steps between calls of ``refresh``, the first before step one.
        refresh: new state from parameters, state and a function that takes parameters
            to the gradient of the loss over the whole training set.
    """

    init: Callable[[PyTree], PyTree]
    step: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, dict[str, Any]]]
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


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        name: as users type it.
        summary: one line.
        grid: learning rates to search; empty for what tunes itself.
        default: learning rate when none is given; None for what takes none.
        build: from losses, a `Plan` and options to a `Method`.
        tuned: whether it needs its learning rate searched.
        options: names of further options, with their types.
        schedule: the shape of its learning rate when none is given.
        schedules: the shapes it can take.
    """

    name: str
    summary: str
    grid: tuple[float, ...]
    default: float | None
    build: Callable[..., Method]
    tuned: bool
    options: Mapping[str, Any]
    schedule: str = "constant"
    schedules: tuple[str, ...] = SCHEDULES


def make(
    name: str,
    losses: Losses,
    *,
    steps: int,
    learning_rate: float | None = None,
    schedule: str | None = None,
    steps_per_epoch: int | None = None,
    **options: Any,
) -> Method:
    """Build an optimizer of the table.

    Args:
        name: a name of `TABLE`.
        losses: from parameters and a minibatch to one loss per example.
        steps: length of the run, over which schedules decay.
        learning_rate: None for the default.
        schedule: a name of `SCHEDULES`; None for the optimizer's own.
        steps_per_epoch: steps in one pass over the data; SVRG's snapshot interval.
        **options: options of this optimizer, see `Entry.options`.

    Raises:
        OptimizerError: anything is unknown or out of range; suggests the nearest name.
    """
    check(name, learning_rate=learning_rate, schedule=schedule, options=options)
    if steps < 1:
        raise OptimizerError(f"steps must be at least 1, not {steps}")
    entry = TABLE[name]
    rate = entry.default if learning_rate is None else float(learning_rate)
    plan = Plan(steps, rate, schedule or entry.schedule, steps_per_epoch)
    return entry.build(losses, plan, **options)


def check(
    name: str,
    *,
    learning_rate: float | None = None,
    schedule: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Refuse what `make` would refuse, without importing jax."""
    if name not in TABLE:
        raise OptimizerError(_unknown("optimizer", name, TABLE))
    entry = TABLE[name]
    if learning_rate is not None:
        if entry.default is None:
            raise OptimizerError(
                f"{name} chooses its own step size and takes no learning rate; "
                f"{name.split('-')[0]}-constant takes one"
            )
        _check_number("learning_rate", learning_rate, float)
        if learning_rate == 0:
            raise OptimizerError("learning_rate must be positive, not 0")
    if schedule is not None and schedule not in entry.schedules:
        if schedule not in SCHEDULES:
            raise OptimizerError(_unknown("schedule", schedule, SCHEDULES))
        raise OptimizerError(
            f"{name} takes no {schedule} schedule, only {', '.join(entry.schedules)}"
        )
    known = entry.options
    for option, value in (options or {}).items():
        if option not in known:
            raise OptimizerError(_unknown(f"option of {name}", option, known))
        _check_option(option, value, known[option])


def _unknown(what: str, name: object, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(known) or 'none'})"


_FRACTIONS = re.compile(r"momentum|b1|b2|beta|rho|decay|(?!weight)\w+_decay")


def _check_option(name: str, value: Any, hint: Any) -> None:
    parts = get_args(hint) if get_origin(hint) is not Literal else ()
    kinds = parts or (hint,)  # the parts of a union
    if value is None:
        if NoneType not in kinds:
            raise OptimizerError(f"{name} needs a value")
        return
    kind = next(kind for kind in kinds if kind is not NoneType)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise OptimizerError(_unknown(name, value, get_args(kind)))
    elif kind is bool:
        if not isinstance(value, bool):
            raise OptimizerError(f"{name} must be true or false, not {value!r}")
    else:
        _check_number(name, value, kind)
        if kind is int and value == 0 and name != "warmup_steps":
            raise OptimizerError(f"{name} must be at least 1, not 0")
        if _FRACTIONS.fullmatch(name) and value >= 1:
            raise OptimizerError(f"{name} must be below 1, not {value!r}")


def _check_number(name: str, value: Any, kind: type) -> None:
    kinds, words = (int, "whole number") if kind is int else (int | float, "number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise OptimizerError(f"{name} must be a {words}, not {value!r}")
    if not (value >= 0 and math.isfinite(value)):
        raise OptimizerError(f"{name} must be finite and not negative, not {value!r}")


# Driving optax ------------------------------------------------------------------------


class Driven(NamedTuple):
    """State of an optax optimizer, and how many steps it has done."""

    count: Any
    inner: Any


def _drive(
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
        params: PyTree, state: Driven, batch: PyTree
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


def _rival(
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
    return _drive(losses, optimizer, measure)


def _mechanic(losses: Losses, plan: Plan) -> Method:
    import optax
    from optax import contrib

    # It learns the scale of Adam's updates; the rate only gives them a shape in time.
    rate = plan.rate()
    optimizer = contrib.mechanize(optax.adam(rate))
    return _drive(losses, optimizer, lambda count, state: rate(count) * state.s.sum())


def _distance_over_gradients(state: Any) -> Any:
    import optax

    gradients = optax.tree.get(state, "sum_sq_norm_grads")
    return optax.tree.get(state, "max_dist") / (gradients + 1e-8) ** 0.5


def _distance_over_weighted_gradients(state: Any) -> Any:
    import optax

    gradients = optax.tree.get(state, "weighted_sq_norm_grads")
    return optax.tree.get(state, "estim_sq_dist") / (gradients**0.5 + 1e-4)


def _nadamw(
    losses: Losses,
    plan: Plan,
    *,
    weight_decay: float = 1e-4,
    warmup_steps: int | None = None,
) -> Method:
    import optax

    rate = plan.rate(plan.steps // 20 if warmup_steps is None else warmup_steps)
    optimizer = optax.nadamw(rate, weight_decay=weight_decay)
    return _drive(losses, optimizer, lambda count, _: rate(count))


def _schedule_free_adamw(
    losses: Losses,
    plan: Plan,
    *,
    b1: float = 0.9,
    weight_decay: float = 0.0,
    warmup_steps: int | None = None,
) -> Method:
    from optax import contrib

    warmup = plan.steps // 20 if warmup_steps is None else warmup_steps
    rate = plan.rate(warmup)
    optimizer = contrib.schedule_free_adamw(
        plan.learning_rate or 0.0,
        warmup_steps=warmup or None,
        b1=b1,
        weight_decay=weight_decay,
    )
    return _drive(
        losses,
        optimizer,
        lambda count, _: rate(count),
        lambda params, state: contrib.schedule_free_eval_params(state, params),
    )


def _svrg(losses: Losses, plan: Plan, *, refresh_every: int | None = None) -> Method:
    import jax.numpy as jnp

    from meka.lab import svrg

    rate = plan.rate()

    def step(
        params: PyTree, state: svrg.SvrgState, batch: PyTree
    ) -> tuple[PyTree, svrg.SvrgState, dict[str, Any]]:
        step_size = jnp.asarray(rate(state.count), jnp.float32)
        params, state, loss = svrg.step(losses, rate, params, state, batch)
        return params, state, {"loss": loss, "step_size": step_size}

    # A snapshot an epoch; where an epoch has no length, about as many as MNIST has.
    every = refresh_every or plan.steps_per_epoch or 500
    return Method(svrg.init, step, _themselves, every, svrg.refresh)


# Ours ---------------------------------------------------------------------------------


def _ours(
    family: str,
    rule: str,
    losses: Losses,
    plan: Plan,
    *,
    groups: int | None = None,
    transport: Transport | None = None,
    probe: ProbeName | None = None,
    micro_batches: int | None = None,
    scale: float = 1.0,
    diagonal: bool | None = None,
    decay: float | None = None,
    value_decay: float | None = None,
    noise_decay: float | None = None,
    model_decay: float | None = None,
    third_order: float | None = None,
    prior_variance: float | None = None,
) -> Method:
    """Build meka or adameka. None leaves an option to the library's default."""
    import meka

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
            transport=transport and getattr(meka, transport),
            probe=probe and getattr(meka, probe),
        ),
    )

    def step(
        params: PyTree, state: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Any]]:
        params, state, info = stepper(params, state, batch)
        scalars = _scalars(info)
        return params, state, {"loss": scalars.pop("observed"), **scalars}

    return Method(optimizer.init, step, _themselves)


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


# The table ----------------------------------------------------------------------------

_SGD = (0.001, 0.01, 0.1, 1.0)
_ADAM = (0.0001, 0.001, 0.01, 0.1)


def _entry(
    name: str,
    summary: str,
    grid: tuple[float, ...],
    default: float | None,
    build: Callable[..., Method],
    **more: Any,
) -> Entry:
    """A row whose options are the keyword-only parameters of its builder."""
    function = build.func if isinstance(build, functools.partial) else build
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
    return Entry(name, summary, grid, default, build, bool(grid), options, **more)


def _optax(
    name: str,
    summary: str,
    grid: tuple[float, ...],
    default: float,
    path: str,
    step_size: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Entry:
    """A row for ``optax.<path>``; ``options`` have the types of their defaults."""
    build = functools.partial(_rival, path, step_size, **options)
    kinds = {option: type(value) for option, value in options.items()}
    return Entry(name, summary, grid, default, build, bool(grid), kinds)


def _rate_alone(state: Any) -> float:
    del state
    return 1.0


def _estimate(state: Any) -> Any:
    return state.estim_lr


def _family(
    family: str, words: str, grid: tuple[float, ...], default: float
) -> list[Entry]:
    def row(suffix: str, rule: str, step: str) -> Entry:
        fixed = rule == "constant"
        build = functools.partial(_ours, family, rule)
        summary = f"{words}; {step}"
        if not fixed:
            return _entry(family + suffix, summary, (), None, build)
        return _entry(family + suffix, summary, grid, default, build)

    return [
        row("", "probability_of_improvement", "the most probable improvement"),
        row("-ei", "expected_improvement", "the largest expected improvement"),
        row("-quadratic", "quadratic", "the minimum of the quadratic model"),
        row("-constant", "constant", "a constant step"),
    ]


_ROWS = (
    *_family("meka", "filtered gradient", _SGD, 0.1),
    *_family("adameka", "filtered gradient, Adam-style", _ADAM, 0.001),
    _optax("sgd", "stochastic gradient descent", _SGD, 0.1, "sgd", _rate_alone),
    _optax("momentum", "SGD, momentum", _ADAM, 0.01, "sgd", _rate_alone, momentum=0.9),
    _optax(
        "adam", "Adam", _ADAM, 0.001, "adam", _rate_alone, b1=0.9, b2=0.999, eps=1e-8
    ),
    _entry(
        "nadamw",
        "NAdamW; warm-up over a twentieth of the run, then cosine",
        (0.0001, 0.001, 0.01),
        0.001,
        _nadamw,
        schedule="cosine",
    ),
    _entry("svrg", "variance-reduced SGD, full gradient an epoch", _SGD, 0.1, _svrg),
    _optax("adadelta", "AdaDelta", (), 1.0, "adadelta", rho=0.95, eps=1e-6),
    _optax(
        "prodigy",
        "Prodigy: D-Adaptation that adapts faster",
        (),
        1.0,
        "contrib.prodigy",
        _estimate,
        weight_decay=0.0,
    ),
    _optax(
        "dadapt-adamw",
        "AdamW by D-Adaptation",
        (),
        1.0,
        "contrib.dadapt_adamw",
        _estimate,
        weight_decay=0.0,
    ),
    _optax(
        "dog",
        "distance over gradients; its authors evaluate an average",
        (),
        1.0,
        "contrib.dog",
        _distance_over_gradients,
    ),
    _optax(
        "dowg",
        "distance over weighted gradients",
        (),
        1.0,
        "contrib.dowg",
        _distance_over_weighted_gradients,
    ),
    _entry("mechanic", "Mechanic: learns the scale of Adam", (), 1.0, _mechanic),
    _optax(
        "momo",
        "momentum with Polyak-type steps, for losses bounded by zero",
        (),
        1.0,
        "contrib.momo",
        adapt_lower_bound=False,
    ),
    _optax(
        "momo-adam",
        "Adam with Polyak-type steps, for losses bounded by zero",
        (),
        0.01,
        "contrib.momo_adam",
        adapt_lower_bound=False,
    ),
    _entry(
        "schedule-free-adamw",
        "Schedule-Free AdamW, warmed up and evaluated at its average",
        (),
        0.0025,
        _schedule_free_adamw,
        schedules=("constant",),
    ),
)

TABLE: dict[str, Entry] = {entry.name: entry for entry in _ROWS}
"""Every optimizer of the bench by name."""
