"""How much a pass forward makes, and a gradient has to keep."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

_PRODUCTS = ("dot_general", "conv_general_dilated")


def numbers_made(function: Callable[..., Any], *given: Any) -> int:
    """How many numbers come out of the matrix products and convolutions of a function.

    All turns of a loop count, if it is known how many there are, and the branch of a
    choice that makes most.
    """
    return _made(jax.make_jaxpr(function)(*given).jaxpr)


def _made(program: core.Jaxpr) -> int:
    return sum(map(_made_by, program.eqns))


def _made_by(equation: core.JaxprEqn) -> int:
    if equation.primitive.name in _PRODUCTS:
        return sum(math.prod(x.aval.shape) for x in equation.outvars)  # pyright: ignore
    inner = max(map(_made, _programs(equation.params)), default=0)
    return equation.params.get("length", 1) * inner if inner else 0


def _programs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for given in params.values():
        for x in given if isinstance(given, tuple | list) else (given,):
            if isinstance(x, core.ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, core.Jaxpr):
                yield x
