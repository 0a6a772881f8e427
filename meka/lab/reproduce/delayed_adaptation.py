"""Figure 7: what happens to curvature and noise once adaptive steps take over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meka
from meka.improvement import Rule
from meka.lab.reproduce import drawing, training
from meka.lab.reproduce.setting import Setting, array
from meka.lab.reproduce.training import Run
from meka.lab.reproduce.verdict import Check, Reason

CHOICES = (
    "Meka with constant steps of 0.1 (the paper's for SGD) until the switch, PI from "
    "there on, same initialisation and data order for all; batch 128. The paper does "
    "not say when its runs switch; here after 0, 1/8, 1/4 and 1/2 of the run. "
    "Curvature is δᵀBδ/δᵀδ along the direction, the variance that of a single "
    "example's gradient, averaged over parameters (and, as the filter has it, over "
    "time). `Rise` is at least 1.5 times the curvature, and 1.1 times the variance, "
    "that the run of constant steps has, at the peaks over the first 15 % of what is "
    "left after the switch; `stay` asks this of the medians over its last fifth. `At "
    "equal loss` compares where each run passes the loss at which the constant one "
    "ends."
)
REASONS = (
    Reason(
        "curvature-stays",
        "Curvature falls as the loss does, and on these networks adaptive steps lower "
        "the loss sooner. Compared at equal training loss and not at equal time (the "
        "figures after `at equal loss`) the curvature along the step is higher after "
        "every switch. So adaptive steps do enter stiffer places, as the paper says; "
        "but an MLP lets them out again, and they end lower for it. ResNet-32 "
        "does not, in the one run there is at scale full.",
        tested=True,
        scales=("desk",),
    ),
    Reason(
        "variance",
        "The variance of single gradients falls with the loss as well, and at equal "
        "loss it is much the same with either kind of step. That it stays high seems "
        "to need a run that is stuck, which these are not.",
        tested=False,
        scales=("desk",),
    ),
    Reason(
        "curvature-rises on cifar10-resnet32",
        "A near miss, of one seed and one switch. The curvature goes on rising after "
        "the phase that is looked at, to more than twice that of constant steps, while "
        "the step falls from 0.066 to 0.032. The measure is coarse: the two runs were "
        "compiled apart, so they differ by rounding even before the switch, and there "
        "the medians of their curvatures are already 14 % apart.",
        tested=False,
        scales=("full",),
    ),
)

_RATE = 0.1
_LOGS = ("step_size", "curvature", "direction_norm", "gradient_noise")
_SHARES = (0.0, 0.125, 0.25, 0.5)


def run(setting: Setting) -> dict[str, Any]:
    """Train with constant steps, and with a switch at several times."""
    names = setting.pick(
        smoke=("digits",), desk=("digits", "mnist"), full=("cifar10-resnet32",)
    )
    seeds = setting.seeds or setting.pick(smoke=2, desk=3, full=1)
    shares = setting.pick(smoke=(0.25,), desk=_SHARES, full=_SHARES)

    def train(name: str) -> dict[str, Any]:
        epochs = setting.pick(
            smoke=2, desk={"digits": 90, "mnist": 1}.get(name, 1), full=8
        )
        steps = training.steps_for(setting, name, epochs)
        switches = [round(share * steps) for share in shares]

        def switched(after: int) -> dict[str, Any]:
            run = Run(
                f"switch after {after}", name, "switching meka", steps, seeds, _RATE,
                logs=_LOGS, evaluations=5, knob=after,
            )  # fmt: skip
            trained = training.train(
                setting, run, lambda w: training.turned(w, _switching)
            )
            return _summary(trained, training.load(name, setting.data_dir).batch_size)

        constant = switched(steps)  # first: nothing can be said without it
        runs = setting.each(switches, switched) | {steps: constant}
        return {
            "steps": steps,
            "switches": [after for after in runs if after != steps],
            "runs": {str(after): run for after, run in runs.items()},
        }

    found = setting.each(setting.select(names), train)
    return {"workloads": found, "seeds": seeds}


def _switching(after: jax.Array) -> Rule:
    """As `meka.switch`, with a time that need not be known when it is compiled."""

    def rule(model: meka.ImprovementModel) -> jax.Array:
        best = meka.probability_of_improvement(model)
        return jnp.where(model.step < after, jnp.asarray(_RATE, best.dtype), best)

    return rule


def _summary(trained: dict[str, Any], batch_size: int) -> dict[str, Any]:
    logs = {name: array(values) for name, values in trained["logs"].items()}
    steps = len(logs["curvature"])
    with np.errstate(all="ignore"):
        curvature = logs["curvature"] / logs["direction_norm"] ** 2
    return {
        "step": training.centres(steps),
        "curvature": training.thinned(curvature),
        "variance": training.thinned(batch_size * logs["gradient_noise"]),
        "step_size": training.thinned(logs["step_size"]),
        "evaluated": trained["step"],
        "train_loss": trained["train_loss"],
    }


def _ratio(own: dict[str, Any], after: int, what: str, first: float, last: float):
    """Over a phase of what is left after the switch, against constant steps.

    Soon after the switch it is the ratio of the peaks; later, of the medians.
    """
    constant = own["runs"][str(own["steps"])]
    adaptive = own["runs"][str(after)]
    step, rest = array(adaptive["step"]), own["steps"] - after
    phase = (step > after + first * rest) & (step <= after + last * rest)
    a, b = (np.median(array(run[what])[phase], axis=1) for run in (adaptive, constant))
    reduce = np.nanmax if first == 0 else np.nanmedian
    return float(reduce(a) / reduce(b))


def _at_equal_loss(own: dict[str, Any], after: int, what: str) -> float:
    """Where a run passes the last loss of constant steps, against their end."""
    constant, run = own["runs"][str(own["steps"])], own["runs"][str(after)]
    level = np.log(np.median(array(constant["train_loss"])[-1]))
    falling = -np.log(np.median(array(run["train_loss"]), axis=1))
    passed = np.interp(-level, falling, array(run["evaluated"]))
    place = int(np.abs(array(run["step"]) - passed).argmin())
    there = array(run[what])[max(0, place - 3) : place + 4]
    return float(np.median(there) / np.median(array(constant[what])[-4:]))


def checks(data: dict[str, Any]) -> list[Check]:
    """Higher soon after every switch, and still at the end."""
    found = []
    phases = (
        ("rises", 0.0, 0.15, "soon after the switch"),
        ("stays", 0.8, 1.0, "at the end of the run"),
    )
    for name, own in data["workloads"].items():
        for what, needed in (("curvature", 1.5), ("variance", 1.1)):
            for word, first, last, when in phases:
                ratio = {k: _ratio(own, k, what, first, last) for k in own["switches"]}
                equal = {k: _at_equal_loss(own, k, what) for k in own["switches"]}
                found.append(
                    Check(
                        f"{what}-{word} on {name}",
                        f"{when} the {what} is at least {needed:g} times that of "
                        "constant steps, whenever the switch is",
                        _listed(ratio)
                        + ("; at equal loss " + _listed(equal) if first else ""),
                        all(r >= needed for r in ratio.values()),
                    )
                )
    return found


def _listed(ratio: dict[int, float]) -> str:
    return ", ".join(f"{r:.3g} times (switch after {k})" for k, r in ratio.items())


def figure(data: dict[str, Any]):
    """Curvature, variance, step size and loss, a row a problem."""
    names = list(data["workloads"])
    picture, axes = drawing.panels(4, len(names), width=14.0, height=2.7)
    titles = {
        "curvature": "curvature along the step",
        "variance": "gradient variance",
        "step_size": "step size",
        "train_loss": "training loss",
    }
    for row, name in zip(axes, names, strict=True):
        own = data["workloads"][name]
        for k, (after, run) in enumerate(own["runs"].items()):
            constant = int(after) == own["steps"]
            color = "#000000" if constant else drawing.PALETTE[k]
            label = "constant steps" if constant else f"switch after {after}"
            for axis, what in zip(row, titles, strict=True):
                x = run["evaluated"] if what == "train_loss" else run["step"]
                drawing.band(axis, x, run[what], color, label)
        for axis, (what, title) in zip(row, titles.items(), strict=True):
            axis.set_yscale("log")
            axis.set_title(f"{name}\n{title}" if what == "curvature" else title)
            axis.set_xlabel("step")
        row[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture
