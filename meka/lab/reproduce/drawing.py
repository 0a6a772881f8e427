"""How the figures look: one style, one colour for each optimizer."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only: there may be no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

BLUE, RED, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
AMBER, SKY, BROWN, GREY = "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F"
PALETTE = (BLUE, RED, GREEN, AMBER, PINK, SKY, BROWN, GREY, "#000000", "#882255")

STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 110,
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "svg.hashsalt": "meka",
}


def panels(columns: int, rows: int = 1, width: float = 9.0, height: float = 3.4):
    """A figure and its axes, as an array (rows, columns)."""
    return plt.subplots(
        rows,
        columns,
        figsize=(width, height * rows),
        layout="constrained",
        squeeze=False,
    )


def band(
    axis: Axes, x: Any, values: Any, color: str, label: str | None, **style: Any
) -> None:
    """Median over seeds, with the 5th to 95th percentile as a band."""
    rows = np.array(values, dtype=float)
    if rows.ndim == 1:
        rows = rows[:, None]
    rows = np.where(np.isfinite(rows) & (np.abs(rows) < 1e30), rows, np.nan)
    keep = np.isfinite(rows).any(axis=1)
    if not keep.any():
        axis.plot([], [], color=color, label=f"{label} (diverged)", **style)
        return
    x, rows = np.asarray(x, float)[keep], rows[keep]
    low, middle, high = np.nanpercentile(rows, [5, 50, 95], axis=1)
    axis.plot(x, middle, color=color, label=label, **{"linewidth": 1.5, **style})
    if rows.shape[1] > 1:
        axis.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)


def below(axis: Axes, columns: int = 2, **options: Any) -> None:
    """A legend under the panel, where it hides no curve."""
    axis.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, **options
    )


def once(figure: Figure, axis: Axes) -> None:
    """One legend for all panels, above them, of what one of them shows."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def save(draw: Callable[[Any], Figure], data: Any, folder: Path) -> None:
    """Draw, and write figure.png and figure.svg."""
    with plt.rc_context(cast(Any, STYLE)):
        figure = draw(data)
        save_small(figure, folder / "figure.png")
        figure.savefig(folder / "figure.svg", metadata={"Date": None})
    plt.close(figure)


def save_small(figure: Figure, path: Path) -> None:
    """A PNG of 256 colours: half the size, and looks the same."""
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    picture = Image.open(content).convert("RGB")
    few = picture.quantize(
        256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )
    few.save(path, optimize=True)
