"""Where else the records of a run may go: other people's tools.

The truth is ``metrics.jsonl``. A writer sees the same records while the run goes on.
It is any object with two methods, `Writer`; whoever has another tool passes a function
that opens one to `meka.lab.train.train`::

    class Printer:
        def write(self, records):
            for record in records:
                print(dict(scalars(record)))

        def close(self):
            pass

    train(config, path, writers=[lambda path, config, resume_at: Printer()])

`scalars` gives the numbers of a record names that tools group by: ``loss/train``,
``step/size``, ``gradient/noise_scale``, ``filter/gain``.
"""

from __future__ import annotations

import importlib.util
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from meka.lab.config import RunConfig


class WriterError(RuntimeError):
    """A writer cannot be used; the message says what to do."""


class Writer(Protocol):
    """Takes the records of a run as they are made."""

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take records, each with a ``kind``, a ``step`` and a ``seed``."""

    def close(self) -> None:
        """The run has ended, however it ended."""


Opener = Callable[[Path, "RunConfig", int], Writer]
"""(run folder, configuration, step the run goes on from) -> a writer."""


def tensorboard(path: Path, config: RunConfig, resume_at: int) -> Writer:
    """Event files in the run folder, for TensorBoard."""
    from meka.lab.events import FOLDER, EventWriter

    several = config.seeds > 1
    return EventWriter(path / FOLDER, resume_at=resume_at, several=several)


def trackio(path: Path, config: RunConfig, resume_at: int) -> Writer:
    """A run of Trackio, kept on this machine unless Trackio is told otherwise.

    The project is "meka", the name that of the folder; ``trackio show`` shows it.
    """
    import trackio

    name = path.resolve().name
    how = "allow" if resume_at else "never"
    run = trackio.init(project="meka", name=name, config=config.to_dict(), resume=how)
    return _Trackio(run, config.seeds > 1)


class _Trackio:
    def __init__(self, run: Any, several: bool):
        self._run, self._several = run, several

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        by_step: dict[int, dict[str, float]] = {}
        for record in records:  # one row a step, with all its seeds
            row = by_step.setdefault(record["step"], {})
            row.update(scalars(record, several=self._several))
        for step, row in by_step.items():
            self._run.log(row, step=step)

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[str, tuple[Opener, str, str]] = {
    "tensorboard": (tensorboard, "tensorboardX", "meka[tensorboard]"),
    "trackio": (trackio, "trackio", "trackio"),
}
"""Name: how to open it, the module it needs, what to install for that."""


def find(name: str) -> Opener:
    """Return the opener of this name.

    Raises:
        WriterError: there is none, or what it needs is not installed.
    """
    if name not in WRITERS:
        raise WriterError(f"no writer {name!r}; there are {', '.join(WRITERS)}")
    opener, module, package = WRITERS[name]
    try:
        missing = importlib.util.find_spec(module) is None
    except ValueError:  # imported already, by hand
        missing = False
    if missing:
        raise WriterError(
            f"the writer {name} needs {module}; install {package}, or train without it"
        )
    return opener


_LABELS = ("kind", "step", "seed")
_NAMES = {
    "loss": "loss/minibatch",
    "value": "loss/filtered",
    "value_variance": "loss/filtered_variance",
    "observed_variance": "loss/minibatch_variance",
    "step_size": "step/size",
    "slope": "step/slope",
    "curvature": "step/curvature",
    "improvement_probability": "step/improvement_probability",
    "predicted_change": "step/predicted_change",
    "direction_norm": "step/direction_norm",
    "displacement_norm": "step/displacement_norm",
    "gradient_norm": "gradient/norm",
    "gradient_noise": "gradient/noise",
    "gradient_variance": "gradient/filtered_variance",
    "change_noise": "gradient/change_noise",
    "noise_scale": "gradient/noise_scale",
    "gain": "filter/gain",
    "innovation": "filter/innovation",
    "gradient_innovation": "filter/gradient_innovation",
    "model_error": "filter/model_error",
    "accepted": "health/accepted",
    "rejected": "health/rejected",
    "suspect": "health/suspect",
}
_EVALUATED = re.compile(r"(average_)?(train|test)_(\w+)")


def scalars(
    record: Mapping[str, Any], *, several: bool = False
) -> Iterator[tuple[str, float]]:
    """Yield a grouped name and the value of each number in a record.

    Lists give one scalar an element, ``…/0`` and so on; text is left out.

    Args:
        record: as in ``metrics.jsonl``.
        several: whether the run has several seeds; the names then end in ``/seed3``.
    """
    suffix = f"/seed{record['seed']}" if several and "seed" in record else ""
    for name, value in record.items():
        if name in _LABELS:
            continue
        tag = _grouped(name, record["kind"]) + suffix
        if isinstance(value, list | tuple):
            for index, each in enumerate(value):
                if _is_number(each):
                    yield f"{tag}/{index}", float(each)
        elif _is_number(value):
            yield tag, float(value)


def _grouped(name: str, kind: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    if name.startswith("model."):
        return name.replace(".", "/")
    found = _EVALUATED.fullmatch(name)
    if found:
        average, where, what = found.groups()
        return f"{what}/{where}{'_average' if average else ''}"
    return f"{kind}/{name}"


def _is_number(value: Any) -> bool:
    # A zero-dimensional array of NumPy or jax is no Number, but is one to a reader.
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
