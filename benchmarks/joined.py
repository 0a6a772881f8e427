"""Sums of two convolutions as one.

A convolution is linear in its images x and in its kernel w. So the change of one when
both change is a sum of two, ẋ * w + x * ẇ, and so is every change of a derivative. It
is the convolution of (ẋ, x), side by side as features, with (w, ẇ): a product with the
Hessian has six convolutions for each of the network's instead of nine. They multiply as
much as before, but small ones leave much of a GPU idle, and there is nothing to add.
What is convolved has to be written side by side first, and takes memory.
"""

from collections import Counter
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from meka.convolutions import CONVOLUTION
from meka.rewriting import Instead, Steps
from meka.tree import Array

_SUMS = ("add", "add_any")


def all_joined(program: core.Jaxpr) -> Steps:
    """The steps of a program, sums of two convolutions made as one."""
    steps: dict[int, core.JaxprEqn | Instead] = dict(enumerate(program.eqns))
    for place, parts in sums(program).items():
        steps[place] = as_one(program, place, parts)
        for part in parts:
            del steps[part]
    return [steps[place] for place in sorted(steps)]


def as_one(program: core.Jaxpr, place: int, parts: tuple[int, int]) -> Instead:
    """What is done in the place of a sum."""
    one, other = (program.eqns[part] for part in parts)
    given = [*one.invars, *other.invars]
    return Instead(given, program.eqns[place].outvars, partial(_both, one))


def sums(program: core.Jaxpr) -> dict[int, tuple[int, int]]:
    """Where two convolutions that can be made as one are added, and where they are."""
    made, found = _made_for_one_use(program), {}
    for place, equation in enumerate(program.eqns):
        if equation.primitive.name not in _SUMS:
            continue
        parts = [made[x] for x in equation.invars if _is_variable(x) and x in made]
        if len(parts) == 2 and _can_be_joined(*(program.eqns[k] for k in parts)):
            found[place] = parts[0], parts[1]
    return found


def _made_for_one_use(program: core.Jaxpr) -> dict[Any, int]:
    """What convolutions make that is used once, and where they do."""
    uses = Counter(x for e in program.eqns for x in e.invars if _is_variable(x))
    uses.update(x for x in program.outvars if _is_variable(x))
    return {
        equation.outvars[0]: place
        for place, equation in enumerate(program.eqns)
        if equation.primitive.name == CONVOLUTION and uses[equation.outvars[0]] == 1
    }


def _is_variable(x: object) -> bool:
    return isinstance(x, core.Var)


def _can_be_joined(one: core.JaxprEqn, other: core.JaxprEqn) -> bool:
    """Whether both differ in nothing but what is convolved, features in one group."""
    counts = one.params["feature_group_count"], one.params["batch_group_count"]
    return counts == (1, 1) and form(one) == form(other)


def form(equation: core.JaxprEqn) -> tuple[Any, ...]:
    """All that two convolutions to be joined must share; not how many features."""
    images, kernel = (x.aval for x in equation.invars)
    options = equation.params | {"lhs_shape": None, "rhs_shape": None}
    shapes = [list(x.shape) for x in (images, kernel)]  # pyright: ignore
    for shape, axis in zip(shapes, _features(equation), strict=True):
        shape[axis] = -1
    dtypes = [x.dtype for x in (images, kernel)]  # pyright: ignore
    return options, shapes, dtypes


def _features(equation: core.JaxprEqn) -> tuple[int, int]:
    """The axes that are summed over: features of images and kernel."""
    images, kernel, _ = equation.params["dimension_numbers"]
    return images[1], kernel[1]


def _both(
    like: core.JaxprEqn, images: Array, kernel: Array, other: Array, with_: Array
) -> list[Array]:
    """The sum of two convolutions of this form."""
    first, second = _features(like)
    images = jnp.concatenate([images, other], first)
    kernel = jnp.concatenate([kernel, with_], second)
    return [like.primitive.bind(images, kernel, **like.params)]
