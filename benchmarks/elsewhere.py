"""What a step needs on a GPU that is not here, as its compiler sees it.

    pip install "jax[cuda13]"
    python -m benchmarks.elsewhere --model mlp          # cnn, resnet32, transformer

Steps are compiled for the GPU that `benchmarks/h200.txtpb` describes, on any machine:
what they hold at once, how many kernels they are, and what these read and write if each
reads all that it is given. Seconds need the GPU itself, and so does what a convolution
of its library holds, which is zero here; what a step holds besides is what it is there.
Ratios are to Adam, as in `benchmarks.step_cost`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks import networks, step_cost, variants
from benchmarks.step_cost import Setting
from meka import tree
from meka.lab import timing
from meka.running import _KINDS, Run

PyTree = Any

TARGET = Path(__file__).parent / "h200.txtpb"
# Whoever is not there cannot be asked which of several kernels is the fastest.
OPTIONS: Any = {"xla_gpu_autotune_level": 0}
ONLY = ("meka fixed step", "meka PI (default)", "meka PI, difference, lagged", "auto")
# Operations that are no kernels.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_FREE |= {"opt-barrier", "after-all", "partition-id", "call", "conditional", "while"}
_OPERATION = re.compile(r"(%\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*?)\)")
_ARRAY = re.compile(r"([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_INNER = re.compile(
    r"(?:to_apply|body|branch_computations|\w+_computation)=(\{.*?\}|\S+)"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=networks.NETWORKS, default="mlp")
    parser.add_argument("--only", nargs="+", default=ONLY, help="settings, by name")
    parser.add_argument("--variants", nargs="+", default=(), choices=variants.VARIANTS)
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def device() -> Any:
    """The GPU that is not here."""
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name="one",
        topology="1x1x1",
        target_config=TARGET.read_text(encoding="utf-8"),
    )
    return found.devices[0]


def compiled(step: jax.stages.Wrapped, *given: PyTree, on: Any) -> jax.stages.Compiled:
    """A jitted function of arguments like these, for that device."""

    def there(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(on))

    traced = step.trace(*jax.tree.map(there, given))
    return traced.lower(lowering_platforms=("cuda",)).compile(OPTIONS)


class Kernels(NamedTuple):
    """What a program does."""

    count: int
    convolutions: int
    moved: int  # bytes, read and written


def kernels(step: jax.stages.Compiled) -> Kernels:
    """The kernels of a program, all branches of a choice and a loop's body once."""
    parts, name = {}, ""
    for line in (step.as_text() or "").splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0]
        parts.setdefault(name, []).append(line)

    def operations(name: str) -> Iterator[tuple[str, str, int]]:
        sizes: dict[str, int] = {}
        for line in parts[name]:
            if found := _OPERATION.search(line):
                made, shape, kind, given = found.groups()
                sizes[made] = _bytes(shape)
                if kind in ("call", "conditional", "while"):
                    for inner in _INNER.findall(line):
                        for each in re.findall(r"%[\w.\-]+", inner):
                            yield from operations(each)
                read = sum(sizes[each] for each in re.findall(r"%[\w.\-]+", given))
                yield kind, line, read + sizes[made]

    found = [each for each in operations("ENTRY") if each[0] not in _FREE]
    convolutions = sum("cudnn$conv" in line for _, line, _ in found)
    return Kernels(len(found), convolutions, sum(moved for *_, moved in found))


def _bytes(shape: str) -> int:
    """Of an array, or of all arrays of a tuple; of truths a byte each."""
    return sum(
        max(int(bits or 8) // 8, 1) * math.prod(int(n) for n in sides.split(",") if n)
        for _, bits, sides in _ARRAY.findall(shape)
    )


def steps(
    setting: Setting, params: PyTree, batch: PyTree, on: Any
) -> Iterator[tuple[str, jax.stages.Compiled]]:
    """The kinds of steps of a setting, compiled."""
    carry = setting.start(params)
    if setting.run is None:
        step = jax.jit(setting.call(1), donate_argnums=0)
        yield "all", compiled(step, carry, batch, on=on)
        return
    run: Run = setting.run(carry)
    for looks, kind in _KINDS.items():
        if kind != "gradient" or setting.name == "auto":
            given = run._scalars, run._arrays, batch, None
            yield kind, compiled(run._step(*looks), *given, on=on)


def main() -> None:
    given = arguments()
    jax.config.update("jax_platforms", "cpu")
    on = device()
    network = networks.NETWORKS[given.model]()
    params, batch = network.init(), network.batch(network.batch_size, 0)
    settings = step_cost.chosen(step_cost.main_settings(network), list(given.only))
    print(f"jax {jax.__version__}, for one {on.device_kind}")
    print(f"{given.model}, {networks.count(params):,} parameters")
    print(f"{'':44}{'MB':>9}{'x adam':>8}{'kernels':>9}{'convolved':>11}{'moved':>9}")
    rows: list[dict[str, Any]] = []
    for name in ("", *given.variants):
        with ExitStack() as stack:
            stack.enter_context(patch.object(tree, "alone", lambda: False))
            stack.enter_context(patch.object(tree, "accelerated", lambda: True))
            if name:
                variants.VARIANTS[name](stack)
            for setting in settings[1:] if name else settings:
                label = f"{setting.name}, {name}" if name else setting.name
                for kind, step in steps(setting, params, batch, on):
                    held, done = timing.peak_bytes(step), kernels(step)
                    rows.append({"name": label, "kind": kind, "bytes": held})
                    rows[-1] |= {"kernels": done.count, "moved": done.moved}
                    rows[-1] |= {"convolutions": done.convolutions}
                    ratio = held / rows[0]["bytes"]
                    title = label if kind == "all" else f"{label}: {kind}"
                    print(
                        f"{title:44}{held / 1e6:9.2f}{ratio:8.3f}"
                        f"{done.count:9}{done.convolutions:11}{done.moved / 1e6:9.1f}",
                        flush=True,
                    )
    if given.json:
        about = {"jax": jax.__version__, "model": given.model, "rows": rows}
        Path(given.json).write_text(json.dumps(about, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
