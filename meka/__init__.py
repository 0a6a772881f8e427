"""Train neural networks without tuning the optimizer.

step = jax.jit(meka.make_step(losses, optimizer := meka.adameka()))
state = optimizer.init(params)
params, state, info = step(params, state, batch)
"""

from meka.checks import check_independent
from meka.direction import adam_style, steepest
from meka.gaussian import Gaussian, Moments, correct, predict
from meka.improvement import (
    ImprovementModel,
    constant,
    expected_improvement,
    probability_of_improvement,
    quadratic,
    scaled,
    switch,
)
from meka.observe import (
    Observation,
    difference,
    hessian_at_current,
    hessian_at_previous,
    observe,
    per_example,
)
from meka.optimizer import Info, State, adameka, find_state, meka, scale_by_meka
from meka.probe import Probe, Scene, current, curve, lagged
from meka.training import make_step

__version__ = "0.1.0"

__all__ = [
    "Gaussian",
    "ImprovementModel",
    "Info",
    "Moments",
    "Observation",
    "Probe",
    "Scene",
    "State",
    "adam_style",
    "adameka",
    "check_independent",
    "constant",
    "correct",
    "current",
    "curve",
    "difference",
    "expected_improvement",
    "find_state",
    "hessian_at_current",
    "hessian_at_previous",
    "lagged",
    "make_step",
    "meka",
    "observe",
    "per_example",
    "predict",
    "probability_of_improvement",
    "quadratic",
    "scale_by_meka",
    "scaled",
    "steepest",
    "switch",
]
