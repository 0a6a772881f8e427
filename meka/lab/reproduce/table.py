"""The experiments by name: where in the paper, and the claim in one sentence.

Readable without jax. The module of the same name has

    run(setting) -> data        plain values, what data.json holds
    figure(data) -> Figure      in the paper's form
    checks(data) -> list        of `Check`, each of which can fail
    CHOICES                     what the paper leaves open, and what was chosen
    NOTES                       what else there is to say, if anything
    REASONS                     why a check fails, where that is known
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from meka.lab.reproduce.verdict import Verdict, judge

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from meka.lab.reproduce.setting import Setting

SCALES = ("smoke", "desk", "full")


class ReproduceError(ValueError):
    """An experiment was asked for that does not exist, or not like this."""


@dataclass(frozen=True)
class Experiment:
    """A row of the table; the work is in the module of its name."""

    name: str
    paper: str
    claim: str

    @property
    def _module(self) -> Any:
        module = self.name.replace("-", "_")
        return importlib.import_module(f"meka.lab.reproduce.{module}")

    def run(self, setting: Setting) -> dict[str, Any]:
        """Run it; interrupted, it goes on where its cache ends."""
        return cast(dict[str, Any], self._module.run(setting))

    def figure(self, data: dict[str, Any]) -> Figure:
        """Draw what `run` returned."""
        return cast("Figure", self._module.figure(data))

    def verdict(self, data: dict[str, Any], scale: str) -> Verdict:
        """Judge what `run` returned."""
        module = self._module
        return judge(self.claim, module.checks(data), module.REASONS, scale)

    @property
    def choices(self) -> str:
        """What the paper leaves open, and what was chosen."""
        return cast(str, self._module.CHOICES)

    @property
    def notes(self) -> str:
        """What else there is to say, or nothing."""
        return getattr(self._module, "NOTES", "")


_ROWS = (
    Experiment(
        "acquisition",
        "Figure 3",
        "The step of largest probability of improvement (PI) lies between zero and the "
        "quadratic minimum; under negative curvature the quadratic rule and expected "
        "improvement (EI) go wrong.",
    ),
    Experiment(
        "negative-curvature",
        "Appendix B.2, figure",
        "Under negative curvature the PI step can be infinite; adding λ‖δ‖⁶ to the "
        "variance makes it finite, while EI stays extremely large and the quadratic "
        "rule negative.",
    ),
    Experiment(
        "rosenbrock",
        "Figure 1",
        "SGD goes into diffusion and does not converge; filtered gradients converge "
        "smoothly, and adaptive steps complement them.",
    ),
    Experiment(
        "noisy-quadratic",
        "Figure 4, Proposition 1",
        "At the same fixed step Meka follows gradient descent while SGD diffuses; "
        "adaptive steps improve Meka and not SGD; E[f − f*] falls as 1/t.",
    ),
    Experiment(
        "model-error",
        "Appendix B.1, figure",
        "The correction λ_t of the function model goes to zero and is far below the "
        "posterior variance s_t.",
    ),
    Experiment(
        "gradient-error",
        "Figure 5",
        "Meka's gradient estimate is about 5 times closer to the full gradient than "
        "the minibatch gradient is.",
    ),
    Experiment(
        "cost",
        "Appendix G, both tables",
        "A Meka step takes 1.0 to 1.6 times as long as an SGD step (table: up to "
        "2.97), and the memory of per-example gradients grows with batch size times "
        "parameters.",
    ),
    Experiment(
        "previous-hessian",
        "Appendix C",
        "Using the Hessian at the current parameters is better and more stable than at "
        "the previous ones.",
    ),
    Experiment(
        "decay-sensitivity",
        "Appendix F, two figures",
        "The decay rates β_r, β_Σ and β_α, each in {0.9, 0.99, 0.999}, change little.",
    ),
    Experiment(
        "delayed-adaptation",
        "Figure 7",
        "As soon as adaptive steps take over from constant ones, the curvature along "
        "the step and the gradient variance rise, and stay high.",
    ),
    Experiment(
        "step-scaling",
        "Figure 6, Appendix D",
        "PI steps are best without scaling (c = 1); the quadratic rule wants c < 1 and "
        "EI wants c > 1.",
    ),
    Experiment(
        "all-optimizers",
        "Appendix D.1",
        "Meka (on ResNet-32 AdaMeka) with adaptive steps and nothing tuned matches "
        "tuned SGD, momentum and Adam, and compares well with AdaDelta and SVRG.",
    ),
)

TABLE: dict[str, Experiment] = {row.name: row for row in _ROWS}
"""Every experiment by name, cheapest first."""


def chosen(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names, in the order of the table; `all` is every one."""
    if not names:
        raise ReproduceError(
            f"name at least one experiment, or `all`; there are {', '.join(TABLE)}"
        )
    for name in names:
        if name != "all" and name not in TABLE:
            near = difflib.get_close_matches(name, TABLE, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ReproduceError(
                f"unknown experiment {name!r}{hint} (known: {', '.join(TABLE)})"
            )
    return [row for row in _ROWS if "all" in names or row.name in names]
