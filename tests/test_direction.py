"""Directions from a belief about the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meka
from meka import Gaussian

MEAN = {"a": jnp.array([3.0, -4.0, 0.0]), "b": jnp.array([[1e-3]])}
DIAGONAL = {"a": jnp.array([16.0, 9.0, 0.0]), "b": jnp.array([[0.0]])}


def test_steepest_points_against_the_gradient():
    found = meka.steepest(Gaussian(MEAN, jnp.float32(1)))
    np.testing.assert_array_equal(found["a"], [-3, 4, 0])
    np.testing.assert_array_equal(found["b"], -MEAN["b"])


def test_adam_style_divides_by_the_root_second_moment():
    found = meka.adam_style()(Gaussian(MEAN, DIAGONAL))
    np.testing.assert_allclose(found["a"], [-3 / 5, 4 / 5, 0], rtol=1e-6)
    np.testing.assert_allclose(found["b"], [[-1]], rtol=1e-4)
    same = meka.adam_style()(Gaussian(MEAN, jnp.float32(16)))
    expected = -MEAN["a"] / jnp.sqrt(MEAN["a"] ** 2 + 16)
    np.testing.assert_allclose(same["a"], expected, rtol=1e-6)


def test_epsilon_counts_where_nothing_is_known_to_move():
    found = meka.adam_style(epsilon=1.0)(Gaussian(MEAN, DIAGONAL))
    np.testing.assert_allclose(found["a"], [-3 / 6, 4 / 6, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="epsilon=0"):
        meka.adam_style(epsilon=0)


def test_directions_keep_the_dtype_of_the_belief():
    belief = Gaussian(jnp.ones(2, jnp.float32), jnp.ones((), jnp.float32))
    for direction in (meka.steepest, meka.adam_style()):
        shape = jax.eval_shape(direction, belief)
        assert (shape.dtype, shape.shape) == (jnp.float32, (2,))
