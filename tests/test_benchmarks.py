"""What the benchmarks count is counted rightly, and their commands work."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import elsewhere

ROOT = Path(__file__).parent.parent


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--device", "cpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_a_step_is_timed_and_weighed_beside_adam(tmp_path):
    out = tmp_path / "cost.json"
    names = "sgd", "meka PI (default)"
    done = run("step_cost", "--rounds", "2", "--only", *names, "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = rows(out)
    assert list(found) == ["adam", *names]
    for row in found.values():
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["seconds"] > 0
        assert row["bytes_ratio"] == row["bytes"] / found["adam"]["bytes"]
        assert f"{row['ratio']:.2f}" in done.stdout
    # Three buffers each but for SGD, which has one; and a product beside the gradient.
    sgd, ours = (found[name]["bytes"] for name in names)
    size = 4 * 79_510
    assert found["adam"]["bytes"] - sgd == pytest.approx(2 * size, rel=0.01)
    assert ours > found["adam"]["bytes"] + size
    assert set(found["meka PI (default)"]["kinds"]) == {"noise", "change"}


def test_a_variant_stands_beside_what_it_varies(tmp_path):
    out = tmp_path / "variants.json"
    which = ["--only", "meka fixed step", "--variants", "kept"]
    done = run("variants", "--rounds", "1", *which, "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = rows(out)
    assert list(found) == ["adam", "meka fixed step", "meka fixed step, kept"]
    more = found["meka fixed step, kept"]["bytes"] - found["meka fixed step"]["bytes"]
    assert more > 0.5 * 4 * 79_510


def test_a_setting_that_is_not_there_is_refused_with_those_that_are():
    done = run("step_cost", "--only", "meka quickest")
    assert done.returncode == 1
    assert "no setting ['meka quickest']: there are adam, sgd" in done.stderr
    assert "Traceback" not in done.stderr


PROGRAM = """\
HloModule jit_step

%fused (a: f32[4,2]) -> f32[4,2] {
  %a = f32[4,2]{1,0} parameter(0)
  ROOT %negated = f32[4,2]{1,0} negate(%a)
}

%body (b: (f32[4,2])) -> (f32[4,2]) {
  %b = (f32[4,2]{1,0}) parameter(0)
  %one = f32[4,2]{1,0} get-tuple-element(%b), index=0
  %twice = f32[4,2]{1,0} fusion(%one), kind=kLoop, calls=%fused
  ROOT %again = (f32[4,2]{1,0}) tuple(%twice)
}

%condition (c: (f32[4,2])) -> pred[] {
  %c = (f32[4,2]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[4,2], k: bf16[2]) -> ((f32[4,2]), s32[]) {
  %x = f32[4,2]{1,0} parameter(0), metadata={op_name="x"}
  %k = bf16[2]{0} parameter(1)
  %both = ((f32[4,2]{1,0}, pred[3]{0}), s32[]) fusion(%x, /*index=1*/%k), kind=kInput
  %pair = (f32[4,2]{1,0}, pred[3]{0}) get-tuple-element(%both), index=0
  %image = f32[4,2]{1,0} get-tuple-element(%pair), index=0
  %number = s32[] get-tuple-element(%both), index=1
  %sum = (f32[4,2]{1,0}, u8[10]{0}) custom-call(%image), \
custom_call_target="__cudnn$convForward"
  %y = f32[4,2]{1,0} get-tuple-element(%sum), index=0
  %start = (f32[4,2]{1,0}) tuple(%y)
  %end = (f32[4,2]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %all = ((f32[4,2]{1,0}), s32[]) tuple(%end, %number)
}
"""


def test_kernels_are_counted_with_what_they_move():
    """Two of the program and one of its loop; not what only names or groups arrays."""
    step: Any = SimpleNamespace(as_text=lambda: PROGRAM)
    found = elsewhere.kernels(step)
    array, half, truths, number, work = 32, 4, 3, 4, 10
    fusion = array + half + (array + truths + number)
    convolution = array + (array + work)
    assert found == (3, 1, fusion + convolution + 2 * array)
