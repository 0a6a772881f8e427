"""Run folders: refused before anything is written, locked, and never torn."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meka.lab import metrics, runfolder
from meka.lab.config import ConfigError, RunConfig
from meka.lab.metrics import MetricsError
from meka.lab.runfolder import RunError, RunFolder, RunLocked

CONFIG = RunConfig(workload="digits", optimizer="adam", steps=10)


def records(steps, **more) -> list[dict]:
    return [{"kind": "step", "step": step, "loss": 1 / step, **more} for step in steps]


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", CONFIG) as opened:
        yield opened


# Configuration ------------------------------------------------------------------------


@pytest.mark.fault(16)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "unknown configuration key 'stepz'; did you mean 'steps'?"),
        ({"xyzzy": 3}, "unknown configuration key 'xyzzy' (known: workload,"),
        ({"steps": -1}, "steps must be at least 1, not -1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 1.5}, "steps must be a whole number, not 1.5"),
        ({"steps": "10"}, "steps must be a whole number, not '10'"),
        ({"steps": True}, "steps must be a whole number, not True"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"batch_size": -4}, "batch_size must be at least 1"),
        ({"eval_every": 0}, "eval_every must be at least 1"),
        ({"checkpoint_every": -5}, "checkpoint_every must be at least 1"),
        ({"learning_rate": -0.1}, "learning_rate must be finite and not negative"),
        ({"learning_rate": 0}, "learning_rate must be positive"),
        ({"learning_rate": math.nan}, "learning_rate must be finite"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, not 'fast'"),
        ({"optimizer": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam'?"),
        ({"optimizer": 3}, "optimizer must be text"),
        ({"workload": ""}, "workload must not be empty"),
        ({"schedule": "liner"}, "unknown schedule 'liner'; did you mean 'linear'?"),
        ({"options": {"epz": 1}}, "unknown option of adam 'epz'; did you mean 'eps'?"),
        ({"options": {"b1": 1.5}}, "b1 must be below 1"),
        ({"options": [1]}, "options must be a table"),
        ({"data_dir": 7}, "data_dir must be text"),
        ({"average": 1}, "average must be true or false"),
        ({"max_rejected": 0}, "max_rejected must be at least 1"),
    ],
)
def test_bad_configurations_are_refused_by_name(change, message, tried):
    tried(configurations=1)
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(CONFIG.to_dict() | change)
    assert message in str(caught.value)


def test_incomplete_configurations_are_refused():
    with pytest.raises(ConfigError, match="has no 'steps'"):
        RunConfig.from_dict({"workload": "digits", "optimizer": "adam"})
    with pytest.raises(ConfigError, match="is a table"):
        RunConfig.from_dict([1, 2])  # pyright: ignore[reportArgumentType]


def test_configuration_survives_the_folder(tmp_path):
    config = RunConfig(
        "digits",
        "meka",
        7,
        seed=3,
        seeds=2,
        batch_size=16,
        schedule="linear",
        options={"groups": 4, "transport": "difference", "diagonal": True},
        data_dir="data",
    )
    RunFolder.create(tmp_path / "run", config).close()
    with RunFolder.resume(tmp_path / "run") as run:
        assert run.config == config
        assert run.warnings == ()
    assert runfolder.read_config(tmp_path / "run") == config
    assert RunConfig.from_dict(config.to_dict()) == config


def test_damaged_configuration_is_named(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG).close()
    file = tmp_path / "run" / "config.json"
    good = file.read_text()
    for bad in ("", good[:-9], good.replace("steps", "stepz"), "[]", "[" * 10**5):
        file.write_text(bad)
        with pytest.raises(RunError, match=r"config\.json cannot be used"):
            RunFolder.resume(tmp_path / "run")
        assert file.read_text() == bad


# Folder -------------------------------------------------------------------------------


def test_refuses_what_is_not_its_own(tmp_path, run):
    before = sorted(path.name for path in run.path.iterdir())
    with pytest.raises(RunError, match="already holds a run; resume it"):
        RunFolder.create(run.path, CONFIG)
    assert sorted(path.name for path in run.path.iterdir()) == before

    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(RunError, match=r"not empty \(it has cat.jpg\)"):
        RunFolder.create(tmp_path / "photos", CONFIG)
    assert len(list((tmp_path / "photos").iterdir())) == 1
    with pytest.raises(RunError, match="is a file"):
        RunFolder.create(tmp_path / "photos" / "cat.jpg", CONFIG)
    with pytest.raises(RunError, match="cannot start a run"):
        RunFolder.create(tmp_path / "photos" / "cat.jpg" / "run", CONFIG)

    for path in (tmp_path / "photos", tmp_path / "missing"):
        with pytest.raises(RunError, match="holds no run to resume"):
            RunFolder.resume(path)
    assert not (tmp_path / "missing").exists()


def test_run_killed_before_it_began_can_be_created_again(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run.lock", "environment.json", "config.json.tmp-77"):
        (tmp_path / "run" / name).touch()
    assert not runfolder.is_run(tmp_path / "run")
    RunFolder.create(tmp_path / "run", CONFIG).close()
    assert runfolder.is_run(tmp_path / "run")


def test_environment(run):
    kept = json.loads((run.path / "environment.json").read_text())
    assert kept == runfolder.environment()
    assert kept["jax"] == jax.__version__
    assert kept["device"] == jax.devices()[0].device_kind
    assert kept["threads"] == len(os.sched_getaffinity(0))
    assert os.uname().nodename not in kept.values()


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("name", "value"), [("jax", "0.9.0"), ("device", "H200"), ("threads", 99)]
)
def test_another_environment_is_warned_of_and_remembered(run, name, value, tried):
    tried(environments=1)
    run.close()
    file = run.path / "environment.json"
    first = json.loads(file.read_text()) | {name: value, "python": "3.11.0"}
    file.write_text(json.dumps(first))
    for _ in range(2):
        with RunFolder.resume(run.path) as resumed:
            (warning,) = resumed.warnings
        assert warning.startswith(f"{name} was {value!r} and is now ")
        assert "bits may differ" in warning
    assert json.loads(file.read_text()) == {
        **first,
        "resumed": [runfolder.environment()],
    }
    file.write_text("{")
    with RunFolder.resume(run.path) as resumed:
        assert "bits may differ" in resumed.warnings[0]


@pytest.mark.fault(11)
def test_second_opener_is_refused(run, tried):
    tried(second_openers=1)
    with pytest.raises(RunLocked) as caught:
        RunFolder.resume(run.path)
    assert str(run.path) in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    run.close()
    run.close()
    RunFolder.resume(run.path).close()


@pytest.mark.fault(11)
def test_lock_holds_across_processes_and_dies_with_its_holder(run, tried):
    tried(killed_holders=1)
    run.close()
    script = """
        import sys, time
        from meka.lab.runfolder import RunFolder
        run = RunFolder.resume(sys.argv[1])
        print("locked", flush=True)
        time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunLocked, match=f"process {holder.pid}"):
            RunFolder.resume(run.path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    RunFolder.resume(run.path).close()


# Metrics ------------------------------------------------------------------------------


def test_values_come_back(run):
    written = {
        "kind": "eval",
        "step": 3,
        "float": 0.1,
        "int": 2**60,
        "bool": True,
        "none": None,
        "text": "ü\n",
        "nan": math.nan,
        "inf": [math.inf, [-math.inf]],
        "float32": np.float32(0.1),
        "bfloat16": jnp.asarray(1.5, jnp.bfloat16),
        "array": np.array([0.1, np.nan], np.float32),
        "jax": jnp.asarray(2, jnp.int32),
    }
    run.append([written])
    text = (run.path / "metrics.jsonl").read_text()
    assert text.count("\n") == 1
    assert '"float32":0.1,' in text  # not 0.10000000149011612
    json.loads(text, parse_constant=pytest.fail)  # strict JSON
    (read,) = metrics.read_metrics(run.path)
    assert list(read) == list(written)
    assert math.isnan(read.pop("nan"))
    array = read.pop("array")
    assert array[0] == 0.1
    assert math.isnan(array[1])
    assert read == {
        "kind": "eval",
        "step": 3,
        "float": 0.1,
        "int": 2**60,
        "bool": True,
        "none": None,
        "text": "ü\n",
        "inf": [math.inf, [-math.inf]],
        "float32": 0.1,
        "bfloat16": 1.5,
        "jax": 2,
    }


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32))
def test_float32_is_exact_and_short(number):
    encoded = metrics.encoded({"kind": "step", "step": 1, "x": np.float32(number)})
    value = metrics._decoded(json.loads(encoded)["x"])
    assert np.float32(value).tobytes() == np.float32(number).tobytes() or math.isnan(
        number
    )


