"""Checkpoints: bit-exact, atomic, and never used unless every byte is right."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meka.lab import checkpoint


class Pair(NamedTuple):
    first: jax.Array
    second: np.ndarray | None


def small(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(3, dtype=np.float32) + step, "n": np.asarray(step)}


def assert_step(restored: checkpoint.Restored | None, step: int) -> None:
    assert restored is not None
    assert restored.step == step
    for name, expected in small(step).items():
        assert restored.tree[name].tobytes() == expected.tobytes()


def bits(leaf) -> tuple:
    if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).data
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@jax.debug_nans(False)  # one is saved on purpose
def test_round_trip_is_bit_exact(tmp_path):
    nan_with_payload = np.array([0x7FC12345, 0x80000000, 1], np.uint32).view(np.float32)
    tree = {
        "float32": jnp.asarray(nan_with_payload),
        "nested": [Pair(jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), None)],
        "float16": jnp.asarray([1.5, -0.0, jnp.inf], jnp.float16),
        "float8": jnp.asarray([0.5, 3.0], jnp.float8_e4m3fn),
        "int4": jnp.asarray([-8, 7], jnp.int4),
        "scalar": jnp.asarray(3.25, jnp.bfloat16),
        "count": jnp.asarray(7, jnp.int32),
        "flag": jnp.asarray([True, False]),
        "empty": jnp.zeros((0, 4)),
        "numpy": np.array([[1.0, 2.0]], np.float64).T,
        "complex": np.array([1 + 2j]),
        "numpy scalar": np.float32(0.1),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 5),
    }
    checkpoint.save(tmp_path, 12, tree, extra={"seen": [1, 2], "name": "ü"})
    restored = checkpoint.latest(tmp_path, tree)
    assert restored is not None
    assert (restored.step, restored.extra) == (12, {"seen": [1, 2], "name": "ü"})
    assert jax.tree.structure(restored.tree) == jax.tree.structure(tree)
    for old, new in zip(
        jax.tree.leaves(tree), jax.tree.leaves(restored.tree), strict=True
    ):
        assert bits(old) == bits(new)
        assert isinstance(old, jax.Array) == isinstance(new, jax.Array)
    for name in ("key", "keys"):
        assert jax.random.key_impl(restored.tree[name]) == jax.random.key_impl(
            tree[name]
        )
    drawn = [jax.random.normal(each["key"], (3,)) for each in (tree, restored.tree)]
    assert bits(drawn[0]) == bits(drawn[1])


def test_python_numbers_keep_their_type(tmp_path):
    tree = {"steps": 2**62 + 1, "done": True, "rate": 0.1}
    checkpoint.save(tmp_path, 0, tree)
    restored = checkpoint.latest(tmp_path, {"steps": 0, "done": False, "rate": 0.0})
    assert restored is not None
    assert restored.tree == tree
    types = {name: type(value) for name, value in restored.tree.items()}
    assert types == {"steps": int, "done": bool, "rate": float}


def test_restores_into_shapes_alone_and_strongly_typed(tmp_path):
    tree = {"x": jnp.asarray(1.0), "key": jax.random.key(0)}  # x is weakly typed
    checkpoint.save(tmp_path, 1, tree)
    like = jax.eval_shape(lambda: tree)
    restored = checkpoint.latest(tmp_path, like)
    assert restored is not None
    assert isinstance(restored.tree["x"], jax.Array)
    assert not restored.tree["x"].weak_type
    assert bits(restored.tree["key"]) == bits(tree["key"])


def test_same_tree_gives_the_same_bytes(tmp_path):
    tree = {"w": jnp.ones(3), "key": jax.random.key(0)}
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, 5, tree, extra={"k": 1})
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, small(step), keep=2)
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert checkpoint.steps(tmp_path / "missing") == []
    assert checkpoint.latest(tmp_path / "missing", small(0)) is None
    assert_step(checkpoint.latest(tmp_path, small(0), up_to=3), 3)


def test_rewound_run_keeps_what_it_just_saved(tmp_path):
    """Damaged checkpoints of later steps must not push good ones out."""
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, small(step), keep=3)
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / "arrays.npz").write_bytes(b"")
    checkpoint.save(tmp_path, 11, small(11), keep=2)
    assert {10, 11} <= set(checkpoint.steps(tmp_path))
    problems: list[str] = []
    assert_step(checkpoint.latest(tmp_path, small(0), on_problem=problems.append), 11)
    assert len(problems) == 2
    checkpoint.save(tmp_path, 20, small(20), keep=2)  # replaces the damaged one
    checkpoint.save(tmp_path, 30, small(30), keep=2)
    assert_step(checkpoint.latest(tmp_path, small(0)), 30)
    assert checkpoint.steps(tmp_path) == [20, 30]


def test_replacing_leaves_no_other_folders(tmp_path):
    checkpoint.save(tmp_path, 1, small(1))
    checkpoint.save(tmp_path, 1, small(1))
    checkpoint.save(tmp_path, 1, {"w": np.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    restored = checkpoint.latest(tmp_path, {"w": np.zeros(2)})
    assert restored is not None
    assert restored.tree["w"].tolist() == [1, 1]


@pytest.mark.fault(9)
@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_every_flipped_byte_falls_back(tmp_path, flip, tried):
    checkpoint.save(tmp_path, 1, small(1))
    newest = checkpoint.save(tmp_path, 2, small(2), extra={"a": 1})
    offsets = 0
    for path in sorted(newest.iterdir()):
        good = path.read_bytes()
        for offset in range(len(good)):
            bad = bytearray(good)
            bad[offset] ^= flip
            path.write_bytes(bad)
            problems: list[str] = []
            restored = checkpoint.latest(tmp_path, small(0), on_problem=problems.append)
            assert_step(restored, 1)
            assert len(problems) == 1
            assert str(newest) in problems[0]
            offsets += 1
        path.write_bytes(good)
    assert offsets > 1000
    assert_step(checkpoint.latest(tmp_path, small(0)), 2)
    tried(flipped_bytes=offsets)


@pytest.mark.fault(9)
def test_every_truncation_and_missing_file_falls_back(tmp_path, tried):
    checkpoint.save(tmp_path, 1, small(1))
    newest = checkpoint.save(tmp_path, 2, small(2))
    problems: list[str] = []
    expected = 0
    for path in sorted(newest.iterdir()):
        good = path.read_bytes()
        for length in range(len(good)):
            path.write_bytes(good[:length])
            restored = checkpoint.latest(tmp_path, small(0), on_problem=problems.append)
            assert_step(restored, 1)
            expected += 1
        path.write_bytes(good + b"\0")
        restored = checkpoint.latest(tmp_path, small(0), on_problem=problems.append)
        assert_step(restored, 1)
        path.unlink()
        restored = checkpoint.latest(tmp_path, small(0), on_problem=problems.append)
        assert_step(restored, 1)
        assert f"{path.name} is missing" in problems[-1]
        expected += 2
        path.write_bytes(good)
    assert len(problems) == expected
    tried(truncations_and_missing_files=expected)


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    ("like", "reason"),
    [
        ({"w": np.zeros(4, np.float32), "n": np.asarray(0)}, r"\['w'\].*\[3\].*\[4\]"),
        ({"w": np.zeros(3, np.float16), "n": np.asarray(0)}, "float32.*float16"),
        ({"w": np.zeros(3, np.int32), "n": np.asarray(0)}, "float32.*int32"),
        ({"w": np.zeros(3, np.float32)}, r"has \['n'\], which this run does not"),
        ({**small(0), "more": np.zeros(1)}, r"no \['more'\], which this run needs"),
        ({"w": np.zeros(3, np.float32), "n": 0}, "int64.*python int"),
    ],
)
def test_another_structure_is_named(tmp_path, like, reason, tried):
    checkpoint.save(tmp_path, 1, small(1))
    with pytest.warns(UserWarning, match=reason):
        assert checkpoint.latest(tmp_path, like) is None
    tried(other_structures=1)


def test_another_key_implementation_is_named(tmp_path):
    checkpoint.save(tmp_path, 1, {"key": jax.random.key(0)})
    like = {"key": jax.random.key(0, impl="rbg")}
    with pytest.warns(UserWarning, match="key<fry>.*key<rbg>"):
        assert checkpoint.latest(tmp_path, like) is None


def rewrite_manifest(folder: Path, **changes) -> None:
    """A manifest that verifies, as another program might have written it."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    data = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "manifest.sha256").write_bytes(checkpoint._line(data))


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 2}, "newer meka.*upgrade"),
        ({"format": "one"}, "cannot be decoded"),
        ({"step": 3}, "of step 3"),
        ({"leaves": [1]}, "cannot be decoded"),
        ({"leaves": [{}, {}]}, "has no dtype, path"),
        ({"leaves": None}, "cannot be decoded"),
    ],
)
def test_unknown_manifests_are_passed_over(tmp_path, changes, reason, tried):
    tried(unknown_manifests=1)
    checkpoint.save(tmp_path, 1, small(1))
    rewrite_manifest(checkpoint.save(tmp_path, 2, small(2)), **changes)
    with pytest.warns(UserWarning, match=reason):
        assert_step(checkpoint.latest(tmp_path, small(0)), 1)


