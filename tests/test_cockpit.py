"""What the page and the live view are made of: following, thinning, words, numbers."""

import base64
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from synthetic import infos, lines, write_run

from meka.improvement import ImprovementModel
from meka.lab import cli
from meka.lab.cockpit import page, thin
from meka.lab.cockpit.follow import Run, Table, Tail
from meka.lab.cockpit.panels import PANELS
from meka.lab.cockpit.story import story
from meka.lab.cockpit.view import RunView, state
from meka.lab.metrics import METRICS, MetricsError
from meka.lab.runfolder import RunError
from meka.state import Info


def read(path: Path) -> Run:
    run = Run(path)
    run.read_all()
    return run


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


# Following ----------------------------------------------------------------------------


def test_a_tail_reads_each_whole_line_once(tmp_path):
    file = tmp_path / METRICS
    tail = Tail(file)
    assert tail.read() == (False, [])
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert tail.read() == (False, [{"step": 1}, {"step": 2}])
    assert tail.read() == (False, [])
    with file.open("a") as more:
        more.write('ep": 3}\n')
    assert tail.read() == (False, [{"step": 3}])


def test_a_tail_never_reads_again_what_it_has_read(tmp_path, monkeypatch):
    file = tmp_path / METRICS
    file.write_text('{"step": 1}\n' * 100_000)
    tail = Tail(file)
    tail.read()
    read_bytes, original = [], os.pread

    def counted(descriptor, size, offset):
        data = original(descriptor, size, offset)
        read_bytes.append(len(data))
        return data

    monkeypatch.setattr("meka.lab.cockpit.follow.os.pread", counted)
    with file.open("a") as more:
        more.write('{"step": 2}\n')
    assert tail.read() == (False, [{"step": 2}])
    assert sum(read_bytes) < 1000


@pytest.mark.parametrize("grown", [False, True])
def test_a_tail_notices_that_the_file_was_cut(tmp_path, grown):
    file = tmp_path / METRICS
    tail = Tail(file)
    file.write_text("".join(f'{{"step": {k}}}\n' for k in range(50)))
    assert len(tail.read()[1]) == 50
    with file.open("r+") as cut:
        cut.truncate(len('{"step": 1}\n') * 5)
        if grown:  # past where it was, before anyone looked
            cut.seek(0, 2)
            cut.write("".join(f'{{"step": {k}, "new": 1}}\n' for k in range(5, 60)))
    lost, records = tail.read()
    assert lost
    assert [r["step"] for r in records] == list(range(60 if grown else 5))


def test_a_tail_names_a_line_that_is_no_record(tmp_path):
    file = tmp_path / METRICS
    file.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(MetricsError, match="line 2 is not a record"):
        Tail(file).read()


def test_a_table_waits_for_all_seeds_of_a_step():
    table = Table(2)
    table.add([{"step": 1, "seed": 0, "loss": 1.0, "word": "x"}])
    assert len(table) == 0
    table.add([{"step": 1, "seed": 1, "loss": "nan"}])
    table.add(
        [{"step": 2, "seed": 0, "loss": 3}, {"step": 2, "seed": 1, "loss": "inf"}]
    )
    assert table.names == ("loss",)
    np.testing.assert_array_equal(table.step, [1, 2])
    np.testing.assert_array_equal(table.column("loss"), [[1, np.nan], [3, np.inf]])


def test_a_run_is_followed_from_before_it_begins_to_after_it_resumes(tmp_path):
    run = Run(tmp_path / "run")
    assert not run.poll()
    assert state(run) == "waiting"
    assert [f.title for f in story(run)] == ["Waiting"]
    write_run(tmp_path / "run", 150, planned=300)
    assert run.poll()
    assert (run.last_step, run.finished, state(run)) == (150, False, "training")
    generation = run.generation
    file = tmp_path / "run" / METRICS
    with file.open("a") as more:
        more.write(lines(range(151, 171)))
    assert run.poll()
    assert (run.last_step, run.generation) == (170, generation)
    file.write_text(lines(range(101)) + lines(range(101, 301), gain=lambda _: 0.5))
    assert run.poll()
    assert run.generation != generation
    assert (run.last_step, run.finished, state(run)) == (300, True, "done")
    assert run.steps.column("gain")[-1] == 0.5
    assert not run.poll()


def test_a_damaged_run_says_so_and_breaks_nothing(tmp_path):
    path = write_run(tmp_path / "run", 50)
    (path / METRICS).write_text("{}\n")
    run = read(path)
    assert state(run) == "unreadable"
    assert "line 1 is not a record" in story(run)[0].text
    json.dumps(RunView(run).to_json(), allow_nan=False)
    path = write_run(tmp_path / "other", 50)
    (path / "config.json").write_text('{"workload": 1}')
    assert "cannot be used" in (read(path).problem or "")


