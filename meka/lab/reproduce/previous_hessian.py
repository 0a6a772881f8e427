"""Appendix C: the Hessian at the current parameters against the previous ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from meka.lab.reproduce import drawing, training
from meka.lab.reproduce.setting import Setting, array
from meka.lab.reproduce.training import Run
from meka.lab.reproduce.verdict import Check, Reason

CHOICES = (
    "Meka with the fixed step 0.1 (the paper's for SGD) and with PI steps; batch 128. "
    "The paper does not say on which examples the previous Hessian is taken; here it "
    "is on those of the current minibatch, so that the two differ in the place alone. "
    "`Better` is, with PI steps, a median final training loss that is lower by 5 %; at "
    "the fixed step, so short that the two Hessians hardly differ, it is one that is "
    "not higher by 5 %. `More stable` is a "
    "smaller innovation of the gradient filter, ‖g − m⁻‖² over what the filter expects "
    "(1 is right), or fewer diverged seeds."
)
REASONS: tuple[Reason, ...] = ()

_TRANSPORTS = {"current": "hessian_at_current", "previous": "hessian_at_previous"}
_STEPS = {  # optimizer, learning rate, and what the loss may be against the other's
    "fixed step 0.1": ("meka-constant", 0.1, 1.05),
    "PI steps": ("meka", None, 0.95),
}


def run(setting: Setting) -> dict[str, Any]:
    """Train with either Hessian at either kind of step."""
    names = setting.pick(
        smoke=("digits",), desk=("digits", "mnist"), full=("mnist", "cifar10-cnn")
    )
    seeds = setting.seeds or setting.pick(smoke=2, desk=5, full=3)
    variants = dict(list(_STEPS.items())[: setting.pick(smoke=1, desk=2, full=2)])

    def train(name: str) -> dict[str, Any]:
        epochs = setting.pick(
            smoke=2, desk={"digits": 90, "mnist": 2}.get(name, 2), full=8
        )
        steps = training.steps_for(setting, name, epochs)
        return setting.each(
            variants,
            lambda label: {
                place: _train(setting, name, label, place, steps, seeds)
                for place in _TRANSPORTS
            },
        )

    found = setting.each(setting.select(names), train)
    return {"workloads": found, "seeds": seeds}


def _train(
    setting: Setting, name: str, label: str, place: str, steps: int, seeds: int
) -> dict[str, Any]:
    optimizer, rate, _ = _STEPS[label]
    run = Run(
        f"{label} {place}",
        name,
        optimizer,
        steps,
        seeds,
        rate,
        {"transport": _TRANSPORTS[place]},
        logs=("gradient_innovation", "rejected"),
        evaluations=12,
    )
    trained = training.train(setting, run)
    innovation = array(trained["logs"]["gradient_innovation"])
    return {
        "step": trained["step"],
        "train_loss": trained["train_loss"],
        "final": training.final(trained),
        "innovation": np.nanmean(innovation[len(innovation) // 10 :], axis=0),
        "rejected": array(trained["logs"]["rejected"])[-1],
    }


def checks(data: dict[str, Any]) -> list[Check]:
    """Better and more stable, for every problem and kind of step."""
    found = []
    for name, variants in data["workloads"].items():
        for label, own in variants.items():
            most = _STEPS[label][2]
            loss, wrong, gone = (
                {place: reduce(array(own[place][key])) for place in _TRANSPORTS}
                for key, reduce in (
                    ("final", _median_loss),
                    ("innovation", lambda x: float(np.median(x))),
                    ("final", lambda x: int(np.sum(~np.isfinite(x)))),
                )
            )
            found += [
                Check(
                    f"better on {name}, {label}",
                    f"the current Hessian's final training loss is at most {most:g} "
                    "times the previous one's (medians)",
                    f"{loss['current']:.4g} against {loss['previous']:.4g}",
                    loss["current"] <= most * loss["previous"],
                ),
                Check(
                    f"more-stable on {name}, {label}",
                    "fewer of its seeds diverge, or as few and the filter is surprised "
                    "less",
                    f"diverged {gone['current']} against {gone['previous']}; "
                    f"innovation {wrong['current']:.4g} against "
                    f"{wrong['previous']:.4g}",
                    (gone["current"], wrong["current"])
                    < (gone["previous"], wrong["previous"]),
                ),
            ]
    return found


def _median_loss(final: np.ndarray) -> float:
    return float(np.median(np.where(np.isfinite(final), final, np.inf)))


def figure(data: dict[str, Any]):
    """Training loss with either Hessian."""
    panels = [(n, v) for n, variants in data["workloads"].items() for v in variants]
    picture, axes = drawing.panels(
        min(2, len(panels)), -(-len(panels) // 2), width=9.0, height=3.0
    )
    colors = {"current": drawing.BLUE, "previous": drawing.RED}
    for axis, (name, label) in zip(axes.flat, panels, strict=False):
        for place, own in data["workloads"][name][label].items():
            dash = "-" if place == "current" else "--"
            drawing.band(
                axis, own["step"], own["train_loss"], colors[place],
                f"{place} Hessian", linestyle=dash,
            )  # fmt: skip
        axis.set_yscale("log")
        axis.set_title(f"{name}, {label}")
        axis.set_xlabel("step")
        axis.set_ylabel("training loss")
    drawing.once(picture, axes.flat[0])
    return picture
