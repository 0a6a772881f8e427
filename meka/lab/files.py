"""The published files of the data sets: names, digests, finding, downloading.

A file counts as found only when its size and sha256 are the published ones,
wherever it came from: a folder the user names, MEKA_DATA, or a download. Archives
are read in memory, member by member, and never extracted to disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meka.lab.download import (
    DownloadError,
    Progress,
    ResumingDownloader,
    alone,
    is_html,
)

CIFAR_FOLDER = "cifar-10-batches-bin"


class DataError(ValueError):
    """A file is missing, damaged or not what it should be; the message says which."""


class File(NamedTuple):
    """A published file: its name, its size in bytes, its sha256."""

    name: str
    size: int
    sha256: str


class Package(NamedTuple):
    """A published download and the files inside it; either form is accepted."""

    file: File
    members: tuple[File, ...]


class Source(NamedTuple):
    """A data set: the addresses that serve it, and its packages."""

    mirrors: tuple[str, ...]
    packages: tuple[Package, ...]


class Check(NamedTuple):
    """What `verify` found out about one file."""

    path: Path
    ok: bool
    message: str


def _idx(name: str, packed: int, packed_sha: str, plain: int, sha: str) -> Package:
    return Package(File(f"{name}.gz", packed, packed_sha), (File(name, plain, sha),))


MNIST = (
    _idx(
        "train-images-idx3-ubyte",
        9912422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        47040016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    _idx(
        "train-labels-idx1-ubyte",
        28881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        60008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    _idx(
        "t10k-images-idx3-ubyte",
        1648877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        7840016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    _idx(
        "t10k-labels-idx1-ubyte",
        4542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        10008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
CIFAR10 = Package(
    File(
        "cifar-10-binary.tar.gz",
        170052171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    tuple(
        File(name, 30730000, sha256)
        for name, sha256 in {
            "data_batch_1.bin": (
                "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
            ),
            "data_batch_2.bin": (
                "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
            ),
            "data_batch_3.bin": (
                "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
            ),
            "data_batch_4.bin": (
                "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
            ),
            "data_batch_5.bin": (
                "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
            ),
            "test_batch.bin": (
                "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
            ),
        }.items()
    ),
)
SOURCES: dict[str, Source] = {
    "mnist": Source(
        (
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
        MNIST,
    ),
    "cifar10": Source(("https://www.cs.toronto.edu/~kriz/",), (CIFAR10,)),
}


def named_folder(folder: Path | str | None) -> Path | None:
    """Return the folder the user names: the argument, else MEKA_DATA, else None."""
    named = folder if folder is not None else os.environ.get("MEKA_DATA")
    return Path(named).expanduser() if named else None


def cache_folder() -> Path:
    """Return the folder for downloads when the user names none."""
    import pooch

    return Path(pooch.os_cache("meka"))


def contents(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every file of the data set as (name, verified bytes)."""
    for package in SOURCES[name].packages:
        plain, packed = _locate(name, package, folder)
        if plain is not None:
            for member, path in zip(package.members, plain, strict=True):
                yield member.name, read(path, member)
        elif packed is not None:
            yield from unpack(packed, package)
        else:
            raise DataError(_missing(name, package, folder))


def fetch(
    name: str, folder: Path | str | None = None, progress: Progress | None = None
) -> list[Path]:
    """Download what is not yet there, and return the paths of all files, verified.

    Downloads go to `<folder>/<name>`, where the folder is the argument, else
    MEKA_DATA, else the user's cache. A transfer that was cut continues where it
    stopped, also in a later call.
    """
    source = SOURCES[name]
    root = named_folder(folder) or cache_folder()
    paths: list[Path] = []
    for package in source.packages:
        plain, packed = _locate(name, package, root)
        if plain is not None:
            for member, path in zip(package.members, plain, strict=True):
                read(path, member)
            paths += plain
        else:
            target = packed.parent if packed is not None else root / name
            paths.append(_download(name, package.file, target, progress))
    return paths


def _download(name: str, file: File, target: Path, progress: Progress | None) -> Path:
    import pooch

    if check(target / file.name, file).ok:
        return target / file.name
    mirrors = SOURCES[name].mirrors
    store = pooch.create(
        path=target,
        base_url=mirrors[0],
        registry={file.name: f"sha256:{file.sha256}"},
    )
    # Any: pooch's own type asks for names that its own downloaders do not have.
    downloader: Any = ResumingDownloader(*file, mirrors, progress)
    try:
        # Whoever had to wait finds the file there, and pooch downloads nothing.
        with alone(target, file.name, file.size, progress):
            return Path(store.fetch(file.name, downloader=downloader))
    except DownloadError as error:
        raise DataError(
            f"{error}\nRun `meka data fetch {name}` to continue, or put the file in a "
            "folder and name that with --data-dir or MEKA_DATA"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot keep {file.name} in {target}: {error}. Name another folder with "
            f"`meka data fetch {name} --data-dir FOLDER`"
        ) from error


