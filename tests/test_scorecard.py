"""`meka scorecard`: scores by hand, the plan, the claims, merging and the page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from meka.lab import optimizers
from meka.lab.scorecard import card as cards
from meka.lab.scorecard import claims, page, records, runner, scores, tables
from meka.lab.scorecard.card import AVERAGED, METRIC, Card, Row
from meka.lab.scorecard.plan import SUBJECTS, TUNED, ScorecardError, plan
from meka.lab.scorecard.summary import summarise
from tests import scorecards
from tests.scorecards import card, grid, ratios, run

INF = float("inf")


# Scores by hand -----------------------------------------------------------------------


def test_the_time_to_a_target_is_the_median_seed_s_first_evaluation_at_or_below_it():
    values = np.array([[0, 9, 9], [3, 9, 9], [2, 2, 9], [9, 9, 9], [1, 1, 1]], float)
    step = (0, 10, 20, 30, 40)
    assert scores.time_to(step, values, 2.0) == 20  # 20, 20 and 40
    assert scores.time_to(step, values, 3.0) == 20  # 10, 20 and 40; 0 does not count
    assert scores.time_to(step, values, 1.0) == 40
    assert scores.time_to(step, values, 0.9) == INF
    values[4] = (1, INF, INF)
    assert scores.time_to(step, values, 1.0) == INF  # two of three never get there


def test_ratios_are_over_the_best_of_each_workload():
    times = {"a": {"x": 10.0, "y": INF}, "b": {"x": 25.0, "y": 8.0}, "c": {"x": INF}}
    assert scores.ratios(times) == {
        "a": {"x": 1.0, "y": INF},
        "b": {"x": 2.5, "y": 1.0},
        "c": {"x": INF},
    }
    nobody = scores.ratios({"a": {"x": INF}, "b": {"x": INF}})
    assert nobody == {"a": {"x": INF}, "b": {"x": INF}}


def test_the_profile_and_the_area_under_it():
    own = [1.0, 2.5, INF, 4.0]
    np.testing.assert_allclose(
        scores.profile(own, [1.0, 2.49, 2.5, 3.99, 4.0]), [0.25, 0.25, 0.5, 0.5, 0.75]
    )
    # Three quarters of nothing: 1 gives 3/3, 2.5 gives 1.5/3, the others nothing.
    assert scores.area(own) == pytest.approx((1 + 0.5) / 4)
    assert scores.area([1.0, 1.0]) == 1.0
    assert scores.area([INF, 5.0]) == 0.0
    # AlgoPerf's way, by trapezoids on a grid, comes to the same.
    taus = np.linspace(1, 4, 100_001)
    integral = np.trapezoid(scores.profile(own, taus), taus) / 3
    assert scores.area(own) == pytest.approx(integral, abs=1e-4)


def test_a_step_that_costs_twice_as_much_must_earn_it():
    """meka needs half the steps of the tuned Adam, and is as fast by the clock."""
    found = Card(
        card(
            *grid("digits"),
            run("digits", "meka", (4, 2, 0.5, 0.4, 0.3)),
            times={"digits": ratios(meka=2.0)},
        )
    )
    meka, adam, tuned = Row("meka"), Row("adam"), Row("adam", tuned=True)
    assert found.rows == [meka, adam, tuned]
    assert found.target("digits") == 0.5
    assert [found.steps(row, "digits") for row in (meka, tuned, adam)] == [20, 40, INF]
    assert found.seconds(meka, "digits") == pytest.approx(0.04)
    assert found.ratios("steps")[tuned] == {"digits": 2.0}
    assert found.ratios("seconds")[tuned] == {"digits": pytest.approx(1.0)}
    assert found.scores("steps") == {meka: 1.0, tuned: pytest.approx(2 / 3), adam: 0.0}
    assert found.scores("seconds")[tuned] == pytest.approx(1.0)


def rate(record: records.Record | None) -> float:
    assert record is not None
    return record["learning_rate"]


def test_the_target_is_the_worst_seed_of_the_rate_with_the_best_median():
    best = [[4, 4], [3, 3], [2, 2], [1, 1], [0.4, 0.6]]
    found = Card(card(*grid("digits", loss=best)))
    assert found.target("digits") == 0.6
    tuned = Row("adam", tuned=True)
    assert rate(found.record(tuned, "digits")) == 0.01
    assert found.steps(tuned, "digits") == 40  # it reaches its own target in all seeds


def test_the_test_metric_has_its_own_target_and_its_own_best_rate():
    accuracy = (0, 0.5, 0.8, 0.9, 0.95)
    worse_loss_better_test = run(
        "digits", "adam", (4, 3, 3, 2, 1), rate=0.1, test_accuracy=accuracy
    )
    others = grid("digits", test_accuracy=(0, 0.2, 0.4, 0.6, 0.9))
    own = run("digits", "meka", (4, 3, 3, 3, 3), test_accuracy=(0, 0.96, 0.9, 0.9, 0.9))
    found = Card(card(*others, worse_loss_better_test, own))
    assert found.metric("digits") == "test_accuracy"
    assert found.target("digits") == 0.5
    assert found.target("digits", METRIC) == pytest.approx(0.05)
    assert rate(found.record(Row("adam", True), "digits", METRIC)) == 0.1
    assert found.steps(Row("meka"), "digits", METRIC) == 10
    assert found.steps(Row("meka"), "digits") == INF


def test_averaged_iterates_run_for_the_same_target():
    own = run(
        "digits", "meka", (4, 3, 2, 1, 1), average_train_loss=(4, 3, 0.5, 0.5, 0.5)
    )
    found = Card(card(*grid("digits"), own))
    assert found.steps(Row("meka"), "digits") == INF
    assert found.steps(Row("meka"), "digits", AVERAGED) == 20


def test_failures_count_and_what_was_not_run_is_not_hidden():
    found = Card(
        card(
            *grid("digits"),
            *grid("quadratic"),
            run("digits", "svrg", (4, 2, 1, 0.5, 0.1), rate=0.1),
            run("quadratic", "svrg", (4,) * 5, rate=0.1)
            | {"failure": "needs finite data", "step": [], "curves": {}},
            run("digits", "meka", (4, 2, 1, 0.5, 0.1)),
        )
    )
    assert found.scores("steps")[Row("svrg")] == pytest.approx(0.5)
    assert found.scores("steps")[Row("meka")] == pytest.approx(0.5)
    assert found.incomplete(Row("meka")) == ["quadratic"]
    assert found.incomplete(Row("svrg")) == []
    rows = {line[0]: line for line in tables.score_rows(summarise(found))}
    assert rows["svrg"][-3:] == ("1 of 2", "1", "")
    assert rows["meka"][-3:] == ("1 of 2", "", "quadratic")


def test_a_run_that_stopped_early_ends_nowhere():
    """Its last finite loss is not what it ended at."""
    own = run("digits", "meka", (4, 3, 2, 1, 0.1), failure="stopped")
    own |= {
        "step": own["step"][:3],
        "curves": {"train_loss": own["curves"]["train_loss"][:3]},
    }
    found = Card(card(*grid("digits"), own))
    final = found.final(Row("meka"), "digits")
    assert final is not None
    assert np.isinf(final).all()


def test_numbers_that_are_not_finite_reach_no_target():
    own = run("digits", "meka", (4, np.nan, INF, 1, np.nan))
    found = Card(card(*grid("digits"), own))
    assert found.steps(Row("meka"), "digits") == INF
    final = found.final(Row("meka"), "digits")
    assert final is not None
    assert np.isinf(final).all()


# The plan -----------------------------------------------------------------------------


def test_everybody_runs_at_one_setting_and_three_at_their_grid():
    runs = plan("desk")
    assert len({r.key for r in runs}) == len(runs)
    for workload in (subject.name for subject in SUBJECTS["desk"]):
        own = [r for r in runs if r.config.workload == workload]
        assert [r.config.optimizer for r in own if r.default] == list(optimizers.TABLE)
        assert {r.config.optimizer for r in own if not r.default} == set(TUNED)
        assert {r.config.steps for r in own} == {own[0].config.steps}
    for name in TUNED:
        rates = {r.config.learning_rate for r in runs if r.config.optimizer == name}
        assert rates >= set(optimizers.TABLE[name].grid)


def test_settings_of_the_runs():
    for planned in plan("full"):
        config, entry = planned.config, optimizers.TABLE[planned.config.optimizer]
        plain = entry.schedule == "constant" and "linear" in entry.schedules
        assert config.schedule == ("linear" if plain else entry.schedule)
        assert not planned.default or config.learning_rate == entry.default
        assert (config.seeds, config.average) == (3, True)
        assert 20 <= config.steps // config.eval_every <= 40


def test_full_has_all_of_desk():
    names = {scale: [s.name for s in SUBJECTS[scale]] for scale in SUBJECTS}
    assert len(names["desk"]) == 8
    assert set(names["full"]) - set(names["desk"]) == {
        "cifar10-cnn",
        "cifar10-resnet32",
        "text-large",
    }


def test_a_part_of_it():
    runs = plan(
        "desk", optimizers=["meka"], workloads=["text"], seeds=1, steps_scale=0.5
    )
    (only,) = runs
    assert only.key == ("text", "meka")
    assert (only.config.steps, only.config.seeds) == (500, 1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"optimizers": ["admeka"]}, "did you mean 'adameka'"),
        ({"workloads": ["rosenbrok"]}, "did you mean 'rosenbrock'"),
        ({"workloads": ["cifar10-cnn"]}, "unknown workload at scale desk"),
        ({"seeds": 0}, "--seeds"),
        ({"steps_scale": 0.0}, "--steps-scale"),
        ({"steps_scale": float("nan")}, "--steps-scale"),
    ],
)
def test_what_is_refused(asked, words):
    with pytest.raises(ScorecardError, match=words):
        plan("desk", **asked)


def test_a_worker_gets_runs_of_one_workload():
    runs = plan("desk")
    groups = runner.groups(runs, size=6)
    assert sorted(r.key for g in groups for r in g) == sorted(r.key for r in runs)
    assert all(len({r.config.workload for r in group}) == 1 for group in groups)
    assert max(map(len, groups)) <= 6


# Claims -------------------------------------------------------------------------------


@pytest.fixture
def auto(monkeypatch):
    """An optimizer named auto in the table, where it may or may not be."""
    entry = dataclasses.replace(optimizers.TABLE["adameka"], name="auto")
    monkeypatch.setitem(optimizers.TABLE, "auto", entry)


DESK = [subject.name for subject in SUBJECTS["desk"]]


def verdict(found: records.Records, name: str) -> claims.Check:
    return next(check for check in claims.checks(Card(found)) if check.name == name)


def with_auto(end: float, worse_on: tuple[str, ...] = ()) -> records.Records:
    runs = []
    for name in DESK:
        runs += grid(name)
        last = 2.0 if name in worse_on else end
        runs += [
            run(name, "auto", (4, 3, 2, 1, last)),
            run(name, "dog", (4,) * 5, rate=1),
        ]
    return card(*runs)


def test_as_good_as_tuned_adam_can_fail(auto):
    name = "as good as tuned Adam"
    assert verdict(with_auto(0.5), name).holds
    assert verdict(with_auto(0.5, ("text",)), name).found == "7 of 8"
    assert verdict(with_auto(0.5, ("text",)), name).holds
    assert not verdict(with_auto(0.5, ("text", "mnist")), name).holds
    assert not verdict(with_auto(0.5, ("text", "mnist")), "text").holds
    assert not verdict(with_auto(np.nan), name).holds


def test_no_worse_is_within_one_deviation_of_the_difference(auto):
    """Seed by seed: worse by 0.1 and 0.3, so by 0.2 with a deviation of 0.14."""
    ends = {"clear": (0.6, 0.8), "close": (0.5, 0.7)}
    for word, end in ends.items():
        own = run("digits", "auto", [[4, 4], [3, 3], [2, 2], [1, 1], end])
        found = Card(card(*grid("digits"), own))
        gap = claims.difference(found, Row("auto"), "digits")
        assert gap is not None
        mean, deviation = gap
        assert deviation == pytest.approx(np.std(end, ddof=1))
        check = verdict(card(*grid("digits"), own), "digits")
        assert check.holds == (word == "close"), (mean, deviation)


def test_ahead_in_steps_can_fail(auto):
    name = "ahead in steps"
    runs = [*grid("digits"), run("digits", "auto", (4, 3, 0.5, 0.4, 0.3))]
    slower = run("digits", "dog", (4, 3, 2, 0.5, 0.4), rate=1)
    faster = run("digits", "prodigy", (4, 0.5, 0.5, 0.5, 0.5), rate=1)
    as_fast = run("digits", "prodigy", (4, 3, 0.5, 0.5, 0.5), rate=1)
    assert verdict(card(*runs, slower), name).holds
    assert not verdict(card(*runs, slower, faster), name).holds
    assert not verdict(card(*runs, as_fast), name).holds  # ahead means ahead
    assert "prodigy" in verdict(card(*runs, slower, faster), name).found
    assert not verdict(card(*runs), name).holds  # nobody to be ahead of
    # A fast one that needs its rate searched is no self-tuner.
    tuned = run("digits", "sgd", (4, 0.5, 0.5, 0.5, 0.5), rate=0.1)
    assert verdict(card(*runs, slower, tuned), name).holds


def test_fast_by_the_clock_can_fail(auto):
    name = "fast by the clock"
    runs = [
        *grid("digits"),
        run("digits", "auto", (4, 3, 0.5, 0.4, 0.3)),
        run("digits", "dog", (4, 3, 2, 0.5, 0.4), rate=1),
    ]
    for cost, holds in ((1.4, True), (1.6, True), (2.4, False)):
        times = {"digits": ratios(auto=cost, dog=1.0)}
        assert verdict(card(*runs, times=times), name).holds == holds
    assert not verdict(card(*runs), name).holds  # not timed


def test_accuracy_on_cifar_can_fail(auto):
    def found(workload, accuracy):
        curve = (0.1, 0.2, 0.3, 0.4)
        rival = run(workload, "prodigy", (4,) * 5, rate=1, test_accuracy=(*curve, 0.7))
        own = run(workload, "auto", (4,) * 5, test_accuracy=(*curve, accuracy))
        ours = run(workload, "meka", (4,) * 5, test_accuracy=(*curve, 0.99))
        return verdict(card(rival, own, ours), f"accuracy on {workload}").holds

    assert found("cifar10-cnn", 0.701)
    assert not found("cifar10-cnn", 0.7)
    assert found("cifar10-resnet32", 0.69)
    assert not found("cifar10-resnet32", 0.689)


def test_accuracy_on_cifar_is_a_mean_over_seeds(auto):
    def found(rival, own):
        runs = [
            run("cifar10-cnn", name, (4,) * 5, rate=rate, test_accuracy=(0.1,) * 5)
            for name, rate in (("prodigy", 1), ("auto", None))
        ]
        for record, last in zip(runs, (rival, own), strict=True):
            record["curves"]["test_accuracy"][-1] = list(last)
        return verdict(card(*runs), "accuracy on cifar10-cnn")

    assert found((0.7, 0.7), (0.6, 0.82)).holds  # by 0.01
    assert not found((0.7, 0.7), (0.58, 0.8)).holds
    assert "71.00% (deviation 15.56)" in found((0.7, 0.7), (0.6, 0.82)).found
    nan = float("nan")  # a rival's seed that diverged is no excuse, an own one is
    assert not found((0.72, nan), (0.7, 0.71)).holds
    assert not found((0.5, 0.5), (0.9, nan)).holds


def test_without_auto_nothing_is_claimed_to_hold():
    found = scorecards.everything("smoke")
    found["runs"] = [r for r in found["runs"] if r["optimizer"] != "auto"]
    assert not any(check.holds for check in claims.checks(Card(found)))


# Records ------------------------------------------------------------------------------


def test_merging_adds_and_the_last_counts():
    old = run("digits", "meka", (4, 3, 2, 1, 1))
    new = run("digits", "meka", (4, 3, 2, 1, 0.1))
    merged = records.merge([card(*grid("digits"), old), card(new)])
    assert len(merged["runs"]) == 3
    assert merged["runs"][2]["curves"]["train_loss"][-1] == [0.1, 0.1]
    assert merged["commands"] == ["meka scorecard"]


def test_times_of_one_device_are_added_and_of_another_replaced():
    first = card(times={"digits": ratios(meka=2.0, dog=1.1)})
    again = card(times={"digits": ratios(meka=1.5) | {"seconds": 9.0}})
    other = card(times={"digits": ratios("gpu", meka=3.0)})
    merged = records.merge([first, again])["times"]["digits"]
    assert merged["seconds"] == 0.001
    assert {k: v[1] for k, v in merged["ratios"].items()} == {
        "adam": 1.0,
        "meka": 1.5,
        "dog": 1.1,
    }
    replaced = records.merge([first, other])["times"]["digits"]
    assert set(replaced["ratios"]) == {"adam", "meka"}
    assert replaced["device"] == "gpu"


def test_what_cannot_be_compared_is_not_merged():
    with pytest.raises(ScorecardError, match=r"steps_scale 0\.5, not 1"):
        records.merge([card(), card(steps_scale=0.5)])
    longer = run("digits", "meka", (4,) * 5) | {"steps": 80}
    with pytest.raises(ScorecardError, match="80 steps"):
        records.merge([card(*grid("digits")), card(longer)])


def test_desk_and_full_go_together():
    merged = records.merge([card(*grid("digits")), card(scale="full")])
    assert merged["settings"]["scale"] == "full"
    with pytest.raises(ScorecardError, match="another scorecard"):
        records.merge([card(), card(scale="smoke")])


def test_what_was_made_at_full_has_a_desk_scorecard_in_it():
    whole = card(*grid("digits"), *grid("cifar10-cnn"), scale="full")
    part = records.at_desk(whole)
    assert part["settings"]["scale"] == "desk"
    assert {record["workload"] for record in part["runs"]} == {"digits"}
    assert len(whole["runs"]) == 2 * len(part["runs"])
    assert records.at_desk(part) == part


# The page -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    out, found = tmp_path_factory.mktemp("page"), scorecards.everything("smoke")
    found["settings"]["steps_scale"] = 0.5
    page.write(found, out)
    return out


def test_the_page_needs_nothing_else(written):
    text = (written / "index.html").read_text()
    assert text.count("data:image/png;base64,") == len(list(written.glob("*.png"))) == 6
    assert not re.search(r"""(src|href)=["']?(http|//|\w+\.(png|js|css))""", text)
    assert "adam, tuned" in text
    assert "it would not" in text  # why it failed
    assert "too short for its scores" in text
    assert "0.5 times its usual length" in text


