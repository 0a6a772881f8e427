"""Data that would train to nonsense is refused before training, by its row."""

import dataclasses

import lines
import numpy as np
import pytest

from meka.lab.config import RunConfig
from meka.lab.data import Data, DataError
from meka.lab.train import train
from meka.lab.workloads import Workload, WorkloadError

ROW = 37


def with_row(values: np.ndarray, value, dtype=None) -> np.ndarray:
    values = values.astype(dtype or values.dtype)
    values[ROW] = value
    return values


def classes(labels: np.ndarray) -> dict:
    return {"labels": labels, "classes": 10}


NUMBERS = np.arange(64) % 10
X, Y = lines.inputs, lines.targets

BAD = {
    "a NaN among the inputs": ({"inputs": with_row(X, np.nan)}, "row 37"),
    "an infinite input": ({"inputs": with_row(X, -np.inf)}, "row 37"),
    "a NaN among the labels": ({"labels": with_row(Y, np.nan)}, "row 37"),
    "an infinite label": ({"labels": with_row(Y, np.inf)}, "row 37"),
    "a negative class": (classes(with_row(NUMBERS, -1)), "label -1 in row 37"),
    "a class too many": (classes(with_row(NUMBERS, 10)), "label 10 in row 37"),
    "a NaN class": (classes(with_row(NUMBERS, np.nan, "f4")), "must be integers"),
    "classes of shape (n, 1)": (classes(NUMBERS[:, None]), r"integers of shape \(n,\)"),
    "too few labels": ({"labels": Y[:-1]}, r"\(64, 2\) and labels \(63,\)"),
    "no examples": ({"inputs": X[:0], "labels": Y[:0]}, "no examples"),
    "inputs of float64": ({"inputs": X.astype("f8")}, "float64, expected float32"),
    "inputs of float16": ({"inputs": X.astype("f2")}, "float16, expected float32"),
    "inputs of int64": ({"inputs": X.astype("i8")}, "int64, expected float32"),
    "text for inputs": ({"inputs": X.astype(str)}, "expected float32"),
    "text for labels": ({"labels": Y.astype(str)}, "expected real numbers"),
    "objects for labels": ({"labels": with_row(Y, None, "O")}, "real numbers"),
    "complex labels": ({"labels": Y.astype("c8")}, "expected real numbers"),
    "a label beyond float32": (
        {"labels": with_row(Y, 1e300, "f8")},
        "row 37 are beyond the range of float32",
    ),
    "a label beyond int32": (
        {"labels": with_row(NUMBERS, 2**40)},
        "row 37 are beyond the range of int32",
    ),
}


@pytest.mark.fault(2)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_before_anything_is_written(tmp_path, name, split, tried):
    fields, message = BAD[name]
    bad = fields.get("inputs", X), fields.get("labels", Y)
    good = X, NUMBERS if "classes" in fields else Y
    data = Data(bad, good) if split == "train" else Data(good, bad)
    workload = dataclasses.replace(
        lines.workload, data=data, classes=fields.get("classes")
    )
    config = RunConfig("lines.py:workload", "meka", 10)
    with pytest.raises(DataError, match=message) as caught:
        train(config, tmp_path / "run", workload=workload)
    assert f"lines {split}: " in str(caught.value)
    assert not list(tmp_path.iterdir())
    tried(data_sets=1)


def refused(**changes) -> Workload:
    return dataclasses.replace(lines.workload, **changes)


@pytest.mark.fault(2)
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (
            refused(losses=lambda p, b: lines.losses(p, b).mean()),
            "one loss per example",
        ),
        (
            refused(losses=lambda p, b: lines.losses(p, b) / 0),
            "example 0 is not finite",
        ),
        (refused(init=lambda key: np.zeros(2, int)), "real floating-point arrays"),
        (
            refused(losses=lambda p, b: lines.losses(p, b) > 0),
            "not real floating-point",
        ),
        (refused(batch_size=65), "batch_size 65 is more than the 64"),
    ],
)
def test_bad_workloads_are_refused_before_anything_is_written(
    tmp_path, workload, message, tried
):
    with pytest.raises(WorkloadError, match=message):
        train(RunConfig("lines.py:x", "meka", 10), tmp_path / "run", workload=workload)
    assert not list(tmp_path.iterdir())
    tried(workloads=1)
