"""`meka reproduce`: every experiment at its smallest, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meka.lab import cli
from meka.lab.reproduce import __main__ as plain_command
from meka.lab.reproduce import page, runner, setting, training
from meka.lab.reproduce.setting import Setting
from meka.lab.reproduce.table import TABLE, Experiment, ReproduceError, chosen
from meka.lab.reproduce.training import Run
from meka.lab.reproduce.verdict import FAILS, HOLDS, Check, judge

PNG = b"\x89PNG\r\n\x1a\n"


# Those that compile little; the others take minutes together, and are slow tests.
QUICK = ("acquisition", "negative-curvature", "rosenbrock")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[Path, list[str]]:
    """The quick ones, once: the folder, and what was said."""
    return run_all(QUICK, tmp_path_factory.mktemp("smoke"))


def run_all(names: Sequence[str], out: Path) -> tuple[Path, list[str]]:
    said: list[str] = []
    runner.reproduce(
        chosen(list(names)), Setting("smoke"), out, command="meka test", say=said.append
    )
    return out, said


def strict(path: Path) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {path}")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("name", QUICK)
def test_an_experiment_leaves_data_figure_and_verdict(smoke, name):
    complete(smoke[0] / name, name)


@pytest.mark.slow
def test_every_experiment_leaves_data_figure_and_verdict(tmp_path):
    """And the page shows them all."""
    out, said = run_all(list(TABLE), tmp_path)
    for name in TABLE:
        complete(out / name, name)
    shown(out, said, list(TABLE))


def complete(folder: Path, name: str) -> None:
    record, verdict = strict(folder / "data.json"), strict(folder / "verdict.json")
    assert (record["experiment"], record["scale"]) == (name, "smoke")
    assert record["seconds"] > 0
    assert verdict["claim"] == TABLE[name].claim
    assert verdict["verdict"] in (HOLDS, FAILS)
    held = [check["holds"] for check in verdict["checks"]]
    assert (verdict["verdict"] == HOLDS) == all(held)
    assert all(re.search(r"\d", check["found"]) for check in verdict["checks"])
    content = (folder / "figure.png").read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 3000
    ElementTree.parse(folder / "figure.svg")


@pytest.mark.parametrize("name", ["acquisition", "negative-curvature"])
def test_what_needs_no_training_holds_at_any_scale(smoke, name):
    assert strict(smoke[0] / name / "verdict.json")["verdict"] == HOLDS


def test_the_page_shows_them_and_needs_nothing_else(smoke):
    out, said = smoke
    shown(out, said, QUICK)


def shown(out: Path, said: list[str], names: Sequence[str]) -> None:
    text = (out / "index.html").read_text()
    for name in names:
        assert f'id="{name}"' in text
        assert page.html.escape(TABLE[name].claim) in text
        assert f"{name}: " in " ".join(said)
    assert text.count("data:image/png;base64,") == len(names)
    assert not re.search(r"""(src|href)=["']?(http|//|\w+\.(png|js|css))""", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_what_is_complete_is_not_run_again(smoke, monkeypatch):
    out, _ = smoke
    before = {p: p.read_bytes() for p in out.glob("*/data.json")}

    def never(self, setting):
        raise AssertionError(f"{self.name} ran again")

    monkeypatch.setattr(Experiment, "run", never)
    said: list[str] = []
    runner.reproduce(
        chosen(["rosenbrock", "acquisition"]),
        Setting("smoke"),
        out,
        command="meka test",
        say=said.append,
    )
    assert sum("not run again" in line for line in said) == 2
    assert before == {p: p.read_bytes() for p in out.glob("*/data.json")}


def test_another_scale_in_the_same_folder_is_refused(smoke):
    out, _ = smoke
    for other in (Setting("desk"), Setting("smoke", seeds=7)):
        with pytest.raises(ReproduceError, match="choose another folder"):
            runner.reproduce(
                chosen(["acquisition"]), other, out, command="", say=lambda text: None
            )


# A small experiment in the place of a real one ----------------------------------------


class Small:
    """Three pieces, the second of which may be interrupted."""

    CHOICES, REASONS = "none", ()

    def __init__(self):
        self.made: list[int] = []
        self.interrupt = False

    def run(self, setting: Setting) -> dict[str, Any]:
        return {"sum": sum(setting.piece(f"p{k}", {"k": k}, self._maker(k))["k"]
                           for k in range(3))}  # fmt: skip

    def _maker(self, k: int):
        def make() -> dict[str, Any]:
            if k == 1 and self.interrupt:
                raise KeyboardInterrupt
            self.made.append(k)
            return {"k": k, "bad": float("nan")}

        return make

    def checks(self, data: dict[str, Any]) -> list[Check]:
        return [Check("sum", "the sum is 3", str(data["sum"]), data["sum"] == 3)]

    def figure(self, data: dict[str, Any]):
        from meka.lab.reproduce import drawing

        figure, axes = drawing.panels(1)
        axes[0, 0].plot([0, data["sum"]])
        return figure


@pytest.fixture
def small(monkeypatch) -> Small:
    module = Small()
    monkeypatch.setattr(Experiment, "_module", module)
    return module


def test_an_interrupt_loses_only_the_piece_it_hit(small, tmp_path, capsys):
    small.interrupt = True
    arguments = ["acquisition", "--scale", "smoke", "--out", str(tmp_path / "out")]
    assert plain_command.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "out" / "acquisition" / "data.json").exists()
    small.interrupt = False
    assert plain_command.main(arguments) == 0
    assert small.made == [0, 1, 2]
    assert strict(tmp_path / "out" / "acquisition" / "data.json")["data"] == {"sum": 3}
    assert "acquisition: holds" in capsys.readouterr().out


