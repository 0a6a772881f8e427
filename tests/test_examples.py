"""The examples train, print what is true, and the code in the documents runs."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meka
from meka.lab.workloads import check

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
NUMBER = r"(-?\d+\.?\d*(?:e[+-]?\d+)?)"


def load(name: str) -> Callable[[], float]:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def numbers(label: str, text: str) -> list[float]:
    return [float(x) for x in re.findall(rf"\b{label} +{NUMBER}", text)]


def test_there_is_an_example_for_each_way_to_hold_parameters() -> None:
    names = {"plain_jax", "equinox_mlp", "flax_nnx", "haiku_mlp", "optax_chain"}
    assert names <= set(EXAMPLES)


# The one of several processes has tests of its own, in test_devices.
@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"distributed"}))
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    loss = load(name)()
    printed = capsys.readouterr().out
    last = printed.splitlines()[-1]

    # Ten classes: ignorance costs ln 10 and guesses one in ten.
    assert 0 < loss < 0.05 * np.log(10)
    assert numbers("train loss", last) == [round(loss, 4)]
    (accuracy,) = numbers("test accuracy", last)
    assert 95 < accuracy <= 100

    # The run starts ignorant, and what it says on the way agrees with where it ends.
    observed = numbers("loss", printed)[:-1]
    assert len(observed) >= 4
    assert observed[-1] < 0.2
    if "epoch" not in printed:
        assert observed[0] == pytest.approx(np.log(10), rel=0.1)
    assert all(s > 0 for s in numbers("step size", printed))
    gains = numbers("gain", printed)
    assert all(0 < gain <= 1 for gain in gains)
    if gains:
        assert gains[0] == 1  # nothing was known before
        assert gains[-1] < 0.5


def test_the_chain_really_clips(capsys: pytest.CaptureFixture[str]) -> None:
    load("optax_chain")()
    moves = numbers("last move", capsys.readouterr().out)
    assert moves[0] == 0  # before the first step nothing moved
    assert all(0 < move < 1.01 for move in moves[1:])


def blocks(page: str) -> list[tuple[int, str]]:
    """The Python of a page, each block with the line it starts on."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: m.start()].count("\n") + 2, m.group(1)) for m in found]


def readme_names() -> dict[str, Any]:
    """What the reader of the README brings along: a model and data."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(16, 5)).astype(np.float32)
    labels = np.argmax(images[:, :3], axis=1)

    def apply(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
        return images @ params["w"] + params["b"]

    params = {"w": jnp.zeros((5, 3)), "b": jnp.zeros(3)}
    return {"apply": apply, "params": params, "data": [(images, labels)] * 200}


def run_blocks(page: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Run a page's Python, block after block, and return what it defined."""
    found = blocks(page)
    assert found, f"{page} shows no code"
    for line, code in found:
        # Numbered as in the page, so that a failure points to the line to mend.
        exec(compile("\n" * (line - 1) + code, ROOT / page, "exec"), scope)
    return scope


@pytest.mark.makes_nan
@pytest.mark.slow
def test_sharp_edges_are_as_described() -> None:
    run_blocks("docs/sharp_edges.md", {})


def test_readme_trains() -> None:
    info = run_blocks("README.md", readme_names())["info"]
    assert info.rejected == 0
    assert info.observed < 0.8 * np.log(3)


def test_the_workload_of_the_bench_page_is_sound() -> None:
    workload = run_blocks("docs/lab.md", {})["workload"]()
    check(workload)
    assert workload.steps == 500


def test_additions_of_the_contributing_page_work() -> None:
    names = run_blocks("CONTRIBUTING.md", {"jax": jax, "jnp": jnp, "meka": meka})
    optimizer = meka.meka(names["cautious"])
    step = jax.jit(
        meka.make_step(
            lambda params, batch: (params - batch) ** 2,
            optimizer,
            transport=names["frozen"],
        )
    )
    params, batch = jnp.zeros(()), jnp.asarray([1.0, 2.0, 3.0, 4.0])
    params, _, info = step(params, optimizer.init(params), batch)
    # Half way to the quadratic minimum, and nothing has changed yet.
    assert params == pytest.approx(0.5 * 2.5)
    assert info.change_noise == 0


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ],
)
def test_links_in_documents_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", here.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("#"):
            continue
        path = (here.parent / target.partition("#")[0]).resolve()
        assert path.exists(), f"{page} links to {target}"


def test_the_paper_map_names_what_exists() -> None:
    text = (ROOT / "docs/paper_map.md").read_text(encoding="utf-8")
    links = re.findall(r"\[([^\]]+)\]\((\.\./meka/\w+\.py)\)", text)
    assert len(links) > 30
    for label, target in links:
        source = (ROOT / "docs" / target).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", label):
            known = rf"(def|class) {name}\b|^{name}\b"
            found = re.search(known, source, re.MULTILINE)
            assert found or name == Path(target).stem, f"no {name} in {target}"
