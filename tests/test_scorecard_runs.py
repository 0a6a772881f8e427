"""`meka scorecard` as a command: it trains, times, stops, goes on, merges, refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from meka.lab import history
from meka.lab.scorecard import __main__ as plain_command
from meka.lab.scorecard import records, runner, steptime
from meka.lab.scorecard.plan import plan

ROOT = Path(__file__).parents[1]
PLAIN = [sys.executable, "-m", "meka.lab.scorecard"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def read(out: Path) -> records.Records:
    found = records.read(out)
    assert found is not None
    return found


def keys(out: Path) -> set[str]:
    return {records.key(r)[1] for r in read(out)["runs"]}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    """The command itself, once: one that trains itself, one that cannot, and Adam."""
    out = tmp_path_factory.mktemp("smoke") / "card"
    words = "--scale smoke --workloads rosenbrock --optimizers adam svrg dog"
    done = subprocess.run(
        [sys.executable, "-m", "meka", "scorecard", *words.split(), "--out", str(out)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "page:" in done.stdout
    return out


def test_it_trains_times_and_reports(smoke):
    found = read(smoke)
    rates = (0.0001, 0.001, 0.01, 0.1)
    assert keys(smoke) == {f"adam-{r:g}" for r in rates} | {"svrg-0.1", "dog-1"}
    by_key = {records.key(r)[1]: r for r in found["runs"]}
    assert "finite data" in by_key["svrg-0.1"]["failure"]
    good = by_key["adam-0.1"]
    assert good["failure"] is None
    assert good["step"][0] == 0
    assert good["step"][-1] == good["steps"] == 60
    assert set(good["curves"]) == {"train_loss", "average_train_loss"}
    assert len(good["curves"]["train_loss"][0]) == 2
    times = found["times"]["rosenbrock"]
    assert set(times["ratios"]) == {"adam", "dog"}
    assert times["left_out"] == ["svrg"]
    assert times["ratios"]["adam"] == [1, 1, 1]
    assert times["seconds"] > 0
    for name in ("index.html", "results.json", "table.md", "profiles.png"):
        assert (smoke / name).stat().st_size > 500
    results = json.loads((smoke / "results.json").read_text())
    tuned = next(r for r in results["rows"] if r["name"] == "adam, tuned")
    assert tuned["workloads"]["rosenbrock"]["loss_steps"] <= 60  # its own target
    assert tuned["workloads"]["rosenbrock"]["loss_seconds"] > 0
    assert str(smoke) not in (smoke / "index.html").read_text()


def test_a_run_is_an_ordinary_run_folder(smoke):
    run = history.read(smoke / "runs" / "rosenbrock" / "dog-1")
    assert run.config.schedule == "linear"
    assert run.evals.step[-1] == 60


def test_what_is_there_is_not_made_again(smoke, capsys):
    before = (smoke / "runs" / "rosenbrock" / "dog-1" / "metrics.jsonl").stat().st_mtime
    words = ["--out", str(smoke), "--train", "--timing", "--workloads", "rosenbrock"]
    assert plain_command.main([*words, "--optimizers", "dog", "adam", "svrg"]) == 0
    assert "0 of 6 runs to train" in capsys.readouterr().out
    after = (smoke / "runs" / "rosenbrock" / "dog-1" / "metrics.jsonl").stat().st_mtime
    assert before == after


def test_merging_folders_and_reporting(smoke, tmp_path, capsys):
    """Another optimizer's records, made elsewhere, join what is here."""
    found = read(smoke)
    other = dict(found, times={}, runs=[])
    other["runs"] = [
        r | {"optimizer": "dowg"} for r in found["runs"] if r["optimizer"] == "dog"
    ]
    records.save(other, tmp_path / "other")
    out = tmp_path / "both"
    merge = ["--merge", str(smoke), str(tmp_path / "other"), "--out", str(out)]
    assert plain_command.main(merge) == 0
    assert keys(out) == keys(smoke) | {"dowg-1"}
    assert "dowg" in (out / "table.md").read_text()
    assert plain_command.main(["--merge", str(tmp_path), "--out", str(out)]) == 2
    assert "holds no records.json" in capsys.readouterr().err


def test_another_scorecard_in_the_same_folder_is_refused(smoke, capsys):
    before = (smoke / "records.json").read_bytes()
    assert plain_command.main(["--out", str(smoke), "--seeds", "7", "--train"]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert (smoke / "records.json").read_bytes() == before


@pytest.mark.parametrize(
    "words", ["--optimizers adm", "--workloads digit", "--jobs 0", "--steps-scale -1"]
)
def test_nothing_is_written_before_all_is_checked(words, tmp_path, capsys):
    out = tmp_path / "out"
    assert plain_command.main(["--out", str(out), *words.split()]) == 2
    assert "meka: " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_interrupted_it_goes_on_without_the_terminal_s_packages(tmp_path):
    """As on a machine that has jax and little else, and where time is short."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("tyro", "rich", "pooch", "matplotlib", "bokeh"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    out = tmp_path / "card"
    words = "--scale smoke --workloads rosenbrock --optimizers adam --steps-scale 40"
    arguments = [*words.split(), "--train", "--out", str(out)]
    env = environment(PYTHONPATH=f"{blocked}{os.pathsep}{ROOT}")
    process = subprocess.Popen(
        [*PLAIN, *arguments], env=env, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(out.glob(f"runs/*/*/{records.RECORD}")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "the same command goes on" in said
    first = keys(out)
    assert 1 <= len(first) < 4
    stamps = {p: p.stat().st_mtime for p in out.glob(f"runs/*/*/{records.RECORD}")}
    assert plain_command.main(arguments) == 0
    assert len(keys(out)) == 4
    assert all(path.stat().st_mtime == stamp for path, stamp in stamps.items())


def test_a_run_that_kills_its_worker_is_named_and_the_others_are_made(tmp_path):
    """The folder of one is occupied by something that is no run."""
    runs = plan("smoke", workloads=["rosenbrock"], optimizers=["dog", "sgd"])
    blocked = records.folder(tmp_path, runs[0])
    blocked.mkdir(parents=True)
    (blocked / "something.txt").write_text("not a run")
    said: list[str] = []
    broken = runner.train(
        runs, tmp_path, jobs=1, seconds=None, say=said.append, keep=lambda: None
    )
    assert [run.key for run in broken] == [runs[0].key]
    assert any("see" in line and "dog" in line for line in said)
    assert (records.folder(tmp_path, runs[1]) / records.RECORD).exists()


def test_what_is_timed_is_a_run_and_not_the_same_batches_over_and_over():
    """From its first quarter to its end, and then again from there."""
    seen = []

    class Fake:
        def advance(self, carry, start, length):
            seen.append((start, int(carry)))
            return carry + length, {}

    course = steptime._Course(Fake(), jnp.int32(100), steps=100, length=24)
    carry = jnp.int32(100)
    for _ in range(7):
        carry = course(carry, None)
    once = [(25, 100), (49, 124), (73, 148)]
    assert seen == [*once, *once, once[0]]
