"""Figure 6 and Appendix D: is a rule's step the right length as it is?"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import meka
from meka.improvement import Rule
from meka.lab.reproduce import drawing, training
from meka.lab.reproduce.setting import Setting, array
from meka.lab.reproduce.training import Run
from meka.lab.reproduce.verdict import Check, Reason

CHOICES = (
    "Meka with every rule's step multiplied by c, batch 128. The paper does not list "
    "its values of c; here powers of two from 1/4 to 2. Best is the lowest median "
    "final training loss; c = 1 counts as best for PI if it is within 10 % of the best."
)
REASONS = (
    Reason(
        "PI",
        "All three rules end lower the larger c is, up to the 2 at which a quadratic's "
        "steps would cease to converge. The step answers to c: eight times the factor "
        "makes the steps only 1.9 to 2.4 times as long, as the figures in brackets "
        "show, since longer steps keep a run in flatter places where the rule itself "
        "then allows longer ones. A greedy step looks one step ahead and settles where "
        "the curvature is high. That c = 2 would still be best in longer runs was not "
        "tested.",
        tested=True,
        scales=("desk",),
    ),
    Reason(
        "quadratic",
        "As for PI. Here the average over a thousand steps already damps what makes "
        "the quadratic rule's steps too long in the paper, so that it does not need c "
        "< 1; that this is why was not tested.",
        tested=False,
        scales=("desk",),
    ),
    Reason(
        "PI",
        "As on the MLPs the loss ends lower the larger c is, and the step answers to "
        "c: eight times the factor makes the steps forty times as long, 0.0032 and "
        "0.13 (medians over the last quarter). At c = 1 they shrink through the run, "
        "from 0.07 to 0.015; at c = 2 they grow from 0.07 to 0.13, about the tuned "
        "SGD's 0.1. That a greedy step, which looks one step ahead, settles where the "
        "curvature is high is a reading. That c = 2 would still be best in longer runs "
        "was not tested.",
        tested=True,
        scales=("full",),
    ),
    Reason(
        "quadratic",
        "As for PI: steps of 0.0035 at c = 0.25 and 0.14 at c = 2. Why the paper's "
        "quadratic rule needs c < 1 and this one does not was not tested.",
        tested=True,
        scales=("full",),
    ),
)

_RULES = {
    "PI": meka.probability_of_improvement,
    "quadratic": meka.quadratic,
    "EI": meka.expected_improvement,
}
_TOLERANCE = 1.1


def run(setting: Setting) -> dict[str, Any]:
    """Train every rule at every scale."""
    names = setting.pick(
        smoke=("digits",), desk=("digits", "mnist"), full=("mnist", "cifar10-cnn")
    )
    seeds = setting.seeds or setting.pick(smoke=2, desk=3, full=3)
    scales = setting.pick(
        smoke=(0.5, 1.0), desk=(0.25, 0.5, 1.0, 2.0), full=(0.25, 0.5, 1.0, 2.0)
    )
    rules = setting.pick(smoke=("PI",), desk=tuple(_RULES), full=tuple(_RULES))

    def train(name: str) -> dict[str, Any]:
        epochs = setting.pick(
            smoke=2, desk={"digits": 90, "mnist": 1}.get(name, 1), full=8
        )
        steps = training.steps_for(setting, name, epochs)
        return setting.each(
            rules,
            lambda rule: {
                f"{c:g}": _train(setting, name, rule, c, steps, seeds) for c in scales
            },
        )

    found = setting.each(setting.select(names), train)
    return {"workloads": found, "seeds": seeds}


def _train(
    setting: Setting, name: str, rule: str, c: float, steps: int, seeds: int
) -> dict[str, Any]:
    run = Run(
        f"{rule} c={c:g}", name, f"scaled {rule}", steps, seeds, evaluations=5, knob=c
    )
    trained = training.train(setting, run, _builder(rule))
    return {
        "step": trained["step"],
        "train_loss": trained["train_loss"],
        "test_accuracy": trained["test_accuracy"],
        "step_size": training.thinned(trained["logs"]["step_size"], 40),
    }


def _builder(rule: str) -> training.Build:
    def scaled(c: jax.Array) -> Rule:
        """As `meka.scaled`, with a factor that is not known when it is compiled."""
        return lambda model: c.astype(model.slope.dtype) * _RULES[rule](model)

    return lambda workload: training.turned(workload, scaled)


def _ends(runs: dict[str, Any]) -> dict[float, float]:
    """Median final training loss by c; infinite where it diverged."""
    found = {}
    for c, own in runs.items():
        last = array(own["train_loss"])[-1]
        found[float(c)] = float(np.median(np.where(np.isfinite(last), last, np.inf)))
    return found


def checks(data: dict[str, Any]) -> list[Check]:
    """Where the best c of every rule is."""
    asked = {
        "PI": ("PI steps do best at c = 1 (within 10 % of the best)", lambda c: c == 1),
        "quadratic": ("the quadratic rule does best at some c < 1", lambda c: c < 1),
        "EI": ("expected improvement does best at some c > 1", lambda c: c > 1),
    }
    found = []
    for name, rules in data["workloads"].items():
        for rule, runs in rules.items():
            ends = _ends(runs)
            best = min(ends, key=lambda c: ends[c])
            if rule == "PI" and ends[1.0] <= _TOLERANCE * ends[best]:
                best = 1.0
            says, right = asked[rule]
            found.append(
                Check(
                    f"{rule} on {name}",
                    says,
                    "final loss "
                    + ", ".join(
                        f"{x:.3g} at c = {c:g}{_step(runs[f'{c:g}'])}"
                        for c, x in ends.items()
                    ),
                    bool(right(best) and np.isfinite(ends[best])),
                )
            )
    return found


def _step(run: dict[str, Any]) -> str:
    """The last step size, if it was kept."""
    if "step_size" not in run:
        return ""
    return f" (steps of {np.nanmedian(array(run['step_size'])[-1]):.2g})"


def figure(data: dict[str, Any]):
    """Training loss, a row a problem, a column a rule."""
    names = list(data["workloads"])
    shown = {rule for own in data["workloads"].values() for rule in own}
    rules = [rule for rule in _RULES if rule in shown]
    picture, axes = drawing.panels(
        len(rules), len(names), width=3.7 * max(2, len(rules)), height=2.9
    )
    for row, name in zip(axes, names, strict=True):
        for axis, rule in zip(row, rules, strict=True):
            runs = data["workloads"][name].get(rule, {})
            for k, (c, own) in enumerate(runs.items()):
                drawing.band(
                    axis, own["step"], own["train_loss"], drawing.PALETTE[k], f"c = {c}"
                )
            axis.set_yscale("log")
            axis.set_title(f"{name}: {rule}")
            axis.set_xlabel("step")
        low = min(axis.get_ylim()[0] for axis in row)
        high = max(axis.get_ylim()[1] for axis in row)
        for axis in row:
            axis.set_ylim(low, min(high, 30))
        row[0].set_ylabel("training loss")
    drawing.once(picture, axes[0, 0])
    return picture
