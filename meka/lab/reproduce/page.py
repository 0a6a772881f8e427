"""One page for all that was reproduced: the paper's claim, our figure, the verdict."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from meka.lab import sheet
from meka.lab.checkpoint import replace_file
from meka.lab.reproduce import setting as files
from meka.lab.reproduce.table import TABLE, Experiment
from meka.lab.reproduce.verdict import Verdict, from_dict

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The paper, reproduced</title>
<style>{style}</style></head><body>
<h1>The paper, reproduced</h1>
<p>Each experiment of <em>Self-Tuning Stochastic Optimization with Curvature-Aware
Gradient Filtering</em> (Chen, Choi, Balles, Duvenaud, Hennig, 2020), run here at scale
<strong>{scale}</strong>. A claim holds if all of its checks do; the checks are computed
from the data, with the tolerances they state.{caution}</p>
<details><summary>The same for all experiments</summary><p>{common}</p></details>
<p><strong>{count}</strong></p>
<div class="scroll"><table><thead><tr><th>experiment</th><th>paper</th><th>verdict</th>
<th>checks</th></tr></thead><tbody>{overview}</tbody></table></div>
{sections}
<section class="small"><p>Made by <code>{command}</code></p>{made}</section>
</body></html>
"""


_COMMON = (
    "The paper gives neither batch size, initialisation nor length. Here the batch is "
    "128 unless it says otherwise, for all optimizers. The MLP has one hidden layer of "
    "100 units, Glorot-uniform weights and zero biases (784-100-10 on MNIST, 64-100-10 "
    "on the 8×8 digits); 3c3d has Glorot weights as in DeepOBS, ResNet-32 He-normal "
    "ones and group normalisation. CIFAR-10 is cropped and flipped unless it says "
    "otherwise. There is no weight decay and no schedule. Meka is the library's with "
    "its defaults, but for noise measured at every step: from two groups of examples, "
    "decay rates 0.999 with bias correction, curvature probed along the new direction "
    "on the same minibatch, no third-order term. Lines are medians over seeds, bands "
    "the 5th to 95th percentile. Lengths and seeds are given with each experiment."
)

_SMOKE = (
    " <strong>This scale only shows that all runs: it is too short for its verdicts to "
    "mean anything.</strong>"
)


def write(out: Path, command: str) -> Path:
    """Write index.html from all experiments whose verdict is in the folder."""
    found = [
        (experiment, *_read(out / experiment.name))
        for experiment in TABLE.values()
        if (out / experiment.name / "verdict.json").exists()
    ]
    held = sum(verdict.holds for _, _, verdict in found)
    scales = dict.fromkeys(record["scale"] for _, record, _ in found)
    text = _PAGE.format(
        style=sheet.STYLE,
        scale=html.escape(", ".join(scales)),
        caution=_SMOKE if "smoke" in scales else "",
        common=html.escape(_COMMON),
        count=f"{held} of {len(found)} claims hold.",
        overview="".join(_row(*each) for each in found),
        sections="".join(_section(out, *each) for each in found),
        command="</code>, <code>".join(
            html.escape(each)
            for each in dict.fromkeys(r.get("command", command) for _, r, _ in found)
        ),
        made=_made([record for _, record, _ in found]),
    )
    path = out / "index.html"
    replace_file(path, text.encode())
    return path


def _read(folder: Path) -> tuple[dict[str, Any], Verdict]:
    record = files.read(folder / "data.json")
    return record, from_dict(files.read(folder / "verdict.json"))


def _row(experiment: Experiment, record: dict[str, Any], verdict: Verdict) -> str:
    passed = sum(check.holds for check in verdict.checks)
    return (
        f'<tr><td><a href="#{experiment.name}">{experiment.name}</a></td>'
        f"<td>{html.escape(experiment.paper)}</td><td>{_word(record, verdict)}</td>"
        f"<td>{passed} of {len(verdict.checks)}</td></tr>"
    )


def _word(record: dict[str, Any], verdict: Verdict) -> str:
    """The verdict; that of an incomplete experiment says so."""
    cut = ", as far as it was run" if record.get("missing") else ""
    return sheet.word(verdict.holds, no=verdict.word) + cut


def _section(
    out: Path, experiment: Experiment, record: dict[str, Any], verdict: Verdict
) -> str:
    reasons = "".join(
        f'<div class="reason"><strong>Why not: {html.escape(reason.check)}</strong> '
        f"({'tested' if reason.tested else 'a reading, not tested'}). "
        f"{html.escape(reason.text)}</div>"
        for reason in verdict.reasons
    )
    unexplained = [
        check.name
        for check in verdict.checks
        if not check.holds
        and not any(check.name.startswith(r.check) for r in verdict.reasons)
    ]
    if unexplained:
        names = html.escape("; ".join(unexplained))
        reasons += f'<div class="reason">Not explained: {names}.</div>'
    notes = f"<p>{html.escape(experiment.notes)}</p>" if experiment.notes else ""
    length = _length(record["data"])
    asked = record["asked"]
    other = f" Asked for: {html.escape(str(asked))}." if asked else ""
    missing = html.escape(", ".join(record.get("missing", [])))
    cut = (
        '<div class="reason"><strong>Incomplete.</strong> These runs, and those that '
        "would have followed them, were not finished; what needs them is neither "
        f"shown nor judged: {missing}.</div>"
        if missing
        else ""
    )
    words = f"{experiment.name}: {experiment.claim}"
    return (
        f'<section id="{experiment.name}"><h2>{experiment.name}: '
        f"{_word(record, verdict)}</h2>"
        f'<p class="paper">{html.escape(experiment.paper)}</p>'
        f"<blockquote>{html.escape(experiment.claim)}</blockquote>"
        f"{sheet.picture(out / experiment.name / 'figure.png', words)}"
        f"{sheet.checks(verdict.checks)}{cut}{reasons}{notes}"
        "<details><summary>What the paper leaves open, and what was chosen</summary>"
        f"<p>{html.escape(experiment.choices)}</p></details>"
        f'<p class="small">{length}{_effort(record)}.{other}</p></section>'
    )


def _effort(record: dict[str, Any]) -> str:
    load = record["load_before"]
    return (
        f"{record['seconds']:.0f} s, {record['cpu_seconds']:.0f} s of processor time"
        + ("" if load is None else f"; load of the machine when it began: {load:.1f}")
    )


def _length(data: dict[str, Any]) -> str:
    """How long and from how many seeds it was trained, if it was."""
    parts = [
        f"{name} {max(steps)} steps"
        for name, own in data.get("workloads", {}).items()
        if (steps := _last_steps(own))
    ]
    seeds = data.get("seeds")
    parts += [f"{seeds} seed{'s' if seeds > 1 else ''}"] if seeds else []
    return html.escape(", ".join(parts)) + ("; " if parts else "")


def _last_steps(value: Any) -> list[int]:
    """The last of every list of steps, however deep."""
    if not isinstance(value, dict):
        return []
    found = [int(x[-1]) for key, x in value.items() if key == "step" and x]
    for each in value.values():
        found += _last_steps(each)
    return found


def _made(records: list[dict[str, Any]]) -> str:
    """Versions and device, and what it all took."""
    total = sum(record["seconds"] for record in records)
    kinds = dict.fromkeys(
        ", ".join(f"{k} {v}" for k, v in environment.items() if v not in ("", None))
        for record in records
        for environment in (
            record["environment"],
            *record.get("other_environments", []),
        )
    )
    lines = "".join(f"<p>{html.escape(kind)}</p>" for kind in kinds)
    return f"<p>{total / 60:.0f} minutes in all.</p>{lines}"
