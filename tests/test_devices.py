"""One run on many devices, in many processes, or in many parts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spread

import meka
from meka.lab import checkpoint

ROOT = Path(__file__).parent.parent


# Eight devices in one process.


@pytest.fixture(scope="module")
def eight() -> dict:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "spread.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **devices, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("parameters", ["copied", "spread"])
def test_eight_devices_take_the_steps_of_one(eight, parameters):
    """To rounding; a difference of gradients over a short step has few digits."""
    digits = {"default": 1e-5, "steepest": 1e-5, "auto": 1e-4}
    digits["difference, lagged"] = 1e-3
    for name, share in digits.items():
        found = eight[f"{name}, {parameters} parameters"]
        assert found["difference"] < share * found["moved"]
        assert found["kept"]


def test_copied_parameters_are_never_gathered(eight):
    """What all devices sum is gradients and products, of each group where measured."""
    for name in ("default", "difference, lagged", "auto"):
        sent = eight[f"{name}, copied parameters"]["sent"]
        assert max(sent.get("all-gather", [0])) < 64
        assert "all-to-all" not in sent
        # Two without a split and four with one, plus what the loss itself needs.
        assert sum(n for n in sent["all-reduce"]) < 7 * eight["size"]
    assert sum(eight["adam, copied parameters"]["sent"]["all-reduce"]) == eight["size"]


def test_spread_parameters_are_gathered_with_the_two_directions(eight):
    """Every layer needs them whole: with the displacement, and with the direction."""
    largest = 32 * spread.WIDTH
    adam = eight["adam, spread parameters"]["sent"]["all-gather"]
    assert adam.count(largest) == 1
    default = eight["default, spread parameters"]["sent"]
    assert default["all-gather"].count(largest) <= 4
    assert sum(default["all-gather"]) < 6 * eight["size"]


# Two processes.


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(out: Path, processes: int, steps: int) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    base = [sys.executable, str(ROOT / "examples" / "distributed.py")]
    base += ["--coordinator", address, "--processes", str(processes)]
    base += ["--steps", str(steps), "--every", "10", "--out", str(out)]
    return [
        subprocess.Popen(
            [*base, "--process", str(k)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(processes)
    ]


def finish(processes: list[subprocess.Popen], timeout: float = 300) -> list[tuple]:
    """Exit code and output of each."""
    try:
        outputs = [p.communicate(timeout=timeout)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]


def all_well(processes: list[subprocess.Popen]) -> list[str]:
    ends = finish(processes)
    for code, output in ends:
        assert code == 0, output
    return [output for _, output in ends]


def parameters(out: Path, step: int) -> dict[str, np.ndarray]:
    with np.load(out / f"step-{step:08d}" / "arrays.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, np.ndarray]:
    """What one process computes."""
    out = tmp_path_factory.mktemp("alone")
    all_well(launch(out, 1, 20))
    return parameters(out, 20)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """To rounding, which an Adam-style step turns into a sign now and then.

    The difference grows tenfold in ten steps, so twenty are compared.
    """
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        off = found[name].astype(float) - value.astype(float)
        assert np.linalg.norm(off) <= 0.01 * np.linalg.norm(value.astype(float)), name


def test_two_processes_take_the_steps_of_one_and_survive_one_that_dies(tmp_path, alone):
    undisturbed = tmp_path / "undisturbed"
    all_well(launch(undisturbed, 2, 20))
    same(parameters(undisturbed, 20), alone)

    # One dies on the way: the other does not wait for ever, and does not say all is
    # well; started again, both go on from the last checkpoint to the same end.
    broken = tmp_path / "broken"
    processes = launch(broken, 2, 100_000)
    deadline = time.monotonic() + 200
    while not checkpoint.steps(broken) and time.monotonic() < deadline:
        assert all(p.poll() is None for p in processes)
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    (code, output), (killed, _) = finish(processes, timeout=120)
    assert killed == -signal.SIGKILL
    assert code != 0, output
    reached = max(checkpoint.steps(broken))
    target = (reached // 40 + 1) * 40
    output, _ = all_well(launch(broken, 2, target))
    assert f"going on after step {reached}" in output
    assert max(checkpoint.steps(broken)) == target


# One device, in parts.


def observed(size: int, **options):
    params = spread.start()
    previous = jax.tree.map(lambda x: 0.99 * x, params)
    batch = tuple(
        np.concatenate(parts)
        for parts in zip(
            *(spread.batch_of(k) for k in range(size // spread.BATCH)), strict=True
        )
    )

    def look(params, previous, batch):
        return meka.observe(spread.losses, params, previous, batch, **options)

    compiled = jax.jit(look).lower(params, previous, batch).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    return compiled(params, previous, batch), stats.temp_size_in_bytes


def test_micro_batches_are_one_batch_at_the_memory_of_a_part():
    whole, _ = observed(1024, groups=8)
    _, much = observed(1024, groups=2)
    parts, little = observed(1024, groups=8, micro_batches=8)
    _, small = observed(128, groups=2)
    for x, y in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        least = 1e-6 * float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=least)
    # The batch itself, dealt into parts, and the losses are all that grow.
    dealt = 1024 * (32 + 2) * 4
    assert little - dealt < 1.5 * small
    assert little < 0.5 * much
