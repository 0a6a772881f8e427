"""`meka.auto`: its scale, its doubts, and what it promises."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import meka
from meka import distance, lasting
from meka.lab import problems

SIZE, BATCH = 6, 16


def losses(params, batch):
    """Logistic regression."""
    inputs, labels = batch
    return jax.nn.softplus(-labels * (inputs @ params))


def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key)
    inputs = jax.random.normal(keys[0], (BATCH, SIZE))
    score = inputs @ jnp.linspace(-2.0, 2.0, SIZE)
    noise = jax.random.logistic(keys[1], (BATCH,))
    return inputs, jnp.sign(score + noise)


def run(optimizer, steps: int, function=losses, batches=draw, start=None, **options):
    """Parameters and everything that was told, over one compiled loop."""
    step = meka.make_step(function, optimizer, **options)
    params = jnp.zeros(SIZE) if start is None else start

    def body(carry, t):
        params, state, info = step(*carry, batches(jax.random.fold_in(KEY, t)))
        return (params, state), (params, info)

    return jax.jit(
        lambda: jax.lax.scan(body, (params, optimizer.init(params)), jnp.arange(steps))
    )()


KEY = jax.random.key(0)


@pytest.mark.parametrize("total", [None, 40])
def test_with_a_gradient_that_is_not_filtered_the_scale_is_prodigys(total):
    """The oracle is optax's; it is fed the gradients of one path, step by step."""
    rate = optax.linear_schedule(1.0, 0.0, total) if total else 1.0
    prodigy = contrib.prodigy(rate)
    params = {"a": jnp.ones((2, 3)), "b": jnp.full(4, -0.5)}
    mine, theirs = distance.start(params), prodigy.init(params)
    rng = np.random.default_rng(0)
    for t in range(30):
        gradient = jax.tree.map(
            lambda p: p + jnp.asarray(0.1 * rng.normal(size=p.shape), p.dtype), params
        )
        now = jnp.asarray(1 - t / total if total else 1.0)
        step, mine = distance.advance(
            mine, params, gradient, gradient, now, growth=np.inf, nesterov=False
        )
        updates, theirs = prodigy.update(gradient, theirs, params)
        for one, other in zip(
            jax.tree.leaves(step), jax.tree.leaves(updates), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-12)
        params = optax.apply_updates(params, updates)
    found = optax.tree.get(theirs, "estim_lr")
    np.testing.assert_allclose(mine.distance, found, rtol=1e-4)
    assert mine.distance > 1e-3


def test_the_errors_of_the_filter_do_not_stretch_the_scale():
    """A direction that is all error, and remembered, moves far; D must not follow."""
    rng = np.random.default_rng(1)
    error = {"p": jnp.asarray(rng.normal(size=200), jnp.float32)}

    def grown(judge_by_error: bool) -> float:
        params = {"p": jnp.zeros(200)}
        state = distance.start(params)
        for _ in range(60):
            noise = {"p": jnp.asarray(rng.normal(size=200), jnp.float32)}
            seen = error if judge_by_error else noise
            step, state = distance.advance(
                state, params, seen, error, jnp.ones(()), growth=np.inf
            )
            params = optax.apply_updates(params, step)
        return float(state.distance)

    assert grown(judge_by_error=False) < 0.1 * grown(judge_by_error=True)


def test_the_scale_grows_by_its_factor_at_most():
    """However far away the solution is said to be; and it is reached in the end."""
    params = {"p": jnp.full(3, 100.0)}
    state, sizes = distance.start(params), []
    for _ in range(400):
        gradient = jax.tree.map(jnp.sign, params)
        step, state = distance.advance(
            state, params, gradient, gradient, jnp.ones(()), growth=1.05
        )
        params = optax.apply_updates(params, step)
        sizes.append(float(state.distance))
    ratios = np.array(sizes[1:]) / sizes[:-1]
    assert ratios.max() <= 1.05 * (1 + 1e-5)
    assert np.median(ratios[:100]) > 1.04
    assert sizes[-1] > 1


