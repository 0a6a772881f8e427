"""Mistakes are named when the step is traced, in words that say what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meka

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
BATCH = (jnp.arange(12.0).reshape(4, 3) / 10, jnp.ones(4))


def losses(params, batch):
    x, y = batch
    return (x @ params["w"] + params["b"] - y) ** 2


def trace(
    losses=losses, params=PARAMS, batch=BATCH, mask=None, optimizer=None, **options
) -> None:
    """A step that is traced, never compiled: all errors must come before that."""
    optimizer = meka.meka() if optimizer is None else optimizer
    step = meka.make_step(losses, optimizer, **options)
    state = jax.eval_shape(optimizer.init, params)
    jax.eval_shape(step, params, state, batch, mask)


def test_a_sound_step_traces():
    trace()
    trace(groups=4, micro_batches=2, mask=jnp.ones(4, bool))


def test_integer_parameters_are_named():
    params = {"w": jnp.ones(3), "layers": [{"table": jnp.arange(3)}]}
    with pytest.raises(TypeError, match=r"params\['layers'\]\[0\]\['table'\].*int\d\d"):
        meka.meka().init(params)
    with pytest.raises(TypeError, match=r"\['table'\].*int\d\d.*\n?.*eqx\.partition"):
        trace(params=params, optimizer=meka.adameka())


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (np.ones(2, complex), "complex128"),
        (np.ones(2, bool), "bool"),
        (3.0, "float"),
        ("relu", "str"),
    ],
)
def test_parameters_must_be_real_arrays(leaf, what):
    with pytest.raises(TypeError, match=rf"params\['x'\] has .*{what}"):
        meka.meka().init({"x": leaf})


def test_no_parameters():
    with pytest.raises(ValueError, match="nothing to optimize"):
        meka.observe(lambda p, b: b[1], {}, {}, BATCH)


def test_empty_batch():
    batch = (jnp.zeros((0, 3)), jnp.zeros(0))
    with pytest.raises(ValueError, match="the batch is empty"):
        trace(batch=batch)
    with pytest.raises(ValueError, match="batch holds no arrays"):
        trace(batch=())


def test_one_example_has_no_second_group():
    batch = jax.tree.map(lambda x: x[:1], BATCH)
    with pytest.raises(ValueError, match="one example has no second group"):
        trace(batch=batch)


def test_leaves_of_the_batch_disagree():
    with pytest.raises(ValueError, match=r"disagree.*'batch\[0\]': 4, 'batch\[1\]': 3"):
        trace(batch=(BATCH[0], BATCH[1][:3]))
    with pytest.raises(ValueError, match=r"batch\[1\] is a scalar"):
        trace(batch=(BATCH[0], jnp.float32(1)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda p, b: jnp.mean(losses(p, b)),
            r"\(4,\).*returned \(\).*before averaging",
        ),
        (lambda p, b: losses(p, b)[:, None], r"returned \(4, 1\).*everything but"),
        (lambda p, b: losses(p, b)[:2], r"returned \(2,\)"),
        (lambda p, b: (losses(p, b), {}), r"must return one loss per example"),
    ],
)
def test_losses_of_the_wrong_shape(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        trace(losses=wrong)
    assert "meka.per_example(loss)" in str(error.value)


def test_losses_that_are_not_real():
    with pytest.raises(TypeError, match=r"returned dtype int\d\d"):
        trace(losses=lambda p, b: jnp.arange(4))


def test_mask_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"mask has shape \(3,\).*4 examples"):
        trace(mask=jnp.ones(3, bool))


@pytest.mark.parametrize("groups", [0, 1, 5])
def test_groups_out_of_range(groups):
    with pytest.raises(ValueError, match=rf"groups={groups}.*2 to 4 groups"):
        trace(groups=groups)


def test_groups_and_micro_batches_must_nest():
    with pytest.raises(ValueError, match=r"groups=3 and micro_batches=2.*nest"):
        trace(groups=3, micro_batches=2)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=f"micro_batches={wrong}"):
            trace(micro_batches=wrong)


@pytest.mark.parametrize("name", ["value_decay", "noise_decay", "model_decay"])
@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_decays_out_of_range(name, decay):
    with pytest.raises(ValueError, match=rf"{name}=.*\[0, 1\)"):
        meka.meka(**{name: decay})


def test_other_options_out_of_range():
    with pytest.raises(ValueError, match="third_order=-1"):
        meka.meka(third_order=-1)
    with pytest.raises(ValueError, match="prior_variance=0"):
        meka.adameka(prior_variance=0)
    with pytest.raises(ValueError, match="epsilon=0"):
        meka.adameka(epsilon=0)


def test_missing_observation_shows_make_step():
    optimizer = meka.meka()
    with pytest.raises(ValueError, match=r"meka\.make_step\(losses, optimizer\)"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    seen = meka.observe(losses, PARAMS, PARAMS, BATCH)
    with pytest.raises(ValueError, match="make_step"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, observation=seen)


def test_missing_parameters():
    optimizer = meka.meka()
    seen = meka.observe(losses, PARAMS, PARAMS, BATCH)
    curve = meka.curve(losses, PARAMS, BATCH)
    with pytest.raises(ValueError, match="needs params"):
        optimizer.update(
            PARAMS,
            optimizer.init(PARAMS),
            observation=seen,
            probe=lambda scene: meka.current(scene, curve),
        )


@pytest.mark.parametrize("diagonal", [False, True])
def test_optimizer_and_observation_disagree_on_variances(diagonal):
    optimizer = meka.meka(diagonal=diagonal)
    seen = meka.observe(losses, PARAMS, PARAMS, BATCH, diagonal=not diagonal)
    curve = meka.curve(losses, PARAMS, BATCH)
    with pytest.raises(ValueError, match="one is diagonal"):
        optimizer.update(
            PARAMS,
            optimizer.init(PARAMS),
            PARAMS,
            observation=seen,
            probe=lambda scene: meka.current(scene, curve),
        )


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: o.gradient_transformation()])
def test_multi_steps_is_named_with_what_to_use_instead(wrap):
    optimizer = wrap(optax.MultiSteps(meka.meka(), 4))
    with pytest.raises(ValueError, match=r"optax\.MultiSteps.*\n?.*micro_batches=k"):
        trace(optimizer=optimizer)


def test_exactly_one_meka_in_a_chain():
    with pytest.raises(ValueError, match="found 0"):
        trace(optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="found 2"):
        trace(optimizer=optax.chain(meka.meka(), meka.meka()))


# Examples that see each other.


def network(normalise):
    def losses(params, batch):
        x, y = batch
        return (normalise(x @ params["in"]) @ params["out"] - y) ** 2

    return losses


def batch_norm(h):
    mean = jnp.mean(h, axis=0, keepdims=True)
    return (h - mean) / jnp.sqrt(jnp.var(h, axis=0, keepdims=True) + 1e-5)


def group_norm(h):
    groups = h.reshape(h.shape[0], 2, -1)
    mean = jnp.mean(groups, axis=2, keepdims=True)
    spread = jnp.sqrt(jnp.var(groups, axis=2, keepdims=True) + 1e-5)
    return ((groups - mean) / spread).reshape(h.shape)


def layer_norm(h):
    mean = jnp.mean(h, axis=1, keepdims=True)
    return (h - mean) / jnp.sqrt(jnp.var(h, axis=1, keepdims=True) + 1e-5)


def coupled_case(count: int) -> tuple:
    rng = np.random.default_rng(count)
    params = {"in": rng.normal(size=(3, 4)), "out": rng.normal(size=4)}
    batch = (rng.normal(size=(count, 3)), rng.normal(size=count))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))


@pytest.mark.parametrize("count", [2, 7, 16])
@pytest.mark.parametrize("normalise", [group_norm, layer_norm, jnp.tanh])
def test_independent_examples_pass(normalise, count):
    meka.check_independent(network(normalise), *coupled_case(count))


@pytest.mark.parametrize("count", [4, 7, 16])
def test_batch_norm_is_caught(count):
    with pytest.raises(ValueError, match=r"coupled.*BatchNorm.*GroupNorm"):
        meka.check_independent(network(batch_norm), *coupled_case(count))


def test_other_couplings_are_caught():
    params, batch = coupled_case(8)

    def shared_denominator(params, batch):
        values = network(jnp.tanh)(params, batch)
        return values / jnp.sum(values)

    def previous_example(params, batch):
        values = network(jnp.tanh)(params, batch)
        return values + 0.1 * jnp.roll(values, 1)

    for wrong in (shared_denominator, previous_example):
        with pytest.raises(ValueError, match="the loss of example"):
            meka.check_independent(wrong, params, batch)


def test_check_independent_needs_two_examples():
    params, batch = coupled_case(1)
    with pytest.raises(ValueError, match="at least two examples"):
        meka.check_independent(network(jnp.tanh), params, batch)
