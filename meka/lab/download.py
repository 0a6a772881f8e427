"""A downloader for pooch that continues a transfer which was cut.

pooch finds the cache, compares digests and moves finished files into place, but it
starts every transfer from zero. This one keeps what has arrived in `<name>.part`
and asks the server for the rest (HTTP Range), after an interrupt too. Of several
processes that want a file, one downloads it (`alone`) and the others find it there.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called as progress(file name, bytes so far, bytes in all) during a download."""

ROUNDS = 4  # passes over the mirrors before a download is given up
PAUSE = 1.0  # seconds before the second pass; doubles with each
TIMEOUT = 30.0  # seconds without a byte before a connection counts as cut
CHUNK = 1 << 18
POLL = 0.1  # seconds between two looks at a file that another process downloads


class DownloadError(Exception):
    """No mirror delivered the file; the message has one line for each failure."""


@dataclass(frozen=True)
class ResumingDownloader:
    """Download one file of known size and sha256 from the first mirror that has it.

    | what happens                    | what is done                               |
    |---------------------------------|--------------------------------------------|
    | connection cut, server error    | next mirror, next round; `.part` is kept   |
    | server ignores Range            | start over                                 |
    | another size (an error page)    | refused before it is written; next mirror  |
    | digest differs when complete    | `.part` is deleted; next mirror            |
    """

    name: str
    size: int
    sha256: str
    mirrors: tuple[str, ...]
    progress: Progress | None = None

    def __call__(self, url: str, output_file: str | Path, pooch: Any) -> None:
        """Leave the verified file at `output_file` (the signature pooch calls)."""
        del url, pooch
        part = _part(Path(output_file).parent, self.name)
        failures: list[str] = []
        for turn in range(ROUNDS):
            if turn:
                time.sleep(PAUSE * 2 ** (turn - 1))
            for mirror in self.mirrors:
                try:
                    self._transfer(mirror + self.name, part)
                    self._verify(part)
                except (OSError, http.client.HTTPException, _WrongFile) as error:
                    failures.append(f"{mirror}{self.name}: {error}")
                    continue
                os.replace(part, output_file)
                return
        # The rounds mostly fail alike; say each thing once.
        lines = "\n  ".join(dict.fromkeys(failures))
        raise DownloadError(f"could not download {self.name}:\n  {lines}")

    def _transfer(self, url: str, part: Path) -> None:
        done = _arrived(part)
        if done == self.size:
            return
        if done > self.size:
            done = 0
        headers = {"User-Agent": "meka", "Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                done = 0
            if response.headers.get_content_type() == "text/html":
                raise _WrongFile("the server sent an HTML page, not the file")
            length = response.headers.get("Content-Length", "")
            if length.isdigit() and done + int(length) != self.size:
                raise _WrongFile(
                    f"the server sent a file of {done + int(length):,} bytes, "
                    f"expected {self.size:,}"
                )
            with part.open("ab" if done else "wb") as sink:
                while done <= self.size and (block := response.read(CHUNK)):
                    sink.write(block)
                    done += len(block)
                    if self.progress is not None:
                        self.progress(self.name, min(done, self.size), self.size)
        if done < self.size:
            raise ConnectionError(f"cut after {done:,} of {self.size:,} bytes")

    def _verify(self, part: Path) -> None:
        with part.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != self.sha256:
            part.unlink()
            raise _WrongFile(f"sha256 is {digest}, expected {self.sha256}")


@contextmanager
def alone(
    folder: Path, name: str, size: int, progress: Progress | None = None
) -> Iterator[None]:
    """Hold the right to download a file into a folder; wait for whoever has it.

    While waiting, the progress of the other process is shown. The right goes with
    its holder, however that ends. Nothing is left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.lock"
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, path):
                break
        except BlockingIOError:
            if progress is not None:
                progress(name, min(_arrived(_part(folder, name)), size), size)
            time.sleep(POLL)
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    """Whether the locked file still has its name: its last holder removed it."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def _arrived(part: Path) -> int:
    try:
        return part.stat().st_size
    except FileNotFoundError:  # not begun, or just finished
        return 0


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


class _WrongFile(Exception):
    """A mirror delivered something, but not the file."""


def is_html(head: bytes) -> bool:
    """Whether these first bytes start a web page: what error pages look like."""
    start = head.lstrip().lower()
    return start.startswith((b"<!doctype html", b"<html", b"<?xml"))
