"""A process that trains several runs of one workload, one after the other.

It reads what to do from its standard input, and leaves a record in the folder of every
run that came to an end, be it a good one. jax and the data are loaded once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from meka.lab.config import RunConfig
from meka.lab.optimizers import TABLE
from meka.lab.reproduce import setting as files
from meka.lab.scorecard import records
from meka.lab.scorecard.plan import Run


def order(runs: list[Run], out: Path) -> str:
    """What to write to the standard input of a worker."""
    configs = [[run.config.to_dict(), run.default] for run in runs]
    return json.dumps({"out": str(out), "parent": os.getpid(), "runs": configs})


def main() -> int:
    """Train what was ordered; returns the exit code."""
    from meka.lab import workloads
    from meka.lab.train import Interrupted

    asked = json.loads(sys.stdin.read())
    out = Path(asked["out"])
    runs = [
        Run(RunConfig.from_dict(config), default) for config, default in asked["runs"]
    ]
    first = runs[0].config
    workload = workloads.load(first.workload, first.data_dir)
    for run in runs:
        if os.getppid() != asked["parent"]:  # nobody is there any more to want it
            return 1
        try:
            record = _train(run, records.folder(out, run), workload)
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            return stopped.exit_code
        files.write(records.folder(out, run) / records.RECORD, record)
        gc.collect()  # the loop and its arrays hold each other
    return 0


def _train(run: Run, path: Path, workload: Any) -> records.Record:
    from meka.lab.runfolder import is_run
    from meka.lab.train import TrainingStopped, train

    if TABLE[run.config.optimizer].finite and workload.data is None:
        reason = "needs finite data, for full gradients; this workload has none"
        return records.describe(run) | {"failure": reason}
    failure = None
    try:
        train(run.config, path, resume=is_run(path), workload=workload)
    except TrainingStopped as reason:  # a result too
        failure = f"stopped: {str(reason).partition('. ')[0]}"
    return records.from_run(run, path, failure)


if __name__ == "__main__":
    raise SystemExit(main())
