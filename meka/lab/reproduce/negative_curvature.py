"""Appendix B.2: a term λ‖δ‖⁶ in the variance makes the step of PI finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meka
from meka.lab.reproduce import drawing
from meka.lab.reproduce.setting import Setting, array
from meka.lab.reproduce.verdict import Check, Reason

CHOICES = (
    "The paper gives no numbers; slope 1, curvature −1, value and slope variance 0.5 "
    "and λ = 0.05 were chosen, and a curvature that is known exactly, since only then "
    "does the variance rise more slowly than the expectation. The random models cover "
    "four orders of magnitude in every number."
)
REASONS: tuple[Reason, ...] = ()

_END = 6.0
_THIRD = {"without": 0.0, "with": 0.05}


def run(setting: Setting) -> dict[str, Any]:
    """Probability and expectation with and without the term; many random models."""
    steps = np.linspace(0, _END, 151)
    at = jnp.asarray(steps, jnp.float32)
    far = jnp.geomspace(1e-3, 1e3, 6001, dtype=jnp.float32)
    data: dict[str, Any] = {"steps": steps, "models": {}}
    for name, third in _THIRD.items():
        model = _model(1.0, -1.0, 0.5, 0.5, third)
        data["models"][name] = {
            "mean": model.mean(at),
            "deviation": model.deviation(at),
            "probability": model.probability(at),
            "step": far[int(jnp.argmax(_score(model, far)))],
            "expected_step": far[int(jnp.argmax(model.expected_improvement(far)))],
            "quadratic": model.slope / model.curvature,
            "end": float(far[-1]),
        }
    count = setting.pick(smoke=200, desk=5000, full=20000)
    data["random"] = _random(np.random.default_rng(0), count)
    return data


def _model(slope, curvature, value, along, third) -> meka.ImprovementModel:
    numbers = (
        slope,
        curvature,
        value,
        along,
        jnp.zeros_like(jnp.asarray(slope)),
        third,
    )
    return meka.ImprovementModel(*(jnp.asarray(x, jnp.float32) for x in numbers))


def _score(model: meka.ImprovementModel, at: jax.Array) -> jax.Array:
    """What PI maximises, before the normal distribution flattens it to one."""
    return -model.mean(at) / model.deviation(at)


def _random(generator: np.random.Generator, count: int) -> dict[str, Any]:
    slope, bend, value, along, third = 10 ** generator.uniform(-2, 2, (5, count))
    grid = jnp.geomspace(1e-5, 1e5, 5001, dtype=jnp.float32)
    zero = jnp.zeros(count)

    @jax.jit
    @jax.vmap
    def places(model: meka.ImprovementModel) -> tuple[jax.Array, jax.Array]:
        best = grid[jnp.argmax(_score(model, grid))]
        return best, meka.probability_of_improvement(model)

    found = {}
    for name, term in (("without", 0 * third), ("with", third)):
        model = _model(slope, -bend, value, along, term)._replace(step=zero)
        best, rule = map(np.asarray, places(model))
        inside = (best > float(grid[0])) & (best < float(grid[-1]))
        # The library trusts no negative curvature beyond twice a/|b|.
        expected = np.minimum(best, 2 * slope / bend)
        found[name] = {
            "finite": int(inside.sum()),
            "agree": int(np.sum(np.abs(rule[inside] / expected[inside] - 1) < 0.01)),
            "bounded": int(np.sum(inside & (best > expected))),
        }
    return {"models": count, **found}


def checks(data: dict[str, Any]) -> list[Check]:
    """Infinite without the term, finite with it; EI and quadratic stay wrong."""
    without, with_term = data["models"]["without"], data["models"]["with"]
    random, end = data["random"], without["end"]
    return [
        Check(
            "infinite",
            "without the term the most probable step is at the far end of any grid",
            f"drawn: {without['step']:.3g} on a grid up to {end:g}; random: finite for "
            f"{random['without']['finite']} of {random['models']}",
            without["step"] >= end and random["without"]["finite"] == 0,
        ),
        Check(
            "finite",
            "with it every model has a finite step, and the library's rule finds it or "
            "stops at its own bound 2a/|b| before (within 1 % for at least 99 %)",
            f"drawn: {with_term['step']:.3g}; random: finite for "
            f"{random['with']['finite']} of {random['models']}, rule agrees on "
            f"{random['with']['agree']}, at its bound on {random['with']['bounded']}",
            with_term["step"] < end
            and random["with"]["finite"] == random["models"]
            and random["with"]["agree"] >= 0.99 * random["with"]["finite"],
        ),
        Check(
            "expected-improvement",
            "EI is at the far end of the grid with the term too",
            f"{with_term['expected_step']:.3g}",
            with_term["expected_step"] >= end,
        ),
        Check(
            "quadratic",
            "the quadratic rule as printed steps backwards",
            f"{with_term['quadratic']:.3g}",
            with_term["quadratic"] < 0,
        ),
    ]


def figure(data: dict[str, Any]):
    """The same model without and with the term."""
    picture, axes = drawing.panels(2, height=4.1)
    steps = array(data["steps"])
    titles = {"without": "Negative curvature", "with": "… with λ‖δ‖⁶ in the variance"}
    for axis, (name, model) in zip(axes[0], data["models"].items(), strict=True):
        mean, spread = array(model["mean"]), array(model["deviation"])
        axis.plot(steps, mean, color="#222222", label="E[f(θ+αδ) − f(θ)]")
        axis.fill_between(
            steps, mean - spread, mean + spread, color="#888888", alpha=0.25,
            label="± one deviation", linewidth=0,
        )  # fmt: skip
        axis.set_ylim(-30, 15)
        right = axis.twinx()
        right.plot(
            steps, array(model["probability"]), color=drawing.RED, linestyle="--"
        )
        right.set_ylim(0.45, 1.02)
        right.set_ylabel("probability of improvement (dashed)", color=drawing.RED)
        right.grid(visible=False)
        step = model["step"]
        if step <= _END:
            axis.axvline(step, color=drawing.RED, label=f"PI: {step:.2f}")
        else:
            axis.plot([], [], color=drawing.RED, label="PI: → ∞")
        axis.plot([], [], color=drawing.BLUE, label="EI: → ∞")
        axis.plot([], [], color=drawing.GREEN, label="quadratic: backwards")
        axis.set_title(titles[name])
        axis.set_xlabel("step size α")
        axis.set_ylabel("change of the loss")
        drawing.below(axis, 3)
    return picture
