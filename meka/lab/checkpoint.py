"""Atomic, verified checkpoints of a pytree of arrays.

A checkpoint of step 1000 is the folder ``step-00001000`` with three files::

    arrays.npz        the leaves, numbered in the order of the tree
    manifest.json     format, step, sha256 of arrays.npz, extra, and for each leaf its
                      path in the tree, dtype, shape and the sha256 of its bytes
    manifest.sha256   sha256 of manifest.json, as ``sha256sum --check`` reads it

What happens when something goes wrong:

==============================  ===================================================
killed inside `save`            the older checkpoints are intact; the half-written
                                folder is ignored by `latest`, removed by `save`
disk full, folder read-only     `CheckpointError`, temporary removed, old ones intact
any byte changed, file cut,     the checkpoint is named to ``on_problem`` and the next
file missing, other structure,  older good one is used; nothing of a bad checkpoint
newer format                    is ever returned
==============================  ===================================================

Values come back bit for bit, in the container and leaf types of ``like``: bfloat16 and
its relatives, typed random keys, zero-dimensional arrays and plain Python numbers too.
Restored jax arrays are never weakly typed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
"""Version of the layout above. A reader refuses what is newer than itself."""

_ARRAYS = "arrays.npz"
_MANIFEST = "manifest.json"
_MANIFEST_DIGEST = "manifest.sha256"
_CHECKPOINT = re.compile(r"step-(\d{8,})(\.replaced)?")
_TEMPORARY = re.compile(r"step-.*\.tmp-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""

    exit_code = 4  # of the command line: it was not the request that was refused


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint."""

    step: int
    tree: Any
    extra: dict[str, Any]


class _UnusableError(Exception):
    """Why one checkpoint cannot be used."""


