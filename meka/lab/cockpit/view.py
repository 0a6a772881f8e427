"""A run as the page wants it: plain JSON, arrays as base64 of float32.

Base64 because JSON has no NaN, and because it is half as long as digits.
"""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from meka.lab.cockpit import rules
from meka.lab.cockpit.follow import Run, Table
from meka.lab.cockpit.series import step_rows
from meka.lab.cockpit.story import num, seconds_text, story
from meka.lab.cockpit.thin import Curve, Thinner

_BINS = 10  # dots of the calibration panel
_SILENT = 60.0  # seconds without news after which a run may have stopped


class RunView:
    """What one run looks like now; cheap to ask for again while the run grows."""

    def __init__(self, run: Run):
        """Nothing is computed yet."""
        self.run = run
        self._generation = -1

    def to_json(self) -> dict[str, Any]:
        """The run as plain values."""
        run = self.run
        if self._generation != run.generation:
            self._generation = run.generation
            self._thin, self._eval_thin = Thinner(step_rows(run)), Thinner(self._evals)
            self._chosen = np.zeros((0, 0, len(rules.RULES)))
            self._width = 0
        series = self._series()
        return {
            "name": str(run.path),
            "label": label(run),
            "state": state(run),
            "step": run.last_step,
            "about": about(run),
            "summary": summary(run),
            "story": [dataclasses.asdict(each) for each in story(run)],
            "series": series,
            "calibration": _calibration(run),
            "profile": self._profile(),
            "seeds": 1 if run.config is None else run.config.seeds,
        }

    def _evals(self, start: int, stop: int) -> dict[str, np.ndarray]:
        table = self.run.evals
        return {name: table.column(name, start, stop) for name in table.names}

    def _series(self) -> dict[str, Any]:
        run, found = self.run, {}
        if len(run.evals):
            curves = self._eval_thin.update(len(run.evals))
            x = _places(run.evals, self._eval_thin.width)
            found |= {name: _curve(x, curve) for name, curve in curves.items()}
        if len(run.steps):
            with np.errstate(all="ignore"):  # what overflows becomes a gap
                curves = self._thin.update(len(run.steps))
            x = _places(run.steps, self._thin.width)
            found |= {name: _curve(x, curve) for name, curve in curves.items()}
            found |= self._rules()
        if run.batch_size and "noise_scale" in found:
            ends = run.steps.step[[0, -1]]
            found["batch_size"] = _line(ends, np.full(2, run.batch_size))
        if run.timing:
            times = np.array(run.timing[-4000:])
            thin = Thinner(lambda start, stop: {"": times[start:stop, 1:]})
            curve = thin.update(len(times))[""]
            places = [c.mean() for c in _cut(times[:, 0], thin.width)]
            found["seconds"] = _curve(np.array(places), curve)
        return found

    def _sampled(self) -> np.ndarray:
        """The last row of each full bucket: what rules and profiles are shown for."""
        width = self._thin.width
        return np.arange(width - 1, len(self.run.steps), width)

    def _rules(self) -> dict[str, Any]:
        if not rules.recorded(self.run):
            return {}
        rows = self._sampled()
        if self._width != self._thin.width:
            self._width = self._thin.width
            self._chosen = self._chosen[:0]
        new = rows[len(self._chosen) :]
        if len(new):
            chosen = rules.steps(rules.models(self.run, new))
            known = [self._chosen] if len(self._chosen) else []
            self._chosen = np.concatenate([*known, chosen])
        x, middle = self.run.steps.step[rows], np.median(self._chosen, axis=1)
        middle = np.where((middle > 0) & (middle < 1e30), middle, np.nan)
        return {
            f"rule_{name}": _line(x, middle[:, k]) for k, name in enumerate(rules.RULES)
        }

    def _profile(self) -> dict[str, Any] | None:
        """The six numbers, and the steps, of the first seed."""
        if not len(self.run.steps) or not rules.recorded(self.run):
            return None
        rows = self._sampled()
        models = rules.models(self.run, rows)[:, 0]
        found = {name: _packed(models[:, k]) for k, name in enumerate(rules.PARTS)}
        for k, name in enumerate(rules.RULES):
            found[name] = _packed(self._chosen[:, 0, k])
        found["step_size"] = _packed(self.run.steps.pick("step_size", rows)[:, 0])
        found["step"] = _packed(self.run.steps.step[rows])
        return found


def label(run: Run) -> str:
    """A short name: the optimizer and what was set of it."""
    if run.config is None:
        return run.path.name
    rate = run.config.learning_rate
    parts = [run.config.optimizer, *([] if rate is None else [f"{rate:g}"])]
    parts += [f"{name}={value}" for name, value in run.config.options.items()]
    return " ".join(parts)


