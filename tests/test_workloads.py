"""Workloads by name and from files, what is refused, and the two exact problems."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka.lab import data, problems, workloads
from meka.lab.data import Data
from meka.lab.problems import Problem
from meka.lab.workloads import Workload, WorkloadError

KEY = jax.random.key(0)


def linear(**changes: Any) -> Workload:
    """A small linear regression that passes every check, with fields replaced."""
    inputs = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    targets = inputs @ np.array([1, -2, 3], np.float32)
    fields: dict[str, Any] = {
        "name": "linear",
        "init": lambda key: {"w": jnp.ones(3)},
        "losses": lambda p, b: jnp.square(b[0] @ p["w"] - b[1]),
        "batch_size": 8,
        "steps": 10,
        "data": Data((inputs, targets), (inputs, targets)),
    }
    return Workload(**{**fields, **changes})


def test_names_are_listed_without_jax() -> None:
    """Whatever `import meka` does: this stands a bare package in for it."""
    code = """
import sys, types, pathlib
package = types.ModuleType("meka")
package.__path__ = [sys.argv[1]]
sys.modules["meka"] = package
import meka.lab.data, meka.lab.workloads
assert len(meka.lab.workloads.WORKLOADS) == 11
heavy = {"jax", "equinox", "optax", "pooch", "requests"} & set(sys.modules)
assert not heavy, heavy
"""
    package = Path(workloads.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(package)], check=True, timeout=60)


def test_names() -> None:
    assert list(workloads.WORKLOADS) == [
        "quadratic",
        "rosenbrock",
        "digits",
        "digits-noisy",
        "mnist",
        "mnist-logistic",
        "mnist-autoencoder",
        "text",
        "text-large",
        "cifar10-cnn",
        "cifar10-resnet32",
    ]
    assert all(workloads.WORKLOADS.values())


@pytest.mark.parametrize("name", ["quadratic", "rosenbrock", "digits", "digits-noisy"])
def test_offline_workloads_pass_their_checks(name: str) -> None:
    workload = workloads.load(name)
    assert workload.name == name
    assert workload.batch_size == 128
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        workloads.check(workload)


def test_digits_can_be_trained() -> None:
    workload = workloads.load("digits")
    assert workload.data is not None
    assert workload.correct is not None
    params = workload.init(KEY)
    train, test = workload.data

    def loss(params: Any) -> jax.Array:
        return workload.losses(params, train).mean()

    @jax.jit
    def step(params: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    trace = []
    for _ in range(100):
        params, value = step(params)
        trace.append(float(value))
    assert trace[0] == pytest.approx(np.log(10), rel=0.2)
    assert trace[-1] < 0.5
    assert np.mean(jax.jit(workload.correct)(params, test)) > 0.85


@pytest.mark.parametrize(
    ("name", "steps"), [("cifar10-cnn", 12 * 2), ("cifar10-resnet32", 6 * 2)]
)
def test_cifar10_workloads(
    monkeypatch: pytest.MonkeyPatch, name: str, steps: int
) -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((300, 32, 32, 3)).astype(np.float32)
    batch = (images, rng.integers(0, 10, 300).astype(np.int32))
    folders = []

    def fake(name: str, folder: object) -> Data:
        folders.append((name, folder))
        return Data(batch, batch)

    monkeypatch.setattr(data, "load", fake)
    workload = workloads.load(name, "some-folder")
    assert folders == [("cifar10", "some-folder")]
    assert workload.steps == steps  # whole batches only
    assert workload.convolutional
    assert workload.classes == 10
    params = jax.eval_shape(workload.init, KEY)
    assert jax.eval_shape(workload.losses, params, batch).shape == (300,)
    assert workload.augment is not None
    small = (images[:2], batch[1][:2])
    augmented, labels = jax.jit(workload.augment)(KEY, small)
    assert augmented.shape == (2, 32, 32, 3)
    assert not np.array_equal(augmented, small[0])
    np.testing.assert_array_equal(labels, small[1])
    # Figure 5 of the paper trains without augmentation.
    assert workloads.load(name, augment=None).augment is None
    assert workloads.load(name, augment=False).augment is None


def test_fields_can_be_replaced() -> None:
    assert workloads.load("quadratic", steps=7, batch_size=4).steps == 7
    with pytest.raises(WorkloadError, match="no field stepps"):
        workloads.load("quadratic", stepps=7)


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(WorkloadError, match="did you mean 'cifar10-cnn'"):
        workloads.load("cifar10-cn")
    with pytest.raises(WorkloadError, match=r"there are quadratic.*file\.py:name"):
        workloads.load("zzz")


USER_FILE = """
from __future__ import annotations
import dataclasses
import neighbour
from meka.lab.workloads import Workload

@dataclasses.dataclass
class Settings:  # dataclasses look their module up by name
    steps: int = neighbour.STEPS

def workload():
    return Workload("mine", lambda key: 0, lambda p, b: 0, 3, Settings().steps)

