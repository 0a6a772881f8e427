"""The page in a real browser: from disk and live, by mouse, by keyboard, on a phone."""

import colorsys
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from lines import place
from synthetic import write_run
from test_watch import serving

from meka.improvement import ImprovementModel
from meka.lab import plots
from meka.lab.cockpit import page as pages
from meka.lab.cockpit.panels import PANELS

pytestmark = pytest.mark.browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    sync = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright (the extra meka[browser])"
    )
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


class Visit:
    """A page that remembers what it asked for and what it complained about."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, **options}
        )
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append("dialog"))
        self.page.on("console", self._said)
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", timeout=30_000)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def rows(self, panel: str) -> int:
        """How many curves a panel draws; it is scrolled to first."""
        self.page.locator(f"#panel-{panel}").scroll_into_view_if_needed()
        self.page.wait_for_function(
            "name => !meka.state[name].dirty", arg=panel, timeout=10_000
        )
        return self.page.evaluate(
            "name => meka.doc.get_model_by_name(name + ':lines').data.xs.length", panel
        )

    def steps(self) -> list[float]:
        return self.page.evaluate("() => [meka.steps.start, meka.steps.end]")

    def ink(self, panel: str) -> int:
        """How many pixels of a panel's canvas are not empty."""
        return self.page.evaluate(
            """name => {
              const found = [];
              const search = (root) => {
                for (const each of root.querySelectorAll("*")) {
                  if (each.tagName === "CANVAS") found.push(each);
                  if (each.shadowRoot) search(each.shadowRoot);
                }
              };
              search(document.getElementById("chart-" + name));
              let count = 0;
              for (const canvas of found) {
                if (!canvas.width || !canvas.height) continue;
                const data = canvas.getContext("2d")
                  .getImageData(0, 0, canvas.width, canvas.height).data;
                for (let k = 3; k < data.length; k += 4) count += data[k] > 0;
              }
              return count;
            }""",
            panel,
        )

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    ours = write_run(folder / EVIL, 600, seeds=2)
    adam = write_run(folder / "adam", 600, optimizer="adam", ours=False)
    return pages.write_report([ours, adam], folder / "r.html", command="meka report")


@pytest.fixture(scope="module")
def visit(browser, report) -> Iterator[Visit]:
    """The file, opened once; a test leaves it as it found it."""
    made = Visit(browser, report.as_uri())
    yield made
    assert made.complaints == []
    assert [url for url in made.requests if not url.startswith("data:")] == [
        report.as_uri()
    ]
    made.close()


def test_the_file_shows_every_panel(visit):
    assert visit.page.locator("article.panel").count() == len(PANELS)
    for panel in PANELS:
        expected = sum(line.shown for line in panel.lines)
        drawn = visit.rows(panel.name)
        assert drawn >= max(expected, 1), panel.name
        assert visit.ink(panel.name) > 2000, panel.name
        label = visit.page.locator(f"#chart-{panel.name}").get_attribute("aria-label")
        assert any(char.isdigit() for char in label), panel.name
    assert visit.page.locator("#summary-table tbody tr").count() == 2
    assert "Step size. It settled around 0.1." in visit.page.inner_text("#stories")
    # The folder's name is shown as it is, and is nothing but a name.
    assert EVIL in visit.page.inner_text("#stories")
    assert visit.page.locator("img").count() == 0


def test_a_mouse_zooms_all_panels_and_a_double_click_ends_it(visit):
    whole = visit.steps()
    visit.rows("loss")
    box = visit.page.locator("#chart-loss").bounding_box()
    y = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + 0.4 * box["width"], y)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=5)
    visit.page.mouse.up()
    start, end = visit.steps()
    assert whole[0] + 50 < start < end < whole[1] - 50
    # Every panel looks through the same range, and fits its height to what it sees.
    assert visit.page.evaluate(
        "() => ['gain', 'signal'].every(n => "
        "meka.doc.get_model_by_name(n).x_range === meka.steps)"
    )
    visit.page.wait_for_function(
        "() => meka.doc.get_model_by_name('loss').y_range.end < 2", timeout=10_000
    )
    visit.page.mouse.dblclick(box["x"] + 0.5 * box["width"], y)
    visit.page.wait_for_function("end => meka.steps.end === end", arg=whole[1])
    assert visit.steps() == whole


