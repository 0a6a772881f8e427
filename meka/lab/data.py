"""Data sets as arrays: embedded digits, MNIST and CIFAR-10.

The formats are read directly (IDX, CIFAR's binary records) from bytes whose digest
was checked (`meka.lab.files`); nothing is unpickled. Labels, shapes and values are
checked once more before training, for a user's own arrays too.
"""

# digits.npz: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak
# (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0
# (https://creativecommons.org/licenses/by/4.0/). Its rows are stored in a fixed
# random order, so that the split needs no generator; see digits.LICENSE.txt.

from __future__ import annotations

import difflib
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meka.lab import files
from meka.lab.download import Progress
from meka.lab.files import Check, DataError, File

__all__ = [
    "CLASSES",
    "NAMES",
    "Batch",
    "Check",
    "Data",
    "DataError",
    "check_batch",
    "check_labels",
    "fetch",
    "load",
    "mislabelled",
    "verify",
]

NAMES = ("digits", "mnist", "cifar10")
CLASSES = 10  # of every data set here

DIGITS = File(
    "digits.npz",
    46319,
    "1144d4003c39a84471483055ad053b18c279ac620335dc9951f06fd3b59bc791",
)
DIGITS_TRAIN = 1500
_WRONG_SEED = 20  # of the labels that are made wrong: the same ones every time
CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes

Batch = tuple[np.ndarray, np.ndarray]
"""Inputs (float32 or uint8) and labels (int32), examples on the leading axis."""


class Data(NamedTuple):
    """A finite data set, already split."""

    train: Batch
    test: Batch


def load(
    name: str, folder: Path | str | None = None, progress: Progress | None = None
) -> Data:
    """Load a data set by name.

    The files come from the folder, else from MEKA_DATA, else from a download into the
    user's cache (`digits` is part of the package). A named folder is only ever read.

    | name    | inputs                                       | train  | test   |
    |---------|----------------------------------------------|--------|--------|
    | digits  | (n, 64) in [0, 1]                            |  1,500 |    297 |
    | mnist   | (n, 784) in [0, 1]                           | 60,000 | 10,000 |
    | cifar10 | (n, 32, 32, 3), standardised by one mean and | 50,000 | 10,000 |
    |         | one deviation over all training pixels       |        |        |
    """
    _require_name(name)
    if name == "digits":
        data = _digits()
    else:
        contents = _contents(name, folder, progress)
        data = _mnist(contents) if name == "mnist" else _cifar10(contents)
    for split, batch in zip(data._fields, data, strict=True):
        check_batch(batch, CLASSES, f"{name} {split}")
    return data


def fetch(
    name: str, folder: Path | str | None = None, progress: Progress | None = None
) -> list[Path]:
    """Download what is missing of a data set; see `meka.lab.files.fetch`."""
    _require_name(name)
    return [_embedded()] if name == "digits" else files.fetch(name, folder, progress)


def verify(name: str, folder: Path | str | None = None) -> list[Check]:
    """Compare every file of a data set with its published digest."""
    _require_name(name)
    if name == "digits":
        return [files.check(_embedded(), DIGITS)]
    return files.verify(name, folder)


def mislabelled(labels: np.ndarray, share: float, classes: int) -> np.ndarray:
    """Copy labels with this share of them, the same ones every time, made wrong."""
    rng = np.random.default_rng(_WRONG_SEED)
    rows = rng.permutation(len(labels))[: round(share * len(labels))]
    wrong = labels.copy()
    # Any of the other classes, each as likely.
    shift = rng.integers(1, classes, len(rows)).astype(labels.dtype)
    wrong[rows] = (labels[rows] + shift) % classes
    return wrong


def check_labels(labels: Any, classes: int, where: str = "labels") -> None:
    """Refuse labels that are not a vector of integers in [0, classes).

    JAX gives an out-of-range label no error: it wraps negative ones and returns NaN
    for the others, a thousand steps later.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{where}: labels must be integers of shape (n,), got "
            f"{labels.dtype} {labels.shape}"
        )
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{where}: label {labels[row]} in row {row} is outside 0..{classes - 1} "
            f"({int(wrong.sum())} such rows)"
        )


def check_batch(batch: Any, classes: int | None = None, where: str = "batch") -> None:
    """Refuse a pair (inputs, labels) that training would choke on.

    Both need the same number of rows, at least one; inputs are float32 or uint8 and
    finite. With `classes`, the labels must be class numbers; without, any finite
    numbers (regression) that the 32 bits jax keeps them in can hold.
    """
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise DataError(f"{where}: expected a pair (inputs, labels), got {type(batch)}")
    inputs, labels = (np.asarray(part) for part in batch)
    if inputs.ndim < 1 or labels.ndim < 1 or len(inputs) != len(labels):
        raise DataError(
            f"{where}: inputs {inputs.shape} and labels {labels.shape} need the same "
            "number of rows on the leading axis"
        )
    if len(inputs) == 0:
        raise DataError(f"{where}: no examples")
    if inputs.dtype not in (np.float32, np.uint8):
        raise DataError(
            f"{where}: inputs are {inputs.dtype}, expected float32 or uint8; convert "
            "them with .astype(np.float32)"
        )
    _require_finite(inputs, f"{where}: inputs")
    if classes is not None:
        check_labels(labels, classes, where)
    else:
        _require_numbers(labels, f"{where}: labels")


def _require_numbers(values: np.ndarray, where: str) -> None:
    """Refuse what is no number, and what 32 bits would turn into another one."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where} are {values.dtype}, expected real numbers")
    _require_finite(values, where)
    kind = values.dtype.kind
    limits = np.iinfo(np.int32) if kind in "iu" else np.finfo(np.float32)
    wrong = (values < limits.min) | (values > limits.max)
    if kind != "b" and wrong.any():
        row = int(wrong.reshape(len(values), -1).any(axis=1).argmax())
        raise DataError(
            f"{where} in row {row} are beyond the range of "
            f"{'int32' if kind in 'iu' else 'float32'}, in which they are kept"
        )