def test_forged_arrays_are_passed_over(tmp_path):
    """Digests that match a file which is no archive."""
    checkpoint.save(tmp_path, 1, small(1))
    newest = checkpoint.save(tmp_path, 2, small(2))
    for data in (b"", b"not an archive", b"PK\x05\x06" + b"\0" * 18):
        (newest / "arrays.npz").write_bytes(data)
        rewrite_manifest(newest, arrays_sha256=checkpoint._sha256(data))
        with pytest.warns(UserWarning, match="cannot be decoded"):
            assert_step(checkpoint.latest(tmp_path, small(0)), 1)


@pytest.mark.parametrize(
    "leaf", ["text", np.array(["text"]), np.array([None]), np.zeros(1, "f4,i4"), 2**70]
)
def test_leaves_that_cannot_be_saved_are_named(tmp_path, leaf):
    with pytest.raises(checkpoint.CheckpointError, match=r"\['odd'\]"):
        checkpoint.save(tmp_path / "new", 1, {"odd": leaf})
    with pytest.raises(checkpoint.CheckpointError, match="not JSON"):
        checkpoint.save(tmp_path / "new", 1, {}, extra={"x": float("nan")})
    with pytest.raises(ValueError, match="step must be"):
        checkpoint.save(tmp_path / "new", -1, {})
    assert not (tmp_path / "new").exists()


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    ("code", "advice"), [(errno.ENOSPC, "Free some space"), (errno.EROFS, "writable")]
)
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_refusing_disk_leaves_the_old_one(
    tmp_path, monkeypatch, call, code, advice, tried
):
    tried(refusing_calls=1)
    checkpoint.save(tmp_path, 1, small(1))
    before = files(tmp_path)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint.os, call, refuse)
    with pytest.raises(checkpoint.CheckpointError, match=advice):
        checkpoint.save(tmp_path, 2, small(2))
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(checkpoint.CheckpointError, match="cannot save"):
        checkpoint.save(tmp_path / "file", 1, small(1))
    assert (tmp_path / "file").read_text() == "mine"


