"""The command line: quick to answer, hard to misuse, and everything left in files."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import lines
import pytest

from meka.lab import cli
from meka.lab.metrics import read_metrics
from meka.lab.optimizers import TABLE
from meka.lab.workloads import WORKLOADS

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An own, empty folder with the user's file."""
    lines.place(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def meka(capsys, monkeypatch):
    """The command in this process: arguments to exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["meka", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        output = capsys.readouterr()
        assert isinstance(code, int)
        return code, output.out, output.err

    return run


def left(place: Path) -> set[str]:
    return {each.name for each in place.iterdir()} - {"lines.py", "__pycache__"}


# Answers without jax ------------------------------------------------------------------

WITHOUT_JAX = """
import sys
from meka.lab.cli import main
try:
    main()
finally:
    heavy = {"jax", "numpy", "matplotlib", "optax", "equinox"} & set(sys.modules)
    print("HEAVY", sorted(heavy))
"""


def light(*arguments: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    assert "HEAVY []" in answer.stdout
    return answer.stdout


def test_help_needs_no_jax():
    text = light("--help")
    for command in ("train", "compare", "show", "data", "optimizers", "workloads"):
        assert command in text


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_of_a_command_needs_no_jax(command):
    assert "--steps" in light(command, "--help")


def test_lists_are_complete_and_need_no_jax():
    optimizers, workloads = light("optimizers"), light("workloads")
    for name in TABLE:
        assert re.search(rf"^{name} ", optimizers, re.MULTILINE), name
    for name, summary in WORKLOADS.items():
        assert re.search(rf"^{name} +{re.escape(summary)}$", workloads, re.MULTILINE)


def test_python_m_meka():
    answer = subprocess.run(
        [sys.executable, "-m", "meka", "workloads"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0
    assert "digits" in answer.stdout


# Refusals -----------------------------------------------------------------------------


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train digitz", "did you mean 'digits'?"),
        ("train lines.py:wrokload", "did you mean 'workload'?"),
        ("train missing.py:workload", "there is no file missing.py"),
        ("train digits --optimizer adamm", "did you mean 'adam'?"),
        ("train digits --option prob=lagged", "did you mean 'probe'?"),
        ("train digits --option probe=laged", "did you mean 'lagged'?"),
        ("train digits --option probe", "write NAME=VALUE"),
        ("train digits --stepz 3", "--steps"),
        ("train digits --schedule liner", "linear"),
        ("train digits --steps -5", "steps must be at least 1, not -5"),
        ("train digits --steps 0", "steps must be at least 1, not 0"),
        ("train digits --seed -1", "seed must be at least 0"),
        ("train digits --seeds 0", "seeds must be at least 1"),
        ("train digits --batch-size -8", "batch_size must be at least 1"),
        ("train digits --batch-size 9999", "more than the 1500 training examples"),
        ("train digits --eval-every 0", "eval_every must be at least 1"),
        ("train digits --max-rejected -2", "max_rejected must be at least 1"),
        ("train digits --checkpoint-every 0", "checkpoint_every must be at least 1"),
        ("train digits --option groups=-1", "groups must be finite and not negative"),
        ("train digits --option noise_every=0", "noise_every must be at least 1"),
        ("train digits --option model_decay=2", "model_decay must be below 1"),
        ("train digits --steps 1e3", "--steps"),
        ("train digits --learning-rate 0.1", "takes no learning rate"),
        (
            "train digits --optimizer adam --learning-rate nan",
            "learning_rate must be finite and not negative",
        ),
        (
            "train digits --optimizer adam --learning-rate -0.1",
            "learning_rate must be finite and not negative",
        ),
        ("train quadratic --optimizer svrg --steps 5", "has endless data"),
        ("compare digitz", "did you mean 'digits'?"),
        ("compare digits --optimizers adam mekka", "did you mean 'meka'?"),
        ("compare digits --steps 0", "steps must be at least 1, not 0"),
        ("compare digits --eval-every 0", "eval_every must be at least 1"),
        ("compare digits --seeds -3", "seeds must be at least 1"),
        ("show nothing-here", "nothing-here holds no run"),
        ("data verify minst", "did you mean 'mnist'?"),
    ],
)
def test_refused_with_a_sentence_and_nothing_written(
    place, meka, arguments, message, tried
):
    tried(command_lines=1)
    code, output, errors = meka(*arguments.split())
    assert code == 2
    assert message in output + errors
    assert "Traceback" not in output + errors
    assert left(place) == set()


def test_a_refusal_as_a_process(place):
    answer = subprocess.run(
        [sys.executable, "-m", "meka", "train", "digitz", "--out", "run"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert answer.returncode == 2
    assert answer.stderr.startswith("meka: no workload 'digitz'")
    assert len(answer.stderr.splitlines()) == 1
    assert left(place) == set()


def test_data_verify(place, meka):
    code, output, _ = meka("data", "verify", "digits")
    assert code == 0
    assert output.startswith("ok ")
    (place / "empty").mkdir()
    code, output, errors = meka("data", "verify", "mnist", "--data-dir", "empty")
    assert code == 1
    assert "BAD" in output
    assert "train-images-idx3-ubyte" in output
    assert "Traceback" not in errors
    code, output, errors = meka("train", "mnist", "--data-dir", "empty")
    assert code == 2
    assert "empty" in errors
    assert left(place) == {"empty"}


# Work ---------------------------------------------------------------------------------


def test_train_resume_and_show(place, meka):
    train = ("train", "lines.py:workload", "--optimizer", "adam", "--out", "run")
    code, output, errors = meka(*train, "--eval-every", "6", "--writer", "tensorboard")
    assert (code, errors) == (0, "")
    records = read_metrics(place / "run")
    final = [r["train_loss"] for r in records if r["kind"] == "eval"][-1]
    # The last line is about the last step, and the table agrees with it.
    assert f"step 12/12 · train {final:.3g}" in output
    assert f" 12/12 │       {final:.3g} " in output
    assert "look at it with: meka report run" in output
    assert len(list((place / "run/events").glob("events.out.tfevents.*"))) == 1

    code, _, errors = meka(*train)
    assert code == 2
    assert "already holds a run; resume it (--resume)" in errors

    before = (place / "run/metrics.jsonl").read_bytes()
    code, output, _ = meka(*train, "--resume")
    assert code == 0
    assert "resuming after step 12" in output
    # What was not given is the run's own; what was given must be.
    code, _, _ = meka("train", "lines.py:workload", "--out", "run", "--resume")
    assert code == 0
    for change, message in (
        (("--steps", "24"), "run holds a run with steps 12, not 24"),
        (("--optimizer", "sgd"), "run holds a run with optimizer 'adam', not 'sgd'"),
        (("--average",), "run holds a run with average False, not True"),
        (("--option", "b1=0.5"), "run holds a run with options {}, not {'b1': 0.5}"),
    ):
        code, _, errors = meka(*train, "--resume", *change)
        assert code == 2
        assert message in errors
    code, _, errors = meka("train", "digits", "--out", "run", "--resume")
    assert code == 2
    assert "run holds a run with workload 'lines.py:workload', not 'digits'" in errors
    assert (place / "run/metrics.jsonl").read_bytes() == before

    code, output, errors = meka("show", "run", "run", "--out", "pictures/show.png")
    assert (code, errors) == (0, "")
    assert output.count("12/12") == 2
    assert "picture: pictures/show.png" in output
    assert (place / "pictures/show.png").read_bytes().startswith(PNG)


def test_endless_data_of_ones_own(place, meka):
    code, output, errors = meka(
        "train", "lines.py:endless", "--optimizer", "sgd", "--seeds", "2"
    )
    assert (code, errors) == (0, "")
    assert "kept in runs/lines-endless-sgd-0" in output


def test_a_run_that_cannot_go_on_has_its_own_exit_code(place, meka):
    arguments = ("--optimizer", "meka", "--out", "run", "--max-rejected", "5")
    code, _, errors = meka("train", "lines.py:stops", *arguments)
    assert code == 3
    assert errors.startswith("meka: seed 0: ")
    assert "Look at the data and the losses; --max-rejected" in errors
    assert list((place / "run/checkpoints").iterdir())
    code, output, _ = meka("show", "run")
    assert code == 0
    assert "60/60" in output


def test_an_interrupt_outside_of_training_is_no_traceback(place, meka, monkeypatch):
    def interrupted(path):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("meka.lab.history.read", interrupted)
    code, _, errors = meka("show", "run")
    assert (code, errors) == (130, "meka: interrupted\n")


def test_compare_leaves_a_page_a_picture_and_numbers(place, meka):
    arguments = ("--seeds", "2", "--eval-every", "4", "--out", "out")
    code, output, errors = meka(
        "compare", "lines.py:workload", "--optimizers", "adameka", "adam", *arguments
    )
    assert (code, errors) == (0, "")
    assert "adameka, one run and nothing tuned, ends " in output
    assert (place / "out/compare.png").read_bytes().startswith(PNG)

    content = json.loads((place / "out/results.json").read_text())
    runs = {row["optimizer"]: row["runs"] for row in content["optimizers"]}
    assert runs == {"adameka": 1, "adam": 4}
    assert content["verdict"] in " ".join(output.split())
    assert len(list((place / "out/runs").iterdir())) == 5

    page = (place / "out/report.html").read_text()
    assert f"page: {Path('out/report.html')}" in output
    assert "meka compare lines.py:workload" in page
    for name in runs:
        assert f"<td>{name}</td>" in page