def _require_finite(values: np.ndarray, where: str) -> None:
    if values.size == 0 or not np.issubdtype(values.dtype, np.inexact):
        return
    # min and max carry NaN and infinity along and need no array of flags.
    if np.isfinite(values.min()) and np.isfinite(values.max()):
        return
    rows = values.reshape(len(values), -1)
    row = next(k for k, r in enumerate(rows) if not np.isfinite(r).all())
    raise DataError(f"{where} in row {row} are not finite")


def _require_name(name: str) -> None:
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"no data set {name!r}; there are {', '.join(NAMES)}{hint}")


def _contents(
    name: str, folder: Path | str | None, progress: Progress | None
) -> dict[str, bytes]:
    root = files.named_folder(folder)
    if root is not None:
        return dict(files.contents(name, root))
    try:
        return dict(files.contents(name, files.cache_folder()))
    except DataError:  # nothing in the cache yet, or damaged since
        files.fetch(name, files.cache_folder(), progress)
        return dict(files.contents(name, files.cache_folder()))


def _embedded() -> Path:
    return Path(__file__).with_name(DIGITS.name)


def _digits() -> Data:
    with np.load(io.BytesIO(files.read(_embedded(), DIGITS))) as archive:
        images = archive["images"].astype(np.float32) / np.float32(16)
        labels = archive["labels"].astype(np.int32)
    return Data(
        (images[:DIGITS_TRAIN], labels[:DIGITS_TRAIN]),
        (images[DIGITS_TRAIN:], labels[DIGITS_TRAIN:]),
    )


def _mnist(contents: Mapping[str, bytes]) -> Data:
    def split(prefix: str) -> Batch:
        images = _idx(contents, f"{prefix}-images-idx3-ubyte", 3)
        labels = _idx(contents, f"{prefix}-labels-idx1-ubyte", 1)
        pixels = images.reshape(len(images), -1).astype(np.float32)
        pixels /= np.float32(255)
        return pixels, labels.astype(np.int32)

    return Data(split("train"), split("t10k"))


def _idx(contents: Mapping[str, bytes], name: str, rank: int) -> np.ndarray:
    """Parse an IDX file of bytes: magic, the sizes (big-endian), then the values."""
    data = contents[name]
    start = 4 * (1 + rank)
    if len(data) < start or data[:4] != bytes((0, 0, 8, rank)):
        raise DataError(f"{name}: not an IDX file of bytes with {rank} axes")
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], ">u4"))
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"{name}: holds {len(data) - start:,} values, its header says {shape}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _cifar10(contents: Mapping[str, bytes]) -> Data:
    batches = [f"data_batch_{k}.bin" for k in range(1, 6)]
    train_pixels, train_labels = _records(contents, batches)
    test_pixels, test_labels = _records(contents, ["test_batch.bin"])
    mean, deviation = _pixel_moments(train_pixels)
    # A byte has 256 values: normalise those, then look every pixel up.
    table = ((np.arange(256) - mean) / deviation).astype(np.float32)
    return Data((table[train_pixels], train_labels), (table[test_pixels], test_labels))


def _records(contents: Mapping[str, bytes], names: list[str]) -> Batch:
    """Parse CIFAR's binary records into NHWC bytes and labels."""
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for name in names:
        data = contents[name]
        if not data or len(data) % CIFAR_RECORD:
            raise DataError(
                f"{name}: {len(data):,} bytes are not whole records of {CIFAR_RECORD}"
            )
        records = np.frombuffer(data, np.uint8).reshape(-1, CIFAR_RECORD)
        labels.append(records[:, 0].astype(np.int32))
        images.append(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return np.concatenate(images), np.concatenate(labels)


def _pixel_moments(pixels: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of all bytes, from their exact histogram."""
    values = np.arange(256)
    # Row by row: bincount widens its argument to eight bytes an entry.
    counts = np.zeros(256, np.int64)
    for start in range(0, len(pixels), 1000):
        counts += np.bincount(pixels[start : start + 1000].ravel(), minlength=256)
    mean = float(counts @ values / counts.sum())
    variance = float(counts @ np.square(values - mean) / counts.sum())
    return mean, math.sqrt(variance)
