"""What a step costs, in seconds and bytes, beside Adam's, in one process.

    python -m benchmarks.step_cost                          # the MLP, every setting
    python -m benchmarks.step_cost --model resnet32         # the main settings
    python -m benchmarks.step_cost --model cnn --settings all --json FILE
    python -m benchmarks.step_cost --model resnet32 --flat  # parameters in one array
    python -m benchmarks.step_cost --grow batch             # 32 ... 1024 examples
    python -m benchmarks.step_cost --grow width             # wider and wider MLPs

All settings take turns (meka/lab/timing.py); a ratio is the median over rounds of
the time by Adam's of the same round, with its quartiles. Bytes are what the compiled
call holds at once: arguments, results and work space. A call is a step (`meka.Run`, for
some settings a jitted `make_step` beside it; a jitted step for the others), or with
--loop a compiled loop of so many (`meka.make_loop`, a scan for the others), so that the
host's dispatch is not measured. Every step sees another batch: what `auto` computes
depends on the noise between them.

Products counts the matrix products of a layer: a gradient has 3, a gradient with a
Hessian-vector product 9, two gradients 6, the current probe 5 more where it looks, at
one step in eight; on a quarter of the examples a quarter, and the others' gradient. The
count is that of all examples where the network decides how many are asked. What the
first two of these take alone, with nothing done about them, is timed as well: no step
that looks at all examples can be faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import meka
from benchmarks import networks
from meka.lab import timing

PyTree = Any
Held = dict[str, int]  # bytes at once, for each kind of step
PAPER = {  # seconds a step as multiples of SGD's (its table 2): fixed, adaptive
    "mlp": (1.10, 1.00),
    "cnn": (0.83, 1.34),
    "resnet32": (1.68, 2.97),
}
OF_THE_PAPER = ("meka fixed step", "meka PI (default)", "adameka PI (default)")
TRANSPORTS = {
    "hessian_at_current": (meka.hessian_at_current, 9),
    "hessian_at_previous": (meka.hessian_at_previous, 9),
    "difference": (meka.difference, 6),
}
PROBES = {"current": (meka.current, 5), "lagged": (meka.lagged, 0)}
BATCHES = 16


@dataclass(frozen=True)
class Setting:
    """A step to time: the carry it starts from, and what it does to it.

    ``several`` takes a step for each of many batches, one after another unless it is
    said how; ``run`` takes over single steps from a carry, where there is one; ``warm``
    is the number of steps before the first that is timed.
    """

    name: str
    products: int
    start: Callable[[PyTree], PyTree]
    step: Callable[[PyTree, PyTree], PyTree]
    several: Callable[[PyTree, PyTree], PyTree] | None = None
    run: Callable[[PyTree], meka.Run] | None = None
    warm: int = 0

    def call(self, loop: int) -> Callable[[PyTree, PyTree], PyTree]:
        if loop == 1:
            return self.step
        step = self.step
        return self.several or (
            lambda carry, block: jax.lax.scan(
                lambda c, b: (step(c, b), None), carry, block
            )[0]
        )


def plain(network: networks.Network, name: str, optimizer) -> Setting:
    gradient = networks.gradient(network)

    def step(carry, batch):
        params, state = carry
        _, g = gradient(params, batch)
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state

    return Setting(name, 3, lambda p: (p, optimizer.init(p)), step)


def gradient_alone(network: networks.Network) -> Setting:
    gradient = networks.gradient(network)

    def step(carry, batch):
        # The gradient is the next carry, shifted by the value so that it is needed too.
        value, g = gradient(carry, batch)
        return jax.tree.map(lambda x: x + value.astype(x.dtype), g)

    return Setting("value_and_grad", 3, lambda p: p, step)


def floors(network: networks.Network) -> list[Setting]:
    """The least that the two ways to see the gradient change compute."""
    gradient = networks.gradient(network)

    def product(carry, batch):
        params, tangent = carry
        found = jax.jvp(lambda p: gradient(p, batch), (params,), (tangent,))
        (value, g), (_, change) = found
        return jax.tree.map(lambda x: x + value.astype(x.dtype), (g, change))

    def both(carry, batch):
        found = [gradient(p, batch) for p in carry]
        return tuple(
            jax.tree.map(lambda x, v=value: x + v.astype(x.dtype), g)
            for value, g in found
        )

    def twice(params: PyTree) -> PyTree:
        return params, jax.tree.map(jnp.copy, params)

    return [
        Setting("gradient and product", 9, twice, product),
        Setting("two gradients", 6, twice, both),
    ]


def ours(network, name, products, optimizer, **options) -> Setting:
    take = meka.make_step(network.losses, optimizer, **options)

    def step(carry, batch):
        params, state, _ = take(*carry, batch)
        return params, state

    loop = meka.make_loop(network.losses, optimizer, **options)

    def several(carry, block):
        params, state, _ = loop(*carry, block)
        return params, state

    def run(carry):
        return meka.Run(network.losses, optimizer, *carry, **options)

    return Setting(name, products, lambda p: (p, optimizer.init(p)), step, several, run)


def bare(setting: Setting) -> Setting:
    """The same through a jitted `make_step`."""
    return replace(setting, name=f"{setting.name}, make_step", run=None)


def automatic(network: networks.Network) -> Setting:
    """`auto` past its beginning: while steps are tiny it follows the gradient's change,
    which costs a second gradient, and finds their length in a tenth of the run."""
    optimizer = meka.auto(10**6)
    setting = ours(network, "auto", 3, optimizer)

    def start(params: PyTree) -> PyTree:
        state: Any = optimizer.init(params)
        scale = state.scale._replace(distance=jnp.asarray(3e-4))
        return params, state._replace(scale=scale)

    return replace(setting, start=start, warm=400)


def main_settings(network: networks.Network) -> list[Setting]:
    fixed = meka.meka(meka.constant(1e-3))
    lagged = {"probe": meka.lagged}
    settings = [
        plain(network, "adam", optax.adam(1e-3)),
        plain(network, "sgd", optax.sgd(1e-3)),
        gradient_alone(network),
        *floors(network),
        ours(network, "meka fixed step", 9, fixed, **lagged),
        ours(network, "meka PI (default)", 14, meka.meka()),
        ours(network, "adameka PI (default)", 14, meka.adameka()),
        ours(
            network,
            "meka PI, difference, lagged",
            6,
            meka.meka(),
            transport=meka.difference,
            **lagged,
        ),
        ours(network, "meka PI, noise at every step", 14, meka.meka(), noise_every=1),
        ours(network, "meka fixed step, sample 1", 9, fixed, sample=1, **lagged),
        ours(network, "meka PI, sample 1", 14, meka.meka(), sample=1),
        ours(network, "meka fixed step, sample 4", 5, fixed, sample=4, **lagged),
        ours(network, "meka PI, sample 4", 6, meka.meka(), sample=4),
        automatic(network),
    ]
    ways = ("meka fixed step", "meka PI (default)", "auto")
    return settings + [bare(each) for each in settings if each.name in ways]


def all_settings(network: networks.Network, batch_size: int) -> list[Setting]:
    settings = main_settings(network)
    for transport, (move, products) in TRANSPORTS.items():
        for probe, (look, more) in PROBES.items():
            for groups in (2, 8, batch_size):
                label = "n" if groups == batch_size else str(groups)
                settings.append(
                    ours(
                        network,
                        f"{transport}, {probe}, groups {label}",
                        products + more,
                        meka.meka(),
                        transport=move,
                        probe=look,
                        groups=groups,
                    )
                )
    return settings


def prepare(
    setting: Setting, params: PyTree, blocks: list[PyTree], loop: int
) -> tuple[timing.Contestant, Held]:
    """Compile a setting; also the bytes that one of its steps holds at once."""
    carry = jax.tree.map(jnp.copy, setting.start(params))
    if setting.run and loop == 1:
        return running(setting.name, setting.run(carry), blocks)
    step = (
        jax.jit(setting.call(loop), donate_argnums=0).lower(carry, blocks[0]).compile()
    )
    contestant = timing.Contestant(
        setting.name,
        lambda carry, turns: step(carry, next(turns)),
        carry,
        itertools.cycle(blocks),
        loop,
    )
    block = sum(x.nbytes for x in jax.tree.leaves(blocks[0]))
    return contestant, {"all": timing.peak_bytes(step) - block * (loop - 1) // loop}


def running(
    name: str, run: meka.Run, blocks: list[PyTree]
) -> tuple[timing.Contestant, Held]:
    """The same of a run, whose steps are of several kinds."""
    for block in (blocks * 2)[: 2 * BATCHES]:
        run.step(block)
    steps = run.compiled(blocks[0])
    held = {kind: timing.peak_bytes(step) for kind, step in steps.items()}
    turns = itertools.cycle(blocks)
    contestant = timing.Contestant(
        name, lambda last, turns: run.step(next(turns)), None, turns
    )
    return contestant, held


def blocks_of(network: networks.Network, batch_size: int, loop: int) -> list[PyTree]:
    """What the calls are given in turn: a batch, or one for each step of a loop."""
    calls = max(1, BATCHES // loop)
    batches = [network.batch(batch_size, seed) for seed in range(calls * loop)]
    if loop == 1:
        return batches
    parts = [batches[k : k + loop] for k in range(0, len(batches), loop)]
    return [jax.tree.map(lambda *x: jnp.stack(x), *part) for part in parts]


def measure(
    settings: list[Setting],
    network: networks.Network,
    batch_size: int,
    loop: int,
    rounds: int,
) -> list[dict[str, Any]]:
    params, blocks = network.init(), blocks_of(network, batch_size, loop)
    prepared = prepare_all(settings, params, blocks, loop)
    return race(settings, prepared, loop, rounds)


def prepare_all(
    settings: list[Setting], params: PyTree, blocks: list[PyTree], loop: int
) -> list[tuple[timing.Contestant, Held]]:
    say(f"compiling {len(settings)} settings")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        made = threads.map(lambda s: prepare(s, params, blocks, loop), settings)
        return list(made)


def race(
    settings: list[Setting],
    prepared: list[tuple[timing.Contestant, Held]],
    loop: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Rows of the table, the first setting being what the others are compared with."""
    contestants, memory = zip(*prepared, strict=True)
    for setting, each in zip(settings, contestants, strict=True):
        for _ in range(0, setting.warm, loop):
            each.burst()

    def progress(done: int) -> None:
        if done % 10 == 0:
            say(f"round {done}/{rounds}")

    least = max(memory[0].values())
    cycle = 8 if jax.default_backend() == "cpu" else 16
    timing.interleave(list(contestants), rounds=rounds, cycle=cycle, progress=progress)
    return [
        {
            "name": setting.name,
            "products": setting.products,
            **timing.summary(contestant, contestants[0]),
            "bytes": max(held.values()),
            "bytes_ratio": max(held.values()) / least,
            "kinds": {kind: size / least for kind, size in held.items()},
        }
        for setting, contestant, held in zip(settings, contestants, memory, strict=True)
    ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def by_kind(ratios: dict[str, float]) -> str:
    if len(ratios) == 1:
        return ""
    return ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items())


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':40} {'products':>8} {'ms':>9} {'x adam':>7} {'quartiles':>13} "
        f"{'MB':>8} {'x adam':>7}  by what a step looks at"
    ]
    lines += [
        f"{r['name']:40} {r['products']:8d} {1e3 * r['seconds']:9.3f} "
        f"{r['ratio']:7.2f} {r['ratio_low']:6.2f}-{r['ratio_high']:<6.2f} "
        f"{r['bytes'] / 1e6:8.1f} {r['bytes_ratio']:7.2f}  {by_kind(r['kinds'])}"
        for r in rows
    ]
    return "\n".join(lines)