@pytest.mark.parametrize(
    "record", [{"step": 1}, {"kind": "step"}, {"kind": "step", "step": 1.0}, {}]
)
def test_records_without_kind_or_step_are_refused(run, record):
    with pytest.raises(ValueError, match="needs a kind"):
        run.append([*records([1]), record])
    assert metrics.read_metrics(run.path) == []
    with pytest.raises(TypeError, match="must be a number"):
        run.append(records([1], odd=object()))


@pytest.mark.fault(12)
def test_torn_last_line_at_every_byte(run, tried):
    run.append(records([1, 2]))
    kept = (run.path / "metrics.jsonl").read_bytes()
    run.append(records([3], nan=math.nan))
    run.close()
    whole = (run.path / "metrics.jsonl").read_bytes()
    for cut in range(len(kept), len(whole)):
        (run.path / "metrics.jsonl").write_bytes(whole[:cut])
        assert [each["step"] for each in metrics.read_metrics(run.path)] == [1, 2]
        tried(cuts=1)
        with RunFolder.resume(run.path) as resumed:
            assert (run.path / "metrics.jsonl").read_bytes() == kept
            resumed.append(records([3], nan=math.nan))
        assert (run.path / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1]",
        b"7",
        b"\xff\xfe",
        b"{}",
        b'{"kind":"step"}',
        b'{"kind":"step","step":1.5}',
        b'{"kind":"step","step":true}',
        b'{"kind":1,"step":1}',
        b'{"kind":"step","step":1,"loss":NaN}',
        b'{"a":' + b"[" * 10**5,
        b"\0" * 9,
    ],
)
def test_corrupt_middle_line_is_named(run, line):
    run.append(records([1]))
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n")
    run.append(records([2]))
    for read in (metrics.read_metrics, metrics.columns):
        with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 2 is not"):
            read(run.path)
    before = (run.path / "metrics.jsonl").read_bytes()
    with pytest.raises(MetricsError, match="line 2"):
        run.truncate_after(1)
    assert (run.path / "metrics.jsonl").read_bytes() == before


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_reader_survives_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "metrics.jsonl"
    path.write_bytes(b'{"kind":"step","step":1}\n' + data)
    try:
        first = metrics.read_metrics(path)[0]
    except MetricsError:
        return
    assert first == {"kind": "step", "step": 1}


