"""SIGINT and SIGTERM: the first is collected, a second may end the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_ASKING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def collected(*, second_ends: bool = False) -> Iterator[list[int]]:
    """Collect these signals in the place of dying of them.

    With ``second_ends`` a second one ends the process, 128 + its number, even while
    the main thread is inside compiled code, where no handler of Python's can run.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received and second_ends:
            os._exit(128 + number)
        received.append(number)

    try:
        before = {number: signal.signal(number, handle) for number in _ASKING}
    except ValueError:  # not the main thread: whoever owns it handles signals
        yield received
        return
    try:
        if second_ends:
            with _watched():
                yield received
        else:
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _watched() -> Iterator[None]:
    """Count signals in a thread, which the system tells of them as they come."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

    def count() -> None:
        seen = 0
        while number := os.read(told, 1):
            seen += number[0] in _ASKING
            if seen > 1:
                os._exit(128 + number[0])
        os.close(told)

    threading.Thread(target=count, daemon=True).start()
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.set_wakeup_fd(before)
        os.close(tell)
