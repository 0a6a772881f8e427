"""What the optimizer does with bad numbers, its state, and other transformations."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import meka

COUNT = 6


def losses(params, batch):
    """Logistic regression with a trap: a finite loss whose gradient is not."""
    score = batch["x"] @ params["w"] + params["b"]
    inside = jnp.where(batch["trap"], 0 * params["b"], 1.0)
    return jax.nn.softplus(-batch["y"] * score) * batch["scale"] + jnp.sqrt(inside) - 1


def batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(COUNT, 3)).astype(np.float32),
            "y": np.sign(rng.normal(size=COUNT)).astype(np.float32),
            "scale": np.ones(COUNT, np.float32),
            "trap": np.zeros(COUNT, bool),
        }
        for _ in range(count)
    ]


def start() -> dict[str, jax.Array]:
    return {"w": jnp.array([0.5, -1.0, 0.25], "f4"), "b": jnp.array(0.1, "f4")}


def broken(batch: dict, how: str) -> tuple[dict, int]:
    """The same batch with one bad example, and which one shows in its loss."""
    batch = {key: value.copy() for key, value in batch.items()}
    if how == "gradient":
        batch["trap"][4] = True
        return batch, -1
    batch["scale"][4] = {"nan": np.nan, "inf": np.inf, "overflow": 3e38}[how]
    return batch, -1 if how == "overflow" else 4


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def without_verdict(state: Any) -> Any:
    """The state, but for the three fields that report a rejected step."""
    info = meka.find_state(state).info
    zero = jnp.zeros((), jnp.int32)
    blank = info._replace(suspect=zero, accepted=zero, rejected=zero)
    return jax.tree.map(
        lambda x: x._replace(info=blank) if isinstance(x, meka.State) else x,
        state,
        is_leaf=lambda x: isinstance(x, meka.State),
    )


def late_overflow(count: Any) -> jax.Array:
    """-1, but infinite at the fifth step."""
    return jnp.where(count == 4, -jnp.inf, -1.0)


OPTIMIZERS = {
    "meka": meka.meka(),
    "chain": optax.chain(
        meka.scale_by_meka(direction=meka.adam_style(), diagonal=True),
        optax.trace(0.5),
        optax.add_decayed_weights(1e-3),
        optax.scale_by_schedule(late_overflow),
    ),
}
PROBES = {"meka": meka.current, "chain": meka.lagged}


@cache
def compiled(name: str):
    step = meka.make_step(losses, OPTIMIZERS[name], probe=PROBES[name])
    return jax.jit(step)


@pytest.mark.parametrize("how", ["nan", "inf", "overflow", "gradient"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_step_is_as_if_it_never_was(name, how):
    step, data = compiled(name), batches(4)
    params, state = start(), OPTIMIZERS[name].init(start())
    for batch in data[:2]:
        params, state, info = step(params, state, batch)
        assert info.accepted
    bad, suspect = broken(data[2], how)
    same, kept, info = step(params, state, bad)
    assert bits(same) == bits(params)
    assert bits(without_verdict(kept)) == bits(without_verdict(state))
    assert not info.accepted
    assert info.rejected == 1
    assert info.suspect == suspect
    assert bits(info) == bits(optax.tree.get(kept, "info"))
    # And again, and then on as if nothing had happened.
    same, kept, info = step(same, kept, bad)
    assert info.rejected == 2
    new, new_state, info = step(same, kept, data[3])
    want, want_state, _ = step(params, state, data[3])
    assert info.accepted
    assert info.rejected == 2
    assert info.suspect == -1
    assert bits(new) == bits(want)
    assert bits(without_verdict(new_state)) == bits(without_verdict(want_state))


def test_the_first_step_can_be_bad():
    step, (good, other) = compiled("meka"), batches(2)
    state = OPTIMIZERS["meka"].init(start())
    same, kept, info = step(start(), state, broken(good, "nan")[0])
    assert bits(same) == bits(start())
    assert bits(without_verdict(kept)) == bits(without_verdict(state))
    new, _, info = step(same, kept, other)
    assert info.accepted
    assert bits(new) == bits(step(start(), state, other)[0])


def test_a_chain_that_overflows_later_is_rejected_too():
    """The step itself is finite; what another transformation makes of it is not."""
    step, data = compiled("chain"), batches(6)
    params, state = start(), OPTIMIZERS["chain"].init(start())
    for batch in data[:4]:
        params, state, info = step(params, state, batch)
    assert info.rejected == 0
    for k, batch in enumerate(data[4:]):
        same, kept, info = step(params, state, batch)
        assert bits(same) == bits(params)
        assert bits(without_verdict(kept)) == bits(without_verdict(state))
        assert (info.rejected, info.suspect) == (k + 1, -1)
        state = kept


def test_without_make_step_a_bad_step_moves_nothing():
    """`update` alone: zero updates, and meka's own state as it was."""
    optimizer = meka.scale_by_meka()
    (batch,) = batches(1)
    bad, _ = broken(batch, "nan")

    @jax.jit
    def update(params, state, batch):
        seen = meka.observe(losses, params, state.previous_params, batch)
        curve = meka.curve(losses, params, batch)
        return optimizer.update(
            seen.gradient.mean,
            state,
            params,
            observation=seen,
            probe=lambda scene: meka.current(scene, curve),
            value=seen.value.mean,
            unknown="swallowed",
        )

    state = optimizer.init(start())
    updates, kept = update(start(), state, bad)
    assert all(np.all(np.asarray(u) == 0) for u in jax.tree.leaves(updates))
    assert bits(without_verdict(kept)) == bits(without_verdict(state))
    # A good step comes in the sign of the gradient, as of every optax scale_by_*.
    updates, kept = update(start(), state, batch)
    gradient = kept.gradient.mean
    for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(u, kept.info.step_size * g, rtol=1e-6)