def test_resume_leaves_no_duplicate_and_no_gap(run):
    run.append(records([1, 2, 3]))
    run.append([{"kind": "eval", "step": 3, "loss": 0.5}])
    whole = (run.path / "metrics.jsonl").read_bytes()
    run.append(records([4, 5]), sync=True)
    assert run.truncate_after(3) == 2
    assert (run.path / "metrics.jsonl").read_bytes() == whole
    assert run.truncate_after(3) == 0
    run.append(records([4]))
    assert [r["step"] for r in metrics.read_metrics(run.path)] == [1, 2, 3, 3, 4]
    assert run.truncate_after(0) == 5
    assert (run.path / "metrics.jsonl").read_bytes() == b""


def test_truncation_of_seeds_run_one_after_another(run):
    for seed in (0, 1):
        run.append(records([1, 2, 3, 4], seed=seed))
    assert run.truncate_after(2) == 4
    run.append(records([3], seed=1))
    steps = [(r["seed"], r["step"]) for r in metrics.read_metrics(run.path)]
    assert steps == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]


def test_columns(run):
    run.append(records([1, 2], note="a"))
    run.append([{"kind": "step", "step": 3, "gain": 0.5, "seeds": [1.0, 2.0]}])
    run.append([{"kind": "eval", "step": 3, "accuracy": 0.9}])
    step = metrics.columns(run.path)
    assert set(step) == {"step", "loss", "note", "gain", "seeds"}
    assert step["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(step["loss"], [1.0, 0.5, np.nan])
    np.testing.assert_array_equal(step["gain"], [np.nan, np.nan, 0.5])
    np.testing.assert_array_equal(step["seeds"], [[np.nan] * 2] * 2 + [[1, 2]])
    assert step["note"].tolist() == ["a", "a", None]
    assert metrics.columns(run.path, "eval")["accuracy"].tolist() == [0.9]
    assert metrics.columns(run.path, "none") == {}


@pytest.mark.fault(10)
def test_full_disk_leaves_whole_lines(run, tried):
    tried(full_disks=1)
    run.append(records([1]))
    run.close()
    script = """
        import resource, sys
        from meka.lab.runfolder import RunError, RunFolder
        run = RunFolder.resume(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            run.append([{"kind": "step", "step": k, "x": k / 7} for k in range(2, 99)])
        except RunError as error:
            print(error)
    """
    before = (run.path / "metrics.jsonl").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(run.path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Free some space" in done.stdout
    assert (run.path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", [float, np.float32])
def test_a_hundred_steps_take_milliseconds(run, number):
    batch = [
        {"kind": "step", "step": step}
        | {f"name{k}": number(math.sin(step + k)) for k in range(25)}
        for step in range(1, 101)
    ]
    seconds = []
    for _ in range(10):
        # Of the processor, and the best of ten: the machine may be busy otherwise.
        start = time.process_time()
        run.append(batch)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.01


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