def test_results_and_tables_say_the_same(written):
    def refuse(name):
        raise AssertionError(name)

    results = json.loads((written / "results.json").read_text(), parse_constant=refuse)
    table = (written / "table.md").read_text()
    assert len(results["rows"]) == len(optimizers.TABLE) + len(TUNED)
    ranks = [row["scores"]["loss_steps"] for row in results["rows"]]
    assert ranks == sorted(ranks, reverse=True)
    for row in results["rows"]:
        assert f"| {row['name']} | {row['scores']['loss_steps']:.3f} |" in table
    assert "## rosenbrock" in table
    lines = [x for x in table.split("## digits")[1].splitlines() if x.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_without_adam_s_grid_there_is_nothing_to_score(tmp_path):
    with pytest.raises(ScorecardError, match="no run of Adam"):
        page.write(card(run("digits", "meka", (4, 3, 2, 1, 1))), tmp_path)
    assert not list(tmp_path.iterdir())


def test_runs_that_did_not_see_the_same_data_are_found():
    other = run("digits", "meka", (4.1, 3, 2, 1, 1))
    assert Card(card(*grid("digits"), *grid("text"), other)).unlike() == ["digits"]
    assert Card(card(*grid("digits"), run("digits", "meka", (4,) * 5))).unlike() == []


def test_records_of_an_optimizer_that_is_gone_are_left_out():
    assert cards.Card(card(*grid("digits"), run("digits", "gone", (4,) * 5))).rows == [
        Row("adam"),
        Row("adam", tuned=True),
    ]
