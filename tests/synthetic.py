"""Run folders that nobody trained: as many steps as a test wants, in no time."""

import json
import math
from pathlib import Path

import numpy as np

from meka.lab.config import RunConfig
from meka.lab.metrics import METRICS, encoded
from meka.lab.train import TIMING


def infos(step: int, rng: np.random.Generator) -> dict[str, float]:
    """One step's numbers, shaped as those of a real run."""
    loss = 2 * math.exp(-step / 300) + 0.01
    noise = 1 + 0.1 * rng.random()
    return {
        "loss": loss * noise,
        "step_size": 0.1,
        "gain": 0.2 * noise,
        "value": loss,
        "value_variance": 1e-4,
        "observed_variance": 4e-4,
        "gradient_norm": loss,
        "gradient_variance": 1e-5,
        "gradient_noise": 8e-5,
        "change_noise": 1e-6,
        "model_error": 1e-4,
        "innovation": float(rng.chisquare(1)),
        "gradient_innovation": noise - 0.05,
        "slope": 1.0,
        "curvature": 8.0,
        "model.slope": 1.0,
        "model.curvature": 8.0,
        "model.value_variance": 1e-4,
        "model.slope_variance": 0.01,
        "model.curvature_variance": 0.5,
        "model.third_order": 0.0,
        "improvement_probability": 0.8,
        "predicted_change": -loss / 300,
        "direction_norm": 2.0,
        "displacement_norm": 0.1,
        "noise_scale": 256.0 * noise,
        "suspect": -1,
        "accepted": True,
        "rejected": 0,
    }


def lines(
    steps: range, *, seeds: int = 1, ours: bool = True, every: int = 100, **changes
) -> str:
    """Records of some steps, and of the evaluations among them."""
    rng = np.random.default_rng(steps.start)
    found = []
    for step in steps:
        for seed in range(seeds):
            values = infos(step, rng)
            if not ours:
                values = {name: values[name] for name in ("loss", "step_size")}
            values |= {name: f(step) for name, f in changes.items()}
            if step:
                found.append({"kind": "step", "step": step, "seed": seed, **values})
        if step % every == 0 or step == steps[-1]:
            loss = 2 * math.exp(-step / 300) + 0.01
            results = {"train_loss": loss, "test_loss": loss + 0.01}
            results |= {"train_accuracy": 0.9, "test_accuracy": 0.8}
            found += [
                {"kind": "eval", "step": step, "seed": seed, **results}
                for seed in range(seeds)
            ]
    return "".join(encoded(record) + "\n" for record in found)


def write_run(
    path: Path,
    steps: int = 400,
    *,
    seeds: int = 1,
    optimizer: str = "adameka",
    ours: bool = True,
    planned: int | None = None,
    **changes,
) -> Path:
    """A run folder; ``changes`` are functions from the step to a number."""
    config = RunConfig(
        workload="digits", optimizer=optimizer, steps=planned or steps, seeds=seeds
    )
    path.mkdir(parents=True)
    subject = {"parameters": 7510, "batch_size": 128, "train_examples": 1500}
    (path / "subject.json").write_text(json.dumps(subject))
    (path / "environment.json").write_text('{"device": "cpu", "jax": "0.10"}')
    content = lines(range(steps + 1), seeds=seeds, ours=ours, **changes)
    (path / METRICS).write_text(content)
    timing = [{"step": k, "steps": 100, "seconds": 0.2} for k in range(100, steps, 100)]
    (path / TIMING).write_text("".join(json.dumps(line) + "\n" for line in timing))
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return path