# Thinning -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> dict:
    path = write_run(
        tmp_path_factory.mktemp("long") / "run",
        10_000,
        loss=lambda step: {7777: 1e3, 5000: 1e-6}.get(step, 1.0),
        gain=lambda step: "nan" if step == 6000 else 0.5,
    )
    return RunView(read(path)).to_json()


def test_thinning_keeps_every_spike(long):
    view = long
    loss = {name: unpacked(text) for name, text in view["series"]["loss"].items()}
    assert len(loss["x"]) <= thin.POINTS
    assert loss["high"].max() == 1e3
    assert loss["low"].min() == np.float32(1e-6)
    assert abs(loss["x"][loss["high"].argmax()] - 7777) <= 16
    np.testing.assert_array_equal(loss["y"], 1)
    gain = {name: unpacked(text) for name, text in view["series"]["gain"].items()}
    np.testing.assert_array_equal(gain["y"], 0.5)


def test_few_steps_are_not_thinned(tmp_path):
    view = RunView(read(write_run(tmp_path / "run", 300, seeds=3))).to_json()
    run = read(tmp_path / "run")
    loss = view["series"]["loss"]
    np.testing.assert_array_equal(unpacked(loss["x"]), np.arange(1, 301))
    values = run.steps.column("loss")
    np.testing.assert_allclose(unpacked(loss["y"]), np.median(values, 1), rtol=1e-6)
    np.testing.assert_allclose(unpacked(loss["low"]), values.min(1), rtol=1e-6)
    np.testing.assert_allclose(unpacked(loss["high"]), values.max(1), rtol=1e-6)


