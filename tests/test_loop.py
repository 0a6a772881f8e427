"""The loop: what a step sees, chunks and seeds that agree, evaluation that adds up."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax import contrib

from meka.lab import optimizers
from meka.lab.data import Data
from meka.lab.loop import CHUNK, Loop, _Evaluator
from meka.lab.methods import Method
from meka.lab.workloads import Workload, WorkloadError


def losses(params, batch):
    inputs, targets = batch
    return 0.5 * (inputs @ params - targets) ** 2


def least_squares(rows=64, test_rows=20, **more) -> Workload:
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(rows + test_rows, 2)).astype(np.float32)
    noise = 0.3 * rng.normal(size=rows + test_rows)
    targets = (inputs @ np.array([1.0, -2.0]) + noise).astype(np.float32)
    train, test = slice(0, rows), slice(rows, None)
    return Workload(
        "least squares",
        lambda key: jax.random.normal(key, (2,)),
        losses,
        8,
        100,
        data=Data((inputs[train], targets[train]), (inputs[test], targets[test])),
        **more,
    )


def make(name, workload=None, *, learning_rate=None, **more) -> Loop:
    workload = workload or least_squares()
    method = optimizers.make(
        name, workload.losses, steps=100, learning_rate=learning_rate
    )
    return Loop(workload, method, **more)


def same_bits(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def agree(one, other, rtol=2e-4):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)


# What a step sees ---------------------------------------------------------------------

# A method that learns nothing and logs the batch it was given.
WITNESS = Method(
    init=lambda params: (),
    step=lambda params, state, batch, number: (
        params,
        state,
        {"loss": 0.0, "seen": batch[0]},
    ),
    evaluate=lambda params, state: params,
)


def witness(rows: int, batch_size: int, **more) -> Loop:
    numbers = np.arange(rows, dtype=np.float32)
    workload = Workload(
        "numbered",
        lambda key: jnp.zeros(2),
        lambda params, batch: batch[0],
        batch_size,
        100,
        data=Data((numbers, numbers), (numbers, numbers)),
    )
    return Loop(workload, WITNESS, **more)


def seen(loop: Loop, start: int, length: int) -> np.ndarray:
    return loop.advance(loop.start(), start, length)[1]["seen"]


def test_every_epoch_is_a_permutation():
    rows = seen(witness(20, 5, seed=3), 0, 12)[:, 0]
    epochs = rows.reshape(3, 20)
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_no_example_twice_where_the_last_batch_would_be_short():
    loop = witness(20, 6)
    assert loop.steps_per_epoch == 3
    for epoch in seen(loop, 0, 30)[:, 0].reshape(10, 18):
        assert len(set(epoch)) == 18
    # Those left over are not always the same.
    assert len(np.unique(seen(loop, 0, 6))) == 20


def test_batches_depend_on_seed_and_step_alone():
    both = witness(20, 6, seed=3, seeds=2)
    rows = seen(both, 0, 12)
    assert not np.array_equal(rows[:, 0], rows[:, 1])
    # Another loop, begun in the middle, and a seed on its own: the same rows.
    np.testing.assert_array_equal(
        seen(witness(20, 6, seed=3, seeds=2), 4, 5), rows[4:9]
    )
    np.testing.assert_array_equal(seen(witness(20, 6, seed=4), 0, 12)[:, 0], rows[:, 1])


def test_drawn_and_augmented_batches_depend_on_seed_and_step_alone():
    workload = Workload(
        "endless",
        lambda key: jnp.zeros(2),
        lambda params, batch: batch[0],
        3,
        100,
        draw=lambda key, n: (jax.random.normal(key, (n,)),),
        augment=lambda key, batch: (batch[0] + 100 * jax.random.uniform(key),),
    )
    values = seen(Loop(workload, WITNESS, seed=3, seeds=2), 0, 9)
    assert len(np.unique(values)) == values.size
    again = seen(Loop(workload, WITNESS, seed=4), 5, 3)[:, 0]
    np.testing.assert_array_equal(again, values[5:8, 1])


def test_places_in_a_batch_are_rows_of_the_data():
    loop = witness(20, 6, seed=3, seeds=2)
    places = np.array([[-1, 5], [0, -1], [2, 3]])
    rows = loop.data_rows(7, places)
    expected = seen(loop, 7, 3)
    assert rows.tolist() == [
        [-1, expected[0, 1, 5]],
        [expected[1, 0, 0], -1],
        [expected[2, 0, 2], expected[2, 1, 3]],
    ]


def test_refuses_a_batch_larger_than_the_data():
    with pytest.raises(ValueError, match="batch_size 65 is more than the 64"):
        make("sgd", batch_size=65)


# Steps --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_seeds():
    return make("adameka", seeds=2, average=True)


@pytest.fixture(scope="module")
def second_seed():
    return make("adameka", seed=1, average=True)


def test_chunk_lengths_do_not_change_bits(two_seeds):
    whole, logs = two_seeds.advance(two_seeds.start(), 0, 12)
    carry, first = two_seeds.advance(two_seeds.start(), 0, 7)
    carry, second = two_seeds.advance(carry, 7, 5)
    assert same_bits(whole, carry)
    assert {x.shape for x in logs.values()} == {(12, 2)}
    for name, column in logs.items():
        joined = np.concatenate([first[name], second[name]])
        assert column.tobytes() == joined.tobytes(), name


def test_seeds_together_are_the_seeds_alone(two_seeds, second_seed):
    together, logs = two_seeds.advance(two_seeds.start(), 0, 20)
    alone, own_logs = second_seed.advance(second_seed.start(), 0, 20)
    agree(jax.tree.map(lambda x: x[1:], together), alone)
    np.testing.assert_allclose(logs["loss"][:, 1:], own_logs["loss"], rtol=2e-4)
    assert not np.allclose(logs["loss"][:, 0], logs["loss"][:, 1])


def test_seeds_in_turn_are_the_seeds_together(two_seeds):
    workload = least_squares(convolutional=True)
    in_turn = make("adameka", workload, seeds=2, average=True)
    carry, logs = in_turn.advance(in_turn.start(), 0, 9)
    carry, more = in_turn.advance(carry, 9, 3)
    together, expected = two_seeds.advance(two_seeds.start(), 0, 12)
    agree(carry, together)
    joined = {name: np.concatenate([logs[name], more[name]]) for name in logs}
    assert {x.shape for x in joined.values()} == {(12, 2)}
    np.testing.assert_allclose(joined["loss"], expected["loss"], rtol=2e-4)


@pytest.mark.parametrize("seeds", [1, 2])
def test_convolutions_stay_fast_in_the_loop(seeds):
    """On a lone CPU they have to be in the order of its fast kernel."""

    def losses(params, batch):
        numbers = ("NCHW", "OIHW", "NCHW")
        found = jax.lax.conv_general_dilated(
            batch[0], params, (1, 1), "SAME", dimension_numbers=numbers
        )
        return jnp.mean(jnp.tanh(found), (1, 2, 3)) - batch[1]

    data = (np.ones((16, 2, 5, 5), np.float32), np.zeros(16, np.float32))
    workload = Workload(
        "images",
        lambda key: jax.random.normal(key, (3, 2, 3, 3)),
        losses,
        4,
        10,
        data=Data(data, data),
        convolutional=True,
    )
    loop = make("auto", workload, seeds=seeds)
    given = loop._data, np.zeros((CHUNK, seeds, 4), np.int32), 0, 1, loop._keys
    text = loop._run_chunk.lower(loop.start(), *given).compile().as_text() or ""
    found = [line for line in text.splitlines() if " convolution(" in line]
    assert found
    assert all("dim_labels=b01f_01io->b01f" in line for line in found)


def test_a_chunk_has_a_limit(second_seed):
    with pytest.raises(ValueError, match=f"at most {CHUNK} steps at once"):
        second_seed.advance(second_seed.start(), 0, CHUNK + 1)


def test_the_average_has_polynomially_decaying_weights():
    loop = make("sgd", learning_rate=0.3, average=True)
    carry, iterates = loop.start(), []
    for step in range(30):
        carry, _ = loop.advance(carry, step, 1)
        iterates.append(np.asarray(carry.params[0], np.float64))
    # Shamir and Zhang (2013) with eta = 8: the weight of t is proportional to
    # t (t + 1) ... (t + 7), so the first iterates hardly count.
    counts = np.arange(1.0, 31.0)
    weights = np.prod([counts + k for k in range(8)], axis=0)
    expected = weights @ np.array(iterates) / weights.sum()
    np.testing.assert_allclose(carry.average[0], expected, rtol=1e-5)
    results = loop.evaluate(carry)[0]
    data = loop.workload.data
    assert data is not None
    direct = np.mean(losses(expected, data.train))
    assert results["average_train_loss"] == pytest.approx(direct, rel=1e-5)
    assert results["average_train_loss"] != results["train_loss"]


# Evaluation ---------------------------------------------------------------------------


def direct(params, batch) -> tuple[float, float]:
    inputs, targets = (np.asarray(part, np.float64) for part in batch)
    residual = inputs @ np.asarray(params, np.float64) - targets
    return float(np.mean(0.5 * residual**2)), float(np.mean(residual > 0))


def above(params, batch):
    return batch[0] @ params > batch[1]


def test_evaluation_is_the_mean_over_all_data():
    workload = least_squares(4500, 2300, correct=above)  # slices of 2000, and a rest
    loop = make("sgd", workload, seeds=2)
    carry = loop.start()
    for params, results in zip(carry.params, loop.evaluate(carry), strict=True):
        assert workload.data is not None
        for name, batch in zip(("train", "test"), workload.data, strict=True):
            loss, accuracy = direct(params, batch)
            assert results[f"{name}_loss"] == pytest.approx(loss, rel=1e-5)
            assert results[f"{name}_accuracy"] == pytest.approx(accuracy, abs=1e-3)


def test_seeds_evaluated_in_turn_are_as_those_evaluated_at_once():
    workload = least_squares(1900, 2100, correct=above)
    params = make("sgd", workload, seeds=3).start().params
    at_once = _Evaluator(workload, None)(params)
    convolutional = dataclasses.replace(workload, convolutional=True)
    in_turn = _Evaluator(convolutional, None)(params)
    assert at_once.keys() == in_turn.keys()
    for name, values in in_turn.items():
        np.testing.assert_allclose(values, at_once[name], rtol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="all of it everywhere else")
def test_where_convolutions_are_slow_a_part_of_the_training_data_is_evaluated():
    workload = least_squares(4500, 2300, convolutional=True)
    loop = make("sgd", workload)
    carry = loop.start()
    results = loop.evaluate(carry)[0]
    assert workload.data is not None
    part = tuple(x[:2000] for x in workload.data.train)
    loss, _ = direct(carry.params[0], part)
    assert results["train_loss"] == pytest.approx(loss, rel=1e-5)
    loss, _ = direct(carry.params[0], workload.data.test)
    assert results["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_schedule_free_is_evaluated_at_its_own_parameters():
    loop = make("schedule-free-adamw", learning_rate=0.1, average=True)
    carry, _ = loop.advance(loop.start(), 0, 40)
    params, state = jax.tree.map(lambda x: x[0], (carry.params, carry.state))
    own = contrib.schedule_free_eval_params(state.inner, params)
    data = loop.workload.data
    assert data is not None
    results = loop.evaluate(carry)[0]
    at_own, at_params = (direct(p, data.train)[0] for p in (own, params))
    assert results["train_loss"] == pytest.approx(at_own, rel=1e-5)
    assert abs(at_own - at_params) > 1e-3 * at_own


def test_an_exact_objective_is_evaluated_as_it_is():
    workload = dataclasses.replace(
        least_squares(),
        data=None,
        draw=lambda key, n: (jnp.ones((n, 2)), jnp.ones(n)),
        objective=lambda params: jnp.sum(params) + 7,
    )
    loop = make("sgd", workload, seeds=2)
    carry = loop.start()
    for params, results in zip(carry.params, loop.evaluate(carry), strict=True):
        assert results == {"train_loss": pytest.approx(float(params.sum()) + 7)}


def test_endless_data_without_an_objective_is_evaluated_on_a_fixed_sample():
    def draw(key, n):
        inputs = jax.random.normal(key, (n, 2))
        return inputs, inputs @ jnp.array([1.0, -2.0])

    workload = dataclasses.replace(least_squares(), data=None, draw=draw)
    loop = make("sgd", workload)
    carry = loop.start()
    results = loop.evaluate(carry)[0]
    # Mean of (x'e)^2 / 2 over standard normal x, within five standard deviations.
    exact = 0.5 * float(jnp.sum((carry.params[0] - jnp.array([1.0, -2.0])) ** 2))
    assert results["train_loss"] == pytest.approx(exact, rel=5 * np.sqrt(2 / 2000))
    assert make("sgd", workload).evaluate(carry)[0] == results


# Full gradients -----------------------------------------------------------------------


def test_refresh_sees_the_whole_training_set():
    workload = least_squares(4500)
    loop = make("svrg", workload, learning_rate=0.1, seeds=2)
    carry = loop.refresh(loop.start())
    assert workload.data is not None
    inputs, targets = (np.asarray(x, np.float64) for x in workload.data.train)
    for params, gradient in zip(carry.params, carry.state.full_gradient, strict=True):
        residual = inputs @ np.asarray(params, np.float64) - targets
        np.testing.assert_allclose(gradient, residual @ inputs / 4500, rtol=1e-4)


def test_svrg_refuses_endless_data():
    endless = dataclasses.replace(
        least_squares(), data=None, draw=lambda key, n: (jnp.ones((n, 2)), jnp.ones(n))
    )
    with pytest.raises(WorkloadError, match=r"endless data.*Choose another optimizer"):
        make("svrg", endless)
