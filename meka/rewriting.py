"""Functions with some of their operations done otherwise."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax.extend import core

T = TypeVar("T")

# Functions that are called, and may as well be written out.
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


class Instead(NamedTuple):
    """What is done in the place of operations: ``run`` makes outvars of invars."""

    invars: list[Any]
    outvars: list[Any]
    run: Callable[..., Sequence[Any]]


Steps: TypeAlias = list[core.JaxprEqn | Instead]
# What a program's operations are replaced by; those that are called see to themselves.
Rewrite: TypeAlias = Callable[[core.Jaxpr], Steps]


def rewritten(function: Callable[..., T], rewrite: Rewrite) -> Callable[..., T]:
    """The same function, operations replaced as ``rewrite`` says."""

    def otherwise(*given: Any) -> T:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*given)
        leaves = jax.tree.leaves(given)
        steps = _steps(program.jaxpr, rewrite)
        if any(isinstance(step, Instead) for step in steps):
            results = _run(program.jaxpr, steps, program.consts, leaves)
        else:
            results = core.jaxpr_as_fun(program)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return otherwise


def _steps(program: core.Jaxpr, rewrite: Rewrite) -> Steps:
    """A program's operations, and what is done instead of some."""
    return [
        step if isinstance(step, Instead) else _within(step, rewrite)
        for step in rewrite(program)
    ]


def _within(equation: core.JaxprEqn, rewrite: Rewrite) -> core.JaxprEqn | Instead:
    """A call is written out if anything in it is done otherwise."""
    called = _called(equation)
    if called is None:
        return equation
    steps = _steps(called.jaxpr, rewrite)
    if not any(isinstance(step, Instead) for step in steps):
        return equation

    def run(*given: Any) -> list[Any]:
        return _run(called.jaxpr, steps, called.consts, given)

    return Instead(equation.invars, equation.outvars, run)


def _called(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The function that is called here, if it is written out."""
    if equation.primitive.name not in _CALLS:
        return None
    names = ("jaxpr", "call_jaxpr")
    found = [equation.params[name] for name in names if name in equation.params]
    return found[0] if found and isinstance(found[0], core.ClosedJaxpr) else None


def _run(
    program: core.Jaxpr, steps: Steps, constants: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    """Take a program's steps; what is as it was, as much of it at once as can be."""
    known: dict[core.Var, Any] = dict(zip(program.constvars, constants, strict=True))
    known.update(zip(program.invars, given, strict=True))

    def values(names: Sequence[Any]) -> list[Any]:
        return [x.val if isinstance(x, core.Literal) else known[x] for x in names]

    last = len(steps)
    used = {x: last for x in program.outvars if isinstance(x, core.Var)}
    for place in reversed(range(last)):
        for x in steps[place].invars:
            if isinstance(x, core.Var):
                used.setdefault(x, place)
    for kind, part in groupby(enumerate(steps), lambda step: type(step[1])):
        places, several = zip(*part, strict=True)
        if kind is Instead:
            for step in several:
                known.update(
                    zip(step.outvars, step.run(*values(step.invars)), strict=True)
                )
            continue
        inner = {x for step in several for x in step.outvars}
        free = [x for step in several for x in step.invars if isinstance(x, core.Var)]
        names = list(dict.fromkeys(x for x in free if x not in inner))
        results = [x for x in inner if used.get(x, -1) > places[-1]]
        plain = program.replace(
            constvars=[],
            invars=names,
            outvars=results,
            eqns=list(several),
            effects=set().union(*(step.effects for step in several)),
        )
        call = core.jaxpr_as_fun(core.ClosedJaxpr(plain, []))
        known.update(zip(results, call(*values(names)), strict=True))
    return values(program.outvars)
