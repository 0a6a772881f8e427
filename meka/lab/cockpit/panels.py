"""The panels: what each shows, and what is healthy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Dash = Literal["solid", "dashed", "dotted", "dotdash"]


@dataclass(frozen=True)
class Line:
    """One curve of a panel, drawn for every run that has it."""

    series: str
    label: str
    dash: Dash = "solid"
    width: float = 1.8
    band: bool = True
    """Whether the range over seeds and steps is shaded."""
    shown: bool = True
    """Whether it is drawn before anyone asks."""


@dataclass(frozen=True)
class Panel:
    """One picture of the page."""

    name: str
    title: str
    shows: str
    healthy: str
    lines: tuple[Line, ...] = ()
    log: bool = True
    wide: bool = False
    height: int = 240
    mark: float | None = None
    """A level to draw across."""
    kind: Literal["lines", "calibration", "profile"] = "lines"


@dataclass(frozen=True)
class Section:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


SECTIONS = (
    Section(
        "Progress",
        (
            Panel(
                "loss",
                "Loss",
                "Loss over the training set and held-out data; the filtered value is "
                "the optimizer's own belief, with two standard deviations.",
                "Training falls, held-out follows, and the filtered value runs through "
                "the training loss.",
                (
                    Line("train_loss", "training", width=2.2),
                    Line("test_loss", "held out", "dashed"),
                    Line("value", "filtered", "dotted", 1.4),
                    Line("loss", "minibatch", "dotdash", 1.0, shown=False),
                ),
                wide=True,
                height=340,
            ),
            Panel(
                "accuracy",
                "Accuracy",
                "Share of examples classified correctly.",
                "Held-out accuracy rises and stays; a widening gap is overfitting.",
                (
                    Line("test_accuracy", "held out", "dashed"),
                    Line("train_accuracy", "training"),
                ),
                log=False,
                wide=True,
                height=340,
            ),
        ),
    ),
    Section(
        "The step",
        (
            Panel(
                "step_size",
                "Step size",
                "The step taken, and where probability of improvement (PI), the "
                "quadratic minimum and expected improvement (EI) would have put it.",
                "Settles, or shrinks near the end; PI at or below the quadratic.",
                (
                    Line("step_size", "taken", width=2.2),
                    Line("rule_probability_of_improvement", "PI", "dashed", 1.2),
                    Line("rule_quadratic", "quadratic", "dotted", 1.2),
                    Line("rule_expected_improvement", "EI", "dotdash", 1.2),
                ),
                wide=True,
                height=430,
            ),
            Panel(
                "profile",
                "The step in profile",
                "Along the direction of one step: the predicted change of the loss "
                "with two standard deviations, the chance of improvement and the "
                "expected improvement, and where each rule would stop.",
                "The chosen step lies left of the minimum, as far as the band allows.",
                kind="profile",
                wide=True,
            ),
            Panel(
                "curvature",
                "Curvature along the step",
                "dᵀBd/dᵀd: how fast the slope changes along the direction, per unit of "
                "length.",
                "Positive and slowly changing; where it is negative, the line breaks "
                "on the log scale.",
                (Line("curvature", "curvature"),),
            ),
            Panel(
                "probability",
                "Probability of improvement",
                "How sure the optimizer was that the step would lower the loss.",
                "Above one half; it nears one half as noise takes over.",
                (Line("improvement_probability", "probability"),),
                log=False,
                mark=0.5,
            ),
            Panel(
                "calibration",
                "Promised and delivered",
                "Steps sorted by the change they predicted; each dot is a tenth of "
                "them. Across: mean predicted change. Up: mean change of the minibatch "
                "loss to the next step, with two standard errors.",
                "The bars touch the diagonal: what is promised is delivered.",
                kind="calibration",
                log=False,
            ),
        ),
    ),
    Section(
        "The gradient and its filter",
        (
            Panel(
                "gain",
                "Gain",
                "The share of the fresh minibatch in the estimate of the gradient.",
                "Falls well below 1 and stays above 0: the filter remembers and still "
                "listens.",
                (Line("gain", "gain"),),
            ),
            Panel(
                "gradient",
                "Gradient and noise",
                "Norms of the filtered gradient, of the minibatch's noise, and of the "
                "error the filter expects of itself.",
                "The filter's error lies below the minibatch's noise.",
                (
                    Line("gradient_norm", "gradient", width=2.2),
                    Line("noise_norm", "minibatch noise", "dashed", 1.4),
                    Line("error_norm", "filter's error", "dotted", 1.4),
                ),
            ),
            Panel(
                "signal",
                "Signal to noise",
                "Squared gradient over squared noise: in one minibatch, and behind the "
                "filter.",
                "Above 1 behind the filter; how far it is above the minibatch's is "
                "what filtering gains.",
                (
                    Line("filtered_signal", "filtered"),
                    Line("signal", "minibatch", "dashed", 1.4),
                ),
                mark=1.0,
            ),
            Panel(
                "noise_scale",
                "Noise scale and batch",
                "The batch size at which noise and gradient are equally long, and the "
                "batch size of the run.",
                "Within a factor of ten of the batch: far above, larger batches pay; "
                "far below, smaller ones do.",
                (
                    Line("noise_scale", "noise scale"),
                    Line("batch_size", "batch size", "dashed", 1.4, band=False),
                ),
            ),
            Panel(
                "innovation",
                "Innovations",
                "Squared surprise over what the filter expected, averaged over fifty "
                "steps: of the gradient and of the loss.",
                "Near 1. Above 2 the filter trusts its model too much, below one half "
                "too little.",
                (
                    Line("gradient_innovation", "gradient"),
                    Line("innovation", "loss", "dashed", 1.4),
                ),
                mark=1.0,
            ),
            Panel(
                "model_error",
                "Model error",
                "λ, the error of the quadratic model the filter inferred, against s, "
                "its variance of the loss, and the minibatch's variance.",
                "λ at or below about half of the two variances together, which chance "
                "alone gives.",
                (
                    Line("model_error", "λ"),
                    Line("value_variance", "s", "dashed", 1.4),
                    Line("observed_variance", "minibatch", "dotted", 1.4),
                ),
            ),
        ),
    ),
    Section(
        "Health",
        (
            Panel(
                "rejected",
                "Rejected steps",
                "Steps not taken because something in them was not finite, counted.",
                "Flat at zero.",
                (Line("rejected", "rejected"),),
                log=False,
                wide=True,
            ),
            Panel(
                "seconds",
                "Seconds per step",
                "Wall-clock time of a step, averaged over each chunk of steps.",
                "Flat, but for the first chunk, which compiles.",
                (Line("seconds", "seconds", band=False),),
                wide=True,
            ),
        ),
    ),
)

PANELS = tuple(panel for section in SECTIONS for panel in section.panels)
