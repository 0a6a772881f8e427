"""Linear algebra on pytrees, with scalars kept in float32 or wider."""

from collections.abc import Sequence
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
    return dots((a, b))[0]


def dots(*pairs: tuple[PyTree, PyTree]) -> list[Array]:
    """Inner products of several pairs of trees, all of one structure.

    On a single device they are summed in one pass over the trees; elsewhere arrays may
    be spread over devices.
    """
    dtype = scalar_dtype(pairs)
    left = [jax.tree.leaves(a) for a, _ in pairs]
    right = [jax.tree.leaves(b) for _, b in pairs]
    totals = [jnp.zeros((), dtype) for _ in pairs]
    leaf_sums = _contractions
    if jax.device_count() == 1:
        leaf_sums = _one_pass if alone() else _at_once
    columns = zip(zip(*left, strict=True), zip(*right, strict=True), strict=True)
    for number, (xs, ys) in enumerate(columns):
        sums = [s.astype(dtype) for s in leaf_sums(xs, ys)]
        totals = [t + s for t, s in zip(totals, sums, strict=True)] if number else sums
    return totals


def alone() -> bool:
    """Whether there is one device, and that a CPU."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def accelerated() -> bool:
    """Whether there is one device, and that is no CPU."""
    return jax.default_backend() != "cpu" and jax.device_count() == 1


# Long sums are folded by one of these until they are short: XLA unrolls a reduction
# over so few rows, which makes the loop over the columns a vector loop.
_FOLDS = (8, 7, 6, 9, 10, 5, 4, 3)
_SHORT = 128


def _one_pass(xs: Sequence[Array], ys: Sequence[Array]) -> Sequence[Array]:
    """Sums of products of arrays of one shape, all in one loop.

    A lone one is summed twice: otherwise it would go to a library that hands it to
    other threads, which takes several times as long.
    """
    if len(xs) == 1:
        once, again = _one_pass([*xs, *xs], [*ys, *(-y for y in ys)])
        return [0.5 * once - 0.5 * again]
    dtypes = [scalar_dtype(pair) for pair in zip(xs, ys, strict=True)]
    products = [
        (x.astype(dtype) * y.astype(dtype)).reshape(-1)
        for x, y, dtype in zip(xs, ys, dtypes, strict=True)
    ]
    while products[0].size > _SHORT:
        fold = next((f for f in _FOLDS if products[0].size % f == 0), None)
        if fold is None:
            break
        products = _sum_first([p.reshape(fold, -1) for p in products])
    return _sum_first(products)


def _at_once(xs: Sequence[Array], ys: Sequence[Array]) -> Sequence[Array]:
    """The same as one reduction of several arrays, for a lone GPU.

    It would sum each of them by a kernel of its own.
    """
    dtypes = [scalar_dtype(pair) for pair in zip(xs, ys, strict=True)]
    return _sum_first(
        [
            (x.astype(dtype) * y.astype(dtype)).reshape(-1)
            for x, y, dtype in zip(xs, ys, dtypes, strict=True)
        ]
    )


def _sum_first(arrays: Sequence[Array]) -> Sequence[Array]:
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return jax.lax.reduce(tuple(arrays), zeros, _add_all, (0,))


def _add_all(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(jnp.add(x, y) for x, y in zip(a, b, strict=True))


def _contractions(xs: Sequence[Array], ys: Sequence[Array]) -> Sequence[Array]:
    return [_contraction(x, y) for x, y in zip(xs, ys, strict=True)]


def _contraction(x: Array, y: Array) -> Array:
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


def is_finite(tree: PyTree) -> Array:
    """Whether every coordinate is."""
    if not alone():
        finite = jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree)
        return jnp.all(jnp.stack(jax.tree.leaves(finite)))
    # Zero times anything finite is zero, and sums are vector loops, if there are two:
    # a lone one would go to a library that hands it to other threads.
    zero = jnp.zeros((), jnp.float32)
    sums = [_one_pass([x, x], [zero, -zero]) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack([x + y == 0 for x, y in sums]))


def is_wide(tree: PyTree) -> bool:
    """Whether no step whose squares have a sum makes a finite coordinate infinite.

    The root of the largest sum is then lost in rounding beside the largest coordinate.
    """
    longest = float(jnp.finfo(scalar_dtype(tree)).max) ** 0.5
    kinds = [jnp.finfo(x.dtype) for x in jax.tree.leaves(tree)]
    return all(float(kind.eps) * float(kind.max) / 4 > longest for kind in kinds)


def ratio(a: Array, b: Array) -> Array:
    """``a / b``, zero where b is zero, finite where it would overflow."""
    usable = (b > 0) & jnp.isfinite(b)
    found = jnp.where(usable, a / jnp.where(usable, b, 1), 0)
    return jnp.minimum(found, jnp.finfo(found.dtype).max)


def per_square(a: Array, length: Array) -> Array:
    """``a / length²``, zero where there is no length; the square may underflow."""
    unit = jnp.where(length > 0, length, 1)
    return jnp.where(length > 0, a / unit / unit, 0)


def same_structure(a: PyTree, b: PyTree) -> bool:
    """Whether two trees have one structure and equal leaf shapes."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    shapes = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(jnp.shape(x) == jnp.shape(y) for x, y in shapes)


def one_by_one(done: PyTree, then: PyTree) -> tuple[PyTree, PyTree]:
    """Both, but the second not before the first is there: they share memory.

    A compiler for GPUs would otherwise do what it can at once, and hold all of it. One
    for CPUs would store what goes through here once more, which takes time.
    """
    if alone():
        return done, then
    return jax.lax.optimization_barrier((done, then))
