"""The table of optimizers: names, grids, refusals, and that every row trains."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import meka
from meka.lab import optimizers, svrg
from meka.lab.optimizers import OptimizerError, make

OURS = [
    family + rule
    for family in ("meka", "adameka")
    for rule in ("", "-ei", "-quadratic", "-constant")
]
RIVALS = [name for name in optimizers.TABLE if name not in (*OURS, "auto")]
STEPS = 300


def losses(params, batch):
    x, y = batch
    residual = x @ params["w"] + params["b"] - y
    return residual * residual


def problem(dtype=np.float32, noise=0.05):
    """Least squares with 256 examples, and 300 minibatches of 16 of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4))
    y = x @ rng.normal(size=4) + 0.5 + noise * rng.normal(size=256)
    rows = rng.integers(0, 256, (STEPS, 16))
    data = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    params = {"w": jnp.zeros(4, dtype), "b": jnp.zeros(1, dtype)}
    return params, data, jnp.asarray(rows)


def full_gradient(data):
    return jax.grad(lambda params: jnp.mean(losses(params, data)))


def train(method, params, data, rows):
    """Run a method as the training loop does: scanned, and refreshed between scans."""

    @jax.jit
    def chunk(params, state, rows):
        def step(carry, row):
            batch = jax.tree.map(lambda x: x[row], data)
            params, state, scalars = method.step(*carry, batch)
            return (params, state), scalars

        return jax.lax.scan(step, (params, state), rows)

    state, logs = method.init(params), []
    every = method.refresh_every or len(rows)
    for start in range(0, len(rows), every):
        if method.refresh is not None:
            state = method.refresh(params, state, full_gradient(data))
        (params, state), scalars = chunk(params, state, rows[start : start + every])
        logs.append(scalars)
    log = jax.tree.map(lambda *x: np.concatenate(x), *logs)
    return params, state, log


@functools.cache
def trained(name):
    """A rival after 300 steps at its defaults, compiled once for several tests."""
    with jax.numpy_dtype_promotion("strict"):
        method = make(name, losses, steps=STEPS, steps_per_epoch=100)
        return method, *train(method, *problem())


def mean_loss(params, data):
    return float(jnp.mean(losses(params, data).astype(jnp.float32)))


def assert_same_types(old, new):
    assert jax.tree.structure(old) == jax.tree.structure(new)
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert not a.weak_type
        assert not b.weak_type


# The table ----------------------------------------------------------------------------


def test_grids_are_the_papers():
    sgd, adam = (0.001, 0.01, 0.1, 1.0), (0.0001, 0.001, 0.01, 0.1)
    grids = {name: entry.grid for name, entry in optimizers.TABLE.items()}
    assert {name: grid for name, grid in grids.items() if grid} == {
        "sgd": sgd,
        "svrg": sgd,
        "meka-constant": sgd,
        "momentum": adam,
        "adam": adam,
        "adameka-constant": adam,
        "nadamw": (0.0001, 0.001, 0.01),
    }
    for name, entry in optimizers.TABLE.items():
        assert entry.name == name
        assert entry.tuned == bool(entry.grid)
        assert entry.default in entry.grid if entry.tuned else True
        assert entry.schedule in entry.schedules
        assert entry.summary


def test_table_has_everyone():
    assert set(RIVALS) == {
        "sgd",
        "momentum",
        "adam",
        "adadelta",
        "svrg",
        "prodigy",
        "dadapt-adamw",
        "dog",
        "dowg",
        "mechanic",
        "momo",
        "momo-adam",
        "schedule-free-adamw",
        "nadamw",
    }
    assert {*OURS, "auto"} <= set(optimizers.TABLE)


