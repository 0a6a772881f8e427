"""optax's own tests, passed by our optimizers in the place of one of optax's."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import meka

# Each method of the two files, and in how many cases it runs for one optimizer.
CONTRIB = {
    "test_gradient_accumulation": 2,
    "test_optimizers": 4,
    "test_optimizers_accept_extra_args": 2,
    "test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such": 1,
    "test_optimizers_can_be_wrapped_in_inject_hyperparams": 1,
    "test_preserve_dtype": 2,
    "test_state_shape_dtype_shard_stability": 4,
}
SHARDING = {
    f"{method}_{slot}": 1
    for method in (
        "test_init_with_abstract_input",
        "test_state_sharding_type_init_match_update",
        "test_state_sharding_type_preserved_with_jit",
    )
    for slot in ("adam", "lion")
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["meka", "adameka"])
@pytest.mark.parametrize(
    ("tests", "least"),
    [
        pytest.param("contrib", CONTRIB, id="contrib"),
        pytest.param("sharding", SHARDING, id="sharding"),
    ],
)
def test_passes_the_tests_of_optax(
    tests: str, least: dict[str, int], optimizer: str
) -> None:
    script = Path(__file__).with_name("optax_slot.py")
    done = subprocess.run(
        [sys.executable, str(script), tests, optimizer],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={k: v for k, v in os.environ.items() if not k.startswith("JAX_")},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["failed"], done.stderr[-8000:]
    assert not result["skipped"]
    # A newer optax may test more, but what is listed above must have been among it.
    names = [name.split(" ")[0].rpartition(".")[2] for name in result["names"]]
    ran = Counter(name.rstrip("0123456789") for name in names)
    assert result["ran"] == len(names) >= sum(least.values())
    assert {name: ran[name] for name in least} == least


@pytest.mark.parametrize(("diagonal", "buffers"), [(False, 2), (True, 4)])
def test_map_params_finds_the_parameter_sized_buffers(
    diagonal: bool, buffers: int
) -> None:
    optimizer = meka.meka(diagonal=diagonal)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    found = optax.tree.map_params(
        optimizer,
        lambda leaf, name: name,
        optimizer.init(params),
        {"w": "w", "b": "b"},
        transform_non_params=lambda leaf: None,
    )
    assert sorted(jax.tree.leaves(found)) == ["b"] * buffers + ["w"] * buffers


SPREAD = """
import jax, jax.numpy as jnp, numpy as np, meka

rng = np.random.default_rng(0)
batch = rng.normal(size=(32, 6)).astype(np.float32)
params = {"w": rng.normal(size=(6, 4)).astype(np.float32), "b": np.ones(4, np.float32)}

def losses(params, batch):
    return jnp.sum(jnp.tanh(batch @ params["w"] + params["b"]) ** 2, axis=1)

def train(spread, **options):
    optimizer = meka.adameka()
    step = jax.jit(meka.make_step(losses, optimizer, **options))
    p = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(p)
    for _ in range(5):
        p, state, info = step(p, state, spread(batch))
    return p, info

for options in ({}, {"groups": 4, "micro_batches": 2}):
    expected, _ = train(jnp.asarray, **options)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            found, info = train(lambda b: jax.device_put(b, jax.P("x")), **options)
        assert info.rejected == 0 and len(info.value.sharding.device_set) == 8
        for name in params:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
print("same")
"""


def test_a_batch_spread_over_devices_gives_the_same_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPREAD],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout == "same\n", done.stderr[-4000:]
