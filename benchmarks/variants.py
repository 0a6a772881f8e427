"""Steps with one part of them done otherwise, beside the steps as they are.

    python -m benchmarks.variants --device gpu --model resnet32
    python -m benchmarks.variants --model cnn --only "meka fixed step" --variants kept

What docs/speed.md says of a part, by the part. All take turns in one process, as in
`benchmarks.step_cost`, and are compared with Adam.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax

from benchmarks import networks, step_cost
from meka import tree
from meka.training import Stepper


def kept(stack: ExitStack) -> None:
    """The last parameters kept, not the displacement; and all looked at once more."""
    swap(stack, Stepper, "can_be_displaced", lambda self, params: False)
    swap(stack, Stepper, "_vouched", lambda self, params: False)


def at_once(stack: ExitStack) -> None:
    """What shares no result in any order the compiler likes."""
    swap(stack, tree, "one_by_one", lambda done, then: (done, then))


def swap(stack: ExitStack, place: Any, name: str, value: Callable[..., Any]) -> None:
    stack.enter_context(patch.object(place, name, value))


VARIANTS = {"kept": kept, "at once": at_once}
ONLY = ("meka fixed step", "meka PI (default)")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "gpu"))
    parser.add_argument("--model", choices=networks.NETWORKS, default="mlp")
    parser.add_argument("--only", nargs="+", default=ONLY, help="settings, by name")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(given.device, "cpu"))
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {device}, python {platform.python_version()}")
    network = networks.NETWORKS[given.model]()
    params, blocks = (
        network.init(),
        step_cost.blocks_of(network, network.batch_size, 1),
    )
    known = step_cost.main_settings(network)
    adam, *chosen = step_cost.chosen(known, list(given.only))
    settings = [adam, *chosen]
    prepared = step_cost.prepare_all(settings, params, blocks, 1)
    for name in given.variants:
        changed = [replace(each, name=f"{each.name}, {name}") for each in chosen]
        with ExitStack() as stack:
            VARIANTS[name](stack)
            prepared += step_cost.prepare_all(changed, params, blocks, 1)
        settings += changed
    rows = step_cost.race(settings, prepared, 1, given.rounds)
    print(f"{given.model}, {networks.count(params):,} parameters")
    print(step_cost.table(rows))
    if given.json:
        about = {"jax": jax.__version__, "device": device, "model": given.model}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({**about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
