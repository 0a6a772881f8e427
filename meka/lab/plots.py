"""Pictures of runs: losses with seed bands, step size, gain and noise over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only: a run may have no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from meka.lab.history import History, Series

# Okabe and Ito's palette, which colour-blind readers can tell apart; ours first.
OURS = {"auto": "#D55E00", "meka": "#0072B2", "adameka": "#009E73"}
_OTHERS = (
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C6D31",
    "#7F7F7F",
    "#000000",
    "#882255",
    "#117733",
    "#332288",
    "#AA4499",
    "#999933",
)
_STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "figure.dpi": 110,
}


def overview(
    runs: Sequence[History],
    path: Path,
    *,
    title: str = "",
    faint: Sequence[History] = (),
    target: float | None = None,
) -> Path:
    """Draw runs side by side in six panels.

    Args:
        runs: drawn in full, median over seeds with the range as a band.
        path: the PNG to write.
        title: above the panels.
        faint: drawn thinly behind, such as the rest of a grid.
        target: a loss to mark.
    """
    colors = _colors(runs)
    with plt.rc_context(cast(Any, _STYLE)):
        figure, axes = plt.subplots(2, 3, figsize=(14, 7.6), layout="constrained")
        loss, accuracy, step_size, gain, noise, curvature = axes.flat
        for run in faint:
            color = colors.get(run.config.optimizer, "#999999")
            for axis, name in ((loss, "train_loss"), (accuracy, "test_accuracy")):
                _line(axis, run.evals, name, color, None, faint=True)
        for run in runs:
            color = colors[run.config.optimizer]
            _line(loss, run.evals, "train_loss", color, run.label)
            _line(accuracy, run.evals, "test_accuracy", color, run.label)
            _line(step_size, run.steps, "step_size", color, run.label)
            _line(gain, run.steps, "gain", color, run.label)
            _line(noise, run.steps, "gradient_noise", color, run.label)
            _line(curvature, run.steps, "curvature", color, run.label, unit=True)
        _finish(loss, "Training loss", "", log=True)
        if target is not None and target > 0:
            loss.axhline(target, color="#555555", linewidth=0.8, linestyle=":")
            loss.annotate(
                "best Adam",
                (0.99, target),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color="#555555",
            )
        _finish(accuracy, "Test accuracy", "", log=False)
        _zoom_accuracy(accuracy)
        _finish(step_size, "Step size", "as chosen or set", log=True)
        _finish(gain, "Kalman gain", "share of the minibatch in the estimate", log=True)
        _finish(noise, "Gradient noise", "variance of the minibatch gradient", log=True)
        _finish(curvature, "Curvature along the step", "d'Bd / d'd", log=True)
        handles, labels = loss.get_legend_handles_labels()
        if handles:  # one for all panels, beside them, so that it hides no curve
            figure.legend(handles, labels, loc="outside right upper", fontsize=9)
        if title:
            figure.suptitle(title, fontsize=13)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)
    return path


def _colors(runs: Sequence[History]) -> dict[str, str]:
    names = list(dict.fromkeys(run.config.optimizer for run in runs))
    others = [name for name in names if name not in OURS]
    rest = {name: _OTHERS[k % len(_OTHERS)] for k, name in enumerate(others)}
    return {name: OURS.get(name) or rest[name] for name in names}


def _line(
    axis: Axes,
    series: Series,
    name: str,
    color: str,
    label: str | None,
    *,
    faint: bool = False,
    unit: bool = False,
) -> None:
    if name not in series:
        return
    values = np.asarray(series[name], float)
    if unit:
        if "direction_norm" not in series:
            return
        with np.errstate(all="ignore"):  # what overflows becomes a gap below
            squared = np.asarray(series["direction_norm"], float) ** 2
            values = values / np.maximum(squared, 1e-300)
    # Overflowed or diverged: a gap in the line, not an axis to infinity.
    values = np.where(np.isfinite(values) & (np.abs(values) < 1e30), values, np.nan)
    if np.isnan(values).all():
        return
    step = series.step
    if len(step) > 1000:  # thin, so that the picture stays small
        keep = np.unique(np.linspace(0, len(step) - 1, 1000).astype(int))
        step, values = step[keep], values[keep]
    with np.errstate(all="ignore"):
        ranked = np.sort(values, axis=1)  # NaN sorts last
        middle = ranked[:, (values.shape[1] - 1) // 2]
    if faint:
        axis.plot(step, middle, color=color, linewidth=0.7, alpha=0.35, zorder=1)
        return
    axis.plot(step, middle, color=color, linewidth=1.6, label=label, zorder=3)
    if values.shape[1] > 1:
        low, high = np.fmin.reduce(values, 1), np.fmax.reduce(values, 1)
        axis.fill_between(step, low, high, color=color, alpha=0.18, linewidth=0)


def _finish(axis: Axes, title: str, note: str, *, log: bool) -> None:
    axis.set_title(title, loc="left")
    if note:
        axis.set_ylabel(note, fontsize=8)
    axis.set_xlabel("step", fontsize=8)
    if not axis.lines:
        axis.text(
            0.5,
            0.5,
            "not recorded",
            ha="center",
            transform=axis.transAxes,
            color="#888888",
        )
        axis.set_xticks([])
        axis.set_yticks([])
        return
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in axis.lines])
    if log and np.any(drawn > 0):
        axis.set_yscale("log")


def _zoom_accuracy(axis: Axes) -> None:
    """Leave out the first steep rise, where nothing can be told apart."""
    main = [line for line in axis.lines if line.get_linewidth() > 1]
    if not main:
        return
    last = [np.asarray(line.get_ydata(), float) for line in main]
    late = np.concatenate([values[len(values) // 5 :] for values in last])
    late = late[np.isfinite(late)]
    if len(late) and late.max() > late.min():
        axis.set_ylim(max(0.0, late.min() - 0.01), min(1.0, late.max() + 0.005))
