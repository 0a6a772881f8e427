"""Convolutions that are fast inside of a branch or a loop on a CPU, too.

XLA's CPU compiler has a fast convolution of images in the order of batch, rows,
columns, features, with kernels in that of rows, columns, inputs, outputs. It puts
others into that order where it finds them, but looks for them in the outermost
computation alone: inside of a `cond` or a `scan` they become plain loops, ten times as
slow. That is what happens to most, since derivatives of a convolution are convolutions
in another order, whatever the order of the model. So they are put into order here.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from meka import tree
from meka.tree import Array

T = TypeVar("T")

_CONVOLUTION = "conv_general_dilated"
# Functions that are called, and may as well be written out.
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


def for_inside(function: Callable[..., T]) -> Callable[..., T]:
    """The same function, to be called inside of a branch or a loop.

    Elsewhere than on a lone CPU it is the function itself.
    """
    if not tree.alone():
        return function

    def ordered(*given: Any) -> T:
        program, shape = jax.make_jaxpr(function, return_shape=True)(*given)
        leaves = jax.tree.leaves(given)
        if any(map(_special, program.jaxpr.eqns)):
            results = _run(program.jaxpr, program.consts, leaves)
        else:
            results = core.jaxpr_as_fun(program)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return ordered


def _called(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The function that is called here, if it is written out."""
    if equation.primitive.name not in _CALLS:
        return None
    names = ("jaxpr", "call_jaxpr")
    found = [equation.params[name] for name in names if name in equation.params]
    return found[0] if found and isinstance(found[0], core.ClosedJaxpr) else None


def _run(program: core.Jaxpr, constants: list, given: list) -> list:
    """Evaluate a program, its convolutions in order."""
    known: dict[core.Var, Any] = dict(zip(program.constvars, constants, strict=True))
    known.update(zip(program.invars, given, strict=True))

    def values(names: list) -> list:
        return [x.val if isinstance(x, core.Literal) else known[x] for x in names]

    last = len(program.eqns)
    used = {x: last for x in program.outvars if isinstance(x, core.Var)}
    for place in reversed(range(last)):
        for x in program.eqns[place].invars:
            if isinstance(x, core.Var):
                used.setdefault(x, place)
    for special, part in groupby(enumerate(program.eqns), lambda e: _special(e[1])):
        places, equations = zip(*part, strict=True)
        if not special:
            inner = {x for e in equations for x in e.outvars}
            free = [x for e in equations for x in e.invars if isinstance(x, core.Var)]
            names = list(dict.fromkeys(x for x in free if x not in inner))
            results = [x for x in inner if used.get(x, -1) > places[-1]]
            effects = set().union(*(e.effects for e in equations))
            plain = program.replace(
                constvars=[],
                invars=names,
                outvars=results,
                eqns=list(equations),
                effects=effects,
            )
            call = core.jaxpr_as_fun(core.ClosedJaxpr(plain, []))
            known.update(zip(results, call(*values(names)), strict=True))
            continue
        for equation in equations:
            operands, called = values(equation.invars), _called(equation)
            found = (
                [_in_order(equation, *operands)]
                if called is None
                else _run(called.jaxpr, called.consts, operands)
            )
            known.update(zip(equation.outvars, found, strict=True))
    return values(program.outvars)


def _special(equation: core.JaxprEqn) -> bool:
    """Whether this is a convolution, or calls one."""
    if equation.primitive.name == _CONVOLUTION:
        return True
    called = _called(equation)
    return called is not None and any(map(_special, called.jaxpr.eqns))


def _in_order(equation: core.JaxprEqn, images: Array, kernel: Array) -> Array:
    """The convolution of transposed arrays, transposed."""
    first, second, result = equation.params["dimension_numbers"]
    rank = images.ndim
    inner = tuple(range(1, rank - 1))
    numbers = jax.lax.ConvDimensionNumbers(
        (0, rank - 1, *inner),
        (rank - 1, rank - 2, *range(rank - 2)),
        (0, rank - 1, *inner),
    )
    images = jnp.transpose(images, (first[0], *first[2:], first[1]))
    kernel = jnp.transpose(kernel, (*second[2:], second[1], second[0]))
    options = equation.params | {"dimension_numbers": numbers}
    found = equation.primitive.bind(images, kernel, **options)
    # Back to where batch, features and the inner axes were.
    places = [result[0], *result[2:], result[1]]
    return jnp.transpose(found, [places.index(axis) for axis in range(rank)])
