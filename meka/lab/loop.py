"""The training loop: batches by step number, compiled chunks of steps, evaluation.

Which examples a step sees, and how they are augmented, is a pure function of the seed
and the step number. So parameters and optimizer state are all there is to checkpoint,
and a run that resumes sees what it would have seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meka.convolutions import for_inside
from meka.lab import culprit
from meka.lab.methods import Method
from meka.lab.workloads import Workload, WorkloadError

PyTree = Any

# Steps in one compiled chunk: long enough to hide the dispatch, short enough for the
# progress display and for Ctrl-C.
CHUNK = 100
_SLICE = 2000  # examples evaluated at once
_SAMPLE_SEED = 2**31 - 1  # of the sample that stands for endless data
_EXAMPLES_ON_CPU = 2000  # training examples evaluated, where convolutions are slow
_TOGETHER = 2**31  # bytes that seeds trained at once may take ...
_COPIES = 12  # ... counting this many parameter-sized buffers each
_AVERAGING = 8  # polynomial-decay averaging (Shamir and Zhang 2013): the last tenth


class Carry(NamedTuple):
    """All that changes from step to step; with several seeds, a leading axis."""

    params: PyTree
    state: PyTree
    average: PyTree  # of the iterates; () when it is not kept


class Loop:
    """A workload trained by a method from one or several seeds at once.

    Several seeds run as one computation, mapped over a leading axis.
    """

    def __init__(
        self,
        workload: Workload,
        method: Method,
        *,
        seed: int = 0,
        seeds: int = 1,
        batch_size: int | None = None,
        average: bool = False,
        eval_examples: int | None = None,
    ):
        """Lay the data out on the device; nothing is compiled yet.

        With ``eval_examples``, so many examples, evenly spaced, stand for the training
        and for the test set where losses are evaluated.
        """
        self.workload, self.method = workload, method
        self.seeds = [seed + k for k in range(seeds)]
        self.batch_size = batch_size or workload.batch_size
        self._average = average
        self._data = ()
        self._rows = 0
        if workload.data is not None:
            self._data = jax.tree.map(jnp.asarray, workload.data.train)
            self._rows = len(jax.tree.leaves(workload.data.train)[0])
            if self.batch_size > self._rows:
                raise ValueError(
                    f"batch_size {self.batch_size} is more than the {self._rows} "
                    f"training examples of {workload.name}"
                )
        elif method.refresh is not None:
            raise WorkloadError(
                f"{workload.name} has endless data: there is no full gradient for svrg "
                "to take. Choose another optimizer."
            )
        self._keys = jnp.stack([jax.random.key(s) for s in self.seeds])
        self._step = self._over_seeds()
        self._run_chunk = jax.jit(self._chunk, donate_argnums=0)
        self._batch_of = jax.jit(self._batch)
        self._accepts = jax.jit(lambda *given: method.step(*given)[2]["accepted"])
        self._sum_gradient = jax.jit(
            jax.grad(lambda params, batch: jnp.sum(workload.losses(params, batch)))
        )
        self._evaluated = jax.jit(jax.vmap(method.evaluate))
        self._evaluator = _Evaluator(workload, eval_examples)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in one pass over the data, or None where it is endless."""
        return self._rows // self.batch_size if self._rows else None

    def start(self) -> Carry:
        """Initial parameters and state."""

        def begin(key: jax.Array) -> Carry:
            params = self.workload.init(jax.random.fold_in(key, 0))
            average = jax.tree.map(jnp.copy, params) if self._average else ()
            return Carry(params, self.method.init(params), average)

        # Compiled, so that the leaves are buffers of their own and can be donated.
        return jax.jit(jax.vmap(begin))(self._keys)

    def subject(self) -> dict[str, Any]:
        """What is trained, in numbers."""
        data = self.workload.data
        test = [] if data is None else jax.tree.leaves(data.test)[0]
        shapes = jax.eval_shape(self.workload.init, self._keys[0])
        return {
            "name": self.workload.name,
            "parameters": sum(x.size for x in jax.tree.leaves(shapes)),
            "batch_size": self.batch_size,
            "train_examples": self._rows or None,
            "test_examples": len(test) or None,
        }

    def advance(
        self, carry: Carry, start: int, length: int
    ) -> tuple[Carry, dict[str, np.ndarray]]:
        """Take ``length`` steps after ``start``; returns what each logged.

        The logs have the shape (length, seeds). At most CHUNK steps are taken at once.
        Where a step was rejected and no loss says why, ``suspect`` is found by taking
        it again on parts of its batch.
        """
        if length > CHUNK:
            raise ValueError(f"at most {CHUNK} steps at once, not {length}")
        parts, done = [], 0
        while done < length:
            carry, logs = self._advance(carry, start + done, length - done)
            done += len(next(iter(logs.values())))
            if _unexplained(logs)[-1].any():
                # The last step changed nothing, so here it can be looked into.
                logs["suspect"] = self._explain(carry, start + done - 1, logs)
            parts.append(logs)
        return carry, jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def _advance(
        self, carry: Carry, start: int, length: int
    ) -> tuple[Carry, dict[str, np.ndarray]]:
        """Up to ``length`` steps; fewer if one is rejected and no loss says why."""
        indices = self._indices(start, length)
        padded = np.zeros((CHUNK, *indices.shape[1:]), np.int32)
        padded[:length] = indices
        carry, sheets, taken = self._run_chunk(
            carry, self._data, padded, start, length, self._keys
        )
        return carry, _columns(sheets, int(taken))

    def _explain(self, carry: Carry, step: int, logs: dict) -> np.ndarray:
        """``suspect`` with the examples that spoiled the last of the logged steps."""
        suspect, indices = logs["suspect"].copy(), self._indices(step, 1)[0]
        for k in np.flatnonzero(_unexplained(logs)[-1]):
            own = jax.tree.map(lambda x, k=k: x[k], carry)
            batch = self._batch_of(
                self._data, indices[k], self._keys[k], jnp.int32(step)
            )
            suspect[-1, k] = culprit.find(
                functools.partial(self._accepts, own.params, own.state), batch
            )
        return suspect

    def refresh(self, carry: Carry) -> Carry:
        """Let the method look at the whole training set (SVRG)."""
        refresh = self.method.refresh
        assert refresh is not None

        def renewed(params: PyTree, state: PyTree) -> PyTree:
            return refresh(params, state, self._full_gradient)

        state = _each_seed(renewed, len(self.seeds))(carry.params, carry.state)
        return carry._replace(state=state)

    def evaluate(self, carry: Carry) -> list[dict[str, float]]:
        """Losses and accuracy on all data, one record a seed."""
        results = self._evaluator(self._evaluated(carry.params, carry.state))
        if self._average:
            averaged = self._evaluator(carry.average)
            results |= {f"average_{name}": x for name, x in averaged.items()}
        return [
            {name: float(values[k]) for name, values in results.items()}
            for k in range(len(self.seeds))
        ]

    def data_rows(self, start: int, places: np.ndarray) -> np.ndarray:
        """Rows of the training data, from places in the batches after ``start``.

        The shape is (length, seeds); -1, for no example, stays. Endless data has no
        rows, so there the places come back.
        """
        if not self._rows or np.all(places < 0):
            return places
        indices = self._indices(start, len(places))
        found = np.take_along_axis(indices, np.maximum(places, 0)[..., None], -1)
        return np.where(places < 0, -1, found[..., 0])

    def _over_seeds(self) -> Callable:
        """A step of all seeds: at once where that is fast and fits, else in turn."""
        shapes = jax.eval_shape(self.workload.init, self._keys[0])
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        fits = len(self.seeds) * size * _COPIES <= _TOGETHER
        # Mapped convolutions become grouped ones, several times slower.
        if fits and not self.workload.convolutional:
            return jax.vmap(self._one, (0, None, 0, 0, None))

        def in_turn(carry: Carry, data, indices, keys, number):
            def one(own):
                return for_inside(self._one)(own[0], data, own[1], own[2], number)

            return jax.lax.map(one, (carry, indices, keys))

        return in_turn

    def _full_gradient(self, params: PyTree) -> PyTree:
        total = jax.tree.map(jnp.zeros_like, params)
        for part in _slices(self._data, self._rows):
            total = jax.tree.map(jnp.add, total, self._sum_gradient(params, part))
        return jax.tree.map(lambda g: g / self._rows, total)

    def _batch(self, data, indices, key, number) -> PyTree:
        workload = self.workload
        key = jax.random.fold_in(jax.random.fold_in(key, 1), number)
        draw_key, augment_key = jax.random.split(key)
        if workload.draw is not None:
            batch = workload.draw(draw_key, self.batch_size)
        else:
            batch = jax.tree.map(lambda x: x[indices], data)
        if workload.augment is not None:
            batch = workload.augment(augment_key, batch)
        return batch

    def _one(self, carry: Carry, data, indices, key, number) -> tuple[Carry, dict]:
        batch = self._batch(data, indices, key, number)
        params, state, info = self.method.step(carry.params, carry.state, batch, number)
        average = carry.average
        if self._average:
            share = (_AVERAGING + 1) / (number + _AVERAGING + 1)
            reached = self.method.evaluate(params, state)
            average = jax.tree.map(
                lambda a, p: a + jnp.asarray(share, a.dtype) * (p - a), average, reached
            )
        return Carry(params, state, average), info

    def _chunk(self, carry: Carry, data, indices, first, length, keys):
        """Up to CHUNK steps. Their number is data, so that one compilation does.

        Ends early after a step that was rejected and no loss says why.
        """
        alone = len(self.seeds) == 1
        if alone:  # the axis of seeds stays outside: inside it costs a copy a leaf
            carry = jax.tree.map(lambda x: x[0], carry)

        def take(k: jax.Array, carry: Carry) -> tuple[Carry, dict]:
            if not alone:
                return self._step(carry, data, indices[k], keys, first + k)
            given = carry, data, indices[k, 0], keys[0], first + k
            carry, info = for_inside(self._one)(*given)
            return carry, jax.tree.map(jnp.asarray, info)

        def goes_on(now: tuple) -> jax.Array:
            _, _, k, sound = now
            return (k < length) & sound

        def body(now: tuple) -> tuple:
            carry, sheets, k, _ = now
            carry, info = take(k, carry)
            row = _sheets(info)
            sheets = jax.tree.map(lambda sheet, x: sheet.at[k].set(x), sheets, row)
            return carry, sheets, k + 1, ~jnp.any(_unexplained(info))

        zero = jnp.int32(0)
        shapes = jax.eval_shape(lambda now: _sheets(take(zero, now)[1]), carry)
        sheets = jax.tree.map(lambda s: jnp.zeros((CHUNK, *s.shape), s.dtype), shapes)
        now = (carry, sheets, zero, jnp.ones((), bool))
        carry, sheets, taken, _ = jax.lax.while_loop(goes_on, body, now)
        if alone:
            carry = jax.tree.map(lambda x: x[None], carry)
            sheets = jax.tree.map(lambda x: x[:, :, None], sheets)
        return carry, sheets, taken

    def _indices(self, start: int, length: int) -> np.ndarray:
        """Rows of the data for each step and seed: every epoch a fresh shuffle."""
        shape = (length, len(self.seeds), self.batch_size)
        if not self._rows:
            return np.zeros((*shape[:2], 0), np.int32)
        per_epoch = self._rows // self.batch_size
        indices = np.empty(shape, np.int32)
        for k, step in enumerate(range(start, start + length)):
            epoch, place = divmod(step, per_epoch)
            first = place * self.batch_size
            for j, seed in enumerate(self.seeds):
                order = _shuffle(seed, epoch, self._rows)
                indices[k, j] = order[first : first + self.batch_size]
        return indices