def test_an_interrupt_keeps_the_page_of_what_was_finished(small, tmp_path):
    out = tmp_path / "out"
    assert plain_command.main(["cost", "--scale", "smoke", "--out", str(out)]) == 0
    (out / "index.html").unlink()
    for path in (out / "cache").rglob("*.json"):
        path.unlink()
    small.interrupt = True
    arguments = ["cost", "acquisition", "--scale", "smoke", "--out", str(out)]
    assert plain_command.main(arguments) == 130
    assert 'id="cost"' in (out / "index.html").read_text()


class Parted(Small):
    """As `Small`, of parts that can be shown without the others."""

    def run(self, setting: Setting) -> dict[str, Any]:
        parts = setting.each(
            range(3), lambda k: setting.piece(f"p{k}", {"k": k}, self._maker(k))["k"]
        )
        return {"sum": sum(parts.values())}


def test_what_is_finished_is_shown_without_training_and_says_what_lacks(
    monkeypatch, tmp_path, capsys
):
    module = Parted()
    monkeypatch.setattr(Experiment, "_module", module)
    arguments = ["cost", "--scale", "smoke", "--out", str(tmp_path)]
    path = tmp_path / "cost" / "data.json"
    assert plain_command.main([*arguments, "--finished"]) == 0
    assert "nothing of it is finished" in capsys.readouterr().out
    assert not path.exists()
    module.interrupt = True
    assert plain_command.main(arguments) == 130
    assert plain_command.main([*arguments, "--finished"]) == 0
    assert module.made == [0]
    assert strict(path)["missing"] == ["p1", "p2"]
    text = (tmp_path / "index.html").read_text()
    assert "neither shown nor judged: p1, p2." in text
    assert "does not hold</span>, as far as it was run" in text
    module.interrupt = False
    assert plain_command.main(arguments) == 0  # goes on: it was not complete
    assert module.made == [0, 1, 2]
    assert "missing" not in strict(path)
    assert "as far as" not in (tmp_path / "index.html").read_text()


def test_a_record_says_where_its_pieces_were_made(small, tmp_path):
    arguments = ["cost", "--scale", "smoke", "--out", str(tmp_path)]
    assert plain_command.main(arguments) == 0
    path = tmp_path / "cost" / "data.json"
    here = strict(path)["environment"]
    path.unlink()
    piece = next((tmp_path / "cache" / "cost").glob("p0-*"))
    there = here | {"device": "a very fast one"}
    piece.write_text(json.dumps(strict(piece) | {"environment": there}))
    assert plain_command.main(arguments) == 0
    record = strict(path)
    assert [record["environment"], *record["other_environments"]] == [there, here]
    assert "a very fast one" in (tmp_path / "index.html").read_text()


def test_a_piece_with_other_settings_is_another_piece(tmp_path):
    where = Setting("smoke", cache=tmp_path)
    first = where.piece("a/b c", {"steps": 1}, lambda: {"x": 1})
    assert where.piece("a/b c", {"steps": 1}, lambda: {"x": 2}) == first == {"x": 1}
    assert len(where.spent) == 1
    assert where.piece("a/b c", {"steps": 2}, lambda: {"x": 2})["x"] == 2


