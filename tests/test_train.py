"""Runs: interrupted, killed, damaged or stopped, and still the same bits."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import jax.numpy as jnp
import lines
import numpy as np
import pytest
from lines import losses
from runs import everything, outcome

from meka.lab import train as training
from meka.lab.config import RunConfig
from meka.lab.metrics import read_metrics
from meka.lab.runfolder import read_config
from meka.lab.train import Interrupted, Silent, TrainingStopped, train
from meka.lab.workloads import Workload, WorkloadError, check


def fitting(losses=losses) -> Workload:
    return dataclasses.replace(lines.workload, losses=losses)


CONFIG = RunConfig(
    workload="lines.py:workload",
    optimizer="svrg",  # the one with work between the chunks
    steps=40,
    seeds=2,
    learning_rate=0.05,
    options={"refresh_every": 7},
    eval_every=5,
    checkpoint_every=10,
    average=True,
)


class Crash(BaseException):
    """A process that ends here, as far as the folder can tell."""


class Recorder(Silent):
    """Remembers what it was told; does something at the given event."""

    def __init__(self, at: int = -1, act=None):
        self.at, self.act = at, act
        self.events: list[str] = []
        self.notes: list[str] = []

    def _event(self, name):
        self.events.append(name)
        if len(self.events) - 1 == self.at and self.act is not None:
            self.act()

    def step(self, done, logs, seconds):
        self._event(f"step {done}")

    def evaluated(self, done, results):
        self._event(f"eval {done}")

    def note(self, message):
        self.notes.append(message)


def crash():
    raise Crash


@pytest.fixture(scope="module")
def go():
    """`train` as in CONFIG, with the loop checked and compiled once for all runs."""
    loops: list[training.Loop] = []
    make_loop = training.make_loop

    def cached(config, workload):
        if not loops:
            check(workload)
            loops.append(make_loop(config, workload))
        return loops[0]

    def run(path, *, resume=False, watcher=None):
        watcher = watcher or Recorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "make_loop", cached)
            patch.setattr(training.workloads, "check", lambda workload: None)
            train(CONFIG, path, resume=resume, watcher=watcher, workload=fitting())
        return watcher

    return run


@pytest.fixture(scope="module")
def whole(go, tmp_path_factory):
    """A run that nothing happened to."""
    path = tmp_path_factory.mktemp("whole") / "run"
    go(path)
    return path


# The folder ---------------------------------------------------------------------------


def test_folder_contents(whole):
    assert {each.name for each in whole.iterdir()} == {
        "checkpoints",
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "run.lock",
        "subject.json",
        "timing.jsonl",
    }
    subject = json.loads((whole / "subject.json").read_text())
    assert subject["batch_size"] > 0
    assert subject["parameters"] > 0
    names = sorted(each.name for each in (whole / "checkpoints").iterdir())
    assert names == ["step-00000030", "step-00000040"]
    assert read_config(whole) == CONFIG
    records = read_metrics(whole)
    steps = [(r["step"], r["seed"]) for r in records if r["kind"] == "step"]
    assert steps == list(itertools.product(range(1, 41), (0, 1)))
    evals = [r for r in records if r["kind"] == "eval"]
    assert [(r["step"], r["seed"]) for r in evals] == list(
        itertools.product(range(0, 41, 5), (0, 1))
    )
    assert set(evals[0]) == {
        "kind",
        "step",
        "seed",
        "train_loss",
        "test_loss",
        "average_train_loss",
        "average_test_loss",
    }
    assert evals[-1]["train_loss"] < 0.2 < evals[0]["train_loss"]


def test_what_does_not_go_together_writes_nothing(tmp_path):
    config = RunConfig(workload="quadratic", optimizer="svrg", steps=5)
    with pytest.raises(WorkloadError, match="quadratic has endless data"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Interruptions ------------------------------------------------------------------------


def test_a_crash_after_any_event_changes_no_bits(go, whole, tmp_path):
    events = Recorder()
    go(tmp_path / "counted", watcher=events)
    assert len(events.events) > 15
    for at in range(len(events.events)):
        path = tmp_path / str(at)
        with pytest.raises(Crash):
            go(path, watcher=Recorder(at, crash))
        # And, every third time, once more soon after it went on.
        watcher = Recorder(1, crash if at % 3 == 0 else None)
        try:
            go(path, resume=True, watcher=watcher)
        except Crash:
            go(path, resume=True)
        assert outcome(path) == outcome(whole), events.events[at]


@pytest.mark.fault(15)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_says_how_to_go_on(go, whole, tmp_path, number, code, tried):
    tried(signals=1)
    handler = signal.getsignal(number)
    watcher = Recorder(9, lambda: os.kill(os.getpid(), number))
    path = tmp_path / "run"
    message = f"stopped by {number.name} after .*--resume"
    with pytest.raises(Interrupted, match=message) as caught:
        go(path, watcher=watcher)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is handler
    assert 10 <= len(watcher.events) <= 11  # to the end of the chunk
    done = int(watcher.events[-1].split()[1])
    assert 0 < done < 40
    assert f"step-{done:08d}" in {p.name for p in (path / "checkpoints").iterdir()}
    resumed = go(path, resume=True)
    assert resumed.notes == [f"resuming after step {done}"]
    assert outcome(path) == outcome(whole)


def test_resuming_what_is_finished_does_nothing(go, whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    before = everything(path)
    watcher = go(path, resume=True)
    assert watcher.events == []
    assert everything(path) == before


# Damage -------------------------------------------------------------------------------


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


@pytest.mark.fault(9)
def test_a_damaged_checkpoint_is_passed_over(go, whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    flip(path / "checkpoints/step-00000040/arrays.npz", 300)
    watcher = go(path, resume=True)
    assert watcher.notes[0].startswith("warning: checkpoint")
    assert "step-00000040 is not usable" in watcher.notes[0]
    assert watcher.notes[1] == "resuming after step 30"
    assert outcome(path) == outcome(whole)


def test_without_a_usable_checkpoint_it_starts_over_and_keeps_the_metrics(
    go, whole, tmp_path
):
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name in ("step-00000030", "step-00000040"):
        flip(path / "checkpoints" / name / "manifest.json", 10)
    watcher = go(path, resume=True)
    assert "no usable checkpoint: starting from the beginning" in watcher.notes
    assert outcome(path) == outcome(whole)
    kept = path / "metrics.jsonl.before"
    assert kept.read_bytes() == (whole / "metrics.jsonl").read_bytes()


def cut(go, whole, tmp_path, offsets) -> int:
    data = (whole / "metrics.jsonl").read_bytes()
    for number, offset in enumerate(offsets):
        path = tmp_path / str(number)
        shutil.copytree(whole, path)
        (path / "metrics.jsonl").write_bytes(data[:offset])
        go(path, resume=True)
        assert outcome(path) == outcome(whole), offset
        shutil.rmtree(path)
    return len(offsets)


@pytest.mark.fault(12)
def test_metrics_cut_anywhere_leave_no_gap_and_no_duplicate(go, whole, tmp_path, tried):
    size = (whole / "metrics.jsonl").stat().st_size
    tried(cuts=cut(go, whole, tmp_path, range(size - 1, 0, -(size // 31))))


@pytest.mark.slow
@pytest.mark.fault(12)
def test_metrics_cut_at_every_byte_of_the_last_lines(go, whole, tmp_path, tried):
    data = (whole / "metrics.jsonl").read_bytes()
    last = len(b"".join(data.splitlines(keepends=True)[:-4]))
    tried(cuts=cut(go, whole, tmp_path, range(last, len(data))))


@pytest.mark.fault(14)
def test_another_environment_is_told(go, whole, tmp_path, tried):
    tried(environments=1)
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    file = path / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"jax": "0.0.1"}))
    watcher = go(path, resume=True)
    assert "jax was '0.0.1'" in watcher.notes[0]
    assert "bits may differ" in watcher.notes[0]


# Rejected steps -----------------------------------------------------------------------

BAD_ROW = 41


def poisoned(params, batch):
    bad = batch[0][:, 0] == lines.inputs[BAD_ROW, 0]
    return jnp.where(bad, jnp.nan, losses(params, batch))


def kinked(power: float):
    """A loss with a kink for one example, where all parameters are zero at the start.

    √|x| is zero there and its gradient is not finite; √|x|³ is zero, its gradient is
    too, and its second derivative is not finite.
    """

    def losses_with_a_kink(params, batch):
        bad = batch[0][:, 0] == lines.inputs[BAD_ROW, 0]
        x = jnp.where(bad, 0 * params[0], 1.0)
        return losses(params, batch) + jnp.abs(x) ** power - jnp.where(bad, 0.0, 1.0)

    return losses_with_a_kink


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("power", "mapped", "seeds"), [(0.5, True, 2), (1.5, False, 1)]
)
def test_a_bad_gradient_or_product_names_its_example(
    tmp_path, power, mapped, seeds, tried
):
    config = RunConfig("lines.py:workload", "meka", 24, seeds=seeds, max_rejected=1)
    workload = dataclasses.replace(fitting(kinked(power)), convolutional=not mapped)
    with pytest.raises(
        TrainingStopped, match=rf"example {BAD_ROW} of the training data"
    ):
        train(config, tmp_path / "run", workload=workload)
    records = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"]
    assert [r["step"] for r in records if r["seed"] == 0] == list(range(1, 25))
    rejected = [r for r in records if not r["accepted"]]
    assert len(rejected) == 3 * seeds  # once an epoch of eight steps
    assert {r["suspect"] for r in rejected} == {BAD_ROW}
    assert {r["suspect"] for r in records if r["accepted"]} == {-1}
    checkpoints = list((tmp_path / "run" / "checkpoints").iterdir())
    assert [each.name for each in checkpoints] == ["step-00000024"]
    tried(bad_examples=len(rejected))


@pytest.fixture(scope="module")
def poisoned_run(tmp_path_factory):
    """A run with one example whose loss is never finite."""
    path = tmp_path_factory.mktemp("poisoned") / "run"
    config = RunConfig("lines.py:workload", "meka", 40, eval_every=20)
    train(config, path, workload=fitting(poisoned))
    return path


@pytest.mark.fault(1)
@pytest.mark.makes_nan
def test_a_step_with_a_bad_example_is_rejected_and_names_it(poisoned_run):
    steps = [r for r in read_metrics(poisoned_run) if r["kind"] == "step"]
    rejected = [r for r in steps if not r["accepted"]]
    assert len(rejected) == 5  # once an epoch of eight steps
    assert {r["suspect"] for r in rejected} == {BAD_ROW}
    assert {r["suspect"] for r in steps if r["accepted"]} == {-1}
    assert [r["rejected"] for r in rejected] == [1, 2, 3, 4, 5]
    evals = [r for r in read_metrics(poisoned_run) if r["kind"] == "eval"]
    assert evals[-1]["test_loss"] < 0.1 < evals[0]["test_loss"]


@pytest.mark.fault(1)
@pytest.mark.makes_nan
def test_rejected_steps_that_are_not_in_a_row_do_not_stop_it(tmp_path):
    """Five in forty steps, the limit is two."""
    config = RunConfig("lines.py:workload", "meka", 40, max_rejected=2)
    train(config, tmp_path / "run", workload=fitting(poisoned))
    steps = [r for r in read_metrics(tmp_path / "run") if r["kind"] == "step"]
    assert (steps[-1]["step"], steps[-1]["rejected"]) == (40, 5)


@pytest.mark.fault(1)
@pytest.mark.makes_nan
def test_too_many_rejected_steps_stop_the_run_at_any_place_in_a_chunk(tmp_path):
    config = RunConfig("lines.py:workload", "meka", 40, max_rejected=1)
    with pytest.raises(
        TrainingStopped, match=rf"example {BAD_ROW} of the training data"
    ):
        train(config, tmp_path / "run", workload=fitting(poisoned))


@pytest.mark.fault(1)
@pytest.mark.makes_nan
def test_a_loss_that_stays_bad_stops_the_run(tmp_path):
    def broken(params, batch):
        return losses(params, batch) + jnp.where(params[0] > 0.5, jnp.nan, 0.0)

    path = tmp_path / "run"
    config = RunConfig("lines.py:workload", "meka", 400, max_rejected=10)
    with pytest.raises(TrainingStopped) as caught:
        train(config, path, workload=fitting(broken))
    message = str(caught.value)
    assert "steps in a row were rejected" in message
    assert "Look at the data and the losses; --max-rejected" in message
    assert str(path) in message
    checkpoints = list((path / "checkpoints").iterdir())
    assert [each.name for each in checkpoints] == ["step-00000100"]
    with np.load(checkpoints[0] / "arrays.npz") as arrays:
        params = arrays["leaf00000"]
    assert params.shape == (1, 2)
    assert np.isfinite(params).all()
    records = [r for r in read_metrics(path) if r["kind"] == "step"]
    assert len(records) == 100
    assert records[-1]["rejected"] >= 10
    # Mended, it goes on to the end.
    train(config, path, resume=True, workload=fitting())
    last = read_metrics(path)[-1]
    assert last["step"] == 400
    assert last["train_loss"] < 0.1
