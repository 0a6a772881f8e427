"""Verdicts can say no: each is fed data that agree with the claim, then that do not."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from meka.lab.reproduce.table import TABLE
from meka.lab.reproduce.verdict import FAILS, HOLDS, UNJUDGED, Check, Reason, judge

STEPS = list(range(0, 101))


def holds(name: str, data: dict[str, Any]) -> bool:
    verdict = TABLE[name].verdict(data, "desk")
    assert verdict.word == (HOLDS if verdict.holds else FAILS)
    return verdict.holds


def failed(name: str, data: dict[str, Any]) -> set[str]:
    """The checks that fail, without the workload they fail on."""
    checks = TABLE[name].verdict(data, "desk").checks
    return {check.name.partition(" on ")[0] for check in checks if not check.holds}


def seeds(*values: float) -> list[list[float]]:
    """A curve over the steps for three seeds, nearly alike."""
    return [[v, 1.01 * v, 0.99 * v] for v in values]


def trained(loss: float | None, accuracy: float = 0.95) -> dict[str, Any]:
    start = [2.3, 2.3, 2.3]
    end = [None] * 3 if loss is None else seeds(loss)[0]
    return {
        "step": [0, 10],
        "train_loss": [start, end],
        "test_accuracy": [[0.1] * 3, [accuracy] * 3],
    }


# Data that agree with each claim ------------------------------------------------------


def acquisition() -> dict[str, Any]:
    random = {
        "models": 100, "told": 100, "between": 100, "finite": 100,
        "ei_at_end": 100, "quantiles": [0.1, 0.5, 0.9],
    }  # fmt: skip
    return {
        "models": {
            "positive": {"printed": {"PI": 0.5, "EI": 2.0, "quadratic": 1.0}},
            "negative": {"printed": {"PI": 1.5, "EI": 1e4, "quadratic": -1.0}},
        },
        "random": {"positive": dict(random), "negative": dict(random)},
    }


def negative_curvature() -> dict[str, Any]:
    model = {"end": 1000.0, "expected_step": 1000.0, "quadratic": -1.0}
    return {
        "models": {
            "without": {**model, "step": 1000.0},
            "with": {**model, "step": 2.0},
        },
        "random": {
            "models": 50,
            "without": {"finite": 0, "agree": 0, "bounded": 0},
            "with": {"finite": 50, "agree": 50, "bounded": 0},
        },
    }


def rosenbrock() -> dict[str, Any]:
    def curve(end: float, detour: float) -> dict[str, Any]:
        return {
            "step": STEPS[1:],
            "loss": seeds(*np.geomspace(4, end, 100)),
            "last_quarter": [end] * 3,
            "third_quarter": [end] * 3,
            "detour": [detour] * 3,
        }

    return {
        "curves": {
            "SGD": curve(1e-2, 3000.0),
            "Meka": curve(1e-4, 4.0),
            "SGD, PI": curve(1e-2, 3000.0),
            "Meka, PI": curve(1e-4, 4.0),
        }
    }


def noisy_quadratic() -> dict[str, Any]:
    def curve(*values: float) -> dict[str, Any]:
        return {"step": STEPS, "loss": seeds(*values)}

    falling = np.geomspace(10, 1e-3, 101)
    flat = np.maximum(falling, 0.2)
    t = np.geomspace(10, 1e4, 40)
    return {
        "curves": {
            "GD": curve(*falling),
            "Meka": curve(*(1.01 * falling)),
            "SGD": curve(*flat),
            "SGD, PI": curve(*flat),
            "SGD, small step": curve(*np.geomspace(10, 0.1, 101)),
            "GD, adaptive": curve(*(falling / 5)),
            "Meka, PI": curve(*(falling / 3)),
        },
        "rate": {
            "seeds": 64,
            "Meka": {"step": t.tolist(), "mean": (1 / t).tolist()},
            "SGD": {"step": t.tolist(), "mean": (0 * t + 0.01).tolist()},
        },
    }


def model_error() -> dict[str, Any]:
    own = {
        "late": [1e-6], "early": [1e-2], "late_median": [0.0], "late_share": [0.1],
        "below": [0.9], "ratio": [2.0],
    }  # fmt: skip
    return {"workloads": {"digits": own}}


def gradient_error() -> dict[str, Any]:
    own = {
        "step": STEPS,
        "minibatch": seeds(*[1.0] * 101),
        "filtered": seeds(*[0.2] * 101),
    }
    return {"workloads": {"digits": {"PI steps": own}}}


def cost() -> dict[str, Any]:
    return {
        "workloads": {
            "mnist": {
                "time": {"Meka, fixed step": [1.1] * 5, "Meka, PI": [1.2] * 5},
                "memory": {
                    "sizes": [64, 128],
                    "parameters": 1000,
                    "methods": {
                        "SGD": [6400, 12800],
                        "Meka, two groups": [9000, 18000],
                        "Meka, per example": [400_000, 800_000],
                    },
                },
            }
        }
    }


def previous_hessian() -> dict[str, Any]:
    def run(loss: float, innovation: float) -> dict[str, Any]:
        return {"final": seeds(loss)[0], "innovation": [innovation] * 3}

    own = {"current": run(0.1, 1.0), "previous": run(0.2, 3.0)}
    return {"workloads": {"mnist": {"PI steps": own}}}


def decay_sensitivity() -> dict[str, Any]:
    runs = {decay: trained(0.1) for decay in ("0.9", "0.99", "0.999")}
    return {"workloads": {"mnist": {"β_α": runs}}}


def delayed_adaptation() -> dict[str, Any]:
    def run(height: float) -> dict[str, Any]:
        values = seeds(*[height] * 100)
        own = {"step": STEPS[1:], "curvature": values, "variance": values}
        return own | {"evaluated": [0, 100], "train_loss": seeds(2.0, 1.0)}

    own = {"steps": 100, "switches": [0, 50]}
    own["runs"] = {"0": run(3.0), "50": run(3.0), "100": run(1.0)}
    return {"workloads": {"digits": own}}


def step_scaling() -> dict[str, Any]:
    def rule(half: float, one: float, two: float) -> dict[str, Any]:
        return {"0.5": trained(half), "1": trained(one), "2": trained(two)}

    own = {"PI": rule(0.2, 0.1, 0.3), "quadratic": rule(0.1, 0.2, 0.3)}
    return {"workloads": {"mnist": {**own, "EI": rule(0.3, 0.2, 0.1)}}}


def all_optimizers() -> dict[str, Any]:
    names = (
        "SGD", "momentum", "Adam", "AdaDelta", "SVRG", "Meka, constant",
        "AdaMeka, constant", "Meka, PI", "AdaMeka, PI",
    )  # fmt: skip
    curves = {name: trained(0.1) | {"rate": 0.1} for name in names}
    curves["Meka, PI"] = trained(0.09) | {"rate": None}
    return {"workloads": {"mnist": {"curves": curves}}}


AGREES = {
    name: globals()[name.replace("-", "_")] for name in TABLE
}  # every experiment must have one


@pytest.mark.parametrize("name", TABLE)
def test_a_claim_that_agrees_with_the_data_holds(name):
    data = AGREES[name]()
    assert holds(name, data), TABLE[name].verdict(data, "desk").checks


# ... and that do not ------------------------------------------------------------------

CONTRADICTIONS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    # experiment, check that must fail, place in the data, what to put there
    ("acquisition", "between", ("random", "positive", "between"), 99),
    ("acquisition", "between", ("models", "positive", "printed", "PI"), 1.2),
    ("acquisition", "quadratic", ("models", "negative", "printed", "quadratic"), 1.0),
    ("acquisition", "expected-improvement", ("random", "negative", "ei_at_end"), 50),
    ("acquisition", "finite", ("random", "negative", "finite"), 10),
    ("negative-curvature", "infinite", ("models", "without", "step"), 3.0),
    ("negative-curvature", "finite", ("random", "with", "finite"), 49),
    ("negative-curvature", "finite", ("random", "with", "agree"), 40),
    ("negative-curvature", "expected-improvement",
     ("models", "with", "expected_step"), 2.0),
    ("negative-curvature", "quadratic", ("models", "with", "quadratic"), 1.0),
    ("rosenbrock", "sgd-diffuses", ("curves", "SGD", "third_quarter"), [1.0] * 3),
    ("rosenbrock", "filter-converges", ("curves", "Meka", "last_quarter"), [5e-3] * 3),
    ("rosenbrock", "smooth", ("curves", "Meka", "detour"), [2000.0] * 3),
    ("rosenbrock", "adaptive-complements",
     ("curves", "SGD, PI", "last_quarter"), [1e-4] * 3),
    ("noisy-quadratic", "follows-gd",
     ("curves", "Meka", "loss"), seeds(*np.geomspace(10, 1e-2, 101))),
    ("noisy-quadratic", "sgd-diffuses",
     ("curves", "SGD", "loss"), seeds(*np.geomspace(10, 1e-3, 101))),
    ("noisy-quadratic", "small-step-is-slow",
     ("curves", "SGD, small step", "loss"), seeds(*np.geomspace(10, 1e-4, 101))),
    ("noisy-quadratic", "pi-helps-meka",
     ("curves", "Meka, PI", "loss"), seeds(*np.geomspace(10, 1e-1, 101))),
    ("noisy-quadratic", "pi-does-not-help-sgd",
     ("curves", "SGD, PI", "loss"), seeds(*np.geomspace(10, 1e-3, 101))),
    ("noisy-quadratic", "one-over-t",
     ("rate", "Meka", "mean"), np.geomspace(1, 0.1, 40).tolist()),
    ("model-error", "goes-to-zero", ("workloads", "digits", "late"), [5e-3]),
    ("model-error", "goes-to-zero", ("workloads", "digits", "late_median"), [1e-9]),
    ("model-error", "usually-far-below-s", ("workloads", "digits", "below"), [0.7]),
    ("gradient-error", "closer",
     ("workloads", "digits", "PI steps", "filtered"), seeds(*[0.5] * 101)),
    ("cost", "time", ("workloads", "mnist", "time", "Meka, PI"), [3.0] * 5),
    ("cost", "per-example memory",
     ("workloads", "mnist", "memory", "methods", "Meka, per example"), [9000, 18000]),
    ("cost", "summed memory",
     ("workloads", "mnist", "memory", "methods", "SGD"), [400_000, 800_000]),
    ("previous-hessian", "better",
     ("workloads", "mnist", "PI steps", "previous", "final"), seeds(0.1)[0]),
    ("previous-hessian", "more-stable",
     ("workloads", "mnist", "PI steps", "current", "final"), [0.1, None, 0.1]),
    ("previous-hessian", "more-stable",
     ("workloads", "mnist", "PI steps", "current", "innovation"), [3.0] * 3),
    ("decay-sensitivity", "β_α", ("workloads", "mnist", "β_α", "0.9"), trained(0.2)),
    ("decay-sensitivity", "β_α",
     ("workloads", "mnist", "β_α", "0.9"), trained(0.1, accuracy=0.9)),
    ("delayed-adaptation", "curvature-rises",
     ("workloads", "digits", "runs", "0", "curvature"), seeds(*[1.2] * 100)),
    ("delayed-adaptation", "curvature-stays",
     ("workloads", "digits", "runs", "50", "curvature"),
     seeds(*[3.0] * 85, *[1.0] * 15)),
    ("delayed-adaptation", "variance-rises",
     ("workloads", "digits", "runs", "50", "variance"), seeds(*[1.0] * 100)),
    ("step-scaling", "PI", ("workloads", "mnist", "PI", "0.5"), trained(0.05)),
    ("step-scaling", "PI", ("workloads", "mnist", "PI", "1"), trained(None)),
    ("step-scaling", "quadratic",
     ("workloads", "mnist", "quadratic", "2"), trained(0.01)),
    ("step-scaling", "EI", ("workloads", "mnist", "EI", "1"), trained(0.01)),
    ("all-optimizers", "Adam",
     ("workloads", "mnist", "curves", "Adam", "train_loss"),
     trained(0.05)["train_loss"]),
    ("all-optimizers", "accuracy",
     ("workloads", "mnist", "curves", "Adam", "test_accuracy"),
     [[0.1] * 3, [0.97] * 3]),
    ("all-optimizers", "adaptive",
     ("workloads", "mnist", "curves", "Meka, constant", "train_loss"),
     trained(0.05)["train_loss"]),
    ("all-optimizers", "SVRG",
     ("workloads", "mnist", "curves", "SVRG", "train_loss"),
     trained(0.01)["train_loss"]),
    ("all-optimizers", "SGD",
     ("workloads", "mnist", "curves", "Meka, PI", "train_loss"),
     trained(None)["train_loss"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "check", "place", "value"), CONTRADICTIONS)
def test_a_claim_that_the_data_contradict_does_not_hold(name, check, place, value):
    data = copy.deepcopy(AGREES[name]())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert not holds(name, data)
    assert check in {each.partition(":")[0] for each in failed(name, data)}


def test_every_experiment_has_been_contradicted():
    assert {name for name, *_ in CONTRADICTIONS} == set(TABLE)


def test_on_resnet_it_is_adameka_that_must_match():
    data = all_optimizers()
    data["workloads"] = {"cifar10-resnet32": data["workloads"]["mnist"]}
    curves = data["workloads"]["cifar10-resnet32"]["curves"]
    curves["AdaDelta"] = trained(None) | {"rate": 1.0}  # as the paper says
    curves["AdaMeka, PI"] = trained(0.09) | {"rate": None}
    curves["Meka, PI"] = trained(5.0) | {"rate": None}
    assert holds("all-optimizers", data)
    curves["AdaMeka, PI"] = trained(5.0) | {"rate": None}
    assert not holds("all-optimizers", data)


def test_without_ours_nothing_is_judged_and_without_rivals_little():
    data = all_optimizers()
    (own,) = data["workloads"].values()
    for rival in ("SGD", "momentum", "Adam"):
        own["curves"].pop(rival, None)
    names = {c.name.partition(" on ")[0] for c in TABLE["all-optimizers"].verdict(
        data, "full").checks}  # fmt: skip
    assert not names & {"SGD", "momentum", "Adam", "accuracy", "generalises"}
    del own["curves"]["Meka, PI"]
    assert TABLE["all-optimizers"].verdict(data, "full").word == UNJUDGED


def test_a_verdict_on_cifar_is_plain_values():
    data = all_optimizers()
    data["workloads"] = {"cifar10-cnn": next(iter(data["workloads"].values()))}
    data["workloads"]["cifar10-cnn"]["curves"]["AdaDelta"] = {"rate": 1.0} | trained(
        None
    )
    verdict = TABLE["all-optimizers"].verdict(data, "full")
    assert any(c.name == "AdaDelta on cifar10-cnn" and c.holds for c in verdict.checks)
    json.dumps(verdict.to_dict())


def test_nothing_checked_is_nothing_held():
    assert not judge("claim", [], [], "desk").holds


def test_reasons_are_given_for_what_failed_and_at_that_scale_only():
    checks = [Check("a on x", "", "", False), Check("b", "", "", True)]
    reasons = [
        Reason("a", "because", tested=True),
        Reason("b", "not asked for", tested=True),
        Reason("a", "elsewhere", tested=False, scales=("full",)),
    ]
    verdict = judge("claim", checks, reasons, "desk")
    assert [reason.text for reason in verdict.reasons] == ["because"]