ready = workload()
number = 3
"""


def test_workload_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_model.py"
    path.write_text(USER_FILE)
    (tmp_path / "neighbour.py").write_text("STEPS = 42")
    before = list(sys.path)
    assert workloads.load(f"{path}:workload").steps == 42
    assert workloads.load(f"{path}:ready", steps=5).steps == 5
    assert sys.path == before
    with pytest.raises(WorkloadError, match=r"no 'worklod' \(did you mean 'workload'"):
        workloads.load(f"{path}:worklod")
    with pytest.raises(WorkloadError, match="is int, expected"):
        workloads.load(f"{path}:number")
    with pytest.raises(WorkloadError, match=r"write path/to/file\.py:name"):
        workloads.load(str(path))
    with pytest.raises(WorkloadError, match="there is no file"):
        workloads.load(f"{tmp_path}/other.py:workload")


def test_a_broken_file_shows_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('mine')")
    with pytest.raises(RuntimeError, match="mine"):
        workloads.load(f"{tmp_path}/broken.py:workload")


def test_check_accepts_a_good_workload() -> None:
    workloads.check(linear())
    # A set with a single example has nothing to compare it with.
    one = (np.zeros((1, 3), np.float32), np.zeros(1, np.float32))
    workloads.check(linear(data=Data(one, one), batch_size=1))


def coupled(params: Any, batch: Any) -> jax.Array:
    outputs = batch[0] @ params["w"]
    return jnp.square((outputs - outputs.mean()) / outputs.std() - batch[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "exactly one of data and draw"),
        ({"draw": lambda key, n: None}, "exactly one of data and draw"),
        ({"batch_size": 41}, "batch_size 41 is more than the 40"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"init": lambda key: {"w": jnp.ones(3, jnp.int32)}}, r"\['w'\].*int32"),
        ({"init": lambda key: {}}, "no arrays"),
        ({"losses": lambda p, b: jnp.mean(b[1] * p["w"][0])}, r"shape \(8,\)"),
        ({"losses": lambda p, b: jnp.log(b[0] @ p["w"] * 0)}, "not finite"),
        ({"losses": coupled}, "example"),
        ({"correct": lambda p, b: True}, "correct must return"),
        ({"objective": lambda p: p["w"]}, "objective must return"),
        ({"augment": lambda key, b: (b[0][:, :2], b[1])}, "must keep shapes"),
    ],
)
def test_check_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=f"linear: .*{message}"):
        workloads.check(linear(**changes))


def test_check_looks_at_every_row_of_the_data() -> None:
    workload = workloads.load("digits")
    assert workload.data is not None
    images, labels = (part.copy() for part in workload.data.test)
    labels[200] = 10
    wrong = dataclasses.replace(
        workload, data=Data(workload.data.train, (images, labels))
    )
    with pytest.raises(data.DataError, match="digits test: label 10 in row 200"):
        workloads.check(wrong)


@pytest.fixture(params=["quadratic", "rosenbrock"])
def problem(request: pytest.FixtureRequest) -> Problem:
    builders = {
        "quadratic": problems.noisy_quadratic,
        "rosenbrock": problems.rosenbrock,
    }
    return builders[request.param]()


def test_losses_average_to_the_objective(problem: Problem) -> None:
    """Value and gradient within 4.5 standard errors (false alarm below 1e-4)."""
    n = 40_000
    batch = problem.draw(KEY, n)
    point = problem.start * 0.7

    @jax.jit
    def observe(point: jax.Array) -> tuple[jax.Array, jax.Array]:
        single = jax.grad(lambda p, row: problem.losses(p, row[None])[0])
        return problem.losses(point, batch), jax.vmap(single, (None, 0))(point, batch)

    losses, gradients = (np.asarray(part, np.float64) for part in observe(point))
    expected = float(problem.objective(point)) + problem.minimum
    assert abs(losses.mean() - expected) < 4.5 * losses.std() / n**0.5
    error = gradients.mean(axis=0) - np.asarray(problem.gradient(point))
    assert np.all(np.abs(error) < 4.5 * gradients.std(axis=0) / n**0.5)
    # The noise is there at the minimum too, in every coordinate.
    at_minimum = observe(minimum_of(problem))[1]
    assert np.asarray(at_minimum).std(axis=0).min() > 1e-3


def minimum_of(problem: Problem) -> jax.Array:
    return jnp.zeros(20) if problem.start.size == 20 else jnp.ones(2)


def test_gradient_is_that_of_the_objective(problem: Problem) -> None:
    gradient = jax.grad(problem.objective)(problem.start)
    np.testing.assert_allclose(problem.gradient(problem.start), gradient, rtol=1e-4)
    assert float(problem.objective(minimum_of(problem))) == 0
    assert not np.any(problem.gradient(minimum_of(problem)))
    assert float(problem.objective(problem.start)) > 10


def test_quadratic_is_ill_conditioned() -> None:
    problem = problems.noisy_quadratic()
    hessian = np.asarray(jax.hessian(problem.objective)(problem.start), np.float64)
    eigenvalues = np.linalg.eigvalsh(hessian)
    assert eigenvalues[-1] / eigenvalues[0] == pytest.approx(2000, rel=1e-2)
    assert np.abs(hessian - np.diag(np.diag(hessian))).max() > 0.05
    assert problem.minimum == pytest.approx(np.trace(hessian) / 2, rel=1e-5)
    # The same problem every time.
    again = problems.noisy_quadratic()
    np.testing.assert_array_equal(problem.start, again.start)