# The displacement is the one that was applied.

HESSIAN = np.diag([1.0, 0.3, 0.1])
DECAY = 1e-2


def quadratic(params, batch):
    away = params["x"][None] - batch
    return jnp.einsum("ni,ij,nj->n", away, HESSIAN, away) / 2


def decayed(params, batch):
    return quadratic(params, batch) + DECAY / 2 * jnp.sum(params["x"] ** 2)


def run_quadratic(loss, optimizer, data) -> tuple[np.ndarray, Any, np.ndarray]:
    """Parameters before every step and after the last, infos and filtered gradients."""
    step = meka.make_step(loss, optimizer, groups=4)

    def body(carry, batch):
        params, state, info = step(*carry, batch)
        mean = meka.find_state(state).gradient.mean["x"]
        return (params, state), (carry[0]["x"], info, mean)

    params = {"x": jnp.array([3.0, -2.0, 5.0], data.dtype)}
    (last, _), (path, infos, means) = jax.jit(partial(jax.lax.scan, body))(
        (params, optimizer.init(params)), data
    )
    return np.concatenate([path, last["x"][None]]), infos, np.asarray(means)


def test_weight_decay_and_clipping_are_seen_by_the_filter(x64):
    """On a quadratic the prediction m + Bδ is exact, if δ is what was applied.

    Then the error of m against the true gradient follows e ← (1-K) e + K noise, with
    no other term; the displacement that meka itself proposed would leave one.
    """
    rng = np.random.default_rng(2)
    data = jnp.asarray(rng.normal(size=(40, 8, 3)))
    noise = -np.asarray(data).mean(axis=1) @ HESSIAN
    chained = optax.chain(
        meka.scale_by_meka(),
        optax.clip_by_global_norm(0.3),
        optax.add_decayed_weights(DECAY),
        optax.scale(-1.0),
    )
    for loss, optimizer, curvature in (
        (quadratic, chained, HESSIAN),
        (decayed, meka.meka(), HESSIAN + DECAY * np.eye(3)),
    ):
        path, infos, means = run_quadratic(loss, optimizer, data)
        assert infos.rejected[-1] == 0
        moved = np.diff(path, axis=0)
        lengths = np.linalg.norm(moved, axis=1)
        np.testing.assert_allclose(infos.displacement_norm[1:], lengths[:-1], rtol=1e-9)
        assert infos.displacement_norm[0] == 0
        proposed = np.asarray(infos.step_size)[:, None] * -means
        if optimizer is chained:
            size = np.linalg.norm(proposed, axis=1, keepdims=True)
            assert (size > 0.3).any()
            clipped = proposed * np.minimum(1, 0.3 / size)
            np.testing.assert_allclose(moved, clipped - DECAY * path[:-1], atol=1e-12)
            assert np.max(np.abs(moved - proposed)) > 0.1
        else:
            np.testing.assert_allclose(moved, proposed, atol=1e-12)
        error = means - path[:-1] @ curvature
        gain = np.asarray(infos.gain)[:, None]
        np.testing.assert_allclose(
            error[1:], (1 - gain[1:]) * error[:-1] + gain[1:] * noise[1:], atol=1e-12
        )
        np.testing.assert_allclose(error[0], noise[0], atol=1e-12)


# State and information.


def test_state_is_two_buffers_and_scalars():
    params = {"a": jnp.ones((30, 20)), "b": [jnp.ones(400)]}
    size = 1000
    leaves = jax.tree.leaves(meka.meka().init(params))
    assert sum(x.size for x in leaves if x.ndim) == 2 * size
    assert sum(x.ndim == 0 for x in leaves) < 64
    leaves = jax.tree.leaves(meka.adameka(diagonal=True).init(params))
    assert sum(x.size for x in leaves if x.ndim) == 4 * size  # and P, Σ


