"""Which runs a scorecard is made of. Readable without jax.

Every optimizer runs at one setting for all workloads, its published default, with a
linear decay over the known number of steps where it can take one. Adam, NAdamW and
momentum also run at every rate of their grid, to be compared at the best of each
workload.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meka.lab.config import RunConfig
from meka.lab.optimizers import TABLE

SCALES = ("smoke", "desk", "full")
TUNED = ("adam", "nadamw", "momentum")
"""Those that are also shown at the best of their grid."""
BASE = "adam"
"""The optimizer whose best run sets the target, and whose step is the unit of time."""


class ScorecardError(ValueError):
    """A scorecard cannot be made like this; the message says what to change."""


@dataclass(frozen=True)
class Subject:
    """A workload as the scorecard trains it.

    Attributes:
        name: of `meka.lab.workloads`.
        steps: how long.
        examples: how many of each set an evaluation looks at; None for all.
        evaluations: how often, beside the start.
    """

    name: str
    steps: int
    examples: int | None = None
    evaluations: int = 40


_EPOCH = {"mnist": 60_000 // 128, "cifar10": 50_000 // 128}
_DESK = (
    Subject("digits", 1000),
    Subject("digits-noisy", 1000),
    Subject("mnist", 5 * _EPOCH["mnist"], examples=10_000),
    Subject("mnist-logistic", 5 * _EPOCH["mnist"], examples=10_000),
    Subject("mnist-autoencoder", 600, examples=1_000),
    Subject("text", 1000, examples=128),
    Subject("quadratic", 2000),
    Subject("rosenbrock", 1500),
)
_LARGE = (
    Subject("cifar10-cnn", 12 * _EPOCH["cifar10"], examples=10_000, evaluations=24),
    Subject("cifar10-resnet32", 6 * _EPOCH["cifar10"], examples=10_000, evaluations=24),
    Subject("text-large", 1500, examples=1_000, evaluations=25),
)
SUBJECTS: dict[str, tuple[Subject, ...]] = {
    "smoke": (Subject("rosenbrock", 60), Subject("digits", 40)),
    "desk": _DESK,
    "full": _DESK + _LARGE,
}
"""The workloads of each scale."""


@dataclass(frozen=True)
class Run:
    """A run of the scorecard: a configuration, and whether it is the one setting."""

    config: RunConfig
    default: bool

    @property
    def key(self) -> tuple[str, str]:
        """Workload, and the optimizer with its rate, if it has one."""
        return self.config.workload, setting(
            self.config.optimizer, self.config.learning_rate
        )


def setting(optimizer: str, rate: float | None) -> str:
    """A name for an optimizer at a rate, which is also its folder's."""
    return optimizer if rate is None else f"{optimizer}-{rate:g}"


def one_setting(optimizer: str) -> str:
    """The name of an optimizer at its one setting."""
    return setting(optimizer, TABLE[optimizer].default)


def plan(
    scale: str,
    *,
    optimizers: Sequence[str] = (),
    workloads: Sequence[str] = (),
    seeds: int | None = None,
    steps_scale: float = 1.0,
    data_dir: str | None = None,
) -> list[Run]:
    """The runs, by workload; refuses unknown names and useless numbers.

    Args:
        scale: a name of `SCALES`.
        optimizers: names of the bench; none for all.
        workloads: some of the scale's; none for all.
        seeds: None for three (two to smoke).
        steps_scale: every workload's length is multiplied by it.
        data_dir: the folder of the data.
    """
    _known("scale", [scale], SCALES)
    if not (math.isfinite(steps_scale) and steps_scale > 0):
        raise ScorecardError(f"--steps-scale must be positive, not {steps_scale:g}")
    if seeds is not None and seeds < 1:
        raise ScorecardError(f"--seeds must be at least 1, not {seeds}")
    subjects = {subject.name: subject for subject in SUBJECTS[scale]}
    _known(f"workload at scale {scale}", workloads, subjects)
    _known("optimizer", optimizers, TABLE)
    runs = []
    for subject in SUBJECTS[scale]:
        if workloads and subject.name not in workloads:
            continue
        steps = max(1, round(subject.steps * steps_scale))
        for name in dict.fromkeys(optimizers or TABLE):
            entry = TABLE[name]
            grid = entry.grid if name in TUNED else ()
            for rate in dict.fromkeys((entry.default, *grid)):
                # Its own shape where it has one, as NAdamW's cosine.
                plain = entry.schedule == "constant" and "linear" in entry.schedules
                config = RunConfig(
                    workload=subject.name,
                    optimizer=name,
                    steps=steps,
                    seeds=seeds or (2 if scale == "smoke" else 3),
                    learning_rate=rate,
                    schedule="linear" if plain else entry.schedule,
                    eval_every=math.ceil(steps / subject.evaluations),
                    eval_examples=subject.examples,
                    checkpoint_every=steps,
                    data_dir=data_dir,
                    average=True,
                )
                runs.append(Run(config, rate == entry.default))
    return runs


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ScorecardError(
                f"unknown {what} {name!r}{hint} (known: {', '.join(known)})"
            )
