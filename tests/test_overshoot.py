"""The ends of a step: when it went too far, and what it should have known."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import meka
from meka.gaussian import Gaussian, Moments
from meka.observation import Path
from meka.overshoot import ends, forget, second_thoughts


def one_step(length, slope=2.0, curvature=0.5, end=None, noise=0.0, change_noise=0.0):
    """A step that began with this slope; ``end`` is the slope where it ended.

    The transport sees the curvature and takes the slope at the start from the end.
    """
    end = curvature * length - slope if end is None else end
    number = jnp.float32
    zero = number(0)
    path = Path(
        number(length),
        Moments(number(curvature * length - end), zero),
        Moments(number(curvature), zero),
    )
    along = number(-slope * length)
    return ends(path, along, number(noise), number(change_noise))


@pytest.mark.parametrize(
    ("length", "overshot"), [(1.0, False), (4.0, False), (7.9, False), (8.1, True)]
)
def test_a_parabola_is_overshot_where_the_loss_rises(length, overshot):
    """Slope 2 and curvature ½: the minimum is at 4, and at 8 the loss is the same."""
    found = one_step(length)
    assert found.overshot == overshot
    assert found.strayed == overshot
    assert found.fall == pytest.approx(2)
    assert found.secant.mean == pytest.approx(0.5, rel=1e-5)


def test_off_the_parabola_is_astray_whether_up_or_down():
    assert one_step(1.0, end=-5.0).strayed
    assert not one_step(1.0, end=-5.0).overshot
    far = one_step(1.0, end=9.0)
    assert far.strayed
    assert far.overshot
    assert far.secant.mean == pytest.approx(11)


def test_only_beyond_three_deviations_of_all_noise():
    # The excess of the end over the start is 7, that over the parabola 10.5.
    assert one_step(1.0, end=9.0, noise=(6.9 / 3) ** 2).overshot
    unsure = one_step(1.0, end=9.0, noise=(7.1 / 3) ** 2)
    assert not unsure.overshot
    assert unsure.strayed
    blind = one_step(1.0, end=9.0, noise=(7.1 / 3) ** 2, change_noise=10.0)
    assert not blind.strayed


@pytest.mark.parametrize("given", [{"length": 0.0}, {"length": 1.0, "slope": -1.0}])
def test_nothing_is_overshot_where_nothing_moved_or_it_began_uphill(given):
    assert not one_step(**given).overshot


def test_forgetting_leaves_what_was_just_measured():
    belief = Gaussian(jnp.ones(2), jnp.float32(0.1))
    seen = Moments(jnp.full(2, 5.0), jnp.float32(0.3))
    for strayed, mean, variance in ((True, 5.0, 0.3), (False, 2.0, 0.075)):
        found, _ = meka.correct(forget(belief, jnp.asarray(strayed)), seen)
        np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
        assert found.variance == pytest.approx(variance, rel=1e-6)


def test_the_step_size_is_what_the_last_should_have_been():
    """Of a direction three times as long as the last, by the quadratic rule."""
    number = jnp.float32
    unused = meka.Probe(*(number(x) for x in (7.0, 7.0, 7.0, 7.0)))
    unseen: Any = None
    scene = meka.Scene(
        unseen,
        Moments(number(1), number(0.2)),
        unseen,
        last_norm=number(2.0),
        last_variance=number(0),
        norm=number(6.0),
        bend=Moments(number(0), number(0)),
    )
    last = one_step(1.0, end=9.0, noise=0.04)  # slope 2, secant 11, direction 2
    found = second_thoughts(unused, last, scene)
    assert found.slope / found.curvature == pytest.approx(2 / (11 * 2), rel=1e-6)
    assert found.curvature == pytest.approx(11 * 36)
    assert found.slope_variance == pytest.approx(0.2)
    assert found.curvature_variance == pytest.approx(0.04 * 36**2)
    kept = second_thoughts(unused, one_step(1.0), scene)
    assert kept == unused