@pytest.mark.parametrize("rate", [0.3, 0.03, 0.003])
@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-6])
def test_the_gain_is_the_one_by_which_parameters_scatter_least(rate, ratio):
    """Against the formula's own minimum, searched for on a grid."""
    gains = np.geomspace(1e-5, 1e4, 20001)
    scatter = (gains**2 + ratio) / (gains * (gains + rate))
    found = lasting.least_gain(jnp.asarray(ratio), jnp.asarray(1 / rate))
    np.testing.assert_allclose(found, gains[np.argmin(scatter)], rtol=2e-3)


@pytest.mark.parametrize(("change_noise", "rate"), [(0.0, 0.2), (1e-3, 0.02)])
def test_how_parameters_scatter(change_noise, rate):
    """The formula against walks: θ relaxes at a rate, along a gradient with error e.

    e is what a filter of gain K leaves: (1 - K)(e + q) + K n. Ten thousand walks, so
    the ratio of two variances is known to two parts in a hundred; the formula itself
    is for small gains and rates.
    """
    rng, walks = np.random.default_rng(0), 10_000

    def scatter(gain: float) -> float:
        theta, error = np.zeros(walks), np.zeros(walks)
        for _ in range(int(5 / min(rate, gain))):
            q = np.sqrt(change_noise) * rng.normal(size=walks)
            error = (1 - gain) * (error + q) + gain * rng.normal(size=walks)
            theta += -rate * theta - error
        return theta.var()

    raw = scatter(1.0)
    for gain in (0.02, 0.1):
        expected = (gain**2 + change_noise) / (gain * (gain + rate))
        assert scatter(gain) / raw == pytest.approx(expected, rel=0.2)


def additive(params, batch):
    """A parabola of examples that differ in their slope alone: Q is zero."""
    return 0.5 * jnp.sum(params**2) + batch[1] @ params


def sharp(params, batch):
    """One steep direction whose curvature differs from example to example."""
    bends, slopes = batch
    return 0.5 * bends * params[0] ** 2 + slopes @ params


def wavy(params, batch):
    """Downhill for ever, over waves that differ from example to example."""
    bends, slopes = batch
    return bends * jnp.sum(jnp.sin(params)) + 8 * jnp.sum(params) + slopes @ params


def steep(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key)
    bends = 4 + 2 * jax.random.normal(keys[0], (BATCH,))
    return bends, 0.5 * jax.random.normal(keys[1], (BATCH, SIZE))


@pytest.mark.parametrize("function", [additive, wavy])
def test_the_filter_is_used_where_the_change_of_the_gradient_is_known(function):
    start = jnp.full(SIZE, 2.0, jnp.float32)
    optimizer = meka.meka(meka.constant(0.05), lasting=True)
    options = {"transport": meka.difference, "probe": meka.lagged, "start": start}
    (_, state), (_, info) = run(optimizer, 300, function, steep, **options)
    gains = np.asarray(info.gain[100:])
    follow = optax.tree.get(state, "follow")
    if function is additive:
        assert gains.max() < 0.02  # an average over all steps so far
        assert follow
    else:
        assert np.median(gains) == 1
        paper = meka.meka(meka.constant(0.05))
        (_, (_, info)) = run(paper, 300, function, steep, **options)
        assert np.median(info.gain[100:]) < 0.5


def test_noise_along_the_path_counts_where_it_is_larger_than_the_average():
    """All of Q lies in one coordinate of six, and at first so does the step."""
    start = jnp.zeros(SIZE).at[0].set(2.0)
    options = {"noise_every": 1, "probe": meka.lagged, "start": start}

    def noise(**choice) -> np.ndarray:
        optimizer = meka.meka(meka.constant(0.05), noise_decay=0.9, **choice)
        info = run(optimizer, 20, sharp, steep, **options)[1][1]
        return np.asarray(info.change_noise[4:])

    assert np.median(noise(lasting=True) / noise()) > 1.4


