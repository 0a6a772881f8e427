"""Figure 1: paths through a noisy Rosenbrock valley."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meka.lab import optimizers, problems
from meka.lab.methods import Method
from meka.lab.reproduce import drawing, training
from meka.lab.reproduce.setting import Setting, array
from meka.lab.reproduce.training import Run
from meka.lab.reproduce.unfiltered import unfiltered
from meka.lab.reproduce.verdict import Check, Reason
from meka.lab.workloads import Workload

CHOICES = (
    "The paper does not say what noise, start, step or batch its picture has. Here an "
    "example's loss is (1 + a − x)² + 100 b (y − x² − c)² with random a, b and c, so "
    "that value, gradient and curvature are all noisy; start (−1.2, 1), batch 8, "
    "and the fixed step 0.001, about the largest that is stable at the minimum."
)
REASONS: tuple[Reason, ...] = ()

_RATE = 1e-3
_METHODS = {
    "SGD": ("sgd", _RATE),
    "Meka": ("meka-constant", _RATE),
    "SGD, PI": ("unfiltered meka", None),
    "Meka, PI": ("meka", None),
}


def run(setting: Setting) -> dict[str, Any]:
    """Follow the three from the same start."""
    steps = setting.pick(smoke=300, desk=20000, full=20000)
    seeds = setting.seeds or setting.pick(smoke=2, desk=5, full=5)
    curves: dict[str, Any] = {}
    for label, (name, rate) in _METHODS.items():
        run = Run(
            label,
            "rosenbrock",
            name,
            steps,
            seeds,
            rate,
            logs=("x", "y"),
            evaluations=2,
            batch_size=8,
        )
        trained = training.train(setting, run, lambda w, n=name, r=rate: _seen(w, n, r))
        curves[label] = _summary(
            array(trained["logs"]["x"]), array(trained["logs"]["y"])
        )
    return {"steps": steps, "seeds": seeds, "curves": curves}


def _seen(workload: Workload, name: str, rate: float | None) -> Method:
    """A method of the bench that also logs where it is."""
    if name in optimizers.TABLE:
        method = training.method(name, workload.losses, steps=1, learning_rate=rate)
    else:
        method = unfiltered(workload)

    def step(
        params: Any, state: Any, batch: Any, number: Any = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        params, state, logs = method.step(params, state, batch, number)
        return params, state, {**logs, "x": params[0], "y": params[1]}

    return replace(method, step=step)


def _summary(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Path of the first seed, loss of all, and how straight the paths end."""
    loss = (1 - x) ** 2 + 100 * (y - x**2) ** 2
    late = slice(len(x) // 2, None)
    lengths = np.hypot(np.diff(x[late], axis=0), np.diff(y[late], axis=0)).sum(axis=0)
    ends = np.hypot(x[late][-1] - x[late][0], y[late][-1] - y[late][0])
    keep = np.unique(np.geomspace(1, len(x), 400).astype(int)) - 1
    quarter = max(1, len(x) // 4)
    return {
        "x": x[keep, 0],
        "y": y[keep, 0],
        "late_x": x[-300:, 0],
        "late_y": y[-300:, 0],
        "step": training.centres(len(x), 150),
        "loss": training.thinned(loss, 150),
        "last_quarter": np.mean(loss[-quarter:], axis=0),
        "third_quarter": np.mean(loss[-2 * quarter : -quarter], axis=0),
        "detour": lengths / np.maximum(ends, 1e-12),
    }


def checks(data: dict[str, Any]) -> list[Check]:
    """SGD stops and wanders; Meka goes on, straight; PI gets lower."""
    found = {
        label: {
            name: float(np.median(array(curve[name])))
            for name in ("last_quarter", "third_quarter", "detour")
        }
        for label, curve in data["curves"].items()
    }
    end = {label: values["last_quarter"] for label, values in found.items()}
    fall = end["SGD"] / found["SGD"]["third_quarter"]
    detour = {label: values["detour"] for label, values in found.items()}
    soon = {
        label: _reached(curve, end["SGD"]) for label, curve in data["curves"].items()
    }
    return [
        Check(
            "sgd-diffuses",
            "the mean loss of SGD over the last quarter is at least 0.7 times that "
            "over the quarter before",
            f"{fall:.2g} (at {end['SGD']:.3g})",
            fall >= 0.7,
        ),
        Check(
            "filter-converges",
            "Meka at the same step ends at least 10 times below SGD",
            f"{end['Meka']:.3g} against {end['SGD']:.3g}",
            10 * end["Meka"] <= end["SGD"],
        ),
        Check(
            "smooth",
            "over the second half Meka's way, over the distance it covers, is at most "
            "a tenth of SGD's",
            f"{detour['Meka']:.3g} times the distance against {detour['SGD']:.3g}",
            10 * detour["Meka"] <= detour["SGD"],
        ),
        Check(
            "adaptive-complements",
            "PI steps along filtered gradients end at least 10 times below PI steps "
            "along minibatch gradients, and no more than twice as high as the fixed "
            "step",
            f"{end['Meka, PI']:.3g}, against {end['SGD, PI']:.3g} and "
            f"{end['Meka']:.3g}; at SGD's last level after {soon['Meka, PI']:.0f} "
            f"steps (fixed step: {soon['Meka']:.0f})",
            10 * end["Meka, PI"] <= end["SGD, PI"]
            and end["Meka, PI"] <= 2 * end["Meka"],
        ),
    ]


def _reached(curve: dict[str, Any], level: float) -> float:
    """The step from which on the median loss is at most ``level``; else infinite."""
    above = np.median(array(curve["loss"]), axis=1) > level
    if above[-1]:
        return float("inf")
    first = int(len(above) - above[::-1].argmax()) if above.any() else 0
    return float(array(curve["step"])[first])


def figure(data: dict[str, Any]):
    """The paths in the valley, their ends near the minimum, and the loss."""
    picture, axes = drawing.panels(3, width=11.5, height=3.8)
    valley, near, loss = axes[0]
    colors = {
        "SGD": drawing.GREEN,
        "Meka": drawing.BLUE,
        "SGD, PI": drawing.AMBER,
        "Meka, PI": drawing.RED,
    }
    problem = problems.rosenbrock()
    for axis, x, y in (
        (valley, np.linspace(-1.7, 1.5, 80), np.linspace(-0.6, 1.9, 80)),
        (near, np.linspace(0.6, 1.4, 60), np.linspace(0.4, 1.8, 60)),
    ):
        grid = np.meshgrid(x, y)
        height = np.asarray(problem.objective(np.stack(grid)))  # pyright: ignore
        axis.contour(
            *grid, np.log10(height + 1e-6), levels=9, cmap="Greys", linewidths=0.6
        )
        axis.plot(1, 1, "*", color="#000000", markersize=9, zorder=5)
        axis.set_xlabel("x")
        axis.set_ylabel("y")
    for label, curve in data["curves"].items():
        color = colors[label]
        valley.plot(curve["x"], curve["y"], color=color, linewidth=1.1, label=label)
        near.plot(
            curve["late_x"], curve["late_y"], color=color, linewidth=0.8, label=label
        )
        drawing.band(loss, curve["step"], curve["loss"], color, label)
    valley.set_title("The path (first seed)")
    near.set_title("Its last 300 steps")
    loss.set_title("f − f*, all seeds")
    loss.set_yscale("log")
    loss.set_xlabel("step")
    drawing.below(valley, 4)
    return picture
