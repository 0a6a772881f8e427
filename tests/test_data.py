"""Files in, checked arrays out: formats, damage, downloads, augmentation."""

import gzip
import hashlib
import io
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np
import pytest

from meka.lab import data, download, files
from meka.lab.augment import crop_and_flip
from meka.lab.data import DataError
from meka.lab.files import CIFAR_FOLDER, File, Package, Source

Contents = dict[str, bytes]
Tried = Callable[..., None]


def published(name: str, content: bytes) -> File:
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()


def tar_gz(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def cifar_archive(contents: Contents, folder: str = CIFAR_FOLDER) -> bytes:
    other = [(tarfile.TarInfo(f"{folder}/readme.html"), b"<html>")]
    wanted = [(tarfile.TarInfo(f"{folder}/{n}"), c) for n, c in contents.items()]
    return tar_gz(other + wanted)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEKA_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.0)


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> Contents:
    """Four small files in MNIST's format, published as if they were MNIST."""
    rng = np.random.default_rng(0)
    contents: Contents = {}
    for split, n in (("train", 12), ("t10k", 5)):
        pixels = rng.integers(0, 256, (n, 28, 28), np.uint8)
        contents[f"{split}-images-idx3-ubyte"] = idx(pixels)
        labels = rng.integers(0, 10, n).astype(np.uint8)
        contents[f"{split}-labels-idx1-ubyte"] = idx(labels)
    packages = tuple(
        Package(published(f"{name}.gz", packed(content)), (published(name, content),))
        for name, content in contents.items()
    )
    monkeypatch.setitem(
        files.SOURCES, "mnist", Source(("http://127.0.0.1:9/",), packages)
    )
    return contents


@pytest.fixture
def cifar10(monkeypatch: pytest.MonkeyPatch) -> Contents:
    rng = np.random.default_rng(1)
    names = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    contents: Contents = {}
    for name in names:
        records = rng.integers(0, 256, (4, data.CIFAR_RECORD), np.uint8)
        records[:, 0] %= 10
        contents[name] = records.tobytes()
    publish_cifar10(monkeypatch, contents, cifar_archive(contents))
    return contents


def publish_cifar10(
    monkeypatch: pytest.MonkeyPatch, contents: Contents, archive: bytes
) -> None:
    members = tuple(published(name, content) for name, content in contents.items())
    package = Package(published("cifar-10-binary.tar.gz", archive), members)
    source = Source(("http://127.0.0.1:9/",), (package,))
    monkeypatch.setitem(files.SOURCES, "cifar10", source)


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def write(folder: Path, contents: Contents) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def write_packed(folder: Path, contents: Contents) -> Path:
    return write(folder, {f"{n}.gz": packed(c) for n, c in contents.items()})


def test_digits_are_digits() -> None:
    (train, train_labels), (test, test_labels) = data.load("digits")
    assert train.shape == (1500, 64)
    assert test.shape == (297, 64)
    assert train.dtype == np.float32
    assert train_labels.dtype == np.int32
    assert train.min() == 0
    assert train.max() == 1
    # Images and labels belong together, and the split is not by writer or class.
    distances = np.square(test[:, None] - train[None]).sum(-1)
    nearest = train_labels[distances.argmin(axis=1)]
    assert np.mean(nearest == test_labels) > 0.97
    assert np.bincount(test_labels).min() > 15


def test_published_sizes_are_those_of_the_formats() -> None:
    sizes = {
        file.name: file.size
        for source in files.SOURCES.values()
        for package in source.packages
        for file in package.members
    }
    assert sizes["train-images-idx3-ubyte"] == 16 + 60_000 * 28 * 28
    assert sizes["train-labels-idx1-ubyte"] == 8 + 60_000
    assert sizes["t10k-images-idx3-ubyte"] == 16 + 10_000 * 28 * 28
    assert sizes["t10k-labels-idx1-ubyte"] == 8 + 10_000
    assert all(sizes[f"data_batch_{k}.bin"] == 10_000 * 3073 for k in range(1, 6))
    assert sizes["test_batch.bin"] == 10_000 * 3073


