"""A mirror of a run's metrics in TensorBoard event files.

The truth is ``metrics.jsonl``; this shows it to those who have TensorBoard open. A step
record's ``loss`` becomes the scalar ``step/loss``, an evaluation's ``eval/loss``. With
a ``seed`` in the record it is ``step/loss/seed3``; a list gives one scalar an element,
``step/loss/0`` and so on. Text is left out. By TensorBoard's convention the names of
event files end in the name of the machine; nothing else in a run folder has it.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = "events"
"""Where in a run folder the event files live."""

_LABELS = ("kind", "step", "seed")


class EventsError(RuntimeError):
    """TensorBoard event files cannot be written; the message says what to do."""


class EventWriter:
    """Writes records to event files. Close it, or use ``with``."""

    def __init__(self, folder: Path, *, resume_at: int | None = None):
        """Open a new event file in ``folder``.

        Args:
            folder: made when missing; earlier event files in it are left alone.
            resume_at: the step a resumed run goes on from. TensorBoard then hides what
                earlier files say about later steps.

        Raises:
            EventsError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise EventsError(
                "TensorBoard event files need tensorboardX; install the extra "
                "meka[tensorboard], or train without event files"
            ) from error
        # It would print a line for every number that is not finite.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        purge = None if resume_at is None else resume_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Mirror records as `meka.lab.runfolder.RunFolder.append` takes them."""
        for record in records:
            for tag, value in scalars(record):
                self._writer.add_scalar(tag, value, record["step"])

    def flush(self) -> None:
        """Make what was written visible to TensorBoard."""
        self._writer.flush()

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the tag and value of each number in a record."""
    suffix = f"/seed{record['seed']}" if "seed" in record else ""
    for name, value in record.items():
        if name in _LABELS:
            continue
        tag = f"{record['kind']}/{name}{suffix}"
        if isinstance(value, list | tuple):
            for index, each in enumerate(value):
                if _is_number(each):
                    yield f"{tag}/{index}", float(each)
        elif _is_number(value):
            yield tag, float(value)


def _is_number(value: Any) -> bool:
    # A zero-dimensional array of NumPy or jax is no Number, but is one to a reader.
    return isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