def _sheets(logs: dict[str, jax.Array]) -> dict[tuple[str, ...], jax.Array]:
    """One array for all logs of a shape and dtype, under their names.

    A step then writes a row or two, and not an element of each of forty arrays.
    """
    alike: dict[Any, list[str]] = {}
    for name, x in logs.items():
        alike.setdefault((x.shape, x.dtype), []).append(name)
    return {
        tuple(names): jnp.stack([logs[n] for n in names]) for names in alike.values()
    }


def _columns(
    sheets: dict[tuple[str, ...], jax.Array], rows: int
) -> dict[str, np.ndarray]:
    """The first so many rows of the sheets, by name."""
    found = {
        name: column
        for names, sheet in sheets.items()
        for name, column in zip(
            names, np.moveaxis(np.array(sheet)[:rows], 1, 0), strict=True
        )
    }
    return dict(sorted(found.items()))


class _Evaluator:
    """Mean losses and accuracy over the data, a slice at a time, for stacked seeds."""

    def __init__(self, workload: Workload, examples: int | None):
        self._workload = workload
        self._sets: dict[str, tuple[PyTree, int]] = {}
        if workload.data is not None:
            slow = workload.convolutional and jax.default_backend() == "cpu"
            most = _EXAMPLES_ON_CPU if slow else None
            self._sets = {
                "train": _some(workload.data.train, most, examples),
                "test": _some(workload.data.test, None, examples),
            }
        elif workload.objective is None:
            # Endless data, and no formula: a fixed sample stands for all of it.
            assert workload.draw is not None
            sample = workload.draw(jax.random.key(_SAMPLE_SEED), _SLICE)
            self._sets = {"train": (sample, _SLICE)}
        # As for the steps: mapped convolutions are slow, so one seed after the other.
        at_once = jax.vmap(self._slice_sums, (0, None))
        self._sums = jax.jit(self._in_turn if workload.convolutional else at_once)

    def __call__(self, params: PyTree) -> dict[str, np.ndarray]:
        workload, results = self._workload, {}
        if workload.objective is not None:
            results["train_loss"] = np.asarray(jax.vmap(workload.objective)(params))
        for name, (data, rows) in self._sets.items():
            total = None
            for part in _slices(data, rows):
                sums = self._sums(params, part)
                total = sums if total is None else jax.tree.map(jnp.add, total, sums)
            assert total is not None
            for what, value in total.items():
                results[f"{name}_{what}"] = np.asarray(value) / rows
        return results

    def _in_turn(self, params: PyTree, batch: PyTree) -> dict[str, jax.Array]:
        return jax.lax.map(lambda own: for_inside(self._slice_sums)(own, batch), params)

    def _slice_sums(self, params: PyTree, batch: PyTree) -> dict[str, jax.Array]:
        sums = {"loss": jnp.sum(self._workload.losses(params, batch))}
        if self._workload.correct is not None:
            sums["accuracy"] = jnp.sum(self._workload.correct(params, batch) * 1.0)
        return sums


