"""What no file here may do: run code hidden in data, write where an archive says, or
swallow an error unseen. ruff bans what has a name to ban; this finds the rest."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path
    for folder in ("meka", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def forbidden(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if name.name.split(".")[0] in PICKLES:
                        yield f"line {node.lineno}: imports {name.name}"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                yield f"line {node.lineno}: imports {module}"
            case ast.keyword(arg="allow_pickle"):
                yield f"line {node.lineno}: allow_pickle"
            case ast.Attribute(attr="extractall" | "unpack_archive" as name):
                yield f"line {node.lineno}: {name}"
            case ast.ExceptHandler(type=None):
                yield f"line {node.lineno}: except without an exception"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_forbidden(path):
    assert list(forbidden(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle as c",
        "from pickle import loads",
        "def f():\n    import shelve",
        "np.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=False)",  # the default: saying it invites changing it
        "tarfile.open(x).extractall('.')",
        "zipfile.ZipFile(x).extractall()",
        "shutil.unpack_archive(x)",
        "try:\n    f()\nexcept:\n    pass",
    ],
)
def test_the_bans_are_seen(source):
    assert len(list(forbidden(source))) == 1


def test_what_is_allowed():
    source = "try:\n    np.load(x)\nexcept OSError:\n    archive.extractfile(y)"
    assert list(forbidden(source)) == []
    assert len(FILES) > 50
