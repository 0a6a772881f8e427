"""Records on their way to other tools."""

import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meka.lab import events, writers
from meka.lab.config import RunConfig
from meka.lab.train import train
from meka.lab.workloads import Workload
from meka.state import Info

CONFIG = RunConfig("lines", "sgd", 6, learning_rate=0.1, eval_every=3)


def read_events(folder: Path) -> list[tuple[str, float, int]]:
    """Read event files as TFRecords, independently of the writer."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            content = data[12 : 12 + length]
            event = event_pb2.Event.FromString(content)  # pyright: ignore
            data = data[16 + length :]
            for value in event.summary.value:
                found.append((value.tag, value.simple_value, event.step))  # noqa: PERF401
    return found


def test_event_files_hold_the_records_under_grouped_names(tmp_path):
    pytest.importorskip("tensorboardX")
    with events.EventWriter(tmp_path, several=True) as writer:
        writer.write([{"kind": "step", "step": 1, "loss": 1.0}])
        writer.write([{"kind": "step", "step": 3, "seed": 4, "x": [1, 2], "t": "no"}])
        writer.write([{"kind": "eval", "step": 3, "test_accuracy": np.float32(0.5)}])
        writer.write([{"kind": "step", "step": 4, "seed": 0, "loss": math.inf}])
    assert read_events(tmp_path) == [
        ("loss/minibatch", 1.0, 1),
        ("step/x/seed4/0", 1.0, 3),
        ("step/x/seed4/1", 2.0, 3),
        ("accuracy/test", 0.5, 3),
        ("loss/minibatch/seed0", math.inf, 4),
    ]


def test_every_number_of_a_step_has_a_group():
    record = {"kind": "step", "step": 1, "seed": 0, **dict.fromkeys(Info._fields, 1.0)}
    record |= {"model.slope": 1.0, "loss": 1.0}
    del record["model"], record["observed"]  # several numbers, and the loss
    tags = dict(writers.scalars(record))
    groups = {tag.partition("/")[0] for tag in tags}
    assert groups == {"loss", "step", "gradient", "filter", "health", "model"}
    assert len(tags) == len(record) - 3
    evaluated = {"kind": "eval", "step": 1, "train_loss": 1, "average_test_accuracy": 2}
    assert dict(writers.scalars(evaluated)) == {
        "loss/train": 1,
        "accuracy/test_average": 2,
    }


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("tensorboard", "tensorboardX", r"meka\[tensorboard\]"),
        ("trackio", "trackio", ""),
    ],
)
def test_what_is_not_installed_is_named(name, module, package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(writers.WriterError, match=f"needs {module}; install {package}"):
        writers.find(name)


def test_an_unknown_writer_is_refused():
    with pytest.raises(writers.WriterError, match="there are tensorboard, trackio"):
        writers.find("abacus")


class FakeTrackio(types.ModuleType):
    """Stands in for the package: its `init`, and a run's `log` and `finish`."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[Any] = []

    def init(self, **options: Any) -> "FakeTrackio":
        self.calls.append(options)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))

    def finish(self) -> None:
        self.calls.append("finished")


def test_trackio_sees_a_row_a_step(tmp_path, monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    config = RunConfig("digits", "adam", 2, seeds=2)
    writer = writers.find("trackio")(tmp_path / "my-run", config, 0)
    writer.write(
        [
            {"kind": "step", "step": 1, "seed": seed, "loss": 1.0 + seed, "gain": 0.5}
            for seed in (0, 1)
        ]
    )
    writer.close()
    opened, row, end = fake.calls
    assert (opened["project"], opened["name"]) == ("meka", "my-run")
    assert (opened["config"]["optimizer"], opened["resume"]) == ("adam", "never")
    assert row == (
        1,
        {
            "loss/minibatch/seed0": 1.0,
            "loss/minibatch/seed1": 2.0,
            "filter/gain/seed0": 0.5,
            "filter/gain/seed1": 0.5,
        },
    )
    assert end == "finished"


def test_a_writer_of_ones_own_sees_every_record_and_is_closed(tmp_path):
    import jax.numpy as jnp

    class Mine:
        def __init__(self, *opened: Any):
            self.opened, self.seen, self.closed = opened, [], False

        def write(self, records):
            self.seen += [(r["kind"], r["step"]) for r in records]
            if len(self.seen) > 5:
                raise OSError("no more")

        def close(self):
            self.closed = True

    def draw(key, n):
        return jnp.ones((n, 2))

    def losses(params, batch):
        return (batch @ params - 1) ** 2

    workload = Workload("lines", lambda key: jnp.zeros(2), losses, 4, 6, draw=draw)
    made: list[Mine] = []

    def open_mine(*arguments):
        made.append(Mine(*arguments))
        return made[-1]

    with pytest.raises(OSError, match="no more"):
        train(CONFIG, tmp_path / "run", workload=workload, writers=[open_mine])
    (mine,) = made
    assert mine.opened == (tmp_path / "run", CONFIG, 0)
    assert mine.seen == [
        ("eval", 0),
        *(("step", k) for k in (1, 2, 3)),
        ("eval", 3),
    ] + [("step", k) for k in (4, 5, 6)]
    assert mine.closed
