"""Workloads: what to train, as one small record, by name or from a user's file.

Those with a name are in `meka.lab.catalogue`.
To bring your own, put a `Workload` (or a function of no arguments that returns one)
in a Python file and name it `my_model.py:workload`.

This module imports neither jax nor equinox until a workload is built, so that the
names can be listed at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meka.lab import catalogue

if TYPE_CHECKING:
    import jax

    from meka.lab.data import Data

BATCH_SIZE = 128


class WorkloadError(ValueError):
    """A workload cannot be found, built or trained; the message says why."""


@dataclass(frozen=True)
class Workload:
    """What to train: parameters, per-example losses, examples and length.

    Examples come from `data` (finite, the run shuffles it) or from `draw` (endless);
    exactly one of the two. A batch is a pytree with examples on the leading axes.
    """

    name: str
    init: Callable[[jax.Array], Any]
    """key -> parameters, a pytree of floating-point arrays and nothing else."""
    losses: Callable[[Any, Any], jax.Array]
    """(params, batch) -> one loss per example, shape (n,)."""
    batch_size: int
    steps: int
    """How long to train unless told otherwise."""
    data: Data | None = None
    draw: Callable[[jax.Array, int], Any] | None = None
    """(key, n) -> a batch of n fresh examples."""
    objective: Callable[[Any], jax.Array] | None = None
    """params -> the exact f - f*, where it is known."""
    correct: Callable[[Any, Any], jax.Array] | None = None
    """(params, batch) -> whether each example is classified correctly, shape (n,)."""
    augment: Callable[[jax.Array, Any], Any] | None = None
    """(key, batch) -> batch, for training only, inside the compiled step."""
    convolutional: bool = False
    """Whether seeds are to be trained in turn: mapped convolutions are slow."""
    classes: int | None = None
    """How many classes the labels of `data` number, if they do."""


WORKLOADS: dict[str, str] = {
    name: named.summary for name, named in catalogue.NAMED.items()
}
"""The names, each with a line that says what it is."""


def load(workload: str, data_dir: Path | str | None = None, **changes: Any) -> Workload:
    """Return a workload by name, or from a file as `path.py:attribute`.

    Keywords replace fields: `load("cifar10-cnn", augment=None, steps=100)`.
    """
    unknown = set(changes) - {field.name for field in dataclasses.fields(Workload)}
    if unknown:
        raise WorkloadError(f"a workload has no field {', '.join(sorted(unknown))}")
    if changes.get("augment") is False:
        changes["augment"] = None
    if workload in catalogue.NAMED:
        built = catalogue.NAMED[workload].build(data_dir)
    elif ".py" in workload:
        built = _from_file(workload)
    else:
        raise WorkloadError(
            f"no workload {workload!r}{_nearest(workload, WORKLOADS)}; there are "
            f"{', '.join(WORKLOADS)}, or your own as path/to/file.py:name"
        )
    return dataclasses.replace(built, **changes)


def classifier(
    name: str,
    build: Callable[[jax.Array], Callable[[jax.Array], jax.Array]],
    data: Data,
    *,
    epochs: int | None = None,
    batch_size: int = BATCH_SIZE,
    steps: int = 1000,
    classes: int = 10,
    augment: Callable[[jax.Array, Any], Any] | None = None,
    convolutional: bool = False,
) -> Workload:
    """Make a workload that trains an equinox model with the cross entropy.

    `build(key)` returns the model; the model maps a batch of inputs to logits
    (n, classes). Its arrays are the parameters, whatever else it holds is fixed.
    """
    import jax.numpy as jnp
    import optax

    init, logits = functional(build)

    def losses(params: Any, batch: Any) -> jax.Array:
        inputs, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(params, inputs), labels
        )

    def correct(params: Any, batch: Any) -> jax.Array:
        inputs, labels = batch
        found = jnp.argmax(logits(params, inputs), axis=-1)
        return found.astype(labels.dtype) == labels

    if epochs is not None:
        steps = epochs * (len(data.train[1]) // batch_size)
    return Workload(
        name,
        init,
        losses,
        batch_size,
        steps,
        data=data,
        correct=correct,
        augment=augment,
        convolutional=convolutional,
        classes=classes,
    )


def functional(
    build: Callable[[jax.Array], Callable[[jax.Array], jax.Array]],
) -> tuple[Callable[[jax.Array], Any], Callable[[Any, jax.Array], jax.Array]]:
    """Split an equinox model into key -> params and (params, inputs) -> outputs.

    Its arrays are the parameters, whatever else it holds is fixed.
    """
    import equinox as eqx
    import jax

    def is_shape(leaf: Any) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    skeleton = eqx.filter_eval_shape(build, jax.random.key(0))
    fixed = eqx.filter(skeleton, is_shape, inverse=True)

    def init(key: jax.Array) -> Any:
        return eqx.filter(build(key), eqx.is_array)

    def apply(params: Any, inputs: jax.Array) -> jax.Array:
        return eqx.combine(params, fixed)(inputs)

    return init, apply


def check(workload: Workload) -> None:
    """Refuse a workload that would fail or mislead, before anything is trained.

    Looks at all of `data` (rows, values, label range), then runs `losses` on a few
    examples: one finite loss each, independent of the other examples in the batch.
    """
    import jax
    import numpy as np

    from meka.checks import check_independent, check_params

    _check_fields(workload)
    key = jax.random.key(0)
    params = workload.init(key)
    batch = _sample(workload, key, 8)
    rows = len(jax.tree.leaves(batch)[0])
    losses = jax.jit(workload.losses)
    try:
        check_params(params)
        finite = np.isfinite(np.atleast_1d(losses(params, batch)))
        if not finite.all():
            raise WorkloadError(
                f"the loss of training example {finite.argmin()} is not finite at the "
                "initial parameters"
            )
        if rows > 1:
            check_independent(losses, params, batch)
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{workload.name}: {error}") from error
    if workload.correct is not None:
        _check_shape(workload, "correct", (rows,), workload.correct, params, batch)
    if workload.objective is not None:
        _check_shape(workload, "objective", (), workload.objective, params)
    if workload.augment is not None:
        changed = jax.eval_shape(workload.augment, key, batch)
        before, after = (
            jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", tree)
            for tree in (batch, changed)
        )
        if before != after:
            raise WorkloadError(
                f"{workload.name}: augment turns a batch of {before} into {after}; "
                "it must keep shapes and types"
            )


def _check_fields(workload: Workload) -> None:
    from meka.lab.data import check_batch

    if (workload.data is None) == (workload.draw is None):
        raise WorkloadError(f"{workload.name}: give exactly one of data and draw")
    for field in ("batch_size", "steps"):
        value = getattr(workload, field)
        if not isinstance(value, int) or value < 1:
            raise WorkloadError(f"{workload.name}: {field} is {value!r}, expected >= 1")
    if workload.data is None:
        return
    for split, batch in zip(("train", "test"), workload.data, strict=True):
        check_batch(batch, workload.classes, f"{workload.name} {split}")
    rows = len(workload.data.train[0])
    if workload.batch_size > rows:
        raise WorkloadError(
            f"{workload.name}: batch_size {workload.batch_size} is more than the "
            f"{rows} training examples"
        )


def _check_shape(
    workload: Workload,
    what: str,
    expected: tuple[int, ...],
    function: Callable[..., Any],
    *arguments: Any,
) -> None:
    import jax

    found = jax.eval_shape(function, *arguments)
    if getattr(found, "shape", None) != expected:
        raise WorkloadError(
            f"{workload.name}: {what} must return an array of shape {expected}, but "
            f"returned {found}"
        )


def _sample(workload: Workload, key: jax.Array, rows: int) -> Any:
    import jax.numpy as jnp

    if workload.draw is not None:
        return workload.draw(key, rows)
    assert workload.data is not None  # _check_fields saw to it
    return tuple(jnp.asarray(part[:rows]) for part in workload.data.train)


def _from_file(spec: str) -> Workload:
    path_text, _, attribute = spec.rpartition(":")
    if not path_text.endswith(".py") or not attribute:
        raise WorkloadError(
            f"{spec!r}: write path/to/file.py:name, where name is a Workload or a "
            "function that returns one"
        )
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise WorkloadError(f"{spec!r}: there is no file {path}")
    module = _run_file(path)
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise WorkloadError(
            f"{path} has no {attribute!r}{_nearest(attribute, public)}; it defines "
            f"{', '.join(public) or 'nothing'}"
        )
    found = getattr(module, attribute)
    built = found() if callable(found) else found
    if not isinstance(built, Workload):
        how = "returned" if callable(found) else "is"
        raise WorkloadError(
            f"{spec!r} {how} {type(built).__name__}, expected a "
            "meka.lab.workloads.Workload"
        )
    return built


def _run_file(path: Path) -> Any:
    # Under its own name in sys.modules: dataclasses and typing look modules up there.
    name = f"meka_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.modules[name] = module
    sys.path.insert(0, folder)  # so that the file can import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
