"""What can be known to be wrong before a step is compiled, said in plain words."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meka.tree import Array, PyTree, same_structure


def check_params(params: PyTree, *, allow_empty: bool = False) -> None:
    """Parameters must be real floating-point arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves and not allow_empty:
        raise ValueError("params holds no arrays: there is nothing to optimize")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            what = type(leaf).__name__ if dtype is None else f"dtype {dtype}"
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} has {what}: meka optimizes real "
                "floating-point arrays. Keep everything else out of params (equinox: "
                "eqx.partition(model, eqx.is_inexact_array); flax nnx: "
                "nnx.split(model, nnx.Param, ...))."
            )


def check_previous(params: PyTree, previous: PyTree) -> None:
    """The displacement needs the whole of the parameters as they were."""
    if not same_structure(params, previous):
        raise ValueError(
            "the parameters do not have the structure of those meka saw before. It "
            "models one step of all of them: do not wrap it in optax.masked or "
            "optax.multi_transform. Close over what is frozen in `losses`, and mask "
            "the transformations that follow it in the chain."
        )


def check_wrappers(state: PyTree) -> None:
    """Nothing around meka may keep the minibatch from it."""
    leaves = jax.tree.leaves(state, is_leaf=_is_multi_steps)
    if any(map(_is_multi_steps, leaves)):
        raise ValueError(
            "optax.MultiSteps around meka: it collects gradients, which meka does not "
            "read, and passes no observation on. For large batches in little memory "
            "use meka.make_step(..., micro_batches=k) with the whole batch."
        )


def _is_multi_steps(x: object) -> bool:
    return isinstance(x, optax.MultiStepsState)


def check_batch(batch: PyTree, mask: Array | None) -> int:
    """Every leaf must hold the examples on its leading axis; returns how many."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("batch holds no arrays")
    sizes = {}
    for path, leaf in leaves:
        shape = jnp.shape(leaf)
        name = f"batch{jax.tree_util.keystr(path)}"
        if not shape:
            raise ValueError(
                f"{name} is a scalar: every leaf of a batch needs the examples on its "
                "leading axis. Close over constants in `losses`."
            )
        sizes[name] = shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the leaves of batch disagree on the number of examples: {sizes}"
        )
    count = next(iter(sizes.values()))
    if count == 0:
        raise ValueError("the batch is empty: a step needs at least two examples")
    if mask is not None and jnp.shape(mask) != (count,):
        raise ValueError(
            f"mask has shape {jnp.shape(mask)}, but the batch holds {count} examples"
        )
    return count


def check_losses(
    losses: Callable[[PyTree, PyTree], Array], params: PyTree, batch: PyTree, count: int
) -> None:
    """``losses`` must give one real number per example."""
    found = jax.eval_shape(losses, params, batch)
    shape = getattr(found, "shape", None)
    if shape != (count,):
        hint = (
            " Return the losses before averaging."
            if shape == ()
            else " Sum or average over everything but the examples."
        )
        raise ValueError(
            f"losses(params, batch) must return one loss per example, shape "
            f"({count},), but returned {shape if shape is not None else found}.{hint} "
            "For a loss of a single example use meka.per_example(loss)."
        )
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(
            f"losses(params, batch) returned dtype {found.dtype}, "
            "not real floating-point numbers"
        )


def check_part(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """``losses`` must follow the batch it is given, not a size it remembers."""
    if found != expected:
        raise ValueError(
            f"losses(params, batch) returned shape {found} for {expected[0]} of the "
            "batch's examples. It is called on parts of the batch: take the number of "
            "examples from the batch, and put all that belongs to an example there."
        )


def check_sample(sample: int) -> None:
    """Examples can be left out, not added."""
    if sample < 1:
        raise ValueError(f"sample={sample}: must be at least 1, for all examples")


def check_groups(count: int, groups: int, micro_batches: int) -> None:
    """Noise needs two groups; micro-batches and groups must nest."""
    if count < 2:
        raise ValueError(
            "a batch of one example has no second group: its noise cannot be "
            "measured. Use at least two examples a batch."
        )
    if not 2 <= groups <= count:
        raise ValueError(
            f"groups={groups}: {count} examples can be split into 2 to {count} groups. "
            "For a ragged last batch, pad it and pass a mask."
        )
    if not 1 <= micro_batches <= count:
        raise ValueError(f"micro_batches={micro_batches}: must be 1 to {count}")
    if groups % micro_batches and micro_batches % groups:
        raise ValueError(
            f"groups={groups} and micro_batches={micro_batches}: one must be a "
            "multiple of the other, so that groups and micro-batches nest"
        )


def check_independent(
    losses: Callable[[PyTree, PyTree], Array],
    params: PyTree,
    batch: PyTree,
    *,
    tolerance: float = 1e-3,
) -> None:
    """Raise if one example's loss depends on the others, as with BatchNorm.

    The noise estimates take the examples of a batch to be independent. Each half of
    the batch is replaced in turn by copies of its counterpart's first example; the
    losses of the other half must not move by more than ``tolerance`` relative to
    their size. Meant to be run once, before training.
    """
    count = check_batch(batch, None)
    check_losses(losses, params, batch, count)
    if count < 2:
        raise ValueError("check_independent needs a batch of at least two examples")
    expected = np.asarray(losses(params, batch), np.float64)
    scale = np.maximum(np.abs(expected), np.mean(np.abs(expected)))
    half = count // 2
    for kept, other in ((slice(0, half), 0), (slice(half, count), half)):
        rows = np.full(count, other)
        rows[kept] = np.arange(count)[kept]
        changed = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        found = np.asarray(losses(params, changed), np.float64)
        error = np.abs(found - expected)[kept] / np.maximum(scale[kept], 1e-30)
        if np.any(~(error <= tolerance)):
            worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
            row = np.arange(count)[kept][worst]
            raise ValueError(
                f"the loss of example {row} changes from {expected[row]:.6g} to "
                f"{found[row]:.6g} when other examples of the batch are replaced: "
                "the examples are coupled, so their spread does not measure the "
                "noise of the gradient. Usual causes: BatchNorm (use GroupNorm or "
                "LayerNorm, or its stored statistics), a contrastive loss, or dividing "
                "by a sum over the batch."
            )
