"""Every optimizer of the bench on CIFAR-10, several at a time on one GPU.

    python -m benchmarks.cifar --data DIR --out DIR [--jobs 4] [--only cifar10-cnn]
    python -m benchmarks.cifar --report DIR     # table and picture of DIR/results.json

Each run is a run folder under OUT; results.json holds what the tables need, and is
written anew after every run, so that an interrupted call loses nothing. Small networks
leave a GPU idle between launches, which is why a few share it; the seconds a step are
therefore not to be compared, only the losses and accuracies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

# Rates that are worth the time here: the paper's best and their neighbours.
RATES = {
    "sgd": (0.1,),
    "momentum": (0.01, 0.1),
    "adam": (0.001,),
    "nadamw": (0.001,),
    "svrg": (0.1,),
    "meka-constant": (0.1,),
    "adameka-constant": (0.001,),
}
STEPS = {"cifar10-cnn": 12 * 390, "cifar10-resnet32": 6 * 390}


def plan(only: str | None, optimizers: list[str] | None) -> list[dict]:
    from meka.lab.optimizers import TABLE

    runs = []
    for workload in STEPS:
        if only not in (None, workload):
            continue
        for name, entry in TABLE.items():
            if optimizers and name not in optimizers:
                continue
            schedule = "linear" if "linear" in entry.schedules else None
            if entry.schedule != "constant":
                schedule = entry.schedule
            rates = RATES.get(name, (entry.default,))
            runs += [
                {
                    "workload": workload,
                    "optimizer": name,
                    "learning_rate": rate,
                    "schedule": schedule,
                }
                for rate in rates
            ]
    return sorted(runs, key=lambda r: (r["workload"], "meka" not in r["optimizer"]))


def folder(out: Path, run: dict) -> Path:
    rate = "" if run["learning_rate"] is None else f"-{run['learning_rate']:g}"
    return out / run["workload"] / f"{run['optimizer']}{rate}"


def train_one(run: dict, data: str, out: Path) -> None:
    from meka.lab.config import RunConfig
    from meka.lab.runfolder import is_run
    from meka.lab.train import train

    steps = run.get("steps") or STEPS[run["workload"]]
    config = RunConfig(
        workload=run["workload"],
        optimizer=run["optimizer"],
        steps=steps,
        learning_rate=run["learning_rate"],
        schedule=run["schedule"],
        eval_every=390,
        checkpoint_every=steps,
        data_dir=data,
        average=True,
    )
    path = folder(out, run)
    train(config, path, resume=is_run(path))


def collect(runs: list[dict], out: Path) -> list[dict]:
    from meka.lab.history import read
    from meka.lab.runfolder import RunError, is_run

    results = []
    for run in runs:
        path = folder(out, run)
        if not is_run(path):
            continue
        try:
            history = read(path)
        except (RunError, ValueError):
            continue
        evals = {name: x[:, 0].tolist() for name, x in history.evals.values.items()}
        keep = np.unique(
            np.linspace(0, max(len(history.steps.step) - 1, 0), 60).astype(int)
        )
        names = (
            "loss",
            "step_size",
            "gain",
            "gradient_noise",
            "noise_scale",
            "curvature",
            "direction_norm",
            "rejected",
            "innovation",
            "gradient_innovation",
        )
        steps = {
            name: history.steps[name][keep, 0].astype(float).tolist()
            for name in names
            if name in history.steps
        }
        results.append(
            {
                **run,
                "steps": history.config.steps,
                "reached": int(history.evals.step[-1]),
                "eval_step": history.evals.step.tolist(),
                "evals": evals,
                "step": history.steps.step[keep].tolist()
                if len(history.steps.step)
                else [],
                "logs": steps,
                "seconds_per_step": history.seconds_per_step,
            }
        )
    return results


def table(results: list[dict]) -> str:
    lines = [
        "workload optimizer rate train_loss test_accuracy averaged rejected ms/step"
    ]
    key = lambda r: (r["workload"], -r["evals"]["test_accuracy"][-1])  # noqa: E731
    for r in sorted(results, key=key):
        evals = r["evals"]
        rejected = int(r["logs"].get("rejected", [0])[-1])
        lines.append(
            f"{r['workload']:17s} {r['optimizer']:20s} {r['learning_rate'] or '-':>6} "
            f"{evals['train_loss'][-1]:.4f} {evals['test_accuracy'][-1]:.4f} "
            f"{evals['average_test_accuracy'][-1]:.4f} {rejected} "
            f"{1e3 * r['seconds_per_step']:.1f} ({r['reached']}/{r['steps']})"
        )
    return "\n".join(lines)


def markdown(results: list[dict]) -> str:
    lines = []
    for workload in STEPS:
        found = [r for r in results if r["workload"] == workload]
        found.sort(key=lambda r: -r["evals"]["test_accuracy"][-1])
        lines += [
            f"### {workload}",
            "",
            "| optimizer | rate | steps | train loss | test accuracy | averaged |",
            "|---|---|---|---|---|---|",
        ]
        for r in found:
            evals, rate = r["evals"], r["learning_rate"]
            lines.append(
                f"| {r['optimizer']} | {'–' if rate is None else f'{rate:g}'} | "
                f"{r['reached']}/{r['steps']} | {evals['train_loss'][-1]:.3f} | "
                f"{evals['test_accuracy'][-1]:.1%} | "
                f"{evals['average_test_accuracy'][-1]:.1%} |"
            )
        lines.append("")
    return "\n".join(lines)


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
    for (bars, curves), workload in zip(axes.T, STEPS, strict=True):
        found = [r for r in results if r["workload"] == workload]
        found.sort(key=lambda r: r["evals"]["test_accuracy"][-1])
        names = [
            r["optimizer"]
            + ("" if r["optimizer"] not in RATES else f" {r['learning_rate']:g}")
            + ("" if r["reached"] == r["steps"] else f" (step {r['reached']})")
            for r in found
        ]
        colors = ["#D55E00" if "meka" in r["optimizer"] else "#9DB4C0" for r in found]
        accuracy = [100 * r["evals"]["test_accuracy"][-1] for r in found]
        drawn = bars.barh(names, accuracy, color=colors)
        bars.bar_label(drawn, fmt="%.1f", padding=2, fontsize=8)
        bars.set_xlim(min(accuracy) - 8, max(accuracy) + 4)
        bars.set_title(f"{workload}: test accuracy, %", loc="left", fontweight="bold")
        bars.tick_params(labelsize=8)
        for r in found:
            ours = "meka" in r["optimizer"]
            curves.plot(
                r["eval_step"],
                r["evals"]["train_loss"],
                color="#D55E00" if ours else "#9DB4C0",
                linewidth=1.6 if ours else 0.9,
                zorder=3 if ours else 2,
            )
        curves.set_yscale("log")
        curves.set_xlabel("step")
        curves.set_title("training loss; ours in orange", loc="left", fontweight="bold")
        for axis in (bars, curves):
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def save(runs: list[dict], out: Path) -> list[dict]:
    results = collect(runs, out)
    (out / "results.json").write_text(json.dumps(results))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", choices=list(STEPS))
    parser.add_argument("--optimizers", nargs="*")
    parser.add_argument("--seconds", type=float, default=1e9, help="then stop and save")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        results = json.loads((args.report / "results.json").read_text())
        (args.report / "table.md").write_text(markdown(results))
        draw(results, args.report / "cifar10.png")
        print(markdown(results))
        return
    if not args.data or not args.out:
        parser.error("--data and --out are needed to train")
    if args.one:
        train_one(json.loads(args.one), args.data, args.out)
        return
    runs = plan(args.only, args.optimizers)
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(args.out / "xla"),
    }
    began, waiting, busy = time.time(), list(runs), []
    while waiting or busy:
        late = time.time() - began > args.seconds
        if late:
            waiting.clear()
            for _, process in busy:
                process.terminate()
        while waiting and len(busy) < args.jobs:
            run = waiting.pop(0)
            command = [sys.executable, "-m", "benchmarks.cifar", "--data", args.data]
            command += ["--out", str(args.out), "--one", json.dumps(run)]
            busy.append((run, subprocess.Popen(command, env=environment)))
        time.sleep(5 if late else 0.5)
        for run, process in list(busy):
            if process.poll() is not None:
                busy.remove((run, process))
                print(
                    f"{time.time() - began:6.0f}s {run['workload']} {run['optimizer']} "
                    f"{run['learning_rate']} exit {process.returncode}",
                    flush=True,
                )
                save(runs, args.out)
    print(table(save(runs, args.out)))


if __name__ == "__main__":
    main()
