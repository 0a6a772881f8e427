"""Text to train on that is on every machine: what Python itself is shipped with.

The licence and the sources of the standard library's top-level modules, as ASCII. The
text differs between versions of Python; the same version gives the same text.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from meka.lab.data import Data
from meka.lab.files import DataError

VOCABULARY = 128
LENGTH = 64
"""Characters a sequence, each to be predicted from those before it."""
SMALL, LARGE = 200_000, 4_000_000
"""How many characters to collect."""
_TEST = 0.1  # the share at the end that is held out
_LICENCES = ("LICENSE.txt", "LICENSE")
_SHARE = 0.02  # of the characters, the most that one module gives


def load(characters: int) -> Data:
    """Sequences and their next characters, the end of the text held out as test."""
    tokens = np.frombuffer(collect(characters).encode("ascii"), np.uint8)
    rows = (len(tokens) - 1) // LENGTH
    split = rows - max(1, round(_TEST * rows))
    # A row's last target is the next row's first character: at the seam between the
    # two splits that row is left out, so that they share nothing.
    return Data(_rows(tokens, 0, split - 1), _rows(tokens, split, rows))


def collect(characters: int) -> str:
    """At most so many characters; the modules in the order of their names.

    A long module gives only its beginning, so that there are many of them.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    licences = [folder / name for name in _LICENCES if (folder / name).is_file()]
    sources = [path for path in sorted(folder.glob("*.py")) if path.is_file()]
    if not sources:
        raise DataError(
            f"{folder} holds no sources of the standard library; this Python was "
            "installed without them, and so has no text to train on"
        )
    most = max(1, round(_SHARE * characters))
    parts, found = [], 0
    for path in licences[:1] + sources:
        part = path.read_text(encoding="utf-8", errors="replace")
        part = part.encode("ascii", "replace").decode("ascii")[:most]
        parts.append(part[: characters - found])
        found += len(parts[-1])
        if found >= characters:
            break
    return "".join(parts)


def _rows(tokens: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    part = tokens[first * LENGTH : last * LENGTH + 1]
    seen = part[:-1].reshape(-1, LENGTH)
    following = part[1:].reshape(-1, LENGTH).astype(np.int32)
    return np.ascontiguousarray(seen), np.ascontiguousarray(following)
