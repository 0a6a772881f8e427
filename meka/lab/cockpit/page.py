"""The page: figures without data, and a script that fills them.

The file that `meka report` writes and the page that `meka watch` serves are the same
page. The file carries what the runs look like inside; the live one asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    LinearScale,
    LogAxis,
    LogScale,
    Range1d,
    Slope,
    Span,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from meka.lab.cockpit.follow import Run
from meka.lab.cockpit.panels import PANELS, SECTIONS, Panel
from meka.lab.cockpit.view import RunView
from meka.lab.runfolder import RunError

# Nothing may be fetched, sent or framed, whatever a run is called.
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)


@dataclasses.dataclass(frozen=True)
class Preface:
    """What stands before the panels, such as the table of a comparison."""

    title: str
    text: str
    head: Sequence[str] = ()
    rows: Iterable[Sequence[str]] = ()


def write_report(
    paths: Sequence[Path], out: Path, *, command: str, preface: Preface | None = None
) -> Path:
    """Write one page about some runs that needs nothing beside it.

    Raises:
        RunError: a folder holds no run, or nothing was recorded in it yet.
    """
    views = []
    for path in paths:
        run = Run(path)
        run.read_all()
        if run.config is None and run.problem is None:
            raise RunError(f"{path} holds no run; name the folder of one")
        if run.problem is not None:
            raise RunError(run.problem)
        if not len(run.evals):
            raise RunError(f"{path} has not recorded anything yet; look again later")
        views.append(RunView(run).to_json())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(views, command=command, preface=preface), encoding="utf-8")
    return out


def page(
    views: Sequence[Mapping[str, Any]],
    *,
    command: str,
    live: bool = False,
    preface: Preface | None = None,
    nonce: str | None = None,
) -> str:
    """The page as text: of finished views, or live, to be served with ``nonce``."""
    bokeh, script, divs = _embedded()
    names = [str(view["name"]) for view in views]
    title = "meka: " + ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    content = {
        "live": live,
        "runs": views,
        "panels": [dataclasses.asdict(panel) for panel in PANELS],
    }
    inline = "'unsafe-inline'" if nonce is None else f"'nonce-{nonce}'"
    parts = {
        "policy": "" if live else _policy_tag(inline),
        "title": html.escape(title),
        "heading": "Live" if live else "Report",
        "command": html.escape(command),
        "preface": "" if preface is None else _preface(preface),
        "first": _section(0, divs),
        "others": "".join(_section(k, divs) for k in range(1, len(SECTIONS))),
        "style": _resource("page.css"),
        "nonce": "" if nonce is None else f' nonce="{nonce}"',
        "data": json.dumps(content, allow_nan=False).replace("<", "\\u003c"),
        "bokeh": bokeh,
        "figures": script,
        "script": _resource("page.js"),
    }
    text = _resource("page.html")
    # In one pass, so that nothing inserted is looked at again.
    pieces = text.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


@functools.cache
def _embedded() -> tuple[str, str, dict[str, str]]:
    """Bokeh's own code, the script that makes the figures, and places for them."""
    script, divs = components(_figures(), wrap_script=False, wrap_plot_info=True)
    code = Resources(mode="inline", components=["bokeh"]).js_raw[0]
    return code, script, divs  # pyright: ignore[reportReturnType]


def _policy_tag(scripts: str) -> str:
    policy = POLICY.format(scripts=scripts, connect="'none'")
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def _resource(name: str) -> str:
    return (
        resources.files("meka.lab.cockpit").joinpath(name).read_text(encoding="utf-8")
    )