def test_what_is_not_followed_costs_no_second_gradient():
    """Evaluations of the loss are counted: one a step, more at every sixteenth."""
    calls = []

    def counted(params, batch):
        jax.debug.callback(lambda: calls.append(1))
        return sharp(params, batch)

    optimizer = meka.auto(400)
    step = jax.jit(meka.make_step(counted, optimizer))
    params = jnp.full(SIZE, 2.0, jnp.float32)
    state = optimizer.init(params)
    for t in range(196):
        if t == 100:
            jax.effects_barrier()
            calls.clear()
        params, state, _ = step(params, state, steep(jax.random.fold_in(KEY, t)))
    jax.effects_barrier()
    assert 96 + 6 <= len(calls) <= 96 + 6 * 4


def test_every_transport_can_be_followed_or_not():
    start, previous = jnp.full(SIZE, 2.0, jnp.float32), jnp.full(SIZE, 2.1, jnp.float32)
    batch = steep(KEY)
    look = partial(meka.observe, sharp, start, previous, batch)

    def seen(follow: bool, transport) -> meka.Observation:
        no = jnp.asarray(False)
        return jax.jit(
            lambda follow: look(transport=transport, measure=no, follow=follow)
        )(follow)

    on, off = (seen(follow, meka.difference) for follow in (True, False))
    np.testing.assert_array_equal(on.gradient.mean, off.gradient.mean)
    assert np.any(np.asarray(on.change.mean) != 0)
    np.testing.assert_array_equal(off.change.mean, 0)
    assert on.followed
    assert not off.followed
    always = seen(False, meka.hessian_at_current)
    assert np.any(np.asarray(always.change.mean) != 0)
    assert always.followed


@pytest.mark.parametrize("measure", [True, False])
def test_a_closer_look_sees_what_is_seen_without_a_choice(x64, measure):
    """Known at run time or when it is compiled: the same numbers, means and noise."""
    start, previous = jnp.full(SIZE, 2.0), jnp.linspace(1.9, 2.1, SIZE)
    look = partial(
        meka.observe, sharp, start, previous, steep(KEY), transport=meka.difference
    )
    chosen = jax.jit(lambda *yes: look(measure=yes[0], follow=yes[1]))
    found = chosen(measure, True)
    expected = jax.jit(lambda measure: look(measure=measure, follow=True))(measure)
    assert bool(found.measured) is measure
    assert np.all(np.asarray(found.path.curvature.mean) > 0)
    assert bool(found.gradient.variance > 0) is measure
    for one, other in zip(found, expected, strict=True):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10), one, other)
    # Without it no noise is known either, and it says so.
    glanced = chosen(measure, False)
    assert not glanced.measured
    assert not glanced.followed
    np.testing.assert_array_equal(glanced.gradient.mean, expected.gradient.mean)


@pytest.mark.parametrize(
    ("optimizer", "options", "choices"),
    [
        (meka.auto(50), {}, 1),
        (meka.meka(lasting=True), {"transport": meka.difference}, 2),
        (meka.meka(), {}, 2),
        (meka.meka(), {"probe": meka.lagged}, 1),
        (meka.meka(), {"noise_every": 1}, 0),
    ],
)
def test_a_step_chooses_no_more_than_it_must(optimizer, options, choices):
    """On a GPU the host waits for each choice. Noise is measured inside of the other,
    and so is what is done with the change of the gradient; whether to probe has to be
    chosen once the direction is known."""
    step = meka.make_step(losses, optimizer, **options)
    params = jnp.zeros(SIZE)
    program = jax.make_jaxpr(step)(params, optimizer.init(params), draw(KEY))
    names = [equation.primitive.name for equation in program.eqns]
    assert names.count("cond") == choices


def test_it_is_observed_as_it_wants_to_be():
    """Differences, the lagged probe and noise at every sixteenth step."""
    default = run(meka.auto(50), 10)[1][0]
    asked = {"transport": meka.difference, "probe": meka.lagged, "noise_every": 16}
    np.testing.assert_array_equal(default, run(meka.auto(50), 10, **asked)[1][0])


