"""Strict promotion for the tests of the optimizer, and fixed seeds everywhere."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

# Compiling is most of the time that tests take. What one of them, or a process it
# starts, has compiled, the others read back.
CACHE = {
    "jax_compilation_cache_dir": Path(__file__).parent.parent / ".pytest_cache" / "jax",
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
for name, value in CACHE.items():
    if name.upper() not in os.environ:
        os.environ[name.upper()] = str(value)
        jax.config.update(name, str(value) if isinstance(value, Path) else value)

CORE = {
    "test_average",
    "test_checks",
    "test_direction",
    "test_gaussian",
    "test_improvement",
    "test_moments",
    "test_observe",
    "test_optimizer",
    "test_overshoot",
    "test_probe",
    "test_quadratic",
    "test_reference",
    "test_training",
}

hypothesis.settings.register_profile(
    "meka", derandomize=True, deadline=None, database=None, print_blob=False
)
hypothesis.settings.load_profile("meka")


MODES = {
    "makes_nan": ("jax_debug_nans", "makes a NaN on purpose, outside of a step"),
    "float32": ("jax_enable_x64", "is about float32"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note the fault that a test tries; leave out what a mode of jax cannot pass."""
    for item in items:
        for mark in item.iter_markers("fault"):
            item.user_properties.append(("fault", mark.args[0]))
        for name, (option, reason) in MODES.items():
            if item.get_closest_marker(name) and jax.config.values[option]:
                item.add_marker(pytest.mark.skip(reason=f"{option}: {reason}"))


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Say what a test of a fault really did, for the table of tests/reliability.py.

    Whole numbers are counts, and are added up; others are measurements, of which the
    largest is kept.
    """

    def count(**what: float) -> None:
        for name, number in what.items():
            record_property(name, number)

    return count


@pytest.fixture(autouse=True)
def strict(request: pytest.FixtureRequest) -> Iterator[None]:
    """No silent promotion of dtypes or ranks in the optimizer's own code."""
    if request.module.__name__ not in CORE:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def x64() -> Iterator[None]:
    """Double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers on every run."""
    return np.random.default_rng(20200)
