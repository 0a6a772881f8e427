"""The readers on bytes nobody wrote: a value, or the one error they promise."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meka.lab import checkpoint, data, files, metrics
from meka.lab.config import RunConfig
from meka.lab.files import DataError, File
from meka.lab.metrics import MetricsError
from meka.lab.runfolder import CONFIG, ENVIRONMENT, RunError, RunFolder, read_config

Read = Callable[[bytes, Path], None]


def edited(good: bytes) -> st.SearchStrategy[bytes]:
    """A good file with pieces replaced, cut out, repeated or put in; or anything."""
    place = st.integers(0, len(good))
    edit = st.tuples(place, place, st.binary(max_size=12), st.integers(1, 3))

    def apply(edits: list[tuple[int, int, bytes, int]]) -> bytes:
        content = good
        for start, end, piece, times in edits:
            start, end = min(start, len(content)), min(end, len(content))
            content = content[:start] + piece * times + content[end:]
        return content

    return st.lists(edit, min_size=1, max_size=4).map(apply) | st.binary(max_size=200)


def json_values() -> st.SearchStrategy[Any]:
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=9), inner, max_size=3)
        ),
        max_leaves=8,
    )


# The readers, each with a file it accepts ---------------------------------------------


def idx() -> tuple[bytes, Read]:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    header = bytes((0, 0, 8, 3)) + np.array(values.shape, ">u4").tobytes()

    def read(content: bytes, folder: Path) -> None:
        try:
            found = data._idx({"x": content}, "x", 3)
        except DataError:
            return
        assert found.dtype == np.uint8
        assert found.tobytes() == content[16:]

    return header + values.tobytes(), read


def cifar() -> tuple[bytes, Read]:
    record = bytes((7,)) + bytes(range(256)) * 12

    def read(content: bytes, folder: Path) -> None:
        try:
            images, labels = data._records({"x": content}, ["x"])
        except DataError:
            return
        assert images.shape == (len(labels), 32, 32, 3)
        assert len(labels) * data.CIFAR_RECORD == len(content)
        assert labels[-1] == content[-data.CIFAR_RECORD]

    return record * 2, read


def gunzip() -> tuple[bytes, Read]:
    plain = b"so many bytes"
    member = File("x", len(plain), files._digest(plain))

    def read(content: bytes, folder: Path) -> None:
        try:
            assert files._gunzip(content, member, folder) == plain
        except DataError:
            return

    return gzip.compress(plain, mtime=0), read


def tar() -> tuple[bytes, Read]:
    plain = b"so many bytes"
    member = File("data_batch_1.bin", len(plain), files._digest(plain))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(f"{files.CIFAR_FOLDER}/{member.name}")
        info.size = len(plain)
        archive.addfile(info, io.BytesIO(plain))

    def read(content: bytes, folder: Path) -> None:
        before = sorted(folder.iterdir())
        packed = io.BytesIO(gzip.compress(content, 1, mtime=0))
        try:
            found = dict(files._tar_members(packed, (member,), folder))
        except DataError:
            found = {member.name: plain}
        assert found == {member.name: plain}
        assert sorted(folder.iterdir()) == before

    return buffer.getvalue()[:2048], read


def jsonl() -> tuple[bytes, Read]:
    lines = [metrics.encoded({"kind": "step", "step": k, "x": 0.5}) for k in range(3)]

    def read(content: bytes, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        path.write_bytes(content)
        try:
            records = metrics.read_metrics(path)
        except MetricsError:
            return
        assert len(records) == content.count(b"\n")
        for record in records:
            assert isinstance(record["kind"], str)
            assert type(record["step"]) is int

    return "".join(line + "\n" for line in lines).encode(), read


def manifest() -> tuple[bytes, Read]:
    """With its digest made to match, as if someone had written it so."""
    tree = {"w": np.arange(3.0), "n": np.asarray(1)}
    good: dict[str, bytes] = {}

    def read(content: bytes, folder: Path) -> None:
        if not good:
            path = checkpoint.save(folder / "checkpoints", 1, tree)
            good.update({file.name: file.read_bytes() for file in path.iterdir()})
        path = folder / "checkpoints" / "step-00000001"
        (path / "manifest.json").write_bytes(content)
        (path / "manifest.sha256").write_bytes(checkpoint._line(content))
        problems: list[str] = []
        found = checkpoint.latest(
            folder / "checkpoints", tree, on_problem=problems.append
        )
        if found is None:
            assert len(problems) == 1
            return
        assert not problems
        assert found.tree["w"].tobytes() == tree["w"].tobytes()

    encoded = checkpoint._encode(1, tree, {"a": 1})
    return encoded["manifest.json"], read


def arrays() -> tuple[bytes, Read]:
    """The npz, with every digest of the file as a whole made to match."""
    tree = {"w": np.arange(3.0)}
    encoded = checkpoint._encode(1, tree, {})
    content_of = json.loads(encoded["manifest.json"])

    def read(content: bytes, folder: Path) -> None:
        path = folder / "checkpoints" / "step-00000001"
        path.mkdir(parents=True, exist_ok=True)
        changed = {**content_of, "arrays_sha256": checkpoint._sha256(content)}
        line = json.dumps(changed).encode()
        (path / "arrays.npz").write_bytes(content)
        (path / "manifest.json").write_bytes(line)
        (path / "manifest.sha256").write_bytes(checkpoint._line(line))
        problems: list[str] = []
        found = checkpoint.latest(path.parent, tree, on_problem=problems.append)
        if found is None:
            assert len(problems) == 1
        else:
            assert found.tree["w"].tobytes() == tree["w"].tobytes()

    return encoded["arrays.npz"], read


def config() -> tuple[bytes, Read]:
    good = RunConfig("digits", "meka", 5)

    def read(content: bytes, folder: Path) -> None:
        (folder / CONFIG).write_bytes(content)
        try:
            assert isinstance(read_config(folder), RunConfig)
        except RunError:
            return

    return json.dumps(good.to_dict()).encode(), read


def environment() -> tuple[bytes, Read]:
    good = RunConfig("digits", "meka", 5)

    def read(content: bytes, folder: Path) -> None:
        path = folder / "run"
        if not path.exists():
            RunFolder.create(path, good).close()
        (path / ENVIRONMENT).write_bytes(content)
        with RunFolder.resume(path) as run:
            assert all("bits may differ" in warning for warning in run.warnings)

    return json.dumps({"jax": "0.1", "threads": 3, "resumed": [{}]}).encode(), read


READERS = (idx, cifar, gunzip, tar, jsonl, manifest, arrays, config, environment)
TEXT = (jsonl, manifest, config, environment)


def fuzz(make, folder: Path, count: int) -> int:
    good, read = make()
    folder.mkdir(exist_ok=True)
    read(good, folder)
    inputs = edited(good)
    if make in TEXT:
        whole = json_values().map(lambda x: json.dumps(x).encode() + b"\n")
        inputs = inputs | whole
    tried = 0

    @settings(max_examples=count)
    @given(inputs)
    def run(content: bytes) -> None:
        nonlocal tried
        read(content, folder)
        tried += 1

    run()
    return tried


@pytest.mark.fault(17)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_reader(reader, tmp_path, tried):
    tried(inputs=fuzz(reader, tmp_path / "fuzz", 100))


@pytest.mark.slow
@pytest.mark.fault(17)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_reader_at_length(reader, tmp_path, tried):
    tried(inputs=fuzz(reader, tmp_path / "fuzz", 10_000))