def test_steps_end_where_the_run_does():
    (_, state), (path, info) = run(meka.auto(60), 65)
    np.testing.assert_array_equal(path[59], path[-1])
    assert np.all(np.asarray(info.step_size[60:]) == 0)
    assert np.any(np.asarray(path[58]) != np.asarray(path[59]))
    assert optax.tree.get(state, "distance") > 1e-3


def test_without_an_end_an_average_is_kept():
    (params, state), (path, _) = run(meka.auto(), 200)
    average = meka.averaged(params, state)
    expected, path = np.zeros(SIZE), np.asarray(path, float)
    for t, reached in enumerate(path):
        expected += 9 / (t + 9) * (reached - expected)
    np.testing.assert_allclose(average, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="without total_steps keeps one"):
        meka.averaged(params, meka.auto(200).init(params))


@pytest.mark.makes_nan
@pytest.mark.parametrize("total", [None, 100])
def test_a_step_that_is_not_finite_changes_nothing(total):
    optimizer = meka.auto(total)
    step = jax.jit(meka.make_step(losses, optimizer))
    params = jnp.zeros(SIZE)
    state: Any = optimizer.init(params)
    for t in range(3):
        params, state, _ = step(params, state, draw(jax.random.fold_in(KEY, t)))
    inputs, labels = draw(KEY)
    after, later, info = step(params, state, (inputs.at[5, 2].set(jnp.nan), labels))
    assert not info.accepted
    assert info.rejected == 1
    assert info.suspect == 5
    np.testing.assert_array_equal(params, after)
    for one, other in zip(
        jax.tree.leaves((state.scale, state.average, state.filter.gradient)),
        jax.tree.leaves((later.scale, later.average, later.filter.gradient)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_what_it_predicts_is_of_the_step_it_takes(x64):
    """In a bowl without noise that bends alike in all directions it is exact."""

    def bowl(params, batch):
        return 1.5 * jnp.sum(params**2) + 0 * batch[1]

    start, steps = jnp.linspace(1.0, 2.0, SIZE), 120
    _, (path, info) = run(meka.auto(150), steps, bowl, start=start)
    value = 1.5 * np.sum(np.concatenate([start[None], path]) ** 2, -1)
    # What bends is seen once something has moved.
    change = np.diff(value)[2:]
    np.testing.assert_allclose(info.predicted_change[2:], change, rtol=1e-6)
    assert 0 < np.sum(change > 0) < len(change)
    np.testing.assert_array_equal(info.improvement_probability[2:], change < 0)
    np.testing.assert_array_equal(info.model.step, np.arange(steps))


def test_at_a_glance_it_tells_the_truth_and_refuses_what_it_must():
    """Where only value and gradient are looked at."""
    optimizer = meka.auto(400)
    step = jax.jit(meka.make_step(sharp, optimizer))
    params = jnp.full(SIZE, 2.0, jnp.float32)
    state: Any = optimizer.init(params)
    for t in range(130):
        params, state, _ = step(params, state, steep(jax.random.fold_in(KEY, t)))
    own, batch = state.filter, steep(KEY)
    assert not own.lasting.follow
    reached, later, info = step(params, state, batch)
    gradient = jax.grad(lambda p: jnp.mean(sharp(p, batch)))(params)
    taken, bend = reached - params, own.held.curvature
    expected = gradient @ taken + bend * taken @ taken / 2
    np.testing.assert_allclose(info.predicted_change, expected, rtol=1e-3)
    np.testing.assert_allclose(later.filter.gradient.mean, gradient, rtol=1e-5)
    np.testing.assert_allclose(info.gradient_norm, jnp.linalg.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(info.observed, jnp.mean(sharp(params, batch)), rtol=1e-5)
    assert info.gain == 1
    moved = later.filter.previous_params
    np.testing.assert_array_equal(moved, params)

    # One group alone, and a gradient whose squares overflow: nothing changes.
    mask = jnp.arange(BATCH) == 3
    huge = (batch[0], batch[1].at[:, 5].set(1e30))
    for given in ((batch, mask), (huge,)):
        after, kept, told = step(params, state, *given)
        assert not told.accepted
        np.testing.assert_array_equal(after, params)
        for one, other in zip(
            jax.tree.leaves((kept.scale, kept.filter._replace(info=()))),
            jax.tree.leaves((state.scale, state.filter._replace(info=()))),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("total", [200, None])
@pytest.mark.parametrize(
    ("beside", "stretch"), [(0.0, 1.0), (10.0, 1.0), (100.0, 5.0), (1e4, 10.0)]
)
def test_the_length_over_a_run(monkeypatch, total, beside, stretch):
    """As long as D until it is found; then up to a twentieth of the parameters, unless
    that is ten times as far; and down to nothing at the end."""

    def advance(state, params, gradient, filtered, rate, growth):
        return jnp.full_like(params, rate), state._replace(count=state.count + 1)

    monkeypatch.setattr(distance, "advance", advance)
    state: Any = meka.auto(total).init(jnp.ones(SIZE))
    start = jnp.full(SIZE, beside * float(state.scale.distance)).at[::2].multiply(-1)
    _, (path, _) = run(meka.auto(total), 500 if total is None else total, start=start)
    rates = np.diff(np.asarray(path, float)[:, 0], prepend=float(start[0]))
    if total is None:
        expected = np.interp(np.arange(500), [200, 400], [1, stretch])
    else:
        expected = np.interp(
            np.arange(200), [20, 40, 100, 200], [1, stretch, stretch, 0]
        )
    np.testing.assert_allclose(rates, expected, rtol=2e-3, atol=2e-3)


def test_parameters_that_are_almost_right_get_better_still():
    """Steps as long as a share of the parameters would be far too long for them."""
    solution = jnp.linspace(-2.0, 2.0, SIZE)

    def squares(params, batch):
        return 0.5 * (batch[0] @ params - batch[1]) ** 2

    def noisy(key):
        keys = jax.random.split(key)
        inputs = jax.random.normal(keys[0], (BATCH, SIZE))
        return inputs, inputs @ solution + 0.01 * jax.random.normal(keys[1], (BATCH,))

    start = solution + 0.01 * jnp.cos(jnp.arange(SIZE))
    (params, _), (path, _) = run(meka.auto(400), 400, squares, noisy, start)
    farthest = jnp.max(jnp.abs(path - solution))
    assert jnp.max(jnp.abs(params - solution)) < 2e-3
    assert farthest < 0.1


def test_a_run_has_to_have_a_length():
    with pytest.raises(ValueError, match="total_steps=0: must be at least 1"):
        meka.auto(0)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)]
)
def test_other_precisions(dtype):
    start = jnp.zeros(SIZE, dtype)

    def cast(key):
        inputs, labels = draw(key)
        return inputs.astype(dtype), labels.astype(dtype)

    (params, _), (_, info) = run(meka.auto(300), 300, batches=cast, start=start)
    assert params.dtype == dtype
    assert info.rejected[-1] == 0
    assert np.mean(info.observed[-50:]) < 0.8 * info.observed[0]


def test_on_a_noisy_quadratic_it_ends_below_the_best_adam():
    problem = problems.noisy_quadratic()

    def body(step, carry, t):
        return step(carry, problem.draw(jax.random.fold_in(KEY, t), 128)), None

    def end(first, step) -> float:
        carry, _ = jax.jit(
            lambda: jax.lax.scan(lambda c, t: body(step, c, t), first, jnp.arange(1000))
        )()
        return float(problem.objective(carry[0]))

    def adam(rate: float) -> float:
        optimizer = optax.adam(optax.linear_schedule(rate, 0.0, 1000))

        def step(carry, batch):
            params, state = carry
            gradient = jax.grad(lambda p: jnp.mean(problem.losses(p, batch)))(params)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state

        return end((problem.start, optimizer.init(problem.start)), step)

    optimizer = meka.auto(1000)
    take = meka.make_step(problem.losses, optimizer)
    first = problem.start, optimizer.init(problem.start)
    ours = end(first, lambda carry, batch: take(*carry, batch)[:2])
    assert ours < 0.5 * min(adam(rate) for rate in (1e-3, 1e-2, 1e-1))
