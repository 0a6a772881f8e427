"""Runs optax's own tests with one of ours in the place of one of theirs.

    python tests/optax_slot.py contrib meka
    python tests/optax_slot.py sharding adameka

Prints one line of JSON: how many tests ran, and the names of those that were skipped
or failed. A process of its own, since it puts our optimizer under a name of optax's,
needs eight devices, and has to be there before optax's tests are imported.
"""

import importlib
import json
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

if __name__ == "__main__":  # eight devices, before jax is imported
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax

import meka

Objective = Callable[[optax.Params], jax.Array]

OPTIMIZERS = {"meka": meka.meka, "adameka": meka.adameka}


class Selection(NamedTuple):
    """A test file of optax, and the ends or parameters of the names that are ours."""

    module: ModuleType
    marks: tuple[str, ...]


def adapt(
    inner: optax.GradientTransformationExtraArgs,
    objective: Objective | None = None,
    *,
    diagonal: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that looks at a plain function of the parameters by itself.

    Two copies of one example: a deterministic function has no noise. The function is
    ``objective``, or else the ``obj_fn`` that optax hands to optimizers that ask.
    """
    batch = jnp.zeros(2)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        obj_fn: Objective | None = objective,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        assert obj_fn is not None

        def losses(p: optax.Params, batch: jax.Array) -> jax.Array:
            return jnp.broadcast_to(obj_fn(p), batch.shape)

        previous = meka.find_state(state).previous_params
        curve = meka.curve(losses, params, batch)
        return inner.update(
            updates,
            state,
            params,
            observation=meka.observe(
                losses, params, previous, batch, diagonal=diagonal
            ),
            probe=lambda scene: meka.current(scene, curve),
            **extra,
        )

    return optax.GradientTransformationExtraArgs(inner.init, update)


def contrib_tests(name: str) -> Selection:
    """The tests every contributed optimizer must pass, ours in the slot of sophia."""

    def slot(
        learning_rate: optax.ScalarOrSchedule,
    ) -> optax.GradientTransformationExtraArgs:
        del learning_rate  # what this library exists to do without
        return adapt(OPTIMIZERS[name]())

    optax.contrib.sophia = slot  # type: ignore[assignment]
    module = importlib.import_module("optax.contrib._common_test")
    return Selection(module, ("opt_name='sophia'",))


def sharding_tests(name: str) -> Selection:
    """The tests of sharded states: ours as adam, with diagonal variances as lion."""

    def squares(params: optax.Params) -> jax.Array:
        return optax.tree.norm(params, squared=True)

    def isotropic(learning_rate: float) -> optax.GradientTransformationExtraArgs:
        del learning_rate
        return adapt(OPTIMIZERS[name](), squares)

    def diagonal(learning_rate: float) -> optax.GradientTransformationExtraArgs:
        del learning_rate
        return adapt(OPTIMIZERS[name](diagonal=True), squares, diagonal=True)

    optax.adam = isotropic  # type: ignore[assignment]
    optax.lion = diagonal  # type: ignore[assignment]
    module = importlib.import_module("optax._src.sharding_test")
    # These tests compare version numbers as strings and would skip themselves on
    # jax 0.10, which sorts before 0.7.2.
    jax.__version__ = "0.9.99"
    assert jax.device_count() == 8
    return Selection(module, ("_adam", "_lion"))


def run(selection: Selection) -> dict[str, object]:
    """Run the tests that are ours."""

    def ours(test: unittest.TestCase) -> bool:
        name = test.id()
        return any(name.endswith(m) or f"({m}" in name for m in selection.marks)

    found = unittest.defaultTestLoader.loadTestsFromModule(selection.module)
    tests = [test for test in _flat(found) if ours(test)]
    result = unittest.TextTestRunner(sys.stderr, verbosity=2).run(
        unittest.TestSuite(tests)
    )
    return {
        "ran": result.testsRun,
        "names": [test.id() for test in tests],
        "skipped": [f"{test.id()}: {why}" for test, why in result.skipped],
        "failed": [test.id() for test, _ in result.failures + result.errors],
    }


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


if __name__ == "__main__":
    which, ours = sys.argv[1:]
    tests = {"contrib": contrib_tests, "sharding": sharding_tests}[which]
    print(json.dumps(run(tests(ours))))
