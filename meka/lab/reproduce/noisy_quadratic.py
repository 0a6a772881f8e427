"""Figure 4 and Proposition 1: a quadratic whose minimum is hidden in noise."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from meka.lab import problems
from meka.lab.methods import Method
from meka.lab.reproduce import drawing, training
from meka.lab.reproduce.setting import Setting, array
from meka.lab.reproduce.training import Run
from meka.lab.reproduce.unfiltered import unfiltered
from meka.lab.reproduce.verdict import Check, Reason
from meka.lab.workloads import Workload

CHOICES = (
    "20 dimensions and ξ ~ N(0, I) as in the paper; condition number 2000 (paper: "
    "above 1000), batch 128, start 5 away from the minimum along every eigenvector, "
    "step 1 = 1/L, and 0.05 as the smaller step of SGD. Adaptive gradient descent "
    "takes the exact quadratic minimum along the gradient. SGD with adaptive steps is "
    "Meka with its filter switched off: gain one for gradient and value, everything "
    "else alike. Curves are medians over seeds. The rate of Proposition 1 is measured "
    "on the same problem with condition number 50, so that the exponential part has "
    "died out."
)
REASONS: tuple[Reason, ...] = ()

_STEP, _SMALL = 1.0, 0.05


def run(setting: Setting) -> dict[str, Any]:
    """Train every method on the figure's problem, and Meka on the proposition's."""
    steps = setting.pick(smoke=300, desk=3000, full=3000)
    seeds = setting.seeds or setting.pick(smoke=2, desk=5, full=5)
    every = setting.pick(smoke=12, desk=100, full=100)
    rates = {
        "SGD": ("sgd", _STEP),
        "SGD, small step": ("sgd", _SMALL),
        "Meka": ("meka-constant", _STEP),
        "Meka, PI": ("meka", None),
        "GD": ("gradient descent", _STEP),
        "GD, adaptive": ("gradient descent", None),
        "SGD, PI": ("unfiltered meka", None),
    }
    build = {
        "GD": lambda w: _descent(_STEP),
        "GD, adaptive": lambda w: _descent(None),
        "SGD, PI": unfiltered,
    }
    curves: dict[str, Any] = {}
    for label, (name, rate) in rates.items():
        run = Run(label, "quadratic", name, steps, seeds, rate, evaluations=every)
        trained = training.train(setting, run, build.get(label))
        curves[label] = {"step": trained["step"], "loss": trained["train_loss"]}
    return {"curves": curves, "rate": _rate(setting), "seeds": seeds}


def _descent(rate: float | None) -> Method:
    """Gradient descent with the exact gradient; without a rate, exact line search."""
    problem = problems.noisy_quadratic()

    def step(
        params: Any, state: Any, batch: Any, number: Any = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        del batch, number
        slope = problem.gradient(params)
        bend = problem.gradient(slope)  # Hg: the gradient is linear
        best = jnp.vdot(slope, slope) / jnp.vdot(slope, bend)
        size = best if rate is None else jnp.float32(rate)
        logs = {"loss": problem.objective(params), "step_size": size}
        return params - size * slope, state, logs

    return Method(lambda params: (), step, lambda params, state: params)


def _rate(setting: Setting) -> dict[str, Any]:
    """E[f − f*] of Meka and SGD at step 1/L over a long run, from many seeds."""
    from meka.lab.loop import CHUNK, Loop

    condition = 50.0
    seeds, steps = setting.pick(smoke=(8, 400), desk=(32, 6000), full=(256, 10000))
    points = setting.pick(smoke=10, desk=60, full=60)
    workload = _conditioned(condition)

    def measure(name: str) -> dict[str, Any]:
        method = training.method(
            name, workload.losses, steps=steps, learning_rate=_STEP
        )
        loop = Loop(workload, method, seeds=seeds)
        watcher = setting.watch(f"rate of {name}", steps)
        carry, done, at, mean = loop.start(), 0, [], []
        marks = np.unique(np.geomspace(10, steps, points).astype(int))
        while done < steps:
            length = min(CHUNK, int(marks[marks > done][0]) - done)
            carry, logs = loop.advance(carry, done, length)
            done += length
            watcher.step(done, logs, 1.0)
            if done in marks:
                at.append(done)
                losses = [record["train_loss"] for record in loop.evaluate(carry)]
                mean.append(float(np.mean(losses)))
        return {"step": at, "mean": mean}

    found: dict[str, Any] = {"condition": condition, "seeds": seeds}
    for label, name in (("Meka", "meka-constant"), ("SGD", "sgd")):
        settings = {"condition": condition, "seeds": seeds, "steps": steps}
        found[label] = setting.piece(
            f"rate-{label}", settings, lambda name=name: measure(name)
        )
    return found


def _conditioned(condition: float) -> Workload:
    problem = problems.noisy_quadratic(condition=condition)
    return Workload(
        "quadratic",
        lambda key: problem.start,
        problem.losses,
        128,
        1000,
        draw=problem.draw,
        objective=problem.objective,
    )


def _final(data: dict[str, Any], label: str) -> float:
    """Median over seeds of the mean over the last tenth of the evaluations."""
    loss = array(data["curves"][label]["loss"])
    tail = loss[-max(1, len(loss) // 10) :]
    return float(np.median(tail.mean(axis=0)))


def _slope(step: Any, mean: Any) -> float:
    """Exponent of t over the last decade."""
    t, e = array(step), array(mean)
    late = t >= t[-1] / 10
    return float(np.polyfit(np.log(t[late]), np.log(e[late]), 1)[0])


def checks(data: dict[str, Any]) -> list[Check]:
    """Meka like GD, SGD in diffusion, PI good for one and not the other, 1/t."""
    end = {label: _final(data, label) for label in data["curves"]}
    meka_loss, gd = (
        np.median(array(data["curves"][label]["loss"]), axis=1)
        for label in ("Meka", "GD")
    )
    step = array(data["curves"]["GD"]["step"])
    after = step >= 0.1 * step[-1]
    apart = float(np.max(meka_loss[after] / gd[after]))
    sgd = np.median(array(data["curves"]["SGD"]["loss"]), axis=1)
    quarter = len(sgd) // 4
    fall = float(np.mean(sgd[-quarter:]) / np.mean(sgd[-2 * quarter : -quarter]))
    rate = {name: _slope(**data["rate"][name]) for name in ("Meka", "SGD")}
    return [
        Check(
            "follows-gd",
            "after the first tenth Meka's median f − f* is never more than 1.5 times "
            "that of gradient descent at the same step",
            f"largest ratio {apart:.3g}; at the end {end['Meka']:.3g} against "
            f"{end['GD']:.3g}",
            apart <= 1.5,
        ),
        Check(
            "sgd-diffuses",
            "SGD at the same step stops falling (last quarter at least 0.7 times the "
            "quarter before it) and ends at least 5 times above Meka",
            f"last quarter over the one before {fall:.2g}; end {end['SGD']:.3g}, "
            f"{end['SGD'] / end['Meka']:.3g} times Meka's",
            fall >= 0.7 and end["SGD"] >= 5 * end["Meka"],
        ),
        Check(
            "small-step-is-slow",
            "SGD with the smaller step is still above Meka at the end",
            f"{end['SGD, small step']:.3g} against {end['Meka']:.3g}",
            end["SGD, small step"] > end["Meka"],
        ),
        Check(
            "pi-helps-meka",
            "adaptive steps end lower than the fixed step, for Meka as for GD",
            f"Meka {end['Meka, PI']:.3g} against {end['Meka']:.3g}; GD "
            f"{end['GD, adaptive']:.3g} against {end['GD']:.3g}",
            end["Meka, PI"] < end["Meka"] and end["GD, adaptive"] < end["GD"],
        ),
        Check(
            "pi-does-not-help-sgd",
            "adaptive steps do not improve SGD (end at least 0.9 times the fixed one)",
            f"{end['SGD, PI']:.3g} against {end['SGD']:.3g}",
            end["SGD, PI"] >= 0.9 * end["SGD"],
        ),
        Check(
            "one-over-t",
            "over the last decade of steps Meka's mean f − f* falls as t to a power "
            "within 0.15 of −1, and SGD's not faster than t^−0.2",
            f"Meka t^{rate['Meka']:.2f}, SGD t^{rate['SGD']:.2f} "
            f"({data['rate']['seeds']} seeds)",
            abs(rate["Meka"] + 1) <= 0.15 and rate["SGD"] > -0.2,
        ),
    ]


def figure(data: dict[str, Any]):
    """The loss of every method, and the rate of Proposition 1."""
    picture, axes = drawing.panels(2, width=9.4, height=4.3)
    left, right = axes[0]
    colors = {
        "SGD": drawing.GREEN,
        "SGD, small step": drawing.AMBER,
        "SGD, PI": drawing.BROWN,
        "GD": "#000000",
        "GD, adaptive": drawing.GREY,
        "Meka": drawing.BLUE,
        "Meka, PI": drawing.RED,
    }
    for label, color in colors.items():
        curve = data["curves"][label]
        width = 3.0 if label == "GD" else 1.5  # Meka lies on top of it
        dash = "--" if "PI" in label or "adaptive" in label else "-"
        drawing.band(
            left,
            curve["step"],
            curve["loss"],
            color,
            label,
            linestyle=dash,
            linewidth=width,
        )
    left.set_yscale("log")
    left.set_title("Noisy quadratic, condition number 2000")
    left.set_xlabel("step")
    left.set_ylabel("f − f*")
    drawing.below(left, 4)
    for label in ("SGD", "Meka"):
        curve = data["rate"][label]
        right.loglog(curve["step"], curve["mean"], color=colors[label], label=label)
    t, e = array(data["rate"]["Meka"]["step"]), array(data["rate"]["Meka"]["mean"])
    right.loglog(
        t, e[-1] * t[-1] / t, ":", color="#555555", label="proportional to 1/t"
    )
    right.set_title("Rate at a constant step (Proposition 1)")
    right.set_xlabel("step t")
    right.set_ylabel("mean f − f*")
    drawing.below(right, 3)
    return picture
