"""Runs: interrupted, killed, damaged or stopped, and still the same bits."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from meka.lab import train as training
from meka.lab.config import RunConfig
from meka.lab.data import Data
from meka.lab.metrics import read_metrics
from meka.lab.runfolder import RunFolder, RunLocked, read_config
from meka.lab.train import Interrupted, Silent, TrainingStopped, train
from meka.lab.workloads import Workload, WorkloadError, check

# As a user would write it. `slow` waits inside the compiled step, once there is a file
# called hold, and leaves word that it does.
FILE = """
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from meka.lab.data import Data
from meka.lab.workloads import Workload

rng = np.random.default_rng(5)
inputs = rng.normal(size=(64, 2)).astype(np.float32)
targets = (inputs @ np.array([1.0, -2.0]) + 0.3 * rng.normal(size=64)).astype("f4")
data = Data((inputs, targets), (inputs[:20], targets[:20]))


def losses(params, batch):
    return 0.5 * (batch[0] @ params - batch[1]) ** 2


def hold(_):
    if pathlib.Path("hold").exists():
        pathlib.Path("held").touch()
        time.sleep(300)


def held(params, batch):
    jax.debug.callback(hold, params)
    return losses(params, batch)


def start(key):
    return jax.random.normal(key, (2,))


workload = Workload("lines", start, losses, 8, 100, data=data)
slow = Workload("slow lines", start, held, 8, 100, data=data)
"""


def losses(params, batch):
    return 0.5 * (batch[0] @ params - batch[1]) ** 2


def examples() -> Data:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(64, 2)).astype(np.float32)
    noise = 0.3 * rng.normal(size=64)
    targets = (inputs @ np.array([1.0, -2.0]) + noise).astype(np.float32)
    return Data((inputs, targets), (inputs[:20], targets[:20]))


def lines(losses=losses) -> Workload:
    data = examples()
    return Workload("lines", lambda key: jnp.zeros(2), losses, 8, 40, data=data)


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
            train(CONFIG, path, resume=resume, watcher=watcher, workload=lines())
        return watcher

    return run


@pytest.fixture(scope="module")
def whole(go, tmp_path_factory):
    """A run that nothing happened to."""
    path = tmp_path_factory.mktemp("whole") / "run"
    go(path)
    return path


def outcome(path: Path) -> dict[str, bytes]:
    """Everything of a finished run that must be the same every time."""
    last = max(path.glob("checkpoints/step-????????"))
    files = [path / "metrics.jsonl", *sorted(last.iterdir())]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def everything(path: Path) -> dict[str, bytes]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_says_how_to_go_on(go, whole, tmp_path, number, code):
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


def test_metrics_cut_anywhere_leave_no_gap_and_no_duplicate(go, whole, tmp_path):
    data = (whole / "metrics.jsonl").read_bytes()
    for number, cut in enumerate(range(len(data) - 1, 0, -(len(data) // 31))):
        path = tmp_path / str(number)
        shutil.copytree(whole, path)
        (path / "metrics.jsonl").write_bytes(data[:cut])
        go(path, resume=True)
        assert outcome(path) == outcome(whole), cut


def test_another_environment_is_told(go, whole, tmp_path):
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
    bad = batch[0][:, 0] == examples().train[0][BAD_ROW, 0]
    return jnp.where(bad, jnp.nan, losses(params, batch))


@pytest.fixture(scope="module")
def poisoned_run(tmp_path_factory):
    """A run with one example whose loss is never finite."""
    path = tmp_path_factory.mktemp("poisoned") / "run"
    config = RunConfig("lines.py:workload", "meka", 40, eval_every=20)
    train(config, path, workload=lines(poisoned))
    return path


def test_a_step_with_a_bad_example_is_rejected_and_names_it(poisoned_run):
    steps = [r for r in read_metrics(poisoned_run) if r["kind"] == "step"]
    rejected = [r for r in steps if not r["accepted"]]
    assert len(rejected) == 5  # once an epoch of eight steps
    assert {r["suspect"] for r in rejected} == {BAD_ROW}
    assert {r["suspect"] for r in steps if r["accepted"]} == {-1}
    assert [r["rejected"] for r in rejected] == [1, 2, 3, 4, 5]
    evals = [r for r in read_metrics(poisoned_run) if r["kind"] == "eval"]
    assert evals[-1]["test_loss"] < 0.1 < evals[0]["test_loss"]


def test_too_many_rejected_steps_stop_the_run_at_any_place_in_a_chunk(tmp_path):
    config = RunConfig("lines.py:workload", "meka", 40, max_rejected=1)
    with pytest.raises(
        TrainingStopped, match=rf"example {BAD_ROW} of the training data"
    ):
        train(config, tmp_path / "run", workload=lines(poisoned))


def test_a_loss_that_stays_bad_stops_the_run(tmp_path):
    def broken(params, batch):
        return losses(params, batch) + jnp.where(params[0] > 0.5, jnp.nan, 0.0)

    path = tmp_path / "run"
    config = RunConfig("lines.py:workload", "meka", 400, max_rejected=10)
    with pytest.raises(TrainingStopped) as caught:
        train(config, path, workload=lines(broken))
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
    train(config, path, resume=True, workload=lines())
    last = read_metrics(path)[-1]
    assert last["step"] == 400
    assert last["train_loss"] < 0.1


# Processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the user's file, and a cache of what was compiled."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "lines.py").write_text(FILE)
    return folder


SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def start(place: Path, out: str, *more: str, workload="workload", steps=400):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": SINGLE_THREADED,
        "JAX_COMPILATION_CACHE_DIR": str(place / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "meka", "train", f"lines.py:{workload}"]
    command += ["--steps", str(steps), "--out", out, "--seeds", "2", "--average"]
    command += ["--eval-every", "5", "--checkpoint-every", "10", *more]
    return subprocess.Popen(
        command,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def wait_for(process: subprocess.Popen, metrics: Path, size: int) -> None:
    """Until so much has been written, or the process has ended."""
    while process.poll() is None:
        if metrics.exists() and metrics.stat().st_size >= size:
            return
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def undisturbed(place):
    """The outcome of a process that nothing happened to."""
    code, output = finish(start(place, "undisturbed"))
    assert code == 0, output
    return outcome(place / "undisturbed")


def test_interrupted_processes_go_on_bit_exactly(place, undisturbed):
    size = len(undisturbed["metrics.jsonl"])
    path = place / "interrupted"
    for number, share in ((signal.SIGTERM, 0.3), (signal.SIGINT, 0.6)):
        process = start(place, "interrupted", "--resume")
        wait_for(process, path / "metrics.jsonl", int(share * size))
        process.send_signal(number)
        code, output = finish(process)
        assert code == 128 + number, output
        assert f"stopped by {number.name} after step" in output
        assert "Traceback" not in output
    code, output = finish(start(place, "interrupted", "--resume"))
    assert code == 0, output
    assert outcome(path) == undisturbed


def survive(place: Path, undisturbed: dict[str, bytes], kills: int, out: str) -> None:
    """Kill a run again and again, each time a little further on, then finish it."""
    rng = random.Random(kills)
    size = len(undisturbed["metrics.jsonl"])
    struck = 0
    for kill in range(kills):
        process = start(place, out, "--resume")
        share = 0.9 * (kill + rng.random()) / kills
        wait_for(process, place / out / "metrics.jsonl", int(share * size))
        time.sleep(rng.random() * 0.02)
        process.kill()
        struck += finish(process)[0] == -signal.SIGKILL
    code, output = finish(start(place, out, "--resume"))
    assert code == 0, output
    assert struck >= 0.8 * kills
    assert outcome(place / out) == undisturbed


def test_killed_processes_go_on_bit_exactly(place, undisturbed):
    survive(place, undisturbed, 5, "killed")


@pytest.mark.slow
def test_many_kills(place, undisturbed):
    survive(place, undisturbed, 40, "killed often")


def test_one_process_a_folder_and_a_second_interrupt_ends_it_at_once(place):
    path, many = place / "slow", 10**6
    process = start(place, "slow", "--optimizer", "sgd", workload="slow", steps=many)
    try:
        wait_for(process, path / "metrics.jsonl", 1)
        with pytest.raises(RunLocked, match=f"in use by process {process.pid}"):
            RunFolder.resume(path)
        second = start(place, "slow", "--resume", workload="slow", steps=many)
        code, output = finish(second)
        assert code == 2, output
        assert f"slow is in use by process {process.pid}" in output
        assert process.poll() is None
        (place / "hold").touch()
        wait_for(process, place / "held", 0)
        before = {each.name for each in (path / "checkpoints").glob("step-*")}
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None  # in the middle of a chunk: it means to save
        process.send_signal(signal.SIGINT)
        code, output = finish(process)
    finally:
        process.kill()
    assert code == 130, output
    assert {each.name for each in (path / "checkpoints").glob("step-*")} == before
    RunFolder.resume(path).close()  # the lock went with the process
