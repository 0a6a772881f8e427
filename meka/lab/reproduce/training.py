"""Training runs of an experiment, on the bench's loop, each a piece of its own."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import meka
from meka.improvement import Rule
from meka.lab import optimizers, workloads
from meka.lab.loop import CHUNK, Loop
from meka.lab.methods import Method, Plan
from meka.lab.reproduce.setting import Setting, array
from meka.lab.workloads import Workload

Build = Callable[[Workload], Method]


@dataclass(frozen=True)
class Run:
    """All that determines a training run, as plain values.

    Attributes:
        label: its name in this experiment.
        workload: a name of `meka.lab.workloads.WORKLOADS`.
        optimizer: a name of `meka.lab.optimizers.TABLE`, or what is built instead.
        steps: how many.
        seeds: how many, from 0 on.
        learning_rate: None for the optimizer's default.
        options: further options of the optimizer.
        logs: what to keep of every step, beside the loss.
        evaluations: how often the whole data is looked at, beside the start.
        augment: whether training images are cropped and flipped, if they usually are.
        batch_size: None for the workload's own.
        knob: the number of a method made by `turned`.
    """

    label: str
    workload: str
    optimizer: str
    steps: int
    seeds: int
    learning_rate: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ("step_size",)
    evaluations: int = 10
    augment: bool = True
    batch_size: int | None = None
    knob: float | None = None


def train(setting: Setting, run: Run, build: Build | None = None) -> dict[str, Any]:
    """Train, or read what was trained before.

    Returns "step" and the evaluations ("train_loss", "test_accuracy", ...), each as
    (evaluations, seeds), and under "logs" what was kept, each as (steps, seeds). A run
    whose seeds all diverged ends there; the rest is null.
    """
    settings = {k: v for k, v in dataclasses.asdict(run).items() if v is not None}
    return setting.piece(run.label, settings, lambda: _train(setting, run, build))


def load(name: str, data_dir: str | None, augment: bool = True) -> Workload:
    """A workload, loaded once."""
    return _load(name, data_dir, augment)


@functools.lru_cache(maxsize=2)
def _load(name: str, data_dir: str | None, augment: bool) -> Workload:
    changes = {} if augment else {"augment": None}
    return workloads.load(name, data_dir, **changes)


def steps_for(setting: Setting, name: str, epochs: float) -> int:
    """How many steps so many epochs are; the setting's own number of epochs wins."""
    workload = load(name, setting.data_dir)
    assert workload.data is not None
    an_epoch = len(workload.data.train[0]) // workload.batch_size
    return max(1, round((setting.epochs or epochs) * an_epoch))


def _train(setting: Setting, run: Run, build: Build | None) -> dict[str, Any]:
    loop = _loop(run, setting.data_dir, build)
    method = loop.method
    watcher = setting.watch(f"{run.workload} {run.label}", run.steps)
    ends = np.unique(np.linspace(0, run.steps, run.evaluations + 1).astype(int))
    carry, done, logs = loop.start(), 0, []
    knob = run.learning_rate if run.knob is None else run.knob
    if knob is not None and isinstance(carry.state, Turned):
        value = jnp.full_like(carry.state.value, knob)
        carry = carry._replace(state=carry.state._replace(value=value))
    records = [loop.evaluate(carry)]
    watcher.evaluated(0, records[0])
    while done < run.steps:
        if method.refresh_every and done % method.refresh_every == 0:
            carry = loop.refresh(carry)
        length = _until(done, ends, method.refresh_every) - done
        carry, log = loop.advance(carry, done, length)
        done += length
        logs.append({name: log[name] for name in ("loss", *run.logs) if name in log})
        watcher.step(done, log, 1.0)
        if done in ends:
            records.append(loop.evaluate(carry))
            watcher.evaluated(done, records[-1])
        if not np.isfinite(log["loss"][-1]).any():
            watcher.note(f"{run.label}: every seed diverged by step {done}")
            break
    return {"step": ends, **_evaluations(records, len(ends)), "logs": _logs(logs, run)}


def method(name: str, losses: Any, **given: Any) -> Method:
    """A method of the bench; meka measures noise at every step, as the paper does."""
    return optimizers.make(name, losses, **_as_the_paper(name, given))


def _as_the_paper(name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"noise_every": 1, **options} if "meka" in name else options


def _from_table(run: Run) -> Build:
    """The optimizer of a run; compiled once for all learning rates, if it has one."""

    def build(workload: Workload) -> Method:
        rows = 0 if workload.data is None else len(workload.data.train[0])
        an_epoch = rows // workload.batch_size or None
        usual = method(
            run.optimizer,
            workload.losses,
            steps=run.steps,
            learning_rate=run.learning_rate,
            steps_per_epoch=an_epoch,
            **run.options,
        )
        if run.learning_rate is None:
            return usual
        entry = optimizers.TABLE[run.optimizer]
        options = _as_the_paper(run.optimizer, run.options)

        def made(rate: Any) -> Method:
            plan = Plan(run.steps, rate, entry.schedule, an_epoch)
            return entry.build(workload.losses, plan, **options)

        return _rated(usual, made)

    return build