@pytest.mark.parametrize("nested", ["", "mnist"])
@pytest.mark.parametrize("writer", [write, write_packed])
def test_mnist_from_a_folder(
    tmp_path: Path, mnist: Contents, writer: Callable[..., Path], nested: str
) -> None:
    writer(tmp_path / nested, mnist)
    (train, labels), (test, _) = data.load("mnist", tmp_path)
    raw = np.frombuffer(mnist["train-images-idx3-ubyte"], np.uint8, offset=16)
    np.testing.assert_allclose(train, raw.reshape(12, 784) / 255, rtol=1e-6)
    assert train.dtype == np.float32
    assert bytes(labels.astype(np.uint8)) == mnist["train-labels-idx1-ubyte"][8:]
    assert test.shape == (5, 784)


def test_environment_names_the_folder(
    tmp_path: Path, mnist: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEKA_DATA", str(write(tmp_path / "mnist", mnist).parent))
    assert data.load("mnist").test[0].shape == (5, 784)
    # An explicit folder goes first.
    with pytest.raises(DataError, match="elsewhere"):
        data.load("mnist", tmp_path / "elsewhere")


@pytest.mark.parametrize("form", ["plain", "nested", "archive"])
def test_cifar10_from_a_folder(tmp_path: Path, cifar10: Contents, form: str) -> None:
    if form == "archive":
        write(tmp_path, {"cifar-10-binary.tar.gz": cifar_archive(cifar10)})
    else:
        write(tmp_path / (CIFAR_FOLDER if form == "nested" else ""), cifar10)
    (train, labels), (test, _) = data.load("cifar10", tmp_path)
    assert train.shape == (20, 32, 32, 3)
    assert train.dtype == np.float32
    # One mean and one deviation for all channels, from the training set alone.
    assert abs(train.mean(dtype=np.float64)) < 1e-6
    assert abs(train.std(dtype=np.float64) - 1) < 1e-6
    raw = np.stack([np.frombuffer(c, np.uint8) for c in cifar10.values()])
    pixels = raw.reshape(6, 4, 3073)[..., 1:]
    mean, deviation = pixels[:5].mean(), pixels[:5].std()
    # Plane 2, row 3, column 5 of the third test record is its blue value there.
    blue = pixels[5, 2, 2 * 1024 + 3 * 32 + 5]
    assert test[2, 3, 5, 2] == pytest.approx((blue - mean) / deviation, rel=1e-5)
    assert labels[4] == raw[1, 0]


def damage(kind: str, content: bytes) -> bytes:
    return {
        "flipped": content[:40] + bytes((content[40] ^ 1,)) + content[41:],
        "truncated": content[:-7],
        "longer": content + b"\0",
        "empty": b"",
        "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    }[kind]


@pytest.mark.fault(13)
@pytest.mark.parametrize("kind", ["flipped", "truncated", "longer", "empty", "html"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damage_is_named(
    tmp_path: Path, mnist: Contents, kind: str, suffix: str, tried: Tried
) -> None:
    tried(damaged_files=1)
    (write_packed if suffix else write)(tmp_path, mnist)
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    good = path.read_bytes()
    bad = damage(kind, good)
    path.write_bytes(bad)
    with pytest.raises(DataError) as caught:
        data.load("mnist", tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert f"sha256 is {hashlib.sha256(bad).hexdigest()}" in message
    assert f"expected {hashlib.sha256(good).hexdigest()}" in message
    assert "meka data fetch mnist" in message
    assert ("HTML" in message) == (kind == "html")
    checks = data.verify("mnist", tmp_path)
    assert [check.ok for check in checks] == [False, True, True, True]
    assert checks[0] == (path, False, message)


def test_damaged_archive_is_not_opened(
    tmp_path: Path, cifar10: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = damage("flipped", cifar_archive(cifar10))
    write(tmp_path, {"cifar-10-binary.tar.gz": archive})
    monkeypatch.setattr(tarfile, "open", lambda **_: pytest.fail("was opened"))
    with pytest.raises(DataError, match="other contents"):
        data.load("cifar10", tmp_path)


@pytest.mark.fault(13)
def test_gzip_bomb_is_not_inflated(
    tmp_path: Path, mnist: Contents, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    tried(hostile_archives=1)
    bomb = packed(bytes(64 << 20))
    packages = files.SOURCES["mnist"].packages
    first = Package(published(packages[0].file.name, bomb), packages[0].members)
    source = Source((), (first, *packages[1:]))
    monkeypatch.setitem(files.SOURCES, "mnist", source)
    write(write_packed(tmp_path, mnist), {first.file.name: bomb})
    tracemalloc.start()
    with pytest.raises(DataError, match=r"unpacked, has 9,425 bytes, expected 9,424"):
        data.load("mnist", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def link(name: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.fault(13)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("hard link", "data_batch_1.bin is not a regular file"),
        ("device", "data_batch_1.bin is not a regular file"),
        ("link", "data_batch_1.bin is not a regular file"),
        ("other size", "data_batch_1.bin has 9 bytes, expected 12,292"),
        ("other bytes", "data_batch_1.bin has the right size but other contents"),
        ("huge", "holds far more than the data set"),
        ("other folder", "has no member cifar-10-batches-bin/data_batch_1.bin"),
        ("not a tar", "not a readable tar.gz archive"),
        ("cut", "not a readable tar.gz archive"),
    ],
)
def test_archive_members(
    tmp_path: Path,
    cifar10: Contents,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    message: str,
    tried: Tried,
) -> None:
    """Archives whose own digest matches are still read with care."""
    tried(hostile_archives=1)
    first = f"{CIFAR_FOLDER}/data_batch_1.bin"
    size = len(cifar10["data_batch_1.bin"])
    archive = {
        "link": lambda: tar_gz([(link(first), b"")]),
        "hard link": lambda: tar_gz([(link(first, tarfile.LNKTYPE), b"")]),
        "device": lambda: tar_gz([(link(first, tarfile.CHRTYPE), b"")]),
        "other size": lambda: tar_gz([(tarfile.TarInfo(first), b"123456789")]),
        "other bytes": lambda: tar_gz([(tarfile.TarInfo(first), bytes(size))]),
        "huge": lambda: tar_gz([(tarfile.TarInfo("x"), bytes(3 << 20))]),
        "other folder": lambda: cifar_archive(cifar10, "../cifar-10-batches-bin"),
        "not a tar": lambda: packed(b"text"),
        "cut": lambda: cifar_archive(cifar10)[:20000],
    }[kind]()
    publish_cifar10(monkeypatch, cifar10, archive)
    write(tmp_path, {"cifar-10-binary.tar.gz": archive})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=message):
        data.load("cifar10", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_missing_files_are_listed(tmp_path: Path, cifar10: Contents) -> None:
    del cifar10["data_batch_3.bin"]
    write(tmp_path, cifar10)
    with pytest.raises(DataError) as caught:
        data.load("cifar10", tmp_path)
    message = str(caught.value)
    assert "neither cifar-10-binary.tar.gz nor data_batch_3.bin in" in message
    assert str(tmp_path / "cifar10") in message
    assert "meka data fetch cifar10" in message
    assert not data.verify("cifar10", tmp_path)[0].ok


def test_verify_good_files(tmp_path: Path, mnist: Contents) -> None:
    checks = data.verify("mnist", write_packed(tmp_path, mnist))
    assert len(checks) == 4
    assert all(check.ok for check in checks)
    assert data.verify("digits")[0].ok


@pytest.mark.parametrize("function", [data.load, data.fetch, data.verify])
def test_unknown_name(function: Callable[[str], object]) -> None:
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        function("cifar-10")


def test_idx_header_is_believed_only_if_it_fits() -> None:
    good = idx(np.zeros((3, 2, 2), np.uint8))
    with pytest.raises(
        DataError, match=r"holds 11 values, its header says \(3, 2, 2\)"
    ):
        data._idx({"x": good[:-1]}, "x", 3)
    with pytest.raises(DataError, match="not an IDX file"):
        data._idx({"x": good}, "x", 1)


class Server(ThreadingHTTPServer):
    """Serves `contents`; `script` says what goes wrong with the next requests."""

    daemon_threads = True

    def __init__(self, contents: Contents):
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents = contents
        self.delay = 0.0
        self.script: list[str] = []
        self.ranges: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        act = self.server.script.pop(0) if self.server.script else "serve"
        content = self.server.contents[self.path.lstrip("/")]
        kind, status, start = "application/octet-stream", 200, 0
        if act == "html":
            kind, content = "text/html", damage("html", content)
        elif act == "error":
            status, content = 503, b"busy"
        elif act in ("flipped", "truncated"):
            content = damage(act, content)
        elif asked and act != "no ranges":
            status, start = 206, int(asked.removeprefix("bytes=").rstrip("-"))
        body = content[start:]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if act != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        time.sleep(self.server.delay)
        stop = act in ("cut", "no length")
        self.wfile.write(body[: len(body) // 2] if stop else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(mnist: Contents, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server({f"{n}.gz": packed(c) for n, c in mnist.items()}) as running:
        source = files.SOURCES["mnist"]._replace(mirrors=(running.address,))
        monkeypatch.setitem(files.SOURCES, "mnist", source)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_fetch_then_load(tmp_path: Path, server: Server) -> None:
    seen: list[tuple[str, int, int]] = []
    paths = data.fetch("mnist", tmp_path, lambda *call: seen.append(call))
    assert paths == [tmp_path / "mnist" / name for name in server.contents]
    assert data.load("mnist", tmp_path).train[0].shape == (12, 784)
    name, size = paths[0].name, paths[0].stat().st_size
    assert (name, size, size) in seen
    # What is there is not asked for again.
    server.ranges.clear()
    assert data.fetch("mnist", tmp_path) == paths
    assert server.ranges == []
    assert sorted(tmp_path.rglob("*.gz")) == sorted(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("act", ["cut", "no length"])
def test_a_cut_transfer_is_continued(tmp_path: Path, server: Server, act: str) -> None:
    server.script = [act, act]
    first = data.fetch("mnist", tmp_path)[0]
    size = first.stat().st_size
    half = size // 2
    rest = half + (size - half) // 2
    assert server.ranges[:3] == [None, f"bytes={half}-", f"bytes={rest}-"]
    assert data.verify("mnist", tmp_path)[0].ok


def test_a_later_call_continues(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "ROUNDS", 1)
    server.script = ["cut"]
    with pytest.raises(DataError, match=r"cut after [\d,]+ of [\d,]+ bytes") as caught:
        data.fetch("mnist", tmp_path)
    assert "meka data fetch mnist" in str(caught.value)
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".part"]
    server.ranges.clear()
    data.fetch("mnist", tmp_path)
    assert server.ranges[0] is not None
    assert all(check.ok for check in data.verify("mnist", tmp_path))


@pytest.mark.parametrize("act", ["html", "error", "flipped", "truncated", "no ranges"])
def test_a_bad_answer_is_not_kept(tmp_path: Path, server: Server, act: str) -> None:
    server.script = ["cut", act]
    data.fetch("mnist", tmp_path)
    assert all(check.ok for check in data.verify("mnist", tmp_path))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("html", "sent an HTML page"),
        ("error", "503"),
        ("flipped", "sha256 is"),
        ("truncated", "sent a file of"),
    ],
)
def test_when_every_answer_is_bad(
    tmp_path: Path, server: Server, act: str, message: str
) -> None:
    server.script = [act] * 100
    with pytest.raises(DataError, match=message) as caught:
        data.fetch("mnist", tmp_path)
    assert server.address in str(caught.value)
    assert len(server.ranges) == download.ROUNDS
    assert list(tmp_path.rglob("*.*")) == []


def test_the_next_mirror_is_tried(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors = ("http://127.0.0.1:9/", server.address)  # nothing listens on port 9
    source = files.SOURCES["mnist"]._replace(mirrors=mirrors)
    monkeypatch.setitem(files.SOURCES, "mnist", source)
    data.fetch("mnist", tmp_path)
    assert all(check.ok for check in data.verify("mnist", tmp_path))


def test_cache_is_filled_used_and_repaired(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "cache_folder", lambda: tmp_path)
    expected = data.load("mnist").train[0]
    assert len(server.ranges) == 4
    np.testing.assert_array_equal(data.load("mnist").train[0], expected)
    assert len(server.ranges) == 4
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(damage("flipped", path.read_bytes() + bytes(40)))
    data.load("mnist")
    assert len(server.ranges) == 5


def test_several_processes_download_once(tmp_path: Path, server: Server) -> None:
    """As threads, which flock tells apart just as well: each opens the lock itself."""
    server.delay = 0.05
    seen: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(data.fetch, "mnist", tmp_path, lambda *x: seen.append(x))
            for _ in range(4)
        ]
    assert len({tuple(call.result()) for call in calls}) == 1
    assert server.ranges == [None] * 4  # one for each file
    assert all(check.ok for check in data.verify("mnist", tmp_path))
    assert sorted(tmp_path.rglob("*.gz")) == sorted(tmp_path.rglob("*.*"))
    assert all(0 <= done <= size for _, done, size in seen)


def test_the_right_to_download_dies_with_its_holder(
    tmp_path: Path, server: Server
) -> None:
    (tmp_path / "mnist").mkdir()
    stale = tmp_path / "mnist" / "train-images-idx3-ubyte.gz.lock"
    stale.touch()  # of a process that was killed: nobody holds it
    data.fetch("mnist", tmp_path)
    assert not stale.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, server: Server) -> None:
    (tmp_path / "mnist").write_text("a file where the folder should go")
    with pytest.raises(DataError, match="--data-dir"):
        data.fetch("mnist", tmp_path)


def test_labels_are_checked() -> None:
    data.check_labels(np.array([0, 9]), 10)
    with pytest.raises(DataError, match=r"label -1 in row 1 is outside 0\.\.9"):
        data.check_labels(np.array([0, -1, 3]), 10)
    with pytest.raises(DataError, match=r"label 10 in row 2 .*2 such rows"):
        data.check_labels(np.array([0, 1, 10, 11]), 10)
    with pytest.raises(DataError, match=r"got float64 \(2,\)"):
        data.check_labels(np.array([0.0, 1.0]), 10)
    with pytest.raises(DataError, match=r"got int64 \(2, 1\)"):
        data.check_labels(np.array([[0], [1]], np.int64), 10)


def test_batches_are_checked() -> None:
    inputs, labels = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)
    data.check_batch((inputs, labels), 10)
    data.check_batch((inputs.astype(np.uint8), labels), 10)
    data.check_batch((inputs, np.full((4, 2), -0.5)))
    broken = inputs.copy()
    broken[2, 1] = np.nan
    endless = inputs.copy()
    endless[3, 0] = -np.inf
    cases = [
        ((broken, labels), "mine: inputs in row 2 are not finite"),
        ((endless, labels), "mine: inputs in row 3 are not finite"),
        ((inputs, labels[:3]), "same number of rows"),
        ((inputs[:0], labels[:0]), "no examples"),
        ((inputs.astype(np.float64), labels), "inputs are float64"),
        ((inputs, labels + 10), "label 10 in row 0"),
        (inputs, "expected a pair"),
    ]
    for batch, message in cases:
        with pytest.raises(DataError, match=message):
            data.check_batch(batch, 10, "mine")


def test_crops_and_flips() -> None:
    pad, n = 2, 400
    images = jax.random.normal(jax.random.key(0), (n, 6, 5, 3))
    key = jax.random.key(1)
    augment = jax.jit(crop_and_flip, static_argnums=2)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        found = augment(key, images, pad)
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    counts = np.zeros((5, 5, 2), int)
    for image, source in zip(np.asarray(found), padded, strict=True):
        for top, left, flip in np.ndindex(counts.shape):
            crop = source[top : top + 6, left : left + 5]
            counts[top, left, flip] += np.array_equal(
                image, crop[:, ::-1] if flip else crop
            )
    # Each image is exactly one of the 50 possibilities, and all of those occur: the
    # chance that a fair choice leaves one out is 50 * (49/50)^400 = 1.5 %.
    assert counts.sum() == n
    assert counts.min() > 0
    np.testing.assert_array_equal(found, augment(key, images, pad))
    assert not np.array_equal(found, augment(jax.random.key(2), images, pad))
