"""The page of a scorecard, and beside it the same as pictures, JSON and Markdown."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from meka.lab import sheet
from meka.lab.checkpoint import replace_file
from meka.lab.reproduce import setting as files
from meka.lab.reproduce.verdict import Check
from meka.lab.scorecard import pictures, tables
from meka.lab.scorecard.card import Card
from meka.lab.scorecard.plan import ScorecardError
from meka.lab.scorecard.summary import summarise

RESULTS, TABLE, PAGE = "results.json", "table.md", "index.html"

_TEXT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Scorecard</title>
<style>{style}
td:not(:first-child), th:not(:first-child) {{ font-variant-numeric: tabular-nums; }}
details {{ margin: .6rem 0; }}</style></head><body>
<h1>Scorecard</h1>
<p>Every optimizer of the bench <strong>at one setting for all workloads</strong>, its
published default, with a linear decay over the known number of steps where it takes
one; beside them Adam, NAdamW and momentum <strong>at the best rate of their grid on
each workload</strong>. Scale <strong>{scale}</strong>, {seeds}.{shortened}{caution}</p>
<h2>Scores</h2>
<p>The target on a workload is what Adam at the best of its grid ended at, its worst
seed. The time to it is the first evaluation at or below it, the median over seeds, in
steps, or in seconds as steps times the time of a step, measured apart. The profile ρ(τ)
is the share of workloads on which an optimizer needs at most τ times the time of the
fastest; the score is the area under it from τ = 1 to 4, over 3. Who never gets there
counts as infinitely slow. Rates that were searched are given for free: the time of the
search is not counted.</p>
{scores}
{profiles}
<section><h2>Where each gets there, and how fast</h2>{heat}</section>
<section><h2>Curves</h2><p>Medians over seeds; the dotted line is the target. Test error
is one minus accuracy.</p>{curves}</section>
<section><h2>By the test metric</h2><p>The same, with the test metric as the target: the
best of Adam's grid by it, its worst seed.</p>{metric}</section>
<section><h2>What was claimed of auto</h2>{claims}</section>
<section><h2>Workload by workload</h2><p>Medians over seeds. Averaged: the same run,
evaluated at a polynomial-decay average of its iterates, for all alike; the target stays
that of the iterates themselves. Of a tuned row each column is of the rate that is best
by it; the rate shown is the best by training loss.</p>{workloads}</section>
<section><h2>What failed</h2>{failures}</section>
<section class="small">{made}</section>
</body></html>
"""
_SMOKE = (
    " <strong>This scale only shows that all runs: it is too short for its scores to "
    "mean anything.</strong>"
)


def write(records: dict[str, Any], out: Path) -> Path:
    """Write page, pictures, results.json and table.md; returns the page."""
    card = Card(records)
    if not any(card.target(workload) is not None for workload in card.workloads):
        raise ScorecardError(
            "nothing to score: there is no run of Adam over its grid to set a target; "
            "train it, or take its records in with --merge"
        )
    summary = summarise(card)
    files.write(out / RESULTS, summary)
    replace_file(out / TABLE, tables.markdown(summary).encode())
    drawn = pictures.draw(card, out)
    path = out / PAGE
    replace_file(path, _page(records, card, summary, drawn).encode())
    return path


def _page(
    records: dict[str, Any], card: Card, summary: dict[str, Any], drawn: dict[str, Path]
) -> str:
    settings = summary["settings"]
    scale, seeds = settings["scale"], settings["seeds"]
    shorter = settings["steps_scale"]
    return _TEXT.format(
        style=sheet.STYLE,
        scale=html.escape(scale),
        seeds=f"{seeds} seed{'s' if seeds > 1 else ''}",
        shortened=""
        if shorter == 1
        else f" <strong>Every run has {shorter:g} times its usual length.</strong>",
        caution=(_SMOKE if scale == "smoke" else "") + _unlike(card),
        scores=sheet.table(tables.SCORE_HEAD, tables.score_rows(summary)),
        profiles=_pictures(drawn, "profiles"),
        heat=_pictures(drawn, "ratios_steps", "ratios_seconds"),
        curves=_pictures(drawn, "curves"),
        metric=_pictures(drawn, "profiles_metric", "curves_metric"),
        claims=sheet.checks(Check(**claim) for claim in summary["claims"]),
        workloads="".join(_workload(summary, name) for name in summary["workloads"]),
        failures=sheet.table(("workload", "optimizer", "why"), _failures(card)),
        made=_made(records),
    )


def _unlike(card: Card) -> str:
    names = ", ".join(card.unlike())
    if not names:
        return ""
    return (
        f" <strong>Not all runs of {html.escape(names)} saw the same data: they began "
        "at different losses, so they cannot be compared.</strong>"
    )


_WORDS = {
    "profiles": "Performance profiles over steps and seconds to the training loss",
    "profiles_metric": "Performance profiles over steps and seconds to the test metric",
    "curves": "Training loss over steps on each workload",
    "curves_metric": "Test metric over steps on each workload",
    "ratios_steps": "Steps to the target over the best, by optimizer and workload",
    "ratios_seconds": "Seconds to the target over the best, by optimizer and workload",
}


def _pictures(drawn: dict[str, Path], *names: str) -> str:
    found = [
        sheet.picture(drawn[name], _WORDS[name]) for name in names if name in drawn
    ]
    return "".join(found) or "<p>Nothing to draw yet.</p>"


def _workload(summary: dict[str, Any], name: str) -> str:
    table = sheet.table(tables.WORKLOAD_HEAD, tables.workload_rows(summary, name))
    words = html.escape(tables.caption(summary, name))
    return (
        f"<details><summary><strong>{html.escape(name)}</strong>: {words}</summary>"
        f"{table}</details>"
    )


def _failures(card: Card) -> list[tuple[str, ...]]:
    """Runs that ended badly; those of a grid too, if they were the best of it."""
    found = []
    for workload in card.workloads:
        for row in card.rows:
            record = card.record(row, workload)
            if record is None:
                found.append((workload, row.name, "not run"))
            elif record["failure"]:
                found.append((workload, row.name, record["failure"]))
    return found


def _made(records: dict[str, Any]) -> str:
    """By which commands, on what."""
    kinds = dict.fromkeys(
        ", ".join(f"{k} {v}" for k, v in record["environment"].items() if v != "")
        for record in records["runs"]
        if "environment" in record
    )
    times = dict.fromkeys(own["device"] for own in records["times"].values())
    lines = [
        f"<p>Made by <code>{html.escape(c)}</code></p>" for c in records["commands"]
    ]
    lines += [f"<p>Trained with {html.escape(kind)}</p>" for kind in kinds]
    if times:
        lines.append(f"<p>Steps timed on {html.escape(', '.join(times))}</p>")
    return "".join(lines)
