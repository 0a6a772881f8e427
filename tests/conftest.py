"""Strict promotion for the tests of the optimizer, and fixed seeds everywhere."""

from collections.abc import Iterator

import hypothesis
import jax
import numpy as np
import pytest

CORE = {
    "test_average",
    "test_checks",
    "test_direction",
    "test_gaussian",
    "test_improvement",
    "test_moments",
    "test_observe",
    "test_optimizer",
    "test_probe",
    "test_quadratic",
    "test_reference",
    "test_training",
}

hypothesis.settings.register_profile(
    "meka", derandomize=True, deadline=None, database=None, print_blob=False
)
hypothesis.settings.load_profile("meka")


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