def _some(data: PyTree, first: int | None, spaced: int | None) -> tuple[PyTree, int]:
    """The first examples, or so many evenly spaced ones if they are fewer; how many."""
    rows = len(jax.tree.leaves(data)[0])
    count = rows if first is None else min(rows, first)
    picked: Any = slice(count)
    if spaced is not None and spaced < count:
        count, picked = spaced, np.linspace(0, rows - 1, spaced).astype(np.int32)
    return jax.tree.map(lambda x: jnp.asarray(x[picked]), data), count


def _slices(data: PyTree, rows: int):
    for first in range(0, rows, _SLICE):
        yield jax.tree.map(lambda x, first=first: x[first : first + _SLICE], data)


@functools.lru_cache(maxsize=64)
def _shuffle(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows).astype(np.int32)


def _unexplained(logs: dict) -> Any:
    """Where a step was rejected although every loss of its batch is finite."""
    if "accepted" not in logs:
        return np.zeros(1, bool)
    return ~logs["accepted"] & (logs["suspect"] < 0)


def _each_seed(function: Callable, seeds: int) -> Callable:
    """Apply a function to each seed in turn, for what cannot be mapped."""

    def apply(*stacked: PyTree) -> PyTree:
        results = [
            function(*jax.tree.map(lambda x, k=k: x[k], stacked)) for k in range(seeds)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *results)

    return apply
