"""Real processes: killed, interrupted, without a disk; and still the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import lines
import pytest
from runs import everything, outcome

from meka.lab.runfolder import RunFolder, RunLocked

SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

# Changes what the process may do, then becomes the command. Root may write anywhere
# unless it gives that right up (PR_CAPBSET_DROP of CAP_DAC_OVERRIDE).
LAUNCH = """
import ctypes, os, resource, sys
limits, command = eval(sys.argv[1]), sys.argv[2:]
if "bytes" in limits:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["bytes"],) * 2)
if "cores" in limits:
    os.sched_setaffinity(0, limits["cores"])
if "obey permissions" in limits and os.geteuid() == 0:
    assert ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *command])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the user's file, and a cache of what was compiled."""
    return lines.place(tmp_path_factory.mktemp("processes"))


def start(place: Path, out: str, *more: str, workload="shaken", steps=200, limits=None):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": SINGLE_THREADED,
        "JAX_COMPILATION_CACHE_DIR": str(place / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = ["-m", "meka", "train", f"lines.py:{workload}", "--out", out]
    command += ["--steps", str(steps), "--seeds", "2", "--average"]
    command += ["--eval-every", "5", "--checkpoint-every", "10", *more]
    if limits is not None:
        command = ["-c", LAUNCH, repr(limits), *command]
    return subprocess.Popen(
        [sys.executable, *command],
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


# Signals ------------------------------------------------------------------------------


@pytest.mark.fault(15)
def test_interrupted_processes_go_on_bit_exactly(place, undisturbed, tried):
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
        tried(signals=1)
    code, output = finish(start(place, "interrupted", "--resume"))
    assert code == 0, output
    assert outcome(path) == undisturbed


@pytest.mark.fault(11)
@pytest.mark.fault(15)
def test_one_process_a_folder_and_a_second_interrupt_ends_it_at_once(place, tried):
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
    tried(second_interrupts=1, second_openers=2)


# kill -9 ------------------------------------------------------------------------------


def half_written(path: Path, process: subprocess.Popen) -> bool:
    """Whether the process is, or died, inside a save."""
    folder = path / "checkpoints"
    names = os.listdir(folder) if folder.exists() else []
    return any(name.endswith(f".tmp-{process.pid}") for name in names)


def catch_inside_a_save(path: Path, process: subprocess.Popen, dice) -> None:
    """Until the process is halted somewhere inside a save, or has ended."""
    while process.poll() is None:
        if not half_written(path, process):
            continue
        time.sleep(max(0, dice.random() - 0.5) * 0.002)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)
        if half_written(path, process):
            return
        process.send_signal(signal.SIGCONT)


def survive(place, undisturbed, kills, out, seed, tried) -> None:
    """Kill a run again and again, each time a little further on, then finish it.

    Every second kill strikes somewhere inside of a save.
    """
    rng = random.Random(seed)
    size, path = len(undisturbed["metrics.jsonl"]), place / out
    struck = inside = 0
    for kill in range(kills):
        process = start(place, out, "--resume")
        share = 0.9 * (kill + rng.random()) / kills
        wait_for(process, path / "metrics.jsonl", int(share * size))
        if kill % 2:
            catch_inside_a_save(path, process, rng)
        else:
            time.sleep(rng.random() * 0.1)
        process.kill()
        struck += finish(process)[0] == -signal.SIGKILL
        inside += half_written(path, process)
    code, output = finish(start(place, out, "--resume"))
    assert code == 0, output
    assert struck >= 0.8 * kills
    assert inside >= 0.3 * kills
    assert outcome(path) == undisturbed
    left = [each.name for each in (path / "checkpoints").iterdir()]
    assert not [name for name in left if "tmp" in name]
    tried(kills=struck, inside_a_save=inside, resumed_runs_identical=1)


@pytest.mark.fault(8)
def test_killed_processes_go_on_bit_exactly(place, undisturbed, tried):
    survive(place, undisturbed, 5, "killed", 5, tried)


@pytest.mark.slow
@pytest.mark.fault(8)
@pytest.mark.parametrize("seed", range(10))
def test_many_kills(place, undisturbed, seed, tried):
    survive(place, undisturbed, 22, f"killed often {seed}", seed, tried)


# The disk -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(place, undisturbed):
    """A run that was stopped after its first checkpoint."""
    process = start(place, "begun")
    while not list((place / "begun").glob("checkpoints/step-00000010")):
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    code, output = finish(process)
    assert code == 143, output
    return place / "begun"


def checkpoints(path: Path) -> dict[str, bytes]:
    return everything(path / "checkpoints")


@pytest.mark.fault(10)
def test_a_disk_that_refuses_stops_the_run_and_costs_nothing(
    place, begun, undisturbed, tried
):
    before = checkpoints(begun)
    saved = max(map(len, before.values()))
    written = (begun / "metrics.jsonl").stat().st_size
    assert written < saved / 2  # so that the limits below hit what they mean to
    limits = {"a checkpoint": saved - 1, "the metrics": written + 100}
    for what, size in limits.items():
        process = start(place, "begun", "--resume", limits={"bytes": size})
        code, output = finish(process)
        assert code == 4, (what, output)
        assert "Free some space" in output
        assert ("save the checkpoint" in output) == (what == "a checkpoint")
        assert "Traceback" not in output
        assert checkpoints(begun) == before
        tried(full_disks=1)
    for folder in (begun / "checkpoints", begun):
        folder.chmod(0o555)
    try:
        limited = {"obey permissions": True}
        code, output = finish(start(place, "begun", "--resume", limits=limited))
        assert code == 4, output
        assert "Make the folder writable" in output
        assert checkpoints(begun) == before
        code, output = finish(start(place, "begun/new", limits=limited))
        assert code == 2, output  # refused before anything was trained
        assert "Make the folder writable" in output
        tried(read_only_folders=2)
    finally:
        for folder in (begun, begun / "checkpoints"):
            folder.chmod(0o755)
    code, output = finish(start(place, "begun", "--resume"))
    assert code == 0, output
    assert outcome(begun) == undisturbed


# Another machine ----------------------------------------------------------------------


@pytest.mark.fault(14)
def test_elsewhere_it_warns_and_goes_on(place, undisturbed, tried):
    path = place / "elsewhere"
    process = start(place, "elsewhere")
    wait_for(process, path / "metrics.jsonl", len(undisturbed["metrics.jsonl"]) // 2)
    process.terminate()
    assert finish(process)[0] == 143
    file = path / "environment.json"
    known = json.loads(file.read_text())
    others: dict[str, str | int] = {
        "jax": "0.0.1",
        "jaxlib": "0.0.1",
        "device": "H200",
        "platform": "gpu",
    }
    file.write_text(json.dumps(known | others))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        others["threads"] = len(cores)
    limits = {"cores": cores[:1]}
    code, output = finish(start(place, "elsewhere", "--resume", limits=limits))
    assert code == 0, output
    for name, value in others.items():
        line = f"warning: {name} was {value!r} and is now"
        assert line in output
    assert output.count("bits may differ") == len(others)
    assert "kept in elsewhere" in output
    tried(environments=len(others))
