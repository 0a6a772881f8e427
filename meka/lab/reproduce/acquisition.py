"""Figure 3: where the acquisition functions want to step.

Two improvement models are drawn, one of positive and one of negative curvature. The
claim is then put to thousands of random ones, by brute force over a grid of steps, so
that the rules of the library are judged by something they had no part in.
"""

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
    "The paper gives no numbers for its two illustrations; slope 1 and curvature ±1 "
    "were chosen, with variances large enough to be seen. The random models have "
    "slopes, curvatures and variances spread over several orders of magnitude. The "
    "quadratic rule and EI are drawn as printed; the library reflects the one and "
    "bounds the other, so that neither steps uphill or to infinity."
)
REASONS: tuple[Reason, ...] = ()

_DRAWN = {"positive": 1.0, "negative": -1.0}
_VARIANCES = {"value_variance": 0.05, "slope_variance": 0.2, "curvature_variance": 4.0}
_END = 3.0


def run(setting: Setting) -> dict[str, Any]:
    """Evaluate the drawn models, and count over random ones."""
    count = setting.pick(smoke=200, desk=5000, full=20000)
    steps = jnp.linspace(0, _END, 151)
    data: dict[str, Any] = {"steps": steps, "models": {}}
    for name, curvature in _DRAWN.items():
        model = _model(1.0, curvature, **_VARIANCES)
        data["models"][name] = _curves(model, steps) | _choices(model)
    data["random"] = {
        name: _random(np.random.default_rng(k), sign, count)
        for k, (name, sign) in enumerate(_DRAWN.items())
    }
    return data


def _model(slope: Any, curvature: Any, **variances: Any) -> meka.ImprovementModel:
    numbers = {"slope": slope, "curvature": curvature, **variances}
    return meka.ImprovementModel(
        **{name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}
    )


@jax.jit
def _curves(model: meka.ImprovementModel, steps: jax.Array) -> dict[str, Any]:
    return {
        "mean": model.mean(steps),
        "deviation": model.deviation(steps),
        "probability": model.probability(steps),
        "expected_improvement": model.expected_improvement(steps),
    }


@jax.jit
def _choices(model: meka.ImprovementModel) -> dict[str, Any]:
    """The steps of the rules, as printed (brute force) and as in the library."""
    far = jnp.geomspace(1e-4, 1e4, 40001, dtype=jnp.float32)
    expectation = model.expected_improvement(far)
    probability = model.probability(far)
    return {
        "printed": {
            "PI": far[jnp.argmax(probability)],
            "EI": far[jnp.argmax(expectation)],
            "quadratic": model.slope / model.curvature,
        },
        "library": {
            "PI": meka.probability_of_improvement(model),
            "EI": meka.expected_improvement(model),
            "quadratic": meka.quadratic(model),
        },
    }


def _random(generator: np.random.Generator, sign: float, count: int) -> dict[str, Any]:
    """Steps of many models in units of a/|b|, by brute force over a grid."""
    numbers = 10 ** generator.uniform(-3, 1, (5, count))
    slope, curvature, value, along, bend = numbers
    unit = slope / curvature
    # Variances in units of the squared change at the quadratic minimum, so that the
    # models run from nearly certain to hopeless.
    change = slope * unit / 2
    model = _model(
        slope,
        sign * curvature,
        value_variance=value * change**2,
        slope_variance=along * (change / unit) ** 2,
        curvature_variance=bend * (change / unit**2) ** 2,
    )
    grid = np.geomspace(1e-3, 1e3, 3001)

    @jax.vmap
    def places(one: meka.ImprovementModel, unit: jax.Array) -> tuple:
        at = jnp.asarray(grid, jnp.float32) * unit
        return (
            jnp.argmax(one.probability(at)),
            jnp.argmax(one.expected_improvement(at)),
            meka.probability_of_improvement(one) / unit,
        )

    stacked = model._replace(third_order=jnp.zeros(count), step=jnp.zeros(count))
    best, expected, rule = jax.jit(places)(stacked, jnp.asarray(unit, jnp.float32))
    best, expected = grid[np.asarray(best)], grid[np.asarray(expected)]
    # Where the probability is flat to float32 the grid's argmax says nothing.
    told = (best > grid[0]) & (best < grid[-1])
    return {
        "models": count,
        "told": int(told.sum()),
        "between": int(np.sum((best[told] > 0) & (best[told] <= 1.005))),
        "largest_share": float(best[told].max()),
        "finite": int(told.sum()),
        "rule_agrees": float(
            np.median(np.abs(np.asarray(rule)[told] / best[told] - 1))
        ),
        "ei_at_end": int(np.sum(expected == grid[-1])),
        "quantiles": np.quantile(best[told], [0.05, 0.5, 0.95]),
    }