def test_info_is_readable_from_any_chain():
    _, state, info = compiled("chain")(
        start(), OPTIMIZERS["chain"].init(start()), batches(1)[0]
    )
    found = optax.tree.get(state, "info")
    assert bits(found) == bits(info)
    for name in (
        "step_size",
        "gain",
        "value",
        "value_variance",
        "gradient_norm",
        "gradient_noise",
        "change_noise",
        "model_error",
        "slope",
        "curvature",
        "improvement_probability",
        "predicted_change",
        "noise_scale",
        "rejected",
    ):
        number = getattr(found, name)
        assert number.shape == ()
        assert np.isfinite(number), name
    assert 0 <= found.improvement_probability <= 1
    assert found.gain == 1  # of the first step, with an infinite prior
    assert meka.find_state(state).info.value == found.value


def test_info_says_what_happened():
    """Against the observation it was made from."""
    step = jax.jit(meka.make_step(losses, OPTIMIZERS["meka"], noise_every=1))
    data = batches(3)
    params, state = start(), OPTIMIZERS["meka"].init(start())
    before, old = params, state
    for batch in data:
        before, old = params, state
        params, state, info = step(params, state, batch)
    own, was = meka.find_state(state), meka.find_state(old)
    seen = jax.jit(partial(meka.observe, losses))(before, was.previous_params, data[-1])
    close = partial(np.testing.assert_allclose, rtol=2e-4)
    close(info.observed, seen.value.mean)
    close(info.value, own.value.mean)
    close(info.value_variance, own.value.variance)
    mean = ravel_pytree(own.gradient.mean)[0]
    close(info.gradient_norm, np.linalg.norm(mean))
    close(info.gradient_variance, own.gradient.variance)
    close(info.gradient_noise, own.gradient_noise.mean)
    close(info.change_noise, seen.change.variance)
    close(info.gain, info.gradient_variance / info.gradient_noise)  # P = KΣ
    prior = was.gradient.variance + seen.change.variance
    close(info.gain, prior / (prior + info.gradient_noise))
    close(info.noise_scale, COUNT * 4 * info.gradient_noise / info.gradient_norm**2)
    close(info.direction_norm, info.gradient_norm)
    close(info.predicted_change, info.model.mean(info.step_size))
    close(info.improvement_probability, info.model.probability(info.step_size))
    close(info.slope, info.gradient_norm**2)
    predicted = ravel_pytree(was.gradient.mean)[0] + ravel_pytree(seen.change.mean)[0]
    surprise = np.sum((ravel_pytree(seen.gradient.mean)[0] - predicted) ** 2) / 4
    close(info.gradient_innovation, surprise / (prior + info.gradient_noise))
    assert own.count == info.model.step + 1 == 3


def test_filter_innovations_are_calibrated():
    """On the model's own terms the normalised innovations average one.

    Same Hessian for all, isotropic noise, 400 steps in 3 dimensions: the gradient's
    average of 399 squares of 3 numbers has deviation √(2/1197) = 0.041, held to 6 of
    it: false alarm below 1e-8. The noise is estimated from 4 groups, so early gains
    are only roughly 1/t.
    """
    rng = np.random.default_rng(3)
    data = jnp.asarray(rng.normal(size=(400, 8, 3)), jnp.float32)

    def round_bowl(params, batch):
        return jnp.sum((params["x"][None] - batch) ** 2, axis=1) / 2

    _, infos, _ = run_quadratic(round_bowl, meka.meka(meka.constant(0.05)), data)
    assert np.mean(infos.gradient_innovation[1:]) == pytest.approx(1, abs=0.25)
    np.testing.assert_allclose(infos.gain, 1 / np.arange(1, 401), rtol=0.5)


def test_options_reach_both_optimizers():
    for make in (meka.meka, meka.adameka):
        state = make(diagonal=True, prior_variance=7.0).init(start())
        variance = meka.find_state(state).gradient.variance
        assert [float(x.ravel()[0]) for x in jax.tree.leaves(variance)] == [7, 7]
        with pytest.raises(TypeError, match="unexpected keyword"):
            make(learning_rate=0.1)


def test_without_a_rule_it_sees_the_same_and_goes_nowhere():
    """Along one path, moved by hand: the beliefs are those of a filter that steps."""
    along = {
        "steps": meka.scale_by_meka(meka.constant(0.1)),
        "watches": meka.scale_by_meka(None),
    }
    params = start()
    states = {name: optimizer.init(params) for name, optimizer in along.items()}
    looks = jax.jit(
        lambda params, before, batch: meka.observe(losses, params, before, batch)
    )
    for batch in batches(8):
        before = meka.find_state(states["steps"]).previous_params
        seen = looks(params, before, batch)
        curve = meka.curve(losses, params, batch)
        for name, optimizer in along.items():
            steps, states[name] = optimizer.update(
                seen.gradient.mean,
                states[name],
                params,
                observation=seen,
                probe=lambda scene, curve=curve: meka.current(scene, curve),
            )
            moves = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(steps))
            assert (moves > 0) is (name == "steps")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, seen.gradient.mean)
    one, other = (meka.find_state(state) for state in states.values())
    assert other.steps == ()
    assert float(other.info.step_size) == 0
    assert 0 < float(other.info.gain) < 1
    for field in ("value", "gradient", "gradient_noise", "value_noise"):
        assert bits(getattr(one, field)) == bits(getattr(other, field))
