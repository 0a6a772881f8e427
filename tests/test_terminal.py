"""Curves in a terminal: of this process's run, and of another's."""

import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from lines import place
from synthetic import lines, write_run

from meka.lab import cli
from meka.lab.metrics import METRICS
from meka.lab.sparkline import Strip, sparkline


def test_a_sparkline_has_the_shape_of_its_values():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3, 3, 3], 9) == "▁▁▁"
    assert sparkline([1, math.nan, 2, math.inf], 4) == "▁ █ "
    assert sparkline([math.nan] * 3, 2) == "  "
    assert sparkline([], 5) == ""
    assert sparkline([1, 1, 9, 9], 2) == "▁█"
    # From a decade on it is logarithmic, and never overflows.
    assert sparkline([1, 10, 100, 1000, 1e4, 1e5, 1e6, 1e7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([-1e308, 0, 1e308], 3) == "▁▅█"


def test_a_strip_forgets_nothing_but_detail():
    strip = Strip(room=8)
    strip.add(range(1000))
    assert len(strip.values) < 8
    assert strip.values == sorted(strip.values)
    assert abs(sum(strip.values) / len(strip.values) - 500) < 150


def spoken(command: list[str], folder: Path, during=None) -> str:
    """What a command prints on a terminal of its own."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    unwanted = ("COLUMNS", "LINES", "NO_COLOR", "CI")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    process = subprocess.Popen(
        [sys.executable, "-m", "meka", *command],
        cwd=folder,
        env=environment | {"TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    output, deadline = b"", time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            try:
                output += os.read(ours, 65536)
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # the other end is closed
                break
            if during is not None and during(output.decode(errors="ignore")):
                during = None
        assert process.wait(5) == 0, output.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = output.decode().replace("\r\n", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_train_draws_curves_in_a_terminal(tmp_path):
    place(tmp_path)
    train = ["train", "lines.py:workload", "--optimizer", "adameka", "--out", "run"]
    output = spoken([*train, "--steps", "300"], tmp_path)
    last = output[output.rindex("lines.py:workload adameka") :]
    assert "300/300" in last
    for label in ("loss", "step size", "gain", "noise scale", "innovation"):
        (row,) = re.findall(rf"^  {label} +([0-9.e+-]+) ([▁▂▃▄▅▆▇█ ]+)$", last, re.M)
        assert len(row[1].strip()) > 30
    assert "kept in run" in output


def test_watch_draws_a_run_of_another_process_until_it_is_done(tmp_path):
    written = []

    def go_on(output: str) -> bool:
        if not written and "waiting for it" in output:
            write_run(tmp_path / "run", 100, planned=300)
            written.append(1)
        if len(written) == 1 and "100/300" in output:
            with (tmp_path / "run" / METRICS).open("a") as more:
                more.write(lines(range(101, 301)))
            written.append(2)
        return len(written) == 2

    output = spoken(["watch", "--terminal", "run"], tmp_path, go_on)
    assert "run: digits adameka" in output
    assert "300/300" in output
    assert re.search(r"step size +0.1 ▁{20,}", output)


def test_watch_prints_plain_lines_where_there_is_no_terminal(
    tmp_path, monkeypatch, capsys
):
    path = write_run(tmp_path / "run", 100, optimizer="adam", ours=False)
    monkeypatch.setattr(sys, "argv", ["meka", "watch", "--terminal", str(path)])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(os, "nice", lambda _: 0)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("run: digits adam: step 100/100 · loss ")
    assert line.endswith("test 80.0%")
