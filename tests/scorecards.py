"""Records of a scorecard that nobody ran: curves a test writes down."""

from typing import Any

import numpy as np

from meka.lab.reproduce.setting import plain
from meka.lab.scorecard import records
from meka.lab.scorecard.plan import plan

STEPS = (0, 10, 20, 30, 40)


def run(
    workload: str,
    optimizer: str,
    loss: Any,
    *,
    rate: float | None = None,
    failure: str | None = None,
    **curves: Any,
) -> records.Record:
    """A record; a curve is one number per evaluation, for both seeds, or two each."""
    names = {"train_loss": loss, "average_train_loss": loss, **curves}
    shaped = {
        name: np.broadcast_to(
            np.array(values, float).reshape(len(STEPS), -1), (len(STEPS), 2)
        )
        for name, values in names.items()
    }
    return plain(
        {
            "workload": workload,
            "optimizer": optimizer,
            "learning_rate": rate,
            "schedule": "linear",
            "steps": STEPS[-1],
            "seeds": 2,
            "failure": failure,
            "step": STEPS,
            "curves": shaped,
        }
    )


def grid(
    workload: str, loss: Any = (4, 3, 2, 1, 0.5), **curves: Any
) -> list[records.Record]:
    """Adam over two rates, of which the second is the better one."""
    return [
        run(workload, "adam", (4, 4, 4, 4, 4), rate=0.001, **curves),
        run(workload, "adam", loss, rate=0.01, **curves),
    ]


def card(*runs: records.Record, times: Any = None, **settings: Any) -> records.Records:
    """Records of a scorecard."""
    standard = {"scale": "desk", "seeds": 2, "steps_scale": 1.0}
    return {
        "settings": {**standard, **settings},
        "runs": list(runs),
        "times": times or {},
        "commands": ["meka scorecard"],
    }


def ratios(device: str = "cpu", **own: float) -> dict[str, Any]:
    """What steps cost, as multiples of Adam's millisecond."""
    return {
        "seconds": 0.001,
        "ratios": {"adam": [1.0] * 3}
        | {k.replace("_", "-"): [v] * 3 for k, v in own.items()},
        "rounds": 5,
        "left_out": [],
        "device": device,
    }


def everything(scale: str) -> records.Records:
    """A whole scorecard, whose losses decay at speeds drawn from a hat."""
    rng = np.random.default_rng(0)
    runs, speed = [], {}
    for planned in plan(scale, seeds=2):
        config = planned.config
        own = speed.setdefault(config.optimizer, rng.uniform(3, 9))
        share = np.linspace(0, 1, 21)[:, None]
        loss = 2.3 * np.exp(-np.sqrt(share) * own * rng.uniform(0.6, 1.4, (1, 2)))
        curves = {"train_loss": loss, "average_train_loss": 0.9 * loss}
        if "digits" in config.workload:
            curves |= {"test_accuracy": 0.98 - loss / 3}
            curves |= {"average_test_accuracy": 0.98 - loss / 3}
        record = records.describe(planned)
        if config.optimizer == "svrg":
            runs.append(record | {"failure": "it would not"})
            continue
        step = (config.steps * share[:, 0]).astype(int)
        runs.append(plain(record | {"step": step, "curves": curves}))
    times = {record["workload"]: ratios(meka=2.5, adameka=3.0) for record in runs}
    return {
        "settings": {"scale": scale, "seeds": 2, "steps_scale": 1.0},
        "runs": runs,
        "times": times,
        "commands": ["meka scorecard --out DIR"],
    }
