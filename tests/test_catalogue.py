"""The workloads made for the scorecard: wrong labels, text, and an autoencoder."""

import sysconfig
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka.lab import data, text, workloads
from meka.lab.data import Data
from meka.lab.loop import Loop
from meka.lab.optimizers import make

KEY = jax.random.key(0)


@pytest.fixture
def strokes(monkeypatch: pytest.MonkeyPatch) -> Data:
    """Stands in for MNIST: bright squares at places that the label tells."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 400).astype(np.int32)
    images = np.zeros((400, 28, 28), np.float32)
    for image, label in zip(images, labels, strict=True):
        row, column = 4 * (label // 4) + 4, 5 * (label % 4) + 3
        image[row : row + 8, column : column + 6] = rng.uniform(0.7, 1)
    pixels = images.reshape(400, 784)
    made = Data((pixels[:300], labels[:300]), (pixels[300:], labels[300:]))
    monkeypatch.setattr(data, "load", lambda name, folder=None: made)
    return made


def test_a_fifth_of_the_training_labels_is_wrong_and_no_test_label():
    clean, noisy = workloads.load("digits").data, workloads.load("digits-noisy").data
    assert clean is not None
    assert noisy is not None
    assert np.mean(clean.train[1] != noisy.train[1]) == 0.2
    np.testing.assert_array_equal(clean.test[1], noisy.test[1])
    np.testing.assert_array_equal(clean.train[0], noisy.train[0])
    again = workloads.load("digits-noisy").data
    assert again is not None
    np.testing.assert_array_equal(noisy.train[1], again.train[1])


def test_wrong_labels_are_any_of_the_others():
    labels = np.repeat(np.arange(10, dtype=np.int32), 300)
    wrong = data.mislabelled(labels, 1.0, 10)
    assert not np.any(wrong == labels)
    assert wrong.dtype == labels.dtype
    counts = np.bincount(wrong[labels == 3], minlength=10)
    assert counts[3] == 0
    # 300 draws from nine classes: each between 12 and 55 but once in 10⁴ fixed seeds.
    assert np.all(np.delete(counts, 3) > 12)
    assert np.all(counts < 55)


def test_text_is_the_same_every_time_and_the_splits_share_nothing():
    first, second = text.load(20_000), text.load(20_000)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    (seen, following), (test_seen, test_following) = first
    assert seen.shape[1] == following.shape[1] == text.LENGTH
    np.testing.assert_array_equal(seen[:, 1:], following[:, :-1])
    characters = "".join(map(chr, np.concatenate([seen.ravel(), following[-1, -1:]])))
    held_out = "".join(
        map(chr, np.concatenate([test_seen.ravel(), test_following[-1, -1:]]))
    )
    whole = text.collect(20_000)
    assert whole.startswith(characters)
    # One after the other, with a gap: no character is in both.
    assert whole.find(held_out) >= len(characters)
    assert 0.08 < len(test_seen) / len(seen) < 0.13


def test_text_comes_from_this_python_and_keeps_to_its_size():
    whole = text.collect(5000)
    assert len(whole) == 5000
    assert whole.isascii()
    assert "GPL-compatible" in text.collect(200_000) or "import " in whole
    most = text.collect(10**7)
    assert 10**6 < len(most) < 10**7
    assert "import " in most


def test_a_python_without_sources_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(data.DataError, match="no sources"):
        text.collect(100)


def test_text_workload_has_a_finite_loss_per_sequence():
    workload = workloads.load("text")
    workloads.check(workload)  # shapes, finite, sequences independent
    assert workload.data is not None
    params = workload.init(KEY)
    batch = jax.tree.map(lambda x: jnp.asarray(x[:4]), workload.data.train)
    losses = np.asarray(jax.jit(workload.losses)(params, batch))
    assert losses.shape == (4,)
    # Untrained, it is about as unsure as of 128 equal characters.
    np.testing.assert_allclose(losses, np.log(text.VOCABULARY), rtol=0.1)


def test_the_large_relative_has_ten_million_parameters():
    workload = workloads.load("text-large")
    shapes = jax.tree.leaves(jax.eval_shape(workload.init, KEY))
    assert 9e6 < sum(x.size for x in shapes) < 11e6


def test_logistic_regression_is_convex_and_small(strokes):
    workload = workloads.load("mnist-logistic")
    shapes = [x.shape for x in jax.tree.leaves(jax.eval_shape(workload.init, KEY))]
    assert sorted(shapes) == [(10,), (784, 10)]
    assert workload.steps == 5 * (300 // 128)


@pytest.mark.slow
def test_the_autoencoder_learns(strokes):
    workload = workloads.load("mnist-autoencoder", steps=40)
    assert workload.correct is None  # its test metric is the loss
    assert workload.convolutional
    loop = Loop(workload, make("adam", workload.losses, steps=40, learning_rate=0.01))
    carry = loop.start()
    carry, _ = loop.advance(carry, 0, 40)
    after = loop.evaluate(carry)[0]
    # Black everywhere would leave the squared brightness of the strokes.
    black = float(np.mean(np.sum(strokes.test[0] ** 2, axis=1)))
    assert after["test_loss"] < 0.5 * black
    assert after["train_loss"] < 0.5 * black


def test_an_evaluation_may_look_at_part_of_the_data():
    workload = workloads.load("digits")
    assert workload.data is not None
    method = make("sgd", workload.losses, steps=1)
    loop = Loop(workload, method, eval_examples=50)
    carry = loop.start()
    found = loop.evaluate(carry)[0]
    params = jax.tree.map(lambda x: x[0], carry.params)

    def mean(batch: Any) -> float:
        rows = np.linspace(0, len(batch[0]) - 1, 50).astype(int)
        return float(np.mean(workload.losses(params, (batch[0][rows], batch[1][rows]))))

    assert found["train_loss"] == pytest.approx(mean(workload.data.train), rel=1e-5)
    assert found["test_loss"] == pytest.approx(mean(workload.data.test), rel=1e-5)
