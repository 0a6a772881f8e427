"""What is claimed of the optimizer named `auto`, judged by the records.

Each claim is checked by code that can say no, and says no where `auto` was not run.
"""

from __future__ import annotations

import numpy as np

from meka.lab.reproduce.verdict import Check
from meka.lab.scorecard.card import METRIC, Card, Row
from meka.lab.scorecard.plan import BASE, SUBJECTS

AUTO = "auto"
_DESK = tuple(subject.name for subject in SUBJECTS["desk"])
_ENOUGH = len(_DESK) - 1
_WITHIN = 0.1  # of the best score in seconds
_POINT = 0.01  # of test accuracy


def checks(card: Card) -> list[Check]:
    """The claims that this card can be asked about, the largest scale's last."""
    auto = card.row(AUTO)
    found = [*_as_good_as_tuned(card, auto), _ahead(card, auto), _fast(card, auto)]
    if "cifar10-cnn" in card.workloads:
        found.append(_accuracy(card, auto, "cifar10-cnn", slack=None))
    if "cifar10-resnet32" in card.workloads:
        found.append(_accuracy(card, auto, "cifar10-resnet32", slack=_POINT))
    return found


def difference(card: Card, row: Row, workload: str) -> tuple[float, float] | None:
    """How much worse than the tuned Adam it ends on the test metric, seed by seed.

    Mean and standard deviation over seeds of the difference; None if one was not run.
    """
    own = card.final(row, workload, METRIC)
    base = card.final(Row(BASE, tuned=True), workload, METRIC)
    if own is None or base is None:
        return None
    if not np.isfinite(own).all():
        return float("inf"), 0.0
    gaps = (own - base)[np.isfinite(base)]
    if not len(gaps):  # the tuned Adam diverged
        return -float("inf"), 0.0
    return float(np.mean(gaps)), float(np.std(gaps, ddof=1)) if len(gaps) > 1 else 0.0


def _as_good_as_tuned(card: Card, auto: Row | None) -> list[Check]:
    each = []
    for workload in _DESK:
        says = (
            "test metric no worse, within one standard deviation over seeds of the "
            "difference"
        )
        gap = None if auto is None else difference(card, auto, workload)
        if gap is None:
            each.append(Check(f"{workload}", says, "not run", False))
            continue
        mean, spread = gap
        if card.metric(workload) == "test_accuracy":
            text = f"{100 * mean:+.2f} points of error, deviation {100 * spread:.2f}"
        else:
            text = f"{mean:+.3g}, deviation {spread:.2g}"
        each.append(Check(f"{workload}", says, text, bool(mean <= spread)))
    held = sum(check.holds for check in each)
    summary = Check(
        "as good as tuned Adam",
        f"{AUTO} is no worse than the best-of-grid Adam on the test metric on at least "
        f"{_ENOUGH} of the {len(_DESK)} desk workloads",
        f"{held} of {len(_DESK)}",
        held >= _ENOUGH,
    )
    return [summary, *each]


def _ahead(card: Card, auto: Row | None) -> Check:
    says = (
        f"{AUTO} has the largest area under the profile over steps of all that tune "
        "themselves, at one setting"
    )
    scores = card.scores("steps")
    rivals = {r: s for r, s in scores.items() if r.tunes_itself and r != auto}
    if auto is None or auto not in scores or not rivals:
        return Check("ahead in steps", says, "not run", False)
    best = max(rivals, key=lambda row: rivals[row])
    return Check(
        "ahead in steps",
        says,
        f"{scores[auto]:.3f}; next best {best.name} {rivals[best]:.3f}",
        scores[auto] > rivals[best],
    )


def _fast(card: Card, auto: Row | None) -> Check:
    says = (
        f"{AUTO}'s area under the profile over seconds is within "
        f"{_WITHIN:.0%} of the best at one setting"
    )
    scores = card.scores("seconds")
    rivals = {r: s for r, s in scores.items() if not r.tuned and r != auto}
    if auto is None or auto not in scores or not rivals:
        return Check("fast by the clock", says, "not run, or not timed", False)
    best = max(rivals, key=lambda row: rivals[row])
    return Check(
        "fast by the clock",
        says,
        f"{scores[auto]:.3f}; best other {best.name} {rivals[best]:.3f}",
        scores[auto] >= (1 - _WITHIN) * rivals[best],
    )


def _accuracy(
    card: Card, auto: Row | None, workload: str, slack: float | None
) -> Check:
    """Above every rival, or within a slack of the best, by means over seeds.

    Of a rival the seeds that diverged are left out.
    """
    says = f"{AUTO}'s mean test accuracy on {workload} is " + (
        "above every rival's" if slack is None else "within a point of the best rival's"
    )
    name = f"accuracy on {workload}"
    rivals = {
        row: final[np.isfinite(final)]
        for row in card.rows
        if not row.ours and (final := card.final(row, workload, METRIC)) is not None
    }
    rivals = {row: final for row, final in rivals.items() if len(final)}
    own = None if auto is None else card.final(auto, workload, METRIC)
    if own is None or not rivals:
        return Check(name, says, "not run", False)
    best = min(rivals, key=lambda row: float(np.mean(rivals[row])))
    behind = float(np.mean(own) - np.mean(rivals[best]))
    return Check(
        name,
        says,
        f"{_accuracies(own)}; best rival {best.name} {_accuracies(rivals[best])}",
        behind < 0 if slack is None else behind <= slack + 1e-9,
    )


def _accuracies(errors: np.ndarray) -> str:
    """Mean and standard deviation over seeds."""
    if not np.isfinite(errors).all():
        return "diverged"
    mean = f"{1 - np.mean(errors):.2%}"
    if len(errors) == 1:
        return mean
    return f"{mean} (deviation {100 * np.std(errors, ddof=1):.2f})"