def verify(name: str, folder: Path | str | None = None) -> list[Check]:
    """Compare every file of the data set with its published digest.

    Looks where `fetch` would put them: the folder, else MEKA_DATA, else the cache.
    """
    root = named_folder(folder) or cache_folder()
    checks: list[Check] = []
    for package in SOURCES[name].packages:
        plain, packed = _locate(name, package, root)
        if plain is not None:
            checks += [
                check(path, member)
                for path, member in zip(plain, package.members, strict=True)
            ]
        elif packed is not None:
            checks.append(check(packed, package.file))
        else:
            message = _missing(name, package, root)
            checks.append(Check(root / name / package.file.name, False, message))
    return checks


def check(path: Path, file: File) -> Check:
    """Compare one file with its published digest."""
    try:
        with path.open("rb") as stream:
            _require(path, file, stream)
    except (DataError, OSError) as error:
        return Check(path, False, str(error))
    return Check(path, True, f"sha256 {file.sha256}")


def read(path: Path, file: File) -> bytes:
    """Return the bytes of a file, if they are the published ones."""
    with path.open("rb") as stream:
        data = stream.read(file.size)
        if _digest(data) != file.sha256 or stream.read(1):
            raise DataError(_mismatch(str(path), file, stream))
    return data


def unpack(path: Path, package: Package) -> Iterator[tuple[str, bytes]]:
    """Yield the members of a packed file as (name, bytes), every digest checked."""
    if not path.name.endswith(".tar.gz"):
        (member,) = package.members
        yield member.name, _gunzip(read(path, package.file), member, path)
        return
    with path.open("rb") as stream:
        _require(path, package.file, stream)
        stream.seek(0)
        yield from _tar_members(stream, package.members, path)


def _gunzip(data: bytes, member: File, path: Path) -> bytes:
    try:
        # One byte past the size shows an overlong stream without inflating it.
        plain = zlib.decompressobj(wbits=31).decompress(data, member.size + 1)
    except zlib.error as error:
        raise DataError(f"{path}: not a gzip file ({error})") from error
    if _digest(plain) != member.sha256:
        raise DataError(_mismatch(f"{path}, unpacked,", member, io.BytesIO(plain)))
    return plain


def _tar_members(
    stream: io.BufferedIOBase, members: tuple[File, ...], path: Path
) -> Iterator[tuple[str, bytes]]:
    wanted = {f"{CIFAR_FOLDER}/{member.name}": member for member in members}
    budget = 2 * sum(member.size for member in wanted.values()) + (1 << 20)
    try:
        with tarfile.open(fileobj=stream, mode="r|gz") as archive:
            for entry in archive:
                budget -= entry.size
                if budget < 0:
                    raise DataError(f"{path}: holds far more than the data set")
                member = wanted.get(entry.name)
                if member is None:
                    continue
                where = f"{path}: member {entry.name}"
                if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise DataError(f"{where} is not a regular file")
                if entry.size != member.size:
                    raise DataError(
                        f"{where} has {entry.size:,} bytes, expected {member.size:,}"
                    )
                body = archive.extractfile(entry)
                data = body.read(member.size) if body is not None else b""
                if _digest(data) != member.sha256:
                    raise DataError(_mismatch(where, member, io.BytesIO(data)))
                del wanted[entry.name]
                yield member.name, data
                if not wanted:
                    return
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: not a readable tar.gz archive ({error})") from error
    raise DataError(f"{path}: has no member {', '.join(wanted)}")


def _locate(
    name: str, package: Package, root: Path
) -> tuple[list[Path] | None, Path | None]:
    """Find the members of a package (all of them, or None), and the package."""
    found = [_find(name, member, root) for member in package.members]
    plain = [path for path in found if path is not None]
    return (
        plain if len(plain) == len(found) else None,
        _find(name, package.file, root),
    )


def _find(name: str, file: File, root: Path) -> Path | None:
    options = (folder / file.name for folder in _folders(name, root))
    return next((path for path in options if path.is_file()), None)


def _folders(name: str, root: Path) -> list[Path]:
    nested = [root, root / name]
    if name == "cifar10":
        nested += [folder / CIFAR_FOLDER for folder in nested]
    return nested


def _missing(name: str, package: Package, root: Path) -> str:
    absent = [m.name for m in package.members if _find(name, m, root) is None]
    folders = ", ".join(str(folder) for folder in _folders(name, root))
    return (
        f"{name}: found neither {package.file.name} nor {', '.join(absent)} in "
        f"{folders}. Run `meka data fetch {name} --data-dir {root}`, or name the "
        "folder that holds them with --data-dir or MEKA_DATA"
    )


def _require(path: Path, file: File, stream: io.BufferedIOBase) -> None:
    if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
        raise DataError(_mismatch(str(path), file, stream))


def _mismatch(where: str, file: File, stream: io.BufferedIOBase) -> str:
    stream.seek(0)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if is_html(stream.read(256)):
        reason = "is an HTML page, not data"
    elif size != file.size:
        reason = f"has {size:,} bytes, expected {file.size:,}"
    else:
        reason = "has the right size but other contents"
    return (
        f"{where} {reason}: sha256 is {digest}, expected {file.sha256}. "
        f"It was not used; {_advice(file)}"
    )


def _advice(file: File) -> str:
    for name, source in SOURCES.items():
        if any(file == p.file or file in p.members for p in source.packages):
            return f"delete it and run `meka data fetch {name}`"
    return "install meka again"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
