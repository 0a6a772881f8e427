"""The optimizers of the bench: one table of names, grids and builders.

`TABLE` can be read, and a choice checked, without importing jax; `make` builds what the
training loop drives. A row is a builder from `meka.lab.methods`, and the grid it is
tuned over: the paper's (App. E) for its own baselines, nothing for what tunes itself.

Rivals run at their published defaults. They log their loss, and their step size where
they have a single one, and nothing that would cost them time.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meka.lab import methods
from meka.lab.methods import Losses, Method, Plan

SCHEDULES = ("constant", "linear", "cosine")
"""Shapes of the learning rate over a run; the last two decay to zero."""


class OptimizerError(ValueError):
    """An optimizer was asked for that does not exist, or not like this."""


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
        finite: whether it needs a finite training set, for full gradients.
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
    finite: bool = False


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
    build = functools.partial(methods.rival, path, step_size, **options)
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
        build = functools.partial(methods.ours, family, rule)
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
    _entry(
        "auto",
        "filtered gradient, as far as the distance says; meka.auto",
        (),
        None,
        methods.auto,
        schedule="linear",
        schedules=("linear", "constant"),
    ),
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
        methods.nadamw,
        schedule="cosine",
    ),
    _entry(
        "svrg",
        "variance-reduced SGD, full gradient an epoch",
        _SGD,
        0.1,
        methods.svrg,
        finite=True,
    ),
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
        methods.distance_over_gradients,
    ),
    _optax(
        "dowg",
        "distance over weighted gradients",
        (),
        1.0,
        "contrib.dowg",
        methods.distance_over_weighted_gradients,
    ),
    _entry("mechanic", "Mechanic: learns the scale of Adam", (), 1.0, methods.mechanic),
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
        methods.schedule_free_adamw,
        schedules=("constant",),
    ),
)

TABLE: dict[str, Entry] = {entry.name: entry for entry in _ROWS}
"""Every optimizer of the bench by name."""