def save(
    folder: Path,
    step: int,
    tree: Any,
    keep: int = 2,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write ``tree`` as the checkpoint of ``step``; then prune all but ``keep``.

    Only checkpoints older than ``step`` are pruned: one from further on, which a
    resumed run fell back from, stays until the run passes it.

    Args:
        folder: where checkpoints live; made when missing.
        step: number of steps done.
        tree: arrays, random keys and Python numbers in any pytree.
        keep: how many checkpoints to leave, this one included.
        extra: anything JSON can hold; returned by `latest` as it is.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the tree has a leaf that cannot be saved, or the disk refused.
    """
    folder = Path(folder)
    if step < 0 or keep < 1:
        raise ValueError(f"step must be >= 0 and keep >= 1, not {step} and {keep}")
    # Whatever can be refused is refused before the disk is touched.
    files = _encode(step, tree, extra or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        target = _publish(folder, f"step-{step:08d}", files)
        _prune(folder, step, keep)
    except OSError as error:
        raise CheckpointError(
            f"cannot save the checkpoint of step {step} in {folder}: {error}. "
            f"{what_to_do(error)} Older checkpoints there are untouched."
        ) from error
    return target


def latest(
    folder: Path,
    like: Any,
    *,
    on_problem: Callable[[str], None] = warnings.warn,
    up_to: int | None = None,
) -> Restored | None:
    """The newest checkpoint that verifies and has the structure of ``like``.

    Args:
        folder: where checkpoints live; may be missing.
        like: a tree of the same structure, shapes and dtypes; its values are not used,
            so `jax.ShapeDtypeStruct` leaves do.
        on_problem: told, in a sentence, of each checkpoint that had to be passed over.
        up_to: pass silently over checkpoints of later steps. A run that was rewound
            gives the last step its metrics know, so that it never jumps ahead of them.

    Returns:
        The checkpoint, or None when there is no usable one.
    """
    # At the same step "step-N" sorts before "step-N.replaced", and is the newer one.
    for step, path in sorted(_checkpoints(folder), key=lambda found: -found[0]):
        if up_to is not None and step > up_to:
            continue
        try:
            return _load(path, step, like)
        except _UnusableError as problem:
            on_problem(f"checkpoint {path} is not usable: {problem}")
        except OSError as error:
            on_problem(f"checkpoint {path} cannot be read: {error}")
    return None


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, oldest first, verified or not."""
    return sorted({step for step, _ in _checkpoints(folder)})


# Writing ------------------------------------------------------------------------------


def _publish(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """Make ``files`` appear as ``folder/name``, wholly or not at all."""
    target, replaced = folder / name, folder / f"{name}.replaced"
    if target.exists() and all(_has(target / file, files[file]) for file in files):
        return target
    temporary = folder / f"{name}.tmp-{os.getpid()}"
    try:
        temporary.mkdir()
        for file, data in files.items():
            write_synced(temporary / file, data)
        sync_directory(temporary)
        if target.exists():
            # A folder cannot be renamed onto another. `latest` knows the second name:
            # even between the two renames nothing good is out of reach.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        os.rename(temporary, target)
        sync_directory(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _prune(folder: Path, step: int, keep: int) -> None:
    past = [path for found, path in _checkpoints(folder) if found <= step]
    standing = [path for path in past if not path.name.endswith(".replaced")]
    for path in past:
        if path not in standing[-keep:]:
            # Renamed first: a kill amid the removal must not leave half a checkpoint.
            doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            # The new checkpoint is safe by now: an old one too many is no failure.
            with contextlib.suppress(OSError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left half-written."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not _another_lives(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _another_lives(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _has(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _encode(step: int, tree: Any, extra: dict[str, Any]) -> dict[str, bytes]:
    paths, leaves, _ = _flatten(tree)
    entries, stored = [], {}
    for index, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        kind = _kind(path, leaf)
        array = stored[_member(index)] = _stored(path, leaf)
        entries.append({"path": path, **kind, "sha256": _sha256(array.tobytes())})
    # In memory first: a ZipFile that fails to close on a full disk raises from its
    # destructor, and the digest needs every byte anyhow.
    buffer = io.BytesIO()
    np.savez(buffer, **stored)
    arrays = buffer.getvalue()
    content = {
        "format": FORMAT,
        "step": step,
        "arrays_sha256": _sha256(arrays),
        "leaves": entries,
        "extra": extra,
    }
    try:
        manifest = json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra of the checkpoint of step {step} is not JSON ({error}); "
            f"put arrays and non-finite numbers in the tree"
        ) from error
    return {_ARRAYS: arrays, _MANIFEST: manifest, _MANIFEST_DIGEST: _line(manifest)}


# Reading ------------------------------------------------------------------------------


def _load(path: Path, step: int, like: Any) -> Restored:
    manifest = _manifest(path)
    if manifest["step"] != step:
        raise _UnusableError(f"its manifest is of step {manifest['step']}")
    arrays = _read(path / _ARRAYS)
    if _sha256(arrays) != manifest["arrays_sha256"]:
        raise _UnusableError(f"{_ARRAYS} is damaged (sha256 differs)")
    paths, leaves, treedef = _flatten(like)
    _same_structure(paths, [entry["path"] for entry in manifest["leaves"]])
    restored = []
    try:
        with np.load(io.BytesIO(arrays)) as archive:
            for index, (leaf, entry) in enumerate(
                zip(leaves, manifest["leaves"], strict=True)
            ):
                restored.append(_restored(leaf, entry, archive[_member(index)]))
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _UnusableError(f"{_ARRAYS} cannot be decoded ({error})") from error
    return Restored(step, treedef.unflatten(restored), manifest["extra"])


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; verified, and of a format this code reads."""
    data = _read(path / _MANIFEST)
    if _read(path / _MANIFEST_DIGEST) != _line(data):
        raise _UnusableError(f"{_MANIFEST} is damaged (sha256 differs)")
    try:
        manifest = json.loads(data.decode())
        version = manifest["format"]
        if version > FORMAT:
            raise _UnusableError(
                f"it has format {version}, written by a newer meka (this one reads up "
                f"to {FORMAT}); upgrade meka to use it"
            )
        missing = {"step", "arrays_sha256", "leaves", "extra"} - manifest.keys()
        for entry in manifest["leaves"]:
            missing |= {"path", "dtype", "shape", "sha256"} - entry.keys()
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _UnusableError(f"{_MANIFEST} cannot be decoded ({error!r})") from error
    if missing:
        raise _UnusableError(f"{_MANIFEST} has no {', '.join(sorted(missing))}")
    return manifest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _UnusableError(f"{path.name} is missing") from None


def _same_structure(expected: list[str], found: list[str]) -> None:
    if expected == found:
        return
    missing = [path for path in expected if path not in found]
    surplus = [path for path in found if path not in expected]
    if missing:
        raise _UnusableError(f"it has no {missing[0]}, which this run needs")
    if surplus:
        raise _UnusableError(f"it has {surplus[0]}, which this run does not know")
    raise _UnusableError("its leaves are in another order than this run's")


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All that look like checkpoints, by step and then by name."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    matches = [match for name in names if (match := _CHECKPOINT.fullmatch(name))]
    return sorted((int(match[1]), Path(folder, match[0])) for match in matches)


# Leaves -------------------------------------------------------------------------------

_PYTHON_NUMBERS = {"python bool": bool, "python int": int, "python float": float}


def _flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    from jax import tree_util

    pairs, treedef = tree_util.tree_flatten_with_path(tree)
    return [tree_util.keystr(path) for path, _ in pairs], [x for _, x in pairs], treedef


def _is_key(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _kind(path: str, leaf: Any) -> dict[str, Any]:
    """Type, dtype and shape of a leaf, as the manifest has them."""
    if type(leaf) in _PYTHON_NUMBERS.values():
        return {"dtype": f"python {type(leaf).__name__}", "shape": []}
    if not hasattr(leaf, "dtype"):
        raise CheckpointError(
            f"{path} is a {type(leaf).__name__}; a checkpoint holds arrays and "
            f"numbers. Keep it out of the tree, or put it in extra"
        )
    shape = [int(size) for size in leaf.shape]
    if _is_key(leaf):
        import jax

        kind: dict[str, Any] = {"dtype": str(leaf.dtype), "shape": shape}
        if isinstance(leaf, jax.Array):
            kind["implementation"] = str(jax.random.key_impl(leaf))
        return kind
    return {"dtype": np.dtype(leaf.dtype).name, "shape": shape}


def _stored(path: str, leaf: Any) -> np.ndarray:
    """The leaf as an array of a dtype that npz knows."""
    if _is_key(leaf):
        import jax

        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf, order="C")
    if array.dtype.kind in "biufc":
        return array
    # npz has no bfloat16, float8 or int4: as unsigned integers of the same width.
    if array.dtype.kind == "V" and array.dtype.type is not np.void:
        return array.view(f"u{array.dtype.itemsize}")
    raise CheckpointError(f"{path} has dtype {array.dtype}, which cannot be saved")


def _restored(leaf: Any, entry: dict[str, Any], stored: np.ndarray) -> Any:
    """``stored`` as a leaf like ``leaf``, once it is known to be the one saved."""
    import jax

    path = entry["path"]
    expected = _kind(path, leaf)
    if any(entry.get(key) != value for key, value in expected.items()):
        raise _UnusableError(
            f"{path} is {entry['dtype']}{entry['shape']}, where this run has "
            f"{expected['dtype']}{expected['shape']}"
        )
    if _sha256(stored.tobytes()) != entry["sha256"]:
        raise _UnusableError(f"{path} is damaged (sha256 differs)")
    if entry["dtype"] in _PYTHON_NUMBERS:
        return _PYTHON_NUMBERS[entry["dtype"]](stored.item())
    if _is_key(leaf):
        return jax.random.wrap_key_data(
            jax.numpy.array(stored), impl=entry["implementation"]
        )
    array = stored.view(leaf.dtype)
    if list(array.shape) != entry["shape"]:
        raise _UnusableError(f"{path} has shape {list(array.shape)} in {_ARRAYS}")
    if isinstance(leaf, np.generic):
        return array[()]
    return array if isinstance(leaf, np.ndarray) else jax.numpy.array(array)


def _member(index: int) -> str:
    return f"leaf{index:05d}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _line(manifest: bytes) -> bytes:
    return f"{_sha256(manifest)}  {_MANIFEST}\n".encode()


# Files that survive a crash, shared with the run folder -------------------------------


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a folder, not only the files' bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds the old content or all of the new."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def what_to_do(error: OSError) -> str:
    """A sentence of advice for a disk that refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space (or raise the quota or file-size limit) and resume."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Make the folder writable, or choose another one, and resume."
    return "See that the disk is well and resume."