def checks(data: dict[str, Any]) -> list[Check]:
    """PI between zero and the minimum; the others wrong under negative curvature."""
    positive, negative = data["random"]["positive"], data["random"]["negative"]
    drawn, down = data["models"]["positive"], data["models"]["negative"]
    pi, minimum = drawn["printed"]["PI"], drawn["printed"]["quadratic"]
    low, mid, high = positive["quantiles"]
    share = positive["told"] / positive["models"]
    return [
        Check(
            "between",
            "under positive curvature the PI step is in (0, quadratic minimum], for "
            "the drawn model and for every random one (grid spacing 0.5 %)",
            f"drawn: PI {pi:.3g} of {minimum:.3g}; random: {positive['between']} of "
            f"{positive['told']}, median {mid:.2g} of the minimum (5–95 %: {low:.2g} "
            f"to {high:.2g})",
            0 < pi <= minimum
            and positive["between"] == positive["told"]
            and share > 0.9,
        ),
        Check(
            "quadratic",
            "under negative curvature the printed quadratic rule steps backwards",
            f"step {down['printed']['quadratic']:.3g}",
            down["printed"]["quadratic"] < 0,
        ),
        Check(
            "expected-improvement",
            "under negative curvature EI grows without bound: its maximum is at the "
            "far end of the grid for at least 99 % of the random models",
            f"{negative['ei_at_end']} of {negative['models']}",
            negative["ei_at_end"] >= 0.99 * negative["models"],
        ),
        Check(
            "finite",
            "PI still has a finite optimum there, where the curvature is uncertain "
            "(at least 90 % of the random models within the grid)",
            f"drawn: {down['printed']['PI']:.3g}; random: {negative['finite']} of "
            f"{negative['models']}",
            down["printed"]["PI"] < 1e3
            and negative["finite"] >= 0.9 * negative["models"],
        ),
    ]


def figure(data: dict[str, Any]):
    """Mean and uncertainty of the change of the loss, and where each rule steps."""
    picture, axes = drawing.panels(2, height=4.3)
    steps = array(data["steps"])
    colors = {"PI": drawing.RED, "quadratic": drawing.GREEN, "EI": drawing.BLUE}
    for axis, (name, model) in zip(axes[0], data["models"].items(), strict=True):
        mean, spread = array(model["mean"]), array(model["deviation"])
        axis.plot(steps, mean, color="#222222", label="E[f(θ+αδ) − f(θ)]")
        axis.fill_between(
            steps, mean - spread, mean + spread, color="#888888", alpha=0.25,
            label="± one deviation", linewidth=0,
        )  # fmt: skip
        axis.set_ylim(-4, 3)
        right = axis.twinx()
        right.plot(
            steps, array(model["probability"]), color=drawing.RED, linestyle="--"
        )
        right.set_ylim(0, 1)
        right.set_ylabel("probability of improvement (dashed)", color=drawing.RED)
        right.grid(visible=False)
        for rule, color in colors.items():
            step = model["printed"][rule]
            if 0 <= step <= _END:
                axis.axvline(
                    step, color=color, linewidth=1.6, label=f"{rule}: {step:.2f}"
                )
            else:
                where = "backwards" if step < 0 else "→ ∞"
                axis.plot([], [], color=color, label=f"{rule}: {where}")
        axis.axhline(0, color="#555555", linewidth=0.6)
        axis.set_title(f"{name.capitalize()} curvature")
        axis.set_xlabel("step size α")
        axis.set_ylabel("change of the loss")
        drawing.below(axis, 3)
    return picture
