"""Convolutions of dual numbers: of x + ẋε with w + ẇε, where ε² = 0, as one.

Where `benchmarks.joined` makes two of the three that a change of a convolution takes,
x * w and ẋ * w + x * ẇ, this makes one: (x, ẋ) side by side as features, with a kernel
of four blocks, w and ẇ over 0 and w. A third more is multiplied, by fewer operations.

A derivative by the kernel convolves two large arrays, of which four blocks would be
much to write. There (x, ẋ) and (w, ẇ) lie side by side in what is not summed over; what
comes out has four blocks, is small, and holds the product of both changes, which nobody
asked for.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from benchmarks import joined
from meka.convolutions import CONVOLUTION
from meka.rewriting import Instead, Steps
from meka.tree import Array


def all_dual(program: core.Jaxpr) -> Steps:
    """The steps of a program, values and changes of convolutions made together."""
    steps: dict[int, core.JaxprEqn | Instead] = dict(enumerate(program.eqns))
    value_of = _values(program)
    for place, parts in joined.sums(program).items():
        dual = value_of(*parts) or value_of(*reversed(parts))
        if dual and steps.get(dual[0]) is program.eqns[dual[0]]:
            value, total = program.eqns[dual[0]], program.eqns[place]
            results = [*value.outvars, *total.outvars]
            steps[dual[0]] = Instead(dual[1], results, partial(_dual, value))
            del steps[place]
        else:
            steps[place] = joined.as_one(program, place, parts)
        for part in parts:
            del steps[part]
    return [steps[place] for place in sorted(steps)]


def _values(program: core.Jaxpr) -> Callable[..., tuple[int, list[Any]] | None]:
    """Where x * w is made, for ẋ * w and x * ẇ, and from what all three are."""
    made: dict[Any, int] = {}
    values: dict[Any, int] = {}
    for place, equation in enumerate(program.eqns):
        made.update(dict.fromkeys(equation.outvars, place))
        if equation.primitive.name == CONVOLUTION:
            values.setdefault(tuple(equation.invars), place)

    def value_of(first: int, second: int) -> tuple[int, list[Any]] | None:
        of_x, of_w = program.eqns[first], program.eqns[second]
        given: list[Any] = [of_w.invars[0], *reversed(of_x.invars), of_w.invars[1]]
        x, w, change_of_x, change_of_w = given
        found = values.get((x, w))
        if found is None or (x.aval, w.aval) != (change_of_x.aval, change_of_w.aval):
            return None
        known = all(made.get(y, -1) < found for y in (change_of_x, change_of_w))
        alike = joined.form(program.eqns[found]) == joined.form(of_x)
        return (found, given) if known and alike else None

    return value_of


def _dual(
    form: core.JaxprEqn, x: Array, w: Array, change_of_x: Array, change_of_w: Array
) -> list[Array]:
    images, kernel, result = form.params["dimension_numbers"]
    convolve = partial(form.primitive.bind, **form.params)
    if w.size <= prod(form.outvars[0].aval.shape):  # pyright: ignore
        above = jnp.concatenate([w, change_of_w], kernel[0])
        below = jnp.concatenate([jnp.zeros_like(w), w], kernel[0])
        found = convolve(
            jnp.concatenate([x, change_of_x], images[1]),
            jnp.concatenate([above, below], kernel[1]),
        )
        return jnp.split(found, 2, result[1])
    found = convolve(
        jnp.concatenate([x, change_of_x], images[0]),
        jnp.concatenate([w, change_of_w], kernel[0]),
    )
    above, below = jnp.split(found, 2, result[0])
    value, change = jnp.split(above, 2, result[1])
    return [value, change + jnp.split(below, 2, result[1])[0]]