def _rated(usual: Method, made: Callable[[Any], Method]) -> Method:
    """A method whose learning rate is part of its state."""

    def init(params: Any) -> Turned:
        return Turned(jnp.zeros((), jnp.float32), usual.init(params))

    def step(
        params: Any, state: Turned, batch: Any, number: Any = None
    ) -> tuple[Any, Turned, dict[str, Any]]:
        own = made(state.value)
        params, inner, logs = own.step(params, state.inner, batch, number)
        return params, Turned(state.value, inner), logs

    def refresh(params: Any, state: Turned, full_gradient: Any) -> Turned:
        assert usual.refresh is not None
        return Turned(state.value, usual.refresh(params, state.inner, full_gradient))

    return dataclasses.replace(
        usual,
        init=init,
        step=step,
        evaluate=lambda params, state: usual.evaluate(params, state.inner),
        refresh=None if usual.refresh is None else refresh,
    )


_LOOPS: OrderedDict[str, Loop] = OrderedDict()  # compiled, and likely asked for again
_KEPT = 4


def _loop(run: Run, data_dir: str | None, build: Build | None = None) -> Loop:
    """The loop of a run; the same for runs that differ in what compiles nothing."""
    unlike: dict[str, Any] = {"label": "", "logs": (), "evaluations": 1, "knob": None}
    if build is None and run.learning_rate is not None:
        unlike["learning_rate"] = 0.0  # part of the state
    same = dataclasses.asdict(dataclasses.replace(run, **unlike))
    key = json.dumps([same, data_dir], sort_keys=True)
    if key not in _LOOPS:
        workload = load(run.workload, data_dir, run.augment)
        build = build or _from_table(run)
        _LOOPS[key] = Loop(
            workload, build(workload), seeds=run.seeds, batch_size=run.batch_size
        )
    _LOOPS.move_to_end(key)
    if len(_LOOPS) > _KEPT:
        _LOOPS.popitem(last=False)
    return _LOOPS[key]


class Turned(NamedTuple):
    """State of a method with a knob."""

    value: jax.Array
    inner: Any


def turned(workload: Workload, rule: Callable[[jax.Array], Rule]) -> Method:
    """Meka with a rule that depends on a number, compiled once for all numbers.

    The number is part of the state; `Run.knob` sets it.
    """

    def parts(value: Any) -> tuple[Any, Any]:
        optimizer = meka.meka(rule=rule(value))
        return optimizer, meka.make_step(workload.losses, optimizer, noise_every=1)

    def init(params: Any) -> Turned:
        value = jnp.zeros((), jnp.float32)
        return Turned(value, parts(value)[0].init(params))

    def step(
        params: Any, state: Turned, batch: Any, number: Any = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        del number
        params, inner, info = parts(state.value)[1](params, state.inner, batch)
        names = ("step_size", "curvature", "direction_norm", "gradient_noise")
        logs = {name: getattr(info, name) for name in names}
        return params, Turned(state.value, inner), {"loss": info.observed, **logs}

    return Method(init, step, lambda params, state: params)


def _until(done: int, ends: np.ndarray, refresh: int | None) -> int:
    """Where the steps after ``done`` pause next."""
    pause = min(done + CHUNK, int(ends[ends > done][0]))
    return min(pause, (done // refresh + 1) * refresh) if refresh else pause


def _evaluations(
    records: list[list[dict[str, float]]], count: int
) -> dict[str, np.ndarray]:
    found = {}
    for name in records[0][0]:
        values = np.full((count, len(records[0])), np.nan)
        for k, record in enumerate(records):
            values[k] = [seed[name] for seed in record]
        found[name] = values
    return found


def _logs(logs: list[dict[str, np.ndarray]], run: Run) -> dict[str, np.ndarray]:
    found = {}
    for name in logs[0]:
        values = np.full((run.steps, run.seeds), np.nan)
        kept = np.concatenate([log[name] for log in logs])
        values[: len(kept)] = kept
        found[name] = values
    return found


def final(trained: dict[str, Any], name: str = "train_loss") -> np.ndarray:
    """An evaluation of every seed at the end; infinite where it is not a number."""
    last = array(trained[name])[-1]
    return np.where(np.isfinite(last), last, np.inf)


def thinned(values: Any, points: int = 120) -> np.ndarray:
    """At most so many rows of (steps, ...), evenly spaced, each the median of a block.

    A median, so that a block with a wild step in it still shows the usual one.
    """
    rows = array(values)
    if len(rows) <= points:
        return rows
    edges = np.linspace(0, len(rows), points + 1).astype(int)
    blocks = [rows[a:b] for a, b in itertools.pairwise(edges)]
    return np.stack([_median(block) for block in blocks])


def centres(steps: int, points: int = 120) -> np.ndarray:
    """The step in the middle of each block of `thinned`, counted from 1."""
    if steps <= points:
        return np.arange(1, steps + 1)
    edges = np.linspace(0, steps, points + 1).astype(int)
    return (edges[:-1] + edges[1:] + 1) / 2


def _median(block: np.ndarray) -> np.ndarray:
    """Over the rows, leaving out what is not a number; NaN where nothing is left."""
    ranked = np.sort(np.where(np.isfinite(block), block, np.nan), axis=0)  # NaN last
    count = np.isfinite(ranked).sum(axis=0)
    middle = np.maximum(count - 1, 0) // 2
    return np.take_along_axis(ranked, middle[None], axis=0)[0]
