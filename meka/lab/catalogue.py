"""The workloads that have a name.

To add one, write a function under `@_named(...)` that returns a `Workload`. Nothing
heavy is imported until one is built, so that the names can be listed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from meka.lab.problems import Problem
    from meka.lab.workloads import Workload

Builder = Callable[[Path | str | None], "Workload"]

WRONG_LABELS = 0.2
"""The share of the training labels of `digits-noisy` that are wrong."""


@dataclass(frozen=True)
class Named:
    """A line that says what it is, and what builds it from the folder of the data."""

    summary: str
    build: Builder


NAMED: dict[str, Named] = {}
"""Every workload that has a name."""


def _named(name: str, summary: str) -> Callable[[Builder], Builder]:
    def register(build: Builder) -> Builder:
        NAMED[name] = Named(summary, build)
        return build

    return register


@_named("quadratic", "noisy quadratic, 20 dimensions, condition number 2000")
def _quadratic(data_dir: Path | str | None) -> Workload:
    from meka.lab import problems

    return _problem("quadratic", problems.noisy_quadratic(), steps=3000)


@_named("rosenbrock", "stochastic Rosenbrock valley, 2 dimensions")
def _rosenbrock(data_dir: Path | str | None) -> Workload:
    from meka.lab import problems

    return _problem("rosenbrock", problems.rosenbrock(), steps=2000)


@_named("digits", "8x8 digits (part of the package), MLP 64-100-10")
def _digits(data_dir: Path | str | None) -> Workload:
    from meka.lab import data, models, workloads

    return workloads.classifier(
        "digits",
        lambda key: models.mlp(key, (64, 100, 10)),
        data.load("digits"),
        steps=1000,
    )


@_named("digits-noisy", "the same, with 20 % of the training labels wrong")
def _digits_noisy(data_dir: Path | str | None) -> Workload:
    from meka.lab import data, models, workloads

    clean = data.load("digits")
    inputs, labels = clean.train
    wrong = data.mislabelled(labels, WRONG_LABELS, data.CLASSES)
    return workloads.classifier(
        "digits-noisy",
        lambda key: models.mlp(key, (64, 100, 10)),
        data.Data((inputs, wrong), clean.test),
        steps=1000,
    )


@_named("mnist", "MNIST, MLP 784-100-10, 8 epochs")
def _mnist(data_dir: Path | str | None) -> Workload:
    from meka.lab import data, models, workloads

    return workloads.classifier(
        "mnist", models.mlp, data.load("mnist", data_dir), epochs=8
    )


@_named("mnist-logistic", "MNIST, logistic regression (convex), 5 epochs")
def _mnist_logistic(data_dir: Path | str | None) -> Workload:
    from meka.lab import data, models, workloads

    return workloads.classifier(
        "mnist-logistic",
        lambda key: models.mlp(key, (784, 10)),
        data.load("mnist", data_dir),
        epochs=5,
    )


@_named("mnist-autoencoder", "MNIST, small convolutional autoencoder, batch 64")
def _mnist_autoencoder(data_dir: Path | str | None) -> Workload:
    import jax.numpy as jnp

    from meka.lab import data, models, workloads

    images = data.load("mnist", data_dir)
    init, reconstruct = workloads.functional(models.autoencoder)

    def losses(params: Any, batch: Any) -> jax.Array:
        """The squared error of each image, summed over its pixels."""
        pixels, _ = batch
        return jnp.sum(jnp.square(reconstruct(params, pixels) - pixels), axis=1)

    return workloads.Workload(
        "mnist-autoencoder",
        init,
        losses,
        batch_size=64,
        steps=600,
        data=images,
        convolutional=True,
    )


@_named("text", "the standard library's sources, character by character; transformer")
def _text(data_dir: Path | str | None) -> Workload:
    from meka.lab import text

    size = {"width": 32, "depth": 2, "heads": 2}
    return _language("text", text.SMALL, batch_size=8, steps=1000, **size)


@_named("text-large", "more of those sources, transformer of ten million parameters")
def _text_large(data_dir: Path | str | None) -> Workload:
    from meka.lab import text

    size = {"width": 320, "depth": 8, "heads": 5}
    return _language("text-large", text.LARGE, batch_size=64, steps=1500, **size)


@_named("cifar10-cnn", "CIFAR-10, DeepOBS's 3c3d, crops and flips, 12 epochs")
def _cifar10_cnn(data_dir: Path | str | None) -> Workload:
    from meka.lab import data, models, workloads

    return workloads.classifier(
        "cifar10-cnn",
        models.cnn_3c3d,
        data.load("cifar10", data_dir),
        epochs=12,
        augment=_crop_and_flip,
        convolutional=True,
    )


@_named("cifar10-resnet32", "CIFAR-10, ResNet-32, crops and flips, 6 epochs")
def _cifar10_resnet32(data_dir: Path | str | None) -> Workload:
    from meka.lab import data, models, workloads

    return workloads.classifier(
        "cifar10-resnet32",
        models.resnet32,
        data.load("cifar10", data_dir),
        epochs=6,
        augment=_crop_and_flip,
        convolutional=True,
    )


def _problem(name: str, problem: Problem, steps: int) -> Workload:
    from meka.lab import workloads

    return workloads.Workload(
        name,
        lambda key: problem.start,
        problem.losses,
        workloads.BATCH_SIZE,
        steps,
        draw=problem.draw,
        objective=problem.objective,
    )


def _language(
    name: str, characters: int, *, batch_size: int, steps: int, **size: int
) -> Workload:
    """Predict each next character; the loss of a sequence is the mean over it."""
    import jax.numpy as jnp
    import optax

    from meka.lab import text, transformer, workloads

    init, logits = workloads.functional(
        lambda key: transformer.transformer(
            key, vocabulary=text.VOCABULARY, length=text.LENGTH, **size
        )
    )

    def losses(params: Any, batch: Any) -> jax.Array:
        seen, following = batch
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, seen), following
        )
        return jnp.mean(each, axis=1)

    return workloads.Workload(
        name, init, losses, batch_size, steps, data=text.load(characters)
    )


def _crop_and_flip(key: jax.Array, batch: Any) -> Any:
    from meka.lab.augment import crop_and_flip

    images, labels = batch
    return crop_and_flip(key, images), labels