def test_keys_and_buttons_zoom(visit):
    first, last = visit.steps()
    visit.page.locator("#chart-loss").focus()
    visit.page.keyboard.press("+")
    start, end = visit.steps()
    assert end - start == pytest.approx((last - first) / 2)
    visit.page.keyboard.press("ArrowRight")
    assert visit.steps()[0] > start
    visit.page.keyboard.press("0")
    assert visit.steps() == [first, last]
    visit.page.get_by_role("button", name="Zoom in").click()
    assert visit.steps() == [start, end]
    visit.page.get_by_role("button", name="Whole run").click()
    assert visit.steps() == [first, last]


def test_toggles_act_on_all_panels(visit):
    assert (visit.rows("step_size"), visit.rows("gain")) == (5, 1)
    visit.page.get_by_role("checkbox", name="adameka").uncheck()
    assert (visit.rows("step_size"), visit.rows("gain")) == (1, 0)
    assert visit.page.locator("#panel-gain .none").inner_text() == (
        "None of the runs shown records this."
    )
    visit.page.get_by_role("checkbox", name="adameka").check()
    assert visit.rows("gain") == 1
    assert visit.page.locator("#panel-gain .none").is_hidden()
    quadratic = visit.page.locator("#panel-step_size").get_by_role(
        "button", name="quadratic"
    )
    quadratic.click()
    assert quadratic.get_attribute("aria-pressed") == "false"
    assert visit.rows("step_size") == 4
    quadratic.click()


def test_the_scale_switches(visit):
    def shown() -> list:
        visit.rows("loss")
        return visit.page.evaluate(
            "() => { const p = meka.doc.get_model_by_name('loss');"
            " return [p.y_scale.type, p.left[0].visible, p.left[1].visible]; }"
        )

    assert shown() == ["LogScale", False, True]
    visit.page.locator("[data-scale=loss]").click()
    assert shown() == ["LinearScale", True, False]
    button = visit.page.locator("[data-scale=loss]")
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert shown() == ["LogScale", False, True]


def test_hovering_tells_the_numbers(visit):
    visit.rows("loss")
    box = visit.page.locator("#chart-loss").bounding_box()
    visit.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 100)
    visit.page.mouse.move(box["x"] + 0.71 * box["width"], box["y"] + 101)
    tip = visit.page.locator("#tip")
    tip.wait_for(state="visible", timeout=5000)
    assert tip.inner_text().startswith("step ")
    assert "adameka, training" in tip.inner_text()


def test_the_profile_follows_its_slider_and_the_formulas_of_the_library(visit):
    assert visit.rows("profile") > 0
    text = visit.page.locator("#profile-text")
    assert text.inner_text().startswith("Step 600, first seed: taken 0.1")
    visit.page.locator("#profile-slider").focus()
    visit.page.keyboard.press("ArrowLeft")
    visit.page.wait_for_function(
        "() => document.getElementById('profile-text').textContent.includes('Step 598')"
    )
    assert not visit.page.locator("#profile-follow").is_checked()
    values = {
        "slope": 1.0,
        "curvature": 8.0,
        "value_variance": 1e-3,
        "slope_variance": 0.01,
        "curvature_variance": 0.5,
        "third_order": 0.1,
    }
    model = ImprovementModel(**{name: jnp.float32(x) for name, x in values.items()})
    alphas = [0.0, 0.05, 0.12, 0.3]
    mine = visit.page.evaluate(
        "([m, steps]) => [meka.probability, meka.expected]"
        ".map(f => steps.map(a => f(m, a)))",
        [values, alphas],
    )
    steps = jnp.array(alphas, jnp.float32)
    theirs = [model.probability(steps), model.expected_improvement(steps)]
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_light_and_dark(browser, report):
    visit = Visit(browser, report.as_uri(), color_scheme="dark")
    dark = "() => getComputedStyle(document.body).backgroundColor"
    assert visit.page.evaluate(dark) == "rgb(14, 18, 23)"
    visit.page.get_by_role("button", name="Dark").click()
    assert visit.page.evaluate(dark) == "rgb(244, 245, 247)"
    assert visit.complaints == []
    visit.close()