def growth(kind: str, network_name: str, loop: int, rounds: int) -> list[dict]:
    """Main settings over batch sizes, or over widths of the MLP."""
    cases = []
    if kind == "batch":
        network = networks.NETWORKS[network_name]()
        cases = [(n, network, n) for n in (32, 64, 128, 256, 512, 1024)]
    else:
        cases = [(w, networks.mlp(w), 128) for w in (100, 400, 1600)]
    found = []
    for value, network, n in cases:
        say(f"{kind} {value}")
        per_example = ours(network, "groups n", 14, meka.meka(), groups=n)
        settings = [*main_settings(network), per_example]
        rows = measure(settings, network, n, loop, rounds)
        print(f"\n{kind} {value}, {networks.count(network.init()):,} parameters")
        print(table(rows), flush=True)
        found += [{kind: value, **row} for row in rows]
    return found


def chosen(settings: list[Setting], names: list[str] | None) -> list[Setting]:
    """Those of these names, and the first, which the others are compared with."""
    known = [s.name for s in settings]
    if unknown := sorted(set(names or ()) - set(known)):
        raise SystemExit(f"no setting {unknown}: there are {', '.join(known)}")
    return [s for s in settings if not names or s.name in (known[0], *names)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "gpu"))
    parser.add_argument("--model", choices=networks.NETWORKS, default="mlp")
    parser.add_argument("--settings", choices=("main", "all"))
    parser.add_argument("--only", nargs="+", help="adam and these alone, by name")
    parser.add_argument("--grow", choices=("batch", "width"))
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--loop", type=int, default=1, help="steps in one call")
    parser.add_argument(
        "--flat", action="store_true", help="all parameters in one array"
    )
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.grow and given.flat:
        raise SystemExit("--flat goes with --model, not with --grow")
    if given.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(given.device, "cpu"))
    backend = jax.default_backend()
    loop = given.loop
    device = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {device}, python {platform.python_version()}")
    if given.grow:
        rows = growth(given.grow, given.model, loop, given.rounds)
    else:
        network = networks.NETWORKS[given.model]()
        network = networks.flat(network) if given.flat else network
        size = given.batch_size or network.batch_size
        every = given.settings or ("all" if given.model == "mlp" else "main")
        settings = (
            all_settings(network, size) if every == "all" else main_settings(network)
        )
        if loop > 1:
            settings = [s for s in settings if s.run or not s.several]
        settings = chosen(settings, given.only)
        rows = measure(settings, network, size, loop, given.rounds)
        count = networks.count(network.init())
        print(f"{given.model}, {count:,} parameters, batch {size}")
        print(table(rows))
        if given.model in PAPER and not given.only:
            fixed, adaptive = PAPER[given.model]
            sgd = next(r for r in rows if r["name"] == "sgd")["seconds"]
            print(f"the paper, over SGD: fixed {fixed}, adaptive {adaptive}; here:")
            for r in rows:
                if r["name"] in OF_THE_PAPER:
                    print(f"  {r['name']}: {r['seconds'] / sgd:.2f}")
    if given.json:
        about = {"jax": jax.__version__, "device": device, "backend": backend}
        about |= {"model": given.model, "loop": loop, "rounds": given.rounds}
        about |= {"flat": given.flat}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({**about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