def test_stale_temporaries_of_dead_processes_are_removed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    names = (f"step-00000001.tmp-{gone.pid}", f"step-00000001.tmp-{os.getpid()}")
    for name in (*names, "step-00000002.tmp-1", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "arrays.npz").write_bytes(b"half")
    checkpoint.save(tmp_path, 3, small(3))
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000002.tmp-1",  # process 1 lives: perhaps it is writing
        "step-00000003",
        "notes",
    }


def run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.fault(10)
def test_file_size_limit(tmp_path, tried):
    """A real refusal by the kernel, as on a full disk."""
    tried(full_disks=1)
    checkpoint.save(tmp_path, 1, small(1))
    before = files(tmp_path)
    out = run(
        """
        import resource, sys
        import numpy as np
        from meka.lab import checkpoint
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            checkpoint.save(sys.argv[1], 2, {"w": np.zeros(100_000)})
        except checkpoint.CheckpointError as error:
            print(error)
        """,
        tmp_path,
    )
    assert "Free some space" in out
    assert files(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 1


KILLED_AT_EVERY_CALL = """
    # Step 2 is saved over and over, in forked children; the n-th child is killed just
    # before its n-th call that changes the disk, until one survives.
    import os, shutil, signal, sys, warnings
    from pathlib import Path
    import numpy as np
    from meka.lab import checkpoint

    warnings.simplefilter("ignore")  # about fork; nothing of jax runs in the children
    folder, replace = Path(sys.argv[1]), sys.argv[2] == "replace"
    tree = lambda step: {"w": np.arange(3.0) + step}

    def dies_before(function, left):
        def wrapped(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return wrapped

    def child(calls):
        left = [calls]
        for owner, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"),
                            (os, "unlink"), (os, "rmdir"), (os, "open")):
            setattr(owner, name, dies_before(getattr(owner, name), left))
        checkpoint.save(folder, 2, tree(2), keep=1)
        os._exit(0)

    for calls in range(200):
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save(folder, 1, tree(1))
        if replace:
            checkpoint.save(folder, 2, tree(1.5))
            shutil.rmtree(folder / "step-00000001")
        pid = os.fork()
        if pid == 0:
            child(calls)
        status = os.waitpid(pid, 0)[1]
        problems = []
        found = checkpoint.latest(folder, tree(0), on_problem=problems.append)
        assert found is not None and not problems, (calls, problems)
        assert found.tree["w"][0] in ((1.5, 2) if replace else (1, 2)), calls
        checkpoint.save(folder, 3, tree(3), keep=9)
        left = [path.name for path in folder.iterdir() if "tmp" in path.name]
        assert not left, (calls, left)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    print(calls)
"""


@pytest.mark.fault(8)
@pytest.mark.parametrize("mode", ["beside", "replace"])
def test_killed_at_every_call_inside_save(tmp_path, mode, tried):
    kills = int(run(KILLED_AT_EVERY_CALL, tmp_path / "run", mode))
    assert 10 < kills < 199
    tried(kills_at_every_call_of_a_save=kills)


def test_killed_at_random_moments(tmp_path):
    """The same without touching the code: a large save, killed by the clock."""
    script = """
        import sys
        import numpy as np
        from meka.lab import checkpoint
        for step in range(1, 10**6):
            checkpoint.save(sys.argv[1], step, {"w": np.full(300_000, step)})
            print(step, flush=True)
    """
    saved, like = 0, {"w": np.zeros(300_000, np.int64)}
    for delay in (0.0, 0.003, 0.011):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                saved = int(line)
                if saved >= 3:
                    break
            signal_after(process, delay)
            rest = process.stdout.read().split()
        saved = int(rest[-1]) if rest else saved
        problems: list[str] = []
        restored = checkpoint.latest(tmp_path, like, on_problem=problems.append)
        assert restored is not None
        assert not problems
        assert restored.step >= saved
        assert (restored.tree["w"] == restored.step).all()


def signal_after(process: subprocess.Popen, delay: float) -> None:
    try:
        process.wait(timeout=delay)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