def test_ours_have_the_colours_they_have_in_pictures(browser, tmp_path):
    """Whatever else is on the page; two runs never share one while there are others."""
    names = ["adam", "adameka", "auto", "meka", "meka"]
    runs = [
        write_run(tmp_path / f"{k}-{name}", 40, optimizer=name, ours=False)
        for k, name in enumerate(names)
    ]
    path = pages.write_report(runs, tmp_path / "r.html", command="meka report")
    visit = Visit(browser, path.as_uri())
    swatches = visit.page.locator("#summary-table tbody .swatch")
    colors = swatches.evaluate_all(
        "found => found.map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(colors)) == len(names)
    for name, color in list(zip(names, colors, strict=True))[1:4]:
        shown = hue(*(int(part) for part in re.findall(r"\d+", color)))
        assert abs(shown - hue(*bytes.fromhex(plots.OURS[name][1:]))) < 0.02, name
    visit.close()


def hue(red: int, green: int, blue: int) -> float:
    return colorsys.rgb_to_hsv(red, green, blue)[0]


def test_a_phone_scrolls_one_way_only(browser, report):
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}
    visit = Visit(browser, report.as_uri(), has_touch=True, **phone)
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") == 390
    assert visit.rows("loss") > 0
    box = visit.page.locator("#chart-loss").bounding_box()
    assert box["width"] > 300
    visit.page.locator("#summary").scroll_into_view_if_needed()
    assert visit.complaints == []
    visit.close()


def test_a_screen_reader_finds_its_way(visit):
    for role in ("main", "banner", "contentinfo"):
        assert visit.page.get_by_role(role).count() >= 1, role
    assert visit.page.get_by_role("heading", level=1).count() == 1
    nameless = visit.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, summary")]
          .filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length))
          .map(e => e.outerHTML)"""
    )
    assert nameless == []
    visit.page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
    visit.page.locator("a.skip").focus()
    assert visit.page.locator("a.skip").bounding_box()["x"] >= 0
    details = visit.page.locator("#panel-loss details")
    visit.rows("loss")
    details.locator("summary").click()
    assert "adameka" in details.locator("tbody").inner_text()


def test_a_live_page_grows_while_a_run_trains(browser, tmp_path):
    """Watched before the run is there, by one process; trained by another."""
    place(tmp_path)
    train = "train lines.py:workload --optimizer adam --steps 1000000 --out run"
    with serving([tmp_path / "run", tmp_path / EVIL]) as server:
        visit = Visit(browser, server.address)
        assert "waiting" in visit.page.inner_text("fieldset.runs")
        assert visit.rows("loss") == 0
        process = subprocess.Popen(
            [sys.executable, "-m", "meka", *train.split()],
            cwd=tmp_path,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.DEVNULL,
        )
        seen: list[int] = []
        try:
            deadline = time.monotonic() + 60
            while len(seen) < 3 and time.monotonic() < deadline:
                visit.page.wait_for_timeout(100)
                step = visit.page.evaluate("() => meka.runs[0].step")
                if step and (not seen or step > seen[-1]):
                    seen.append(step)
        finally:
            process.terminate()
            process.wait()
        assert len(seen) == 3
        assert "training" in visit.page.inner_text("fieldset.runs")
        assert visit.rows("loss") == 2
        assert visit.rows("step_size") == 1
        assert visit.ink("step_size") > 2000
        assert visit.page.locator("img").count() == 0
        assert visit.complaints == []
        assert {url.partition("?")[0] for url in visit.requests} <= {
            server.address,
            server.address + "data",
            "data:,",
        }
        visit.close()


def test_a_page_that_loses_its_server_says_so(browser, tmp_path):
    with serving([write_run(tmp_path / "run", 60, ours=False)]) as server:
        visit = Visit(browser, server.address)
        visit.page.wait_for_function(
            "() => document.getElementById('status').textContent === 'all done'"
        )
    visit.page.wait_for_function(
        "() => document.getElementById('status').textContent.includes('lost')"
    )
    assert visit.rows("loss") == 2
    visit.close()


def test_a_token_opens_the_page_once_and_leaves_the_address(browser, tmp_path):
    token = "correct-horse-battery"
    run = write_run(tmp_path / "run", 60, ours=False)
    with serving([run], host="127.0.0.1", token=token) as server:
        visit = Visit(browser, server.address)
        assert token not in visit.page.url
        assert visit.rows("loss") == 2
        visit.page.reload()
        visit.page.wait_for_selector("html[data-ready]")
        assert visit.page.evaluate("() => document.cookie") == ""
        visit.close()