def state(run: Run) -> str:
    """One word or two for what a run is doing."""
    if run.problem is not None:
        return "unreadable"
    if run.config is None:
        return "waiting"
    if run.finished:
        return "done"
    if not run.changed:
        return "starting"
    silent = time.time() - run.changed
    return "training" if silent < _SILENT else "silent"


def about(run: Run) -> dict[str, str]:
    """What was trained, by what, where."""
    if run.config is None:
        return {}
    config, subject, where = run.config, run.subject, run.environment
    options = ", ".join(f"{name} {value}" for name, value in config.options.items())
    examples = subject.get("train_examples")
    facts = {
        "workload": config.workload,
        "parameters": _count(subject.get("parameters")),
        "training examples": _count(examples) if subject else "",
        "batch size": _count(run.batch_size),
        "optimizer": config.optimizer,
        "learning rate": "" if config.learning_rate is None else config.learning_rate,
        "schedule": config.schedule or "",
        "options": options,
        "steps": f"{config.steps:,}",
        "seeds": config.seeds,
        "device": where.get("device", ""),
        "software": ", ".join(
            f"{name} {where[name]}" for name in ("meka", "jax") if where.get(name)
        ),
        "folder": str(run.path),
    }
    return {name: str(value) for name, value in facts.items() if value != ""}


def summary(run: Run) -> dict[str, str]:
    """The row of the summary table."""
    row = {"step": ""}
    if run.config is not None:
        row["step"] = f"{run.last_step:,} of {run.config.steps:,}"
    row["train loss"] = _spread(run.evals, "train_loss")
    row["held-out loss"] = _spread(run.evals, "test_loss")
    row["accuracy"] = _spread(run.evals, "test_accuracy", "{:.2%}".format)
    row["step size"] = _spread(run.steps, "step_size")
    row["gain"] = _spread(run.steps, "gain")
    row["noise scale"] = _spread(run.steps, "noise_scale")
    row["rejected"] = _spread(run.steps, "rejected")
    pace = [seconds for _, seconds in run.timing]
    row["time per step"] = seconds_text(float(np.median(pace))) if pace else "–"
    return row


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _spread(table: Table, name: str, text: Callable[[float], str] = num) -> str:
    """The last value: its median over seeds, and the range where they differ."""
    if name not in table or not len(table):
        return "–"
    values = table.column(name, len(table) - 1)[0]
    if not np.isfinite(values).all():
        return "not finite"
    low, middle, high = map(text, np.quantile(values, [0, 0.5, 1]).tolist())
    return middle if low == high else f"{middle} ({low} to {high})"


def _calibration(run: Run) -> dict[str, Any] | None:
    """Predicted change against the change of the minibatch loss to the next step.

    The next minibatch is fresh, so its loss is an unbiased look at what the step did.
    """
    if "predicted_change" not in run.steps or len(run.steps) < 2 * _BINS:
        return None
    recent = max(0, len(run.steps) - 20000)
    predicted = run.steps.column("predicted_change", recent)[:-1].ravel()
    realised = np.diff(run.steps.column("loss", recent), axis=0).ravel()
    usable = np.isfinite(predicted) & np.isfinite(realised)
    order = np.argsort(predicted[usable], kind="stable")
    dots = []
    for part in np.array_split(order, _BINS):
        x, y = predicted[usable][part], realised[usable][part]
        if len(y) > 1:
            error = 2 * np.std(y, ddof=1) / np.sqrt(len(y))
            dots.append((np.mean(x), np.mean(y), error))
    if not dots:
        return None
    columns = np.array(dots).T
    names = ("predicted", "realised", "error")
    return {name: _packed(x) for name, x in zip(names, columns, strict=True)}


def _places(table: Table, width: int) -> np.ndarray:
    """The step in the middle of each bucket."""
    step = table.step
    first = np.arange(0, len(step), width)
    last = np.minimum(first + width, len(step)) - 1
    return (step[first] + step[last]) / 2


def _cut(values: np.ndarray, width: int) -> list[np.ndarray]:
    return [values[k : k + width] for k in range(0, len(values), width)]


def _curve(x: np.ndarray, curve: Curve) -> dict[str, str]:
    packed = _line(x, curve.middle)
    flat = np.array_equal(curve.low, curve.high, equal_nan=True)
    if not flat:
        packed |= {"low": _packed(curve.low), "high": _packed(curve.high)}
    return packed


def _line(x: np.ndarray, y: np.ndarray) -> dict[str, str]:
    return {"x": _packed(x), "y": _packed(y)}


def _packed(values: np.ndarray) -> str:
    with np.errstate(over="ignore"):
        return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