def _preface(preface: Preface) -> str:
    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)

    table = ""
    if preface.head:
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in preface.rows)
        head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in preface.head)
        table = (
            '<div class="scroll" tabindex="0" role="region" aria-label="Comparison">'
            f'<table class="plain"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
    return (
        f'<section aria-labelledby="preface"><h2 id="preface">'
        f"{html.escape(preface.title)}</h2><p>{html.escape(preface.text)}</p>"
        f"{table}</section>"
    )


def _section(number: int, divs: Mapping[str, str]) -> str:
    section = SECTIONS[number]
    panels = "".join(_article(panel, divs) for panel in section.panels)
    return (
        f'<section aria-labelledby="s{number}"><h2 id="s{number}">{section.title}</h2>'
        f'<div class="grid">{panels}</div></section>'
    )


def _article(panel: Panel, divs: Mapping[str, str]) -> str:
    name = panel.name
    scale = ""
    if panel.kind == "lines":
        scale = (
            f'<button type="button" class="scale" data-scale="{name}" '
            f'aria-pressed="{str(panel.log).lower()}">log</button>'
        )
    chart = divs[name]
    if panel.kind == "profile":
        chart += divs["chance"]
    controls = _PROFILE_CONTROLS if panel.kind == "profile" else ""
    return f"""
<article class="panel{" wide" if panel.wide else ""}" id="panel-{name}"
 aria-labelledby="t-{name}" aria-describedby="d-{name}">
<header><h3 id="t-{name}">{panel.title}</h3>{scale}</header>
<p class="shows" id="d-{name}">{panel.shows}
<span class="healthy"><b>Healthy:</b> {panel.healthy}</span></p>
<div class="legend" role="group" aria-label="Curves of {panel.title}"></div>
{controls}
<div class="chart" id="chart-{name}" tabindex="0" role="group"
 aria-roledescription="chart" aria-label="{panel.title}">{chart}</div>
<p class="none" hidden></p>
<details><summary>In numbers</summary><div class="scroll" tabindex="0" role="region"
 aria-label="{panel.title} in numbers"><table class="plain"></table></div></details>
</article>"""


_PROFILE_CONTROLS = """
<div class="controls">
<label>Run <select id="profile-run"></select></label>
<div class="grow"><label for="profile-slider">Step</label>
<output id="profile-step" for="profile-slider"></output>
<input type="range" id="profile-slider" min="0" max="0" value="0" step="1"></div>
<label class="follow"><input type="checkbox" id="profile-follow" checked> newest</label>
</div>
<p id="profile-text" class="readout"></p>"""


def _figures() -> dict[str, Any]:
    x = Range1d(start=0, end=1, name="steps")
    hair = Span(dimension="height", line_width=1, name="hair")
    found: dict[str, Any] = {}
    for panel in PANELS:
        if panel.kind == "lines":
            found[panel.name] = _lines(panel, x, hair)
    found["calibration"] = _calibration()
    along = Range1d(start=0, end=1, name="along")
    found["profile"] = _plain("profile", along, 230, "change of the loss")
    found["chance"] = _plain("chance", along, 170, "chance, share")
    found["chance"].xaxis.axis_label = "step size α"
    return found


def _base(name: str, height: int, x: Range1d, tools: list[Any]) -> figure:
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        x_range=x,
        y_range=Range1d(start=0, end=1),
        toolbar_location=None,
        tools=tools,
        min_border_right=14,
        min_border_left=64,
        outline_line_color=None,
        background_fill_color=None,
        border_fill_color=None,
        output_backend="canvas",
    )
    plot.xaxis.minor_tick_line_color = None
    plot.yaxis.minor_tick_line_color = None
    columns = {key: [] for key in ("xs", "ys", "color", "alpha")}
    bands = ColumnDataSource(dict(columns), name=f"{name}:bands")
    plot.patches(
        "xs",
        "ys",
        source=bands,
        fill_color="color",
        fill_alpha="alpha",
        line_color="color",
        line_alpha="alpha",
        line_width=0.7,
    )
    columns |= {"dash": [], "width": []}
    lines = ColumnDataSource(columns, name=f"{name}:lines")
    plot.multi_line(
        "xs",
        "ys",
        source=lines,
        line_color="color",
        line_alpha="alpha",
        line_dash="dash",
        line_width="width",
        line_join="round",
    )
    return plot


def _lines(panel: Panel, x: Range1d, hair: Span) -> figure:
    tools = [BoxZoomTool(dimensions="width"), CrosshairTool(overlay=hair)]
    plot = _base(panel.name, panel.height, x, tools)
    log = LogAxis(visible=False, minor_tick_line_color=None)
    plot.add_layout(log, "left")
    plot.tags = [LinearScale(), LogScale()]  # for the switch
    plot.xaxis.axis_label = "step"
    if panel.mark is not None:
        span = Span(location=panel.mark, dimension="width", line_dash="4 4")
        span.name = f"{panel.name}:mark"
        plot.add_layout(span)
    return plot


def _plain(name: str, x: Range1d, height: int, label: str) -> figure:
    plot = _base(name, height, x, [])
    plot.yaxis.axis_label = label
    return plot


def _calibration() -> figure:
    plot = _plain("calibration", Range1d(start=0, end=1), 240, "delivered")
    plot.xaxis.axis_label = "promised change of the loss"
    plot.add_layout(
        Slope(gradient=1, y_intercept=0, line_dash="4 4", name="calibration:mark")
    )
    dots = ColumnDataSource({"x": [], "y": [], "color": []}, name="calibration:dots")
    plot.scatter("x", "y", source=dots, size=7, color="color")
    return plot
