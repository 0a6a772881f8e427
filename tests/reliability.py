"""Try to break it, at length, and print what was tried and what survived.

    python -m tests.reliability                 # everything, the slow tests too
    python -m tests.reliability --rows 8 12     # some faults only
    python -m tests.reliability --from a.xml b.xml   # the table of earlier calls
    python -m tests.reliability --write         # also put the table into the docs

Runs every test that is marked with a fault, and counts what they really did: each says
so through the fixture `tried`. The results stay in --results (reliability.xml), as
JUnit XML, so that the rows may be run one after another.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"

FAULTS = {
    1: "a non-finite loss, gradient or product in one example, at random steps",
    2: "NaN or out-of-range labels, wrong shapes, wrong dtype, wrong workloads",
    3: "empty batch, batch of one, ragged batch, identical examples, zero gradients, "
    "δ = 0, P = Q = s = 0",
    4: "gradients 1e-30…1e30, losses to 1e38, in float32, bfloat16, float16",
    5: "random filter steps, against float64 and 60 digits",
    6: "negative or zero curvature (saddles, cubic wells), every rule",
    7: "labels permuted midway",
    8: "`kill -9` at random moments and inside a save, single-threaded",
    9: "checkpoint truncated, byte flipped, file missing, other structure, newer",
    10: "disk full (`RLIMIT_FSIZE`), read-only folder",
    11: "two runs in one folder",
    12: "`metrics.jsonl` cut at any byte, then resumed",
    13: "data files damaged; archives with `../`, links, a bomb",
    14: "resumed under another jax, device or number of threads",
    15: "SIGTERM, SIGINT, a second SIGINT",
    16: "configuration with a typo, an unknown key, negative numbers",
    17: "readers fuzzed: IDX, CIFAR, gzip, tar, JSONL, manifest, npz, configuration",
}


@dataclass
class Row:
    """What was done to one fault."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, number: str) -> None:
        """Whole numbers are counts; of measurements the largest is kept."""
        if "." in number or "e" in number or "inf" in number or "nan" in number:
            self.counts[name] = max(self.counts.get(name, 0.0), float(number))
        else:
            self.counts[name] = self.counts.get(name, 0) + int(number)

    def __str__(self) -> str:
        words = []
        for name, number in self.counts.items():
            label = name.replace("_", " ")
            if isinstance(number, int):
                words.append(f"{number:,} {label}")
            else:
                words.append(f"{label} {number:.3g}")
        return ", ".join(words)


def run(rows: list[int], results: Path) -> int:
    """Run the tests of these faults; returns pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-m", "fault", f"--junitxml={results}"]
    if set(rows) != set(FAULTS):
        command += ["-p", "tests.reliability", f"--rows={','.join(map(str, rows))}"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def pytest_addoption(parser) -> None:
    """As a plugin: only the tests of some faults."""
    parser.addoption("--rows", default="")


def pytest_collection_modifyitems(config, items) -> None:
    """As a plugin: only the tests of some faults."""
    rows = {int(row) for row in config.getoption("--rows").split(",") if row}
    items[:] = [
        item
        for item in items
        if rows & {mark.args[0] for mark in item.iter_markers("fault")}
    ]


def read(paths: Iterable[Path]) -> dict[int, Row]:
    """What the tests did, by fault."""
    found: dict[int, Row] = {}
    for path in paths:
        # Written by pytest on this machine a moment ago.
        for case in ElementTree.parse(path).iter("testcase"):
            given = [(p.get("name"), p.get("value")) for p in case.iter("property")]
            for number in [int(v or 0) for name, v in given if name == "fault"]:
                row = found.setdefault(number, Row())
                if case.find("failure") is not None or case.find("error") is not None:
                    row.failed.append(case.get("name") or "?")
                elif case.find("skipped") is not None:
                    row.skipped += 1
                else:
                    row.passed += 1
                    for name, value in given:
                        if name and value and name != "fault":
                            row.add(name, value)
    return found


def table(rows: dict[int, Row]) -> str:
    """As Markdown."""
    lines = ["| # | fault | tried | tests | survived |", "|---|---|---|---|---|"]
    for number, fault in FAULTS.items():
        row = rows.get(number)
        if row is None:
            lines.append(f"| {number} | {fault} | not run | 0 | |")
            continue
        verdict = f"**no**: {', '.join(row.failed)}" if row.failed else "yes"
        if row.skipped:
            verdict += f" ({row.skipped} skipped)"
        count = row.passed + len(row.failed)
        lines.append(f"| {number} | {fault} | {row} | {count} | {verdict} |")
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("meka", "jax", "jaxlib")
    )
    lines += ["", f"{datetime.date.today()}, {versions}, Python "]
    lines[-1] += f"{platform.python_version()}, {platform.machine()}, CPU."
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Try to break it, at length, and print what was tried and survived."
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(FAULTS))
    parser.add_argument("--results", type=Path, default=Path("reliability.xml"))
    parser.add_argument("--from", type=Path, nargs="+", dest="earlier")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    arguments = parser.parse_args()
    code = 0
    if not arguments.earlier:
        code = run(arguments.rows, arguments.results.resolve())
    text = table(read(arguments.earlier or [arguments.results]))
    print(text)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        pattern = re.escape(BEGIN) + ".*" + re.escape(END)
        page = re.sub(pattern, lambda _: BEGIN + text + END, page, flags=re.DOTALL)
        PAGE.write_text(page, encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
