"""What the numbers of a run say, in plain words, and what a person could do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meka.lab.cockpit.follow import Run

Level = Literal["good", "note", "warn"]

_LATE = 0.2  # the share of the run that "at the end" means
_SETTLED = 1.5  # a step size within this factor of its earlier self has settled
_TRUST = 2.0  # innovations within this factor of 1 are as expected
_BATCH = 10.0  # a noise scale within this factor of the batch size suits it
# E max(0, z² - 1) of a standard normal z: the model error that chance alone infers,
# in units of the variance it is compared with.
_CHANCE = 2 / math.sqrt(2 * math.pi * math.e)


@dataclass(frozen=True)
class Finding:
    """One thing the numbers say."""

    level: Level
    title: str
    text: str
    advice: str = ""


def story(run: Run) -> list[Finding]:
    """All that can be said about a run, in the order of the page."""
    if run.problem is not None:
        return [Finding("warn", "Cannot be read", run.problem)]
    if run.config is None:
        waiting = f"There is no run in {run.path} yet; it is followed once it begins."
        return [Finding("note", "Waiting", waiting)]
    if not len(run.steps):
        return [Finding("note", "Starting", "No step was recorded yet.")]
    parts = (_loss, _step, _trust, _error, _noise, _batch, _promise, _rejected, _pace)
    return [finding for part in parts for finding in part(run)]


def _loss(run: Run) -> Iterator[Finding]:
    assert run.config is not None
    if "train_loss" not in run.evals:
        return
    loss = _over_seeds(run.evals.column("train_loss"))
    where = f"step {run.last_step:,} of {run.config.steps:,}"
    if not np.isfinite(loss[-1]):
        yield Finding(
            "warn",
            "Loss",
            f"The training loss is no number at {where}: the run has diverged.",
            "Take a smaller learning rate, or an optimizer that chooses its own step.",
        )
        return
    best = np.nanmin(np.where(np.isfinite(loss), loss, np.nan))
    text = f"Training loss went from {num(loss[0])} to {num(loss[-1])} by {where}."
    if loss[-1] > 1.2 * best and loss[-1] - best > 0.01 * abs(loss[0] - best):
        yield Finding(
            "warn",
            "Loss",
            f"{text} It had been {num(best)} at step "
            f"{run.evals.step[np.nanargmin(loss)]:,} and has risen since.",
            "Steps are too long for the noise: compare with probe=lagged (meka, "
            "adameka), a larger batch, or a schedule that decays.",
        )
    else:
        yield Finding("good", "Loss", text)
    yield from _held_out(run)


def _held_out(run: Run) -> Iterator[Finding]:
    if "test_loss" not in run.evals or len(run.evals) < 4:
        return
    loss = _over_seeds(run.evals.column("test_loss"))
    usable = np.where(np.isfinite(loss), loss, np.inf)
    best = int(np.argmin(usable))
    if not np.isfinite(usable[-1]) or usable[-1] <= 1.1 * usable[best]:
        return
    yield Finding(
        "note",
        "Held-out loss",
        f"It was lowest at step {run.evals.step[best]:,} ({num(loss[best])}) and is "
        f"now {num(loss[-1])}: the model fits its training data more than the task.",
        f"Stop near step {run.evals.step[best]:,}, augment the data, or add weight "
        "decay.",
    )


def _step(run: Run) -> Iterator[Finding]:
    assert run.config is not None
    if "step_size" not in run.steps:
        return
    step = _over_seeds(run.steps.column("step_size"))
    end = _late(step)
    now = _median(end)
    if not np.isfinite(now):
        return
    if "model.slope" not in run.steps:
        yield Finding("good", "Step size", f"At the end it was {num(now)}, as set.")
        return
    still = float(np.mean(end == 0))
    if still > 0.1:
        yield Finding(
            "warn",
            "Step size",
            f"{still:.0%} of the last steps were of length zero, because the slope "
            "along the direction was not positive: noise hides which way is down.",
            "Take a larger batch, or stop: there may be nothing left to gain.",
        )
        return
    before = _median(step[int(0.3 * len(step)) : int(0.5 * len(step)) or None])
    change = now / before if before > 0 else math.inf
    if len(step) < 50 or 1 / _SETTLED < change < _SETTLED:
        yield Finding("good", "Step size", f"It settled around {num(now)}.")
    elif change >= _SETTLED:
        advice = (
            "Good while the loss falls. If it does not, the step is too long: try "
            "--option probe=lagged or --schedule linear."
        )
        yield Finding(
            "note",
            "Step size",
            f"It is still growing: {num(before)} in the middle of the run, "
            f"{num(now)} at the end.",
            "" if _by_distance(run) else advice,
        )
    else:
        yield Finding(
            "good",
            "Step size",
            f"It shrinks as the end nears: {num(before)} in the middle of the run, "
            f"{num(now)} at the end.",
        )


def _trust(run: Run) -> Iterator[Finding]:
    for name, what in (("gradient_innovation", "gradient"), ("innovation", "loss")):
        if name not in run.steps:
            continue
        ratio = _mean(_late(run.steps.column(name)))
        if not np.isfinite(ratio):
            continue
        text = f"Surprises of the {what} are {num(ratio)} times what the filter expects"
        title = f"Trust in the {what}"
        if ratio > _TRUST:
            yield Finding(
                "warn",
                title,
                f"{text}: it trusts its model more than the model deserves.",
                "The change of the gradient is predicted to second order; --option "
                "transport=difference has no such error. Smaller steps help, too.",
            )
        elif ratio < 1 / _TRUST:
            yield Finding(
                "note",
                title,
                f"{text}: it is more careful than it needs to be. Near the end of a "
                "run that is usual, as noise falls faster than its average.",
            )
        else:
            yield Finding("good", title, f"{text}; 1 is a filter that knows itself.")


def _error(run: Run) -> Iterator[Finding]:
    names = ("model_error", "value_variance", "observed_variance")
    if not all(name in run.steps for name in names):
        return
    error, s, noise = (_mean(_late(run.steps.column(name))) for name in names)
    if not (np.isfinite([error, s, noise]).all() and s > 0):
        return
    chance = _CHANCE * (s + noise)
    text = f"λ averages {num(error)}, {num(error / s)} times s = {num(s)}"
    if not error:
        text = f"λ was zero throughout: no surprise exceeded s = {num(s)} and noise"
    if error > 3 * chance:
        yield Finding(
            "warn",
            "Model error",
            f"{text}, and {num(error / chance)} times what chance alone would infer: "
            "the loss is not the parabola the model takes it for.",
            "Let the step feel it with --option third_order=0, or shorten the steps "
            "with --option scale=0.5.",
        )
    else:
        yield Finding(
            "good",
            "Model error",
            f"{text}. Chance alone would infer about {num(chance)}, so the quadratic "
            "model holds.",
        )


def _noise(run: Run) -> Iterator[Finding]:
    if not all(n in run.steps for n in ("gradient_noise", "gradient_variance")):
        return
    noise = _late(run.steps.column("gradient_noise"))
    left = _late(run.steps.column("gradient_variance"))
    with np.errstate(all="ignore"):
        cut = _median(noise / left)
    if not np.isfinite(cut):
        return
    text = (
        f"The filtered gradient has {num(cut)} times less variance than the minibatch's"
    )
    if run.batch_size:
        text += f", as if the batch had {num(cut * run.batch_size)} examples"
    if cut >= 1.5:
        yield Finding("good", "Noise", f"{text}.")
        return
    text += (
        ": filtering gains little here, since the gradient changes faster than it can "
        "be averaged"
    )
    if _by_distance(run):
        yield Finding("good", "Noise", f"{text}. So auto takes the minibatch's.")
        return
    yield Finding(
        "note",
        "Noise",
        f"{text}.",
        "A plain rule on the minibatch gradient would do as well.",
    )


def _batch(run: Run) -> Iterator[Finding]:
    size = run.batch_size
    if "noise_scale" not in run.steps or not size:
        return
    scale = _median(_late(run.steps.column("noise_scale")))
    if not np.isfinite(scale) or scale <= 0:
        return
    text = f"The noise scale is {num(scale)} examples, the batch {size}"
    if scale > _BATCH * size:
        examples = run.subject.get("train_examples") or scale
        better = _power(min(scale, 8 * size, examples / 2))
        yield Finding(
            "note",
            "Batch size",
            f"{text}: too small at the end of the run, where noise outweighs the "
            "gradient.",
            f"If there is memory, try --batch-size {better}: fewer, surer steps."
            if better > size
            else "",
        )
    elif scale < size / _BATCH:
        yield Finding(
            "note",
            "Batch size",
            f"{text}: larger than the noise asks for.",
            f"--batch-size {_power(max(scale, 8, size / 8))} would make nearly the "
            "same steps for less.",
        )
    else:
        yield Finding("good", "Batch size", f"{text}: they suit each other.")


def _promise(run: Run) -> Iterator[Finding]:
    """Over the second half: what the model predicted, and what the loss did."""
    if "predicted_change" not in run.steps or len(run.steps) < 100:
        return
    size = len(run.steps)
    half, near = size // 2, max(10, size // 20)
    change = run.steps.column("predicted_change")[half:]
    loss = run.steps.column("loss")
    with np.errstate(all="ignore"):
        promised = _median(np.nansum(change, axis=0))
        start = np.mean(loss[half : half + near], axis=0)
        delivered = _median(np.mean(loss[-near:], axis=0) - start)
    if not (np.isfinite([promised, delivered]).all() and promised < 0):
        return
    text = (
        f"Over the second half the model promised a change of {num(promised)} in all; "
        f"the minibatch loss changed by {num(delivered)}"
    )
    if delivered <= promised / 4:
        yield Finding("good", "Promises", f"{text}.")
    elif _by_distance(run):
        yield Finding(
            "note",
            "Promises",
            f"{text}. A step is judged by examples that helped to choose it, and by "
            "those of the last steps. How long it is does not depend on that.",
        )
    else:
        yield Finding(
            "note",
            "Promises",
            f"{text}. The model is an average over many steps and lags behind a loss "
            "that falls fast; and a step is judged on examples that helped to choose "
            "it.",
            "Harmless while the loss falls. If it does not, --option probe=lagged "
            "judges each step on fresh examples.",
        )


def _by_distance(run: Run) -> bool:
    """Whether steps are as long as a distance says (`auto`), not as the model would."""
    return "distance" in run.steps


def _rejected(run: Run) -> Iterator[Finding]:
    if "rejected" not in run.steps:
        return
    counted = _usable(run.steps.column("rejected")[-1:])
    count = int(counted.max()) if len(counted) else 0
    if not count:
        yield Finding("good", "Rejected steps", "None.")
        return
    text = f"{count:,} of {run.last_step:,} steps were not taken, because something in "
    text += "them was not finite."
    advice = "Look at the losses for overflow, logarithms of zero and divisions."
    suspect = run.steps.column("suspect") if "suspect" in run.steps else np.zeros(0)
    named = suspect[suspect >= 0]
    if len(named):
        row = int(named[-1])
        advice = f"Example {row} of the data had a loss that is no number: look there."
    yield Finding("warn", "Rejected steps", text, advice)


def _pace(run: Run) -> Iterator[Finding]:
    if not run.timing:
        return
    pace = [seconds for _, seconds in run.timing]
    middle = float(np.median(pace))
    late = float(np.median(pace[len(pace) // 2 :]))
    yield Finding("good", "Speed", f"{seconds_text(middle)} a step.")
    if len(pace) >= 8 and late > 1.5 * float(np.median(pace[1 : len(pace) // 2])):
        yield Finding(
            "note",
            "Speed",
            f"The second half took {seconds_text(late)} a step, markedly more than "
            "the first: something else may be using the machine.",
        )


def _over_seeds(values: np.ndarray) -> np.ndarray:
    return np.median(values, axis=1)


def _late(values: np.ndarray) -> np.ndarray:
    return values[-max(1, min(len(values), max(20, int(_LATE * len(values))))) :]


def _usable(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values) & (np.abs(values) < 1e30)]


def _median(values: np.ndarray) -> float:
    values = _usable(values)
    return float(np.median(values)) if len(values) else math.nan


def _mean(values: np.ndarray) -> float:
    values = _usable(values)
    return float(np.mean(values)) if len(values) else math.nan


def _power(value: float) -> int:
    """The nearest power of two."""
    return 2 ** round(math.log2(value))


def num(value: float) -> str:
    """Three digits, in the shortest form that reads well."""
    if 1e3 <= abs(value) < 1e7:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.2g} s"