def test_thinning_as_rows_come_is_thinning_at_the_end(rng):
    values = rng.normal(size=(3000, 2))
    values[rng.random(values.shape) < 0.1] = np.nan
    values[100:140] = np.inf
    looked = []

    def rows(start, stop):
        looked.append(stop - start)
        return {"x": values[start:stop]}

    growing = thin.Thinner(rows, points=64)
    for size in [*range(7, 3000, 97), 3000]:
        curves = growing.update(size)
    once = thin.Thinner(rows, points=64).update(3000)["x"]
    for mine, other in zip(curves["x"], once, strict=True):
        np.testing.assert_array_equal(mine, other)
    # Each look reads what is new, and all again only when the width doubles.
    assert sum(looked) < 5 * 3000 + 31 * 64
    assert np.isnan(once.middle[np.arange(100, 140, 64) // 64 + 1]).sum() <= 1


def test_a_page_of_ten_long_runs_is_small(long):
    text = page.page([long] * 10, command="meka report")
    assert 1e6 < len(text.encode()) < 4e6


# Numbers ------------------------------------------------------------------------------


def test_what_the_panels_read_is_what_a_step_records():
    names = {*Info._fields, *(f"model.{n}" for n in ImprovementModel._fields)}
    assert {*infos(1, np.random.default_rng(0))} - {"loss"} <= names


def test_every_panel_has_data_for_ours_and_says_what_it_shows(tmp_path):
    view = RunView(read(write_run(tmp_path / "run", 200))).to_json()
    for panel in PANELS:
        assert panel.shows.endswith(".")
        assert panel.healthy.endswith(".")
        for line in panel.lines:
            assert np.isfinite(unpacked(view["series"][line.series]["y"])).any(), line
    assert view["profile"] is not None
    assert view["calibration"] is not None


def test_noise_is_measured_in_whole_gradients(tmp_path):
    path = write_run(tmp_path / "run", 100, noise_scale=lambda _: 512.0)
    series = RunView(read(path)).to_json()["series"]
    y = {name: unpacked(curve["y"]) for name, curve in series.items()}
    # tr(Sigma)/|m|² = 512/128, and the filter's variance is an eighth of the noise.
    np.testing.assert_allclose(y["noise_norm"], 2 * y["gradient_norm"], rtol=1e-5)
    np.testing.assert_allclose(y["signal"], 0.25, rtol=1e-5)
    np.testing.assert_allclose(y["filtered_signal"], 2.0, rtol=1e-5)
    np.testing.assert_allclose(y["error_norm"] * 8**0.5, y["noise_norm"], rtol=1e-5)
    np.testing.assert_allclose(y["curvature"], 2.0)


def test_a_rule_is_where_meka_would_have_put_it(tmp_path):
    path = write_run(
        tmp_path / "run",
        700,
        seeds=2,
        **{"model.curvature": lambda step: step / 10, "model.slope": lambda _: 2.0},
    )
    run = read(path)
    view = RunView(run).to_json()
    x = unpacked(view["series"]["rule_quadratic"]["x"]).astype(int)
    assert len(x) == 350
    np.testing.assert_allclose(
        unpacked(view["series"]["rule_quadratic"]["y"]), 20 / x, rtol=1e-6
    )

    def scores(a):
        mean = a * (20 * a - 2)
        deviation = np.sqrt(2e-4 + 0.01 * a**2 + 0.5 / 4 * a**4)
        z = -mean / deviation
        chance = norm.cdf(z)
        return chance, -mean * chance + deviation * norm.pdf(z)

    everywhere = np.linspace(0, 0.1, 5001)[1:]  # where the mean improves at all
    for k, name in enumerate(["probability_of_improvement", "expected_improvement"]):
        found = unpacked(view["series"][f"rule_{name}"]["y"])[x == 400]
        assert scores(found)[k] >= scores(everywhere)[k].max() - 1e-7
        np.testing.assert_allclose(unpacked(view["profile"][name])[x == 400], found)


def test_rules_computed_as_a_run_grows_are_those_computed_at_the_end(tmp_path):
    rising: dict[str, Any] = {"model.slope": lambda step: 1 + step / 100}
    text = lines(range(901), **rising).splitlines()
    path = write_run(tmp_path / "run", 1, planned=900)
    run = Run(path)
    view = RunView(run)
    for stop in (100, 333, 700, len(text)):
        (path / METRICS).write_text("\n".join(text[:stop]) + "\n")
        run.read_all()
        grown = view.to_json()
    assert grown == RunView(read(path)).to_json()


def test_the_calibration_compares_with_the_next_minibatch(tmp_path):
    path = write_run(
        tmp_path / "run",
        401,
        loss=lambda step: 10.0 - 0.5 * (step // 2),
        predicted_change=lambda step: -0.5 if step % 2 else 0.0,
    )
    found = RunView(read(path)).to_json()["calibration"]
    np.testing.assert_allclose(unpacked(found["predicted"]), [-0.5] * 5 + [0] * 5)
    np.testing.assert_allclose(unpacked(found["realised"]), [-0.5] * 5 + [0] * 5)


# Words --------------------------------------------------------------------------------


def told(path: Path, title: str):
    found = [f for f in story(read(path)) if f.title == title]
    assert found, title
    return found[-1]


def test_a_healthy_run_is_called_so(tmp_path):
    path = write_run(tmp_path / "run", 2000, noise_scale=lambda _: 256.0)
    levels = {f.title: f.level for f in story(read(path))}
    assert set(levels.values()) == {"good"}
    assert levels.keys() >= {"Loss", "Step size", "Trust in the gradient", "Noise"}
    assert "settled around 0.1" in told(path, "Step size").text
    assert "8 times less variance" in told(path, "Noise").text
    assert "as if the batch had 1,020 examples" in told(path, "Noise").text
    assert "2 ms a step" in told(path, "Speed").text


@pytest.mark.parametrize(
    ("title", "changes", "level", "says", "advises"),
    [
        ("Step size", {"step_size": lambda t: t / 1e3}, "note", "growing", "lagged"),
        ("Step size", {"step_size": lambda t: 1 / (t + 1)}, "good", "shrinks", ""),
        ("Step size", {"step_size": lambda t: t % 2}, "warn", "50%", "larger batch"),
        (
            "Trust in the gradient",
            {"gradient_innovation": lambda _: 5.0},
            "warn",
            "5 times",
            "transport=difference",
        ),
        ("Trust in the loss", {"innovation": lambda _: 0.1}, "note", "careful", ""),
        ("Model error", {"model_error": lambda _: 0.1}, "warn", "parabola", "third"),
        ("Noise", {"gradient_variance": lambda _: 8e-5}, "note", "little", "plain"),
        (
            "Batch size",
            {"noise_scale": lambda _: 1e5},
            "note",
            "too small",
            "size 1024",
        ),
        ("Batch size", {"noise_scale": lambda _: 2.0}, "note", "larger", "size 16"),
        (
            "Promises",
            {"predicted_change": lambda _: -9.0},
            "note",
            "promised",
            "lagged",
        ),
        (
            "Rejected steps",
            {"rejected": lambda t: t // 100, "suspect": lambda t: 41},
            "warn",
            "4 of 400",
            "Example 41",
        ),
    ],
)
def test_the_story_says_what_is_wrong_and_what_to_do(
    tmp_path, title, changes, level, says, advises
):
    path = write_run(tmp_path / "run", 400, **changes)
    found = told(path, title)
    assert found.level == level
    assert says in found.text
    assert advises in found.advice


def test_the_story_of_auto_has_no_advice_on_rules_it_does_not_use(tmp_path):
    changes = {
        "predicted_change": lambda _: -9.0,
        "gradient_variance": lambda _: 8e-5,
        "step_size": lambda t: t / 1e3,
        "distance": lambda _: 0.1,
    }
    path = write_run(tmp_path / "run", 400, optimizer="auto", **changes)
    for title, level, says in [
        ("Promises", "note", "does not depend on that"),
        ("Noise", "good", "auto takes the minibatch's"),
        ("Step size", "note", "growing"),
    ]:
        found = told(path, title)
        assert (found.level, found.advice) == (level, "")
        assert says in found.text


def test_the_story_sees_overfitting_and_divergence(tmp_path):
    path = write_run(tmp_path / "run", 600)
    records = [json.loads(x) for x in (path / METRICS).read_text().splitlines()]
    for record in records:
        if record["kind"] == "eval":
            record["test_loss"] = 1 + abs(record["step"] - 200) / 100
    (path / METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "Stop near step 200" in told(path, "Held-out loss").advice
    for record in records:
        if record["kind"] == "eval" and record["step"] > 300:
            record["train_loss"] = "nan"
    (path / METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    assert told(path, "Loss").level == "warn"
    assert "diverged" in told(path, "Loss").text


def test_other_optimizers_have_fewer_panels_and_no_made_up_words(tmp_path):
    run = read(write_run(tmp_path / "run", 200, optimizer="adam", ours=False))
    view = RunView(run).to_json()
    assert view["profile"] is None
    assert view["calibration"] is None
    assert view["summary"]["gain"] == "–"
    titles = {f["title"] for f in view["story"]}
    assert titles == {"Loss", "Step size", "Speed"}


def test_numbers_that_are_not_finite_make_gaps_and_no_warnings(tmp_path):
    wild: dict[str, Any] = dict.fromkeys(
        infos(1, np.random.default_rng(0)), lambda _: "nan"
    )
    path = write_run(tmp_path / "nan", 150, **wild)
    view = RunView(read(path)).to_json()
    text = json.dumps([view["story"], view["summary"]], allow_nan=False)
    assert "nan" not in text
    huge: dict[str, Any] = {name: (lambda t: 1e300 * (-1) ** t) for name in wild}
    path = write_run(tmp_path / "huge", 150, **huge)
    json.dumps(RunView(read(path)).to_json(), allow_nan=False)


# The page -----------------------------------------------------------------------------


def test_the_page_fetches_nothing_and_escapes_names(tmp_path):
    path = write_run(tmp_path / "<img src=x onerror=alert(1)>", 50)
    out = page.write_report(
        [path], tmp_path / "new" / "r.html", command="meka report <script>x"
    )
    text = out.read_text()
    start = text.index("<body>")
    own = text[: text.index('<script type="application/json"')]
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\w+:(?!,)""", own)
    assert "default-src 'none'" in own
    assert "<img" not in text[start : text.index("<script>", start)]
    assert "meka report &lt;script&gt;x" in text
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["runs"][0]["name"] == str(path)


def test_a_report_refuses_what_is_no_run(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        page.write_report([tmp_path], tmp_path / "r.html", command="")
    path = write_run(tmp_path / "run", 50)
    (path / METRICS).write_text("")
    with pytest.raises(RunError, match="not recorded anything yet"):
        page.write_report([path], tmp_path / "r.html", command="")
    assert not (tmp_path / "r.html").exists()


def test_the_command_says_where_the_page_is_or_what_is_wrong(
    tmp_path, monkeypatch, capsys
):
    def report(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["meka", "report", *arguments])
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return end.value.code

    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", 60, optimizer="adam", ours=False)
    assert report("run", "--out", "page.html") == 0
    assert capsys.readouterr().out == "page: page.html\n"
    assert "meka report run --out page.html" in (tmp_path / "page.html").read_text()
    assert report("nowhere") == 2
    assert "meka: nowhere holds no run" in capsys.readouterr().err
    assert report() == 2
    assert "name at least one run folder" in capsys.readouterr().err


def luminance(color: str) -> float:
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_curves_stand_out(theme):
    folder = Path(page.__file__).parent
    css, script = (folder / "page.css").read_text(), (folder / "page.js").read_text()
    block = css.split("}")[0 if theme == "light" else 1]
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    for ground in ("ground", "card"):
        for ink in ("ink", "soft", "accent", "good"):
            assert contrast(colors[ink], colors[ground]) >= 4.5, (ink, ground)
    for level in ("good", "note", "warn"):
        assert contrast(colors[level], colors[f"{level}-tint"]) >= 4.5, level
    listed = script.partition(f"{theme}: [")[2].partition("]")[0]
    curves = re.findall(r"#\w{6}", listed)
    assert len(set(curves)) == 10
    for color in curves:
        assert contrast(color, colors["card"]) >= 3, color
