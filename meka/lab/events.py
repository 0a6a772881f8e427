"""A mirror of a run's metrics in TensorBoard event files.

Names are those of `meka.lab.writers.scalars`. By TensorBoard's convention the names of
event files end in the name of the machine; nothing else in a run folder has it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meka.lab.writers import scalars

FOLDER = "events"
"""Where in a run folder the event files live."""


class EventWriter:
    """Writes records to event files. Close it, or use ``with``."""

    def __init__(
        self, folder: Path, *, resume_at: int | None = None, several: bool = False
    ):
        """Open a new event file in ``folder``; needs tensorboardX.

        Args:
            folder: made when missing; earlier event files in it are left alone.
            resume_at: the step a resumed run goes on from. TensorBoard then hides what
                earlier files say about later steps.
            several: whether the run has several seeds.
        """
        from tensorboardX import SummaryWriter

        # It would print a line for every number that is not finite.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        purge = None if resume_at is None else resume_at + 1
        self._several = several
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Mirror records as `meka.lab.runfolder.RunFolder.append` takes them."""
        for record in records:
            for tag, value in scalars(record, several=self._several):
                self._writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        """Write out and close the event file."""
        self._writer.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
