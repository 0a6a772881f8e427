"""What a run measures, a record a line: metrics.jsonl.

Strict JSON. Non-finite numbers, which JSON lacks, are the strings "nan", "inf" and
"-inf", and become numbers again on reading. A record has at least ``kind`` ("step",
"eval", ...) and ``step``. A batch of records is one write, so a crash can tear only the
last line, and readers drop it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

METRICS = "metrics.jsonl"


class MetricsError(RuntimeError):
    """A line of metrics.jsonl, other than a torn last one, cannot be read."""


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run folder (or of a metrics file), a line at a time."""
    for record, _ in lines(_metrics_file(path)):
        yield record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run folder (or of a metrics file).

    A torn last line is dropped: it is what a crash leaves, or a run that is writing.

    Raises:
        MetricsError: any other line is not a record; names the line.
    """
    return list(iterate_metrics(path))


def columns(path: Path, kind: str = "step") -> dict[str, np.ndarray]:
    """Return the records of one kind as arrays by name, for plots.

    A number missing from some records is NaN there. Values that are lists, all of one
    length, give two-dimensional arrays; text gives arrays of objects.
    """
    records = [record for record in iterate_metrics(path) if record["kind"] == kind]
    names = dict.fromkeys(name for record in records for name in record)
    names.pop("kind", None)
    return {name: _column([each.get(name) for each in records]) for name in names}


def _column(values: list[Any]) -> np.ndarray:
    if any(isinstance(value, str | dict) for value in values):
        return np.array(values, dtype=object)
    shaped = next((value for value in values if value is not None), None)
    missing = [math.nan] * len(shaped) if isinstance(shaped, list) else math.nan
    return np.array([missing if value is None else value for value in values])


def _metrics_file(path: Path) -> Path:
    return path / METRICS if path.is_dir() else path


def lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole record with the offset at which its line ends."""
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line.decode(), parse_constant=_refuse_constant)
                record = {name: _decoded(value) for name, value in record.items()}
                if (
                    not isinstance(record["kind"], str)
                    or type(record["step"]) is not int
                ):
                    raise ValueError("kind must be text and step a whole number")
            except (AttributeError, KeyError, ValueError, RecursionError) as error:
                raise MetricsError(
                    f"{path}, line {number} is not a record ({error!r}). The file was "
                    f"changed or damaged; restore it, or delete that line by hand"
                ) from error
            yield record, end


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    return [_decoded(each) for each in value] if isinstance(value, list) else value


def encoded(record: dict[str, Any]) -> str:
    """Return a record as a line of JSON, without the line end."""
    if not isinstance(record.get("kind"), str) or type(record.get("step")) is not int:
        raise ValueError(f"a record needs a kind (text) and a step (int): {record!r}")
    try:
        return _dumps(record)
    except ValueError:  # something is not finite; rare, so the other way stays fast
        return _dumps({name: _named(value) for name, value in record.items()})


def _dumps(record: dict[str, Any]) -> str:
    return json.dumps(
        record, allow_nan=False, separators=(",", ":"), default=_plain, sort_keys=False
    )


def _plain(value: Any) -> Any:
    """Return a NumPy or jax number, or an array of them, as Python numbers."""
    if type(value) is np.float32:  # nearly all of them, so this first
        return float(str(value))
    if not hasattr(value, "dtype"):
        raise TypeError(f"a metric must be a number, text or a list, not {value!r}")
    array = np.asarray(value)
    if array.dtype.kind not in "fV" or array.dtype == np.float64:
        return array.tolist()
    # The shortest decimal that gives the same number in its own precision.
    return [_plain(each) for each in array] if array.ndim else float(str(array[()]))


def _named(value: Any) -> Any:
    """Return non-finite numbers by name."""
    if hasattr(value, "dtype"):
        value = _plain(value)
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
