"""What `meka reproduce` and `python -m meka.lab.reproduce` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from meka.lab.reproduce.table import TABLE, chosen
from meka.lab.train import Watcher

INTERRUPTED = 130


def listed() -> str:
    """The experiments, a line each and their claims below."""
    return "\n".join(
        f"{row.name} ({row.paper})\n    {row.claim}" for row in TABLE.values()
    )


def reproduce(
    names: Sequence[str],
    *,
    scale: str,
    out: Path,
    seeds: int | None,
    epochs: float | None,
    workloads: Sequence[str],
    optimizers: Sequence[str],
    finished: bool,
    data_dir: Path | None,
    command: str,
    watch: Callable[[str, int], Watcher],
    say: Callable[[str], None],
) -> int:
    """Run, and answer Ctrl-C with what to do next; returns the exit code."""
    experiments = chosen(names)
    from meka.lab.reproduce.runner import reproduce as run
    from meka.lab.reproduce.setting import Setting

    setting = Setting(
        scale,
        seeds=seeds,
        epochs=epochs,
        workloads=tuple(workloads),
        optimizers=tuple(optimizers),
        finished=finished,
        data_dir=None if data_dir is None else str(data_dir),
        watch=watch,
    )
    try:
        verdicts = run(experiments, setting, out, command=command, say=say)
    except KeyboardInterrupt:
        say(f"interrupted; what is finished is in {out}, the same command goes on")
        return INTERRUPTED
    held = sum(verdict.holds for verdict in verdicts.values())
    say(f"{held} of {len(verdicts)} claims hold")
    say(f"page: {out / 'index.html'}")
    return 0
