"""Train neural networks without tuning the optimizer.

    run = meka.Run(losses, meka.auto(total_steps=len(data)), params)
    for batch in data:
        info = run.step(batch)
    params = run.params

The names below are imported when first used, so that the command line can answer
``--help`` without loading jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meka.automatic import auto, averaged
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
    from meka.looping import make_loop
    from meka.observation import (
        Observation,
        observe,
        per_example,
    )
    from meka.optimizer import adameka, meka, scale_by_meka
    from meka.probe import Probe, Scene, current, curve, lagged
    from meka.running import Reading, Run
    from meka.state import Info, State, find_state
    from meka.training import make_step
    from meka.transport import difference, hessian_at_current, hessian_at_previous

__version__ = "0.1.0"

__all__ = [
    "Gaussian",
    "ImprovementModel",
    "Info",
    "Moments",
    "Observation",
    "Probe",
    "Reading",
    "Run",
    "Scene",
    "State",
    "adam_style",
    "adameka",
    "auto",
    "averaged",
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
    "make_loop",
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

# No public name is the name of a module, or importing that module would hide it.
_MODULES = (
    "automatic",
    "checks",
    "direction",
    "gaussian",
    "improvement",
    "looping",
    "observation",
    "optimizer",
    "probe",
    "running",
    "state",
    "training",
    "transport",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = importlib.import_module(f"meka.{module}")
            if name in vars(found):
                globals()[name] = vars(found)[name]
                return globals()[name]
    raise AttributeError(f"module 'meka' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
