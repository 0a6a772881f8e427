"""Pictures of a card: profiles, curves, and who is how many times slower where."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.lines import Line2D

from meka.lab.plots import OURS
from meka.lab.reproduce import drawing
from meka.lab.reproduce.drawing import plt
from meka.lab.scorecard import scores
from meka.lab.scorecard.card import AVERAGED, METRIC, PLAIN, Card, Row, View
from meka.lab.scorecard.summary import ranked

_TUNED = {"adam": "#000000", "nadamw": "#882255", "momentum": "#8C6D31"}
_REST = ("#E69F00", "#56B4E9", "#CC79A7", "#999933", "#332288", "#AA4499", "#44AA99")
_DASHES = ("-", "-.", ":")
_COLUMNS = 4
_FAR = 8.0  # the ratio at which the colour of the heat map ends


def draw(card: Card, out: Path) -> dict[str, Path]:
    """Draw all that the records allow; returns the files by what they show."""
    found = {}
    with plt.rc_context(cast(Any, drawing.STYLE)):
        for name, figure in {
            "profiles": _profiles(card, PLAIN, AVERAGED),
            "profiles_metric": _profiles(
                card, METRIC, METRIC._replace(iterate="average_")
            ),
            "curves": _curves(card, PLAIN),
            "curves_metric": _curves(card, METRIC),
            "ratios_steps": _heat(card, "steps"),
            "ratios_seconds": _heat(card, "seconds"),
        }.items():
            if figure is None:
                continue
            found[name] = out / f"{name}.png"
            drawing.save_small(figure, found[name])
            plt.close(figure)
    return found


def _style(card: Card, row: Row) -> dict[str, Any]:
    """Ours in strong lines, the tuned ones dashed, the others thin."""
    if row.tuned:
        color = _TUNED[row.optimizer]
        return {"color": color, "linestyle": (0, (4, 2)), "linewidth": 1.8, "zorder": 4}
    if row.optimizer in OURS:
        return {"color": OURS[row.optimizer], "linewidth": 2.6, "zorder": 5}
    rest = [r for r in card.rows if not r.tuned and r.optimizer not in OURS]
    turn, place = divmod(rest.index(row), len(_REST))
    style = _DASHES[turn % len(_DASHES)]
    return {"color": _REST[place], "linewidth": 1.1, "linestyle": style, "zorder": 3}


def _profiles(card: Card, *views: View) -> Any:
    """Steps beside seconds, a row of panels a view; one legend with the scores."""
    units = [u for u in ("steps", "seconds") if card.scores(u, views[0])]
    if not units:
        return None
    height = 4.0 * len(views)
    figure, axes = plt.subplots(
        len(views),
        len(units),
        figsize=(5.2 * len(units) + 3.4, height),
        layout="constrained",
        squeeze=False,
    )
    taus = np.linspace(1, scores.LAST, 601)
    for line, view in zip(axes, views, strict=True):
        for axis, unit in zip(line, units, strict=True):
            for row, own in card.profile_ratios(unit, view).items():
                axis.plot(taus, scores.profile(own, taus), **_style(card, row))
            which = "averaged iterates" if view.iterate else "the iterates themselves"
            what = "test metric" if view.what == "metric" else "training loss"
            axis.set_title(f"{unit} to tuned Adam's {what}\n{which}")
            axis.set_xlabel(f"τ: at most so many times the fewest {unit}")
            axis.set_ylabel("share of workloads")
            axis.set_xlim(1, scores.LAST)
            axis.set_ylim(-0.02, 1.02)
    own = card.scores("steps", views[0])
    order = sorted(card.rows, key=lambda row: -own.get(row, 0.0))
    handles = [
        Line2D([], [], label=f"{own.get(r, 0.0):.2f}  {r.name}", **_style(card, r))
        for r in order
    ]
    figure.legend(
        handles=handles,
        loc="outside right upper",
        title="area, steps, top left",
        handlelength=2.6,
        alignment="left",
    )
    return figure


def _curves(card: Card, view: View) -> Any:
    """A panel a workload: everybody in grey, ours and the tuned ones in colour."""
    names = [w for w in card.workloads if card.target(w, view) is not None]
    if view.what == "metric":
        names = [w for w in names if card.metric(w) != "train_loss"]
    if not names:
        return None
    columns = min(_COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(3.6 * columns, 3.1 * lines + 0.6),
        layout="constrained",
        squeeze=False,
    )
    shown: dict[str, Any] = {}
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        ends, starts = [], []
        for row in card.rows:
            record = card.record(row, name, view)
            if record is None or not record["step"]:
                continue
            values = np.median(card.curve(record, view), axis=1)
            values = np.where(np.isfinite(values) & (values > 0), values, np.nan)
            marked = row.tuned or row.optimizer in OURS
            style = _style(card, row) if marked else _faint()
            (line,) = axis.plot(record["step"], values, **style)
            label = row.name if marked else "the others"
            shown.setdefault(label, line)
            starts.append(values[0])
            if np.isfinite(values[-1]):
                ends.append(np.nanmin(values))
        target = card.target(name, view)
        assert target is not None
        axis.axhline(target, color="#555555", linewidth=1, linestyle=":", zorder=2)
        axis.set_yscale("log")
        axis.set_title(f"{name}, {_said(card, name, view)}")
        low, high = min([target, *ends]), np.nanmax(starts)
        if 0 < low < high:
            axis.set_ylim(low * (low / high) ** 0.05, high * (high / low) ** 0.15)
        axis.tick_params(labelsize=8)
    order = sorted(shown, key=lambda label: (label == "the others", "tuned" in label))
    figure.supxlabel("step", fontsize=9)
    figure.legend(
        [shown[label] for label in order],
        order,
        loc="outside upper center",
        ncols=len(order),
    )
    return figure


def _faint() -> dict[str, Any]:
    return {"color": "#b0b0b0", "linewidth": 0.8, "zorder": 1}


def _said(card: Card, workload: str, view: View) -> str:
    if view.what == "loss":
        exact = card.metric(workload) == "train_loss"
        return "objective" if exact else "train loss"
    accuracy = card.metric(workload) == "test_accuracy"
    return "test error" if accuracy else "test loss"


def _heat(card: Card, unit: str) -> Any:
    """Ratios to the best, a line a competitor; what failed is named."""
    ratios = card.ratios(unit)
    names = [w for w in card.workloads if any(w in own for own in ratios.values())]
    if not names:
        return None
    rows = ranked(card)
    figure, axis = plt.subplots(
        figsize=(3.2 + 1.05 * len(names), 1.6 + 0.29 * len(rows)), layout="constrained"
    )
    colors = plt.get_cmap("YlGnBu").with_extremes(bad="#ffffff")
    shown = np.full((len(rows), len(names)), np.nan)
    for i, row in enumerate(rows):
        for j, name in enumerate(names):
            ratio = ratios[row].get(name)
            if ratio is not None and np.isfinite(ratio):
                shown[i, j] = np.log2(min(ratio, _FAR))
                dark = shown[i, j] > 0.6 * np.log2(_FAR)
                text, color = f"{ratio:.2f}", "white" if dark else "black"
            else:
                text, color = _why(card, row, name, ratio), "#b3261e"
                if text == "failed":
                    axis.axhspan(
                        i - 0.5, i + 0.5, j / len(names), (j + 1) / len(names),
                        facecolor="#f6c1bb", linewidth=0, zorder=2,
                    )  # fmt: skip
            axis.text(
                j, i, text, ha="center", va="center", fontsize=8, color=color, zorder=3
            )
    axis.imshow(shown, cmap=colors, vmin=0, vmax=np.log2(_FAR), aspect="auto")
    axis.set_xticks(range(len(names)), [n.replace("-", "-\n") for n in names])
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.optimizer in OURS else "normal")
        label.set_fontstyle("italic" if row.tuned else "normal")
    axis.xaxis.tick_top()
    axis.tick_params(length=0, labelsize=8.5)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    figure.suptitle(
        f"{unit.capitalize()} to tuned Adam's training loss, over the best of all",
        fontsize=10.5,
        fontweight="bold",
    )
    return figure


def _why(card: Card, row: Row, workload: str, ratio: float | None) -> str:
    record = card.record(row, workload)
    if record is None or ratio is None:
        return "not run" if record is None else "not timed"
    if record["failure"]:
        return "failed"
    return "never"