def test_a_damaged_file_is_named(small, tmp_path, capsys):
    arguments = ["cost", "--scale", "smoke", "--out", str(tmp_path)]
    assert plain_command.main(arguments) == 0
    path = tmp_path / "cost" / "data.json"
    path.write_text(path.read_text()[:20])
    assert plain_command.main(arguments) == 2
    errors = capsys.readouterr().err
    assert str(path) in errors
    assert "delete it" in errors


def test_a_failed_check_is_shown_and_explained_or_said_not_to_be(small, tmp_path):
    small.checks = lambda data: [Check("sum", "it is 4", "it is 3", False)]
    out = tmp_path / "out"
    assert plain_command.main(["cost", "--scale", "smoke", "--out", str(out)]) == 0
    text = (out / "index.html").read_text()
    assert "0 of 1 claims hold" in text
    assert "does not hold" in text
    assert "Not explained: sum" in text


# The command line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rosenbrok",), "did you mean 'rosenbrock'?"),
        ((), "name at least one experiment"),
        (("cost", "--seeds", "0"), "seeds must be at least 1"),
        (("cost", "--epochs", "-1"), "epochs must be positive"),
        (("cost", "--scale", "smoke", "--workloads", "imagenet"), "none of imagenet"),
        (
            ("all-optimizers", "--scale", "smoke", "--optimizers", "sdg"),
            "sdg takes no part",
        ),
        (
            ("all-optimizers", "--scale", "smoke", "--optimizers", "svrg"),
            "svrg takes the tuned step of sgd",
        ),
    ],
)
@pytest.mark.parametrize("how", ["meka", "plain"])
def test_refusals(how, arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if how == "plain":
        code: Any = plain_command.main(list(arguments))
    else:
        monkeypatch.setattr(sys, "argv", ["meka", "reproduce", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("*/*/data.json")) == []


def test_the_list_and_the_command_run_without_the_terminal_packages(tmp_path):
    """As on a machine that has no tyro, rich or pooch."""
    script = (
        "import sys\n"
        "for name in ('tyro', 'rich', 'pooch', 'tqdm'): sys.modules[name] = None\n"
        "from meka.lab.reproduce.__main__ import main\n"
        "main(['--list'])\n"
        "sys.exit(main(['acquisition', '--scale', 'smoke', '--out', 'out']))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()},
    )
    assert answer.returncode == 0, answer.stderr
    assert all(name in answer.stdout for name in TABLE)
    assert (tmp_path / "out" / "index.html").exists()


# Its parts ----------------------------------------------------------------------------


def test_numbers_survive_json():
    value = {"a": np.float32(1.234567), "b": [np.nan, float("inf")], "c": (1, "x")}
    assert setting.plain(value) == {"a": 1.2346, "b": [None, None], "c": [1, "x"]}
    assert np.isnan(setting.array([None, 1.0])[0])


def test_thinned_takes_the_median_of_a_block_and_bears_what_is_missing():
    values = [[1.0], [100.0], [2.0], [None], [None], [None]]
    assert training.thinned(values, 2).tolist()[0] == [2.0]
    assert np.isnan(training.thinned(values, 2)[1, 0])
    assert training.centres(6, 2).tolist() == [2.0, 5.0]


def test_a_run_whose_seeds_all_diverge_ends_there(tmp_path):
    run = Run("wild", "quadratic", "sgd", 400, 2, 1e6, evaluations=4)
    found = training.train(Setting("smoke"), run)
    assert found["train_loss"][-1] == [None, None]
    assert found["logs"]["loss"][-1] == [None, None]
    assert np.isinf(training.final(found)).all()


def test_learning_rates_share_a_compilation_and_are_kept_apart():
    runs = [Run(f"{r}", "quadratic", "sgd", 20, 2, r) for r in (1e-3, 1e-2)]
    first, second = (training.train(Setting("smoke"), run) for run in runs)
    loops = [training._loop(run, None) for run in runs]
    assert loops[0] is loops[1]
    assert first["logs"]["step_size"][-1] == [1e-3, 1e-3]
    assert second["logs"]["step_size"][-1] == [1e-2, 1e-2]
    assert second["train_loss"][-1] != first["train_loss"][-1]


def test_a_verdict_reads_back():
    from meka.lab.reproduce.verdict import from_dict

    verdict = judge("c", [Check("a", "b", "1", True)], [], "desk")
    assert from_dict(verdict.to_dict()) == verdict
