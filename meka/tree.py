"""Linear algebra on pytrees, with scalars kept in float32 or wider."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

PyTree: TypeAlias = Any
Array: TypeAlias = jax.Array


def scalar_dtype(tree: PyTree) -> jnp.dtype:
    """Float32, or the widest floating dtype among the leaves."""
    # Said explicitly, so that it also works where users forbid implicit promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *(x.dtype for x in jax.tree.leaves(tree)))


def wide(x: Array) -> jnp.dtype:
    """The dtype in which a leaf is accumulated: its own, but at least float32."""
    return scalar_dtype(x)


def size(tree: PyTree) -> int:
    """Number of coordinates, known at trace time."""
    return sum(x.size for x in jax.tree.leaves(tree))


def dot(a: PyTree, b: PyTree) -> Array:
    """Inner product of two trees of one structure."""
    dtype = scalar_dtype((a, b))
    terms = [
        _dot(x, y).astype(dtype)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    return sum(terms[1:], terms[0]) if terms else jnp.zeros((), dtype)


def _dot(x: Array, y: Array) -> Array:
    # A contraction rather than sum(x * y): on the CPU it is the vectorised kernel.
    # No ravel(), which under explicit sharding would gather the array.
    dtype = scalar_dtype((x, y))
    mesh = jax.typeof(x).sharding.mesh
    replicated = None
    if mesh.are_all_axes_explicit:
        replicated = jax.sharding.NamedSharding(mesh, jax.P())
    return jnp.tensordot(
        x.astype(dtype),
        y.astype(dtype),
        x.ndim,
        precision=jax.lax.Precision.HIGHEST,
        out_sharding=replicated,
    )


def square(tree: PyTree) -> Array:
    """Squared Euclidean norm."""
    return dot(tree, tree)


def subtract(a: PyTree, b: PyTree) -> PyTree:
    """``a - b``, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: Array, tree: PyTree) -> PyTree:
    """``factor * tree`` in each leaf's own dtype."""
    return jax.tree.map(lambda x: factor.astype(x.dtype) * x, tree)


def widen(tree: PyTree) -> PyTree:
    """Every leaf in the dtype in which it is accumulated."""
    return jax.tree.map(lambda x: x.astype(wide(x)), tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Every leaf in the dtype of its counterpart."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def select(condition: Array, a: PyTree, b: PyTree) -> PyTree:
    """``a`` where the scalar condition holds, else ``b``, bit for bit."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have one structure and equal leaf shapes."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    shapes = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(jnp.shape(x) == jnp.shape(y) for x, y in shapes)
