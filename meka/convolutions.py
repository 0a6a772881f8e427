"""Convolutions that are fast inside of a branch or a loop on a CPU, too.

XLA's CPU compiler has a fast convolution of images in the order of batch, rows,
columns, features, with kernels in that of rows, columns, inputs, outputs. It puts
others into that order where it finds them, but looks for them in the outermost
computation alone: inside of a `cond` or a `scan` they become plain loops, ten times as
slow. That is what happens to most, since derivatives of a convolution are convolutions
in another order, whatever the order of the model. So they are put into order here.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from meka import tree
from meka.rewriting import Instead, Steps, rewritten
from meka.tree import Array

T = TypeVar("T")

CONVOLUTION = "conv_general_dilated"


def for_inside(function: Callable[..., T]) -> Callable[..., T]:
    """The same function, to be called inside of a branch or a loop.

    Elsewhere than on a lone CPU it is the function itself.
    """
    return rewritten(function, _all_in_order) if tree.alone() else function


def _all_in_order(program: core.Jaxpr) -> Steps:
    return [
        Instead(equation.invars, equation.outvars, partial(_in_order, equation))
        if equation.primitive.name == CONVOLUTION
        else equation
        for equation in program.eqns
    ]


def _in_order(equation: core.JaxprEqn, images: Array, kernel: Array) -> list[Array]:
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
    return [jnp.transpose(found, [places.index(axis) for axis in range(rank)])]