def test_reading_and_checking_the_table_imports_no_jax():
    script = """
import sys
from meka.lab import optimizers
optimizers.check("meka", options={"groups": 4})
assert optimizers.TABLE["adam"].options
assert not {"jax", "optax", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mekka", {}, "unknown optimizer 'mekka'; did you mean 'meka'?"),
        ("zzz", {}, "unknown optimizer 'zzz' (known: auto,"),
        ("adam", {"learning_rate": -1.0}, "not negative, not -1.0"),
        ("adam", {"learning_rate": True}, "learning_rate must be a number"),
        ("meka", {"learning_rate": 0.1}, "meka-constant takes one"),
        ("adameka-ei", {"learning_rate": 0.1}, "adameka-constant takes one"),
        ("adam", {"schedule": "cosin"}, "did you mean 'cosine'?"),
        ("schedule-free-adamw", {"schedule": "linear"}, "only constant"),
        ("sgd", {"momentum": 0.9}, "unknown option of sgd 'momentum' (known: none)"),
        ("meka", {"group": 2}, "did you mean 'groups'?"),
        ("meka", {"groups": 0}, "groups must be at least 1"),
        ("meka", {"groups": 2.5}, "groups must be a whole number"),
        ("meka", {"transport": "diference"}, "did you mean 'difference'?"),
        ("meka", {"probe": "lag"}, "unknown probe 'lag'"),
        ("meka", {"diagonal": 1}, "diagonal must be true or false"),
        ("meka", {"decay": 1.0}, "decay must be below 1"),
        ("meka", {"noise_decay": 1}, "noise_decay must be below 1"),
        ("meka", {"scale": None}, "scale needs a value"),
        ("adam", {"b2": float("nan")}, "b2 must be finite"),
        ("svrg", {"refresh_every": 0}, "refresh_every must be at least 1"),
        ("adam", {"steps": 0}, "steps must be at least 1"),
    ],
)
def test_refusals_say_what_to_do(name, options, message):
    with pytest.raises(OptimizerError) as caught:
        make(name, losses, **{"steps": 10, **options})
    assert message in str(caught.value)


def test_allowed_edges():
    optimizers.check("nadamw", options={"warmup_steps": 0, "weight_decay": 2})
    optimizers.check("meka", options={"groups": None, "scale": 2, "probe": "lagged"})
    optimizers.check("prodigy", learning_rate=0.5, schedule="linear")


# Rivals -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RIVALS)
def test_rival_trains(name):
    params, data, rows = problem()
    method, new_params, new_state, log = trained(name)
    assert_same_types((params, method.init(params)), (new_params, new_state))
    evaluated = method.evaluate(new_params, new_state)
    assert_same_types(params, evaluated)
    assert mean_loss(evaluated, data) < 0.8 * mean_loss(params, data)
    # What was logged is the loss before each step, on its own minibatch.
    first = jax.tree.map(lambda x: x[rows[0]], data)
    np.testing.assert_allclose(log["loss"][0], mean_loss(params, first), rtol=1e-6)
    assert all(values.shape == (STEPS,) for values in log.values())
    assert set(log) <= {"loss", "step_size"}


@pytest.mark.parametrize("name", RIVALS)
def test_rival_keeps_half_precision(name):
    params, data, rows = problem(jnp.bfloat16)
    schedule = optimizers.TABLE[name].schedules[-1]  # a decaying rate is a float32
    method = make(name, losses, steps=STEPS, schedule=schedule)
    state = method.init(params)
    batch = jax.tree.map(lambda x: x[rows[0]], data)
    result = jax.eval_shape(method.step, params, state, batch)
    assert jax.tree.map(lambda x: (x.dtype, x.shape), (params, state)) == jax.tree.map(
        lambda x: (x.dtype, x.shape), result[:2]
    )


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("sgd", optax.sgd(0.1)),
        ("momentum", optax.sgd(0.01, 0.9)),
        ("adam", optax.adam(0.001, 0.9, 0.999, 1e-8)),
        ("adadelta", optax.adadelta(1.0, 0.95, 1e-6)),
        ("prodigy", optax.contrib.prodigy(1.0)),
        ("dadapt-adamw", optax.contrib.dadapt_adamw(1.0)),
        ("dog", optax.contrib.dog()),
        ("dowg", optax.contrib.dowg()),
        ("mechanic", optax.contrib.mechanize(optax.adam(1.0))),
        ("momo", optax.contrib.momo()),
        ("momo-adam", optax.contrib.momo_adam()),
        ("schedule-free-adamw", optax.contrib.schedule_free_adamw(2.5e-3, 15)),
        (
            "nadamw",
            optax.nadamw(
                optax.warmup_cosine_decay_schedule(0.001 / 15, 0.001, 15, STEPS)
            ),
        ),
    ],
)
def test_rival_is_what_optax_has(name, optimizer):
    """Published defaults, driven by hand."""
    optimizer = optax.with_extra_args_support(optimizer)

    def step(params, state, batch):
        mean = lambda params: jnp.mean(losses(params, batch))  # noqa: E731
        value, gradient = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradient, state, params, value=value)
        return optax.apply_updates(params, updates), state, {"loss": value}

    by_hand = optimizers.Method(optimizer.init, step, lambda params, _: params)
    expected, _, losses_by_hand = train(by_hand, *problem())
    _, found, _, log = trained(name)
    np.testing.assert_allclose(log["loss"], losses_by_hand["loss"], rtol=1e-3)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-3)


@pytest.mark.parametrize("name", ["sgd", "dog", "dowg"])
def test_logged_step_size_is_the_one_taken(name):
    _, data, rows = problem()
    method, params, state, _ = trained(name)
    batch = jax.tree.map(lambda x: x[rows[5]], data)
    gradient = full_gradient(batch)(params)["w"]
    new, _, scalars = method.step(params, state, batch)
    taken = (params["w"] - new["w"]) / gradient
    np.testing.assert_allclose(taken, scalars["step_size"], rtol=1e-3)


@pytest.mark.parametrize("name", ["prodigy", "svrg"])
def test_linear_schedule_ends_at_zero(name):
    params, data, rows = problem()
    method = make(name, losses, steps=40, schedule="linear")
    *_, log = train(method, params, data, rows[:41])
    assert log["step_size"][40] == 0
    assert log["step_size"][39] > 0
    if name == "svrg":
        np.testing.assert_allclose(
            log["step_size"] / log["step_size"][0], 1 - np.arange(41) / 40, atol=1e-6
        )


def test_nadamw_warms_up_and_decays():
    params, data, rows = problem()
    method = make("nadamw", losses, steps=100, learning_rate=0.01)
    *_, log = train(method, params, data, rows[:100])
    size = log["step_size"]
    np.testing.assert_allclose(size[:6], np.linspace(0.002, 0.01, 6), rtol=1e-5)
    assert (np.diff(size[6:]) < 0).all()
    assert size[-1] < 1e-5


def test_schedule_free_is_evaluated_at_its_average():
    params, data, rows = problem()
    method = make("schedule-free-adamw", losses, steps=STEPS, learning_rate=0.1)
    trained, state, _ = train(method, params, data, rows)
    averaged = method.evaluate(trained, state)
    # The trained parameters are y = (1 - b1) z + b1 x; x is what counts.
    for name in params:
        y = 0.1 * np.asarray(state.inner.z[name]) + 0.9 * np.asarray(averaged[name])
        np.testing.assert_allclose(trained[name], y, rtol=1e-5, atol=1e-6)
        assert (np.asarray(averaged[name]) != np.asarray(trained[name])).any()
    assert mean_loss(averaged, data) < mean_loss(trained, data)


@pytest.mark.parametrize("name", ["dog", "svrg"])
def test_methods_map_over_seeds_and_donate(name):
    params, data, rows = problem()
    method = make(name, losses, steps=STEPS)
    many = jax.tree.map(lambda x: jnp.stack([x, x + 1]), params)
    state = jax.vmap(method.init)(many)
    batch = jax.tree.map(lambda x: x[rows[0]], data)
    step = jax.jit(jax.vmap(method.step, (0, 0, None)), donate_argnums=(0, 1))
    result, _, scalars = step(many, state, batch)
    assert scalars["loss"].shape == (2,)
    alone, *_ = method.step(params, method.init(params), batch)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-5, atol=1e-7)


@jax.debug_nans(False)  # they are the point here
def test_losses_that_are_not_finite_are_only_logged():
    params, data, rows = problem()
    method = make("sgd", losses, steps=STEPS, learning_rate=100.0)
    *_, log = train(method, params, data, rows)
    assert not np.isfinite(log["loss"]).all()


# SVRG ---------------------------------------------------------------------------------


def test_svrg_by_hand():
    x = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]])
    y = np.array([1.0, 0.0, 2.0])

    def gradient(theta, rows):
        return 2 * x[rows].T @ (x[rows] @ theta - y[rows]) / len(rows)

    def squares(params, batch):
        return (batch[0] @ params - batch[1]) ** 2

    snapshot, theta = np.array([0.3, -0.2]), np.array([0.1, 0.4])
    method = make("svrg", squares, steps=10, learning_rate=0.01)
    assert method.refresh is not None
    state = method.init(jnp.asarray(snapshot, jnp.float32))
    state = method.refresh(
        jnp.asarray(snapshot, jnp.float32),
        state,
        lambda p: jnp.asarray(gradient(np.asarray(p), [0, 1, 2]), jnp.float32),
    )
    rows = [0, 2]
    batch = jnp.asarray(x[rows], jnp.float32), jnp.asarray(y[rows], jnp.float32)
    new, state, scalars = method.step(jnp.asarray(theta, jnp.float32), state, batch)
    v = gradient(theta, rows) - gradient(snapshot, rows) + gradient(snapshot, [0, 1, 2])
    np.testing.assert_allclose(new, theta - 0.01 * v, rtol=1e-6)
    np.testing.assert_allclose(
        scalars["loss"], np.mean((x[rows] @ theta - y[rows]) ** 2), rtol=1e-6
    )
    assert int(state.count) == 1


def test_svrg_is_plain_sgd_until_refreshed():
    params, data, rows = problem()
    batch = jax.tree.map(lambda x: x[rows[0]], data)
    results = []
    for name in ("svrg", "sgd"):
        method = make(name, losses, steps=10, learning_rate=0.1)
        results.append(method.step(params, method.init(params), batch)[0])
    np.testing.assert_array_equal(results[0]["w"], results[1]["w"])


def test_svrg_converges_linearly_where_sgd_stalls():
    """Noisy least squares: SGD stops where its noise stops it, SVRG goes on."""
    params, data, rows = problem(noise=1.0)
    x = np.column_stack([np.asarray(data[0], float), np.ones(256)])
    y = np.asarray(data[1], float)
    best = np.linalg.lstsq(x, y, rcond=None)[0]

    def excess(params):
        theta = np.concatenate([np.asarray(params["w"], float), params["b"]])
        return float(np.sum((theta - best) ** 2))

    plain = make("sgd", losses, steps=STEPS, learning_rate=0.05)
    reduced = make("svrg", losses, steps=STEPS, learning_rate=0.05, refresh_every=30)
    halfway, end = (
        excess(train(reduced, params, data, rows[:length])[0]) for length in (120, 240)
    )
    assert halfway < 1e-4
    assert end < 1e-4 * halfway or end < 1e-11
    assert excess(train(plain, params, data, rows[:240])[0]) > 1e-3


def test_svrg_takes_a_snapshot_an_epoch():
    assert make("svrg", losses, steps=9, steps_per_epoch=7).refresh_every == 7
    assert make("svrg", losses, steps=9, refresh_every=3).refresh_every == 3
    assert make("svrg", losses, steps=9).refresh_every == 500
    state = svrg.init({"w": jnp.ones(2)})
    assert not state.ready


# Ours ---------------------------------------------------------------------------------


def test_options_of_ours_exist_in_the_library():
    known = set(optimizers.TABLE["meka"].options)
    known -= {"scale", "decay"}  # a rule, and short for three
    library = inspect.signature(meka.scale_by_meka).parameters
    stepper = inspect.signature(meka.make_step).parameters
    assert known <= set(library) | set(stepper)


@pytest.mark.parametrize("name", OURS)
def test_ours_have_the_rule_of_their_name(name, monkeypatch):
    family, _, suffix = name.partition("-")
    rules = {
        "": meka.probability_of_improvement,
        "ei": meka.expected_improvement,
        "quadratic": meka.quadratic,
    }
    seen = {}
    original = getattr(meka, family)

    def spy(**options):
        seen.update(options)
        return original(**options)

    monkeypatch.setattr(meka, family, spy)
    make(name, losses, steps=STEPS)
    assert set(seen) == {"rule"}  # the rest is left to the library
    if suffix in rules:
        assert seen["rule"] is rules[suffix]
    else:
        zero = jnp.zeros(())
        model = meka.ImprovementModel(zero, zero, zero, zero, zero)
        assert float(seen["rule"](model)) == pytest.approx(
            {"meka": 0.1, "adameka": 0.001}[family]
        )


@pytest.mark.parametrize("name", ["meka", "adameka", "auto"])
def test_ours_keep_types_and_log_scalars(name):
    params, data, rows = problem()
    batch = jax.tree.map(lambda x: x[rows[0]], data)
    method = make(name, losses, steps=STEPS, schedule="linear")
    state = method.init(params)
    result = jax.eval_shape(method.step, params, state, batch)
    assert jax.tree.map(lambda x: x.dtype, (params, state)) == jax.tree.map(
        lambda x: x.dtype, result[:2]
    )
    scalars = result[2]
    assert {"loss", "step_size", "gain", "value", "model.slope"} <= set(scalars)
    assert all(value.shape == () for value in scalars.values())
    assert method.evaluate(params, state) is params


def test_ours_train_with_every_option():
    params, data, rows = problem()
    options = {
        "groups": 4,
        "transport": "difference",
        "probe": "lagged",
        "diagonal": True,
        "decay": 0.9,
        "scale": 2.0,
    }
    method = make("meka-constant", losses, steps=STEPS, schedule="linear", **options)
    trained, state, log = train(method, params, data, rows)
    assert mean_loss(trained, data) < 0.01 * mean_loss(params, data)
    assert meka.find_state(state).gradient.variance["w"].shape == (4,)
    first = jax.tree.map(lambda x: x[rows[0]], data)
    np.testing.assert_allclose(log["loss"][0], mean_loss(params, first), rtol=1e-6)
    decay = 1 - np.arange(STEPS) / STEPS
    np.testing.assert_allclose(log["step_size"], 2 * 0.1 * decay, rtol=1e-4)
