"""The command `meka`. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from meka.lab.scorecard.command import Scorecard

if TYPE_CHECKING:
    from rich.console import Console

    from meka.lab.config import RunConfig

_USAGE = 2  # exit code for a request that was refused
_STOPPED = 3  # exit code for a run that could not go on
_DISK = 4  # exit code for a disk that is full or must not be written
_Schedule = Literal["constant", "linear", "cosine"]


class UsageError(Exception):
    """The command line asks for something that cannot be done."""


@dataclass(frozen=True)
class Train:
    """Train one model and keep everything that was measured in a folder."""

    workload: Annotated[str, tyro.conf.Positional]
    """A name from `meka workloads`, or your own as path/to/file.py:name."""
    optimizer: str = "adameka"
    """A name from `meka optimizers`."""
    steps: int | None = None
    """How many steps; by default the workload's own length."""
    seed: int = 0
    seeds: int = 1
    """Train this many seeds at once, counting up from --seed."""
    out: Path | None = None
    """The run folder; by default runs/WORKLOAD-OPTIMIZER-SEED."""
    resume: bool = False
    """Go on with the run in the folder, from its last checkpoint."""
    learning_rate: float | None = None
    """Only for optimizers that take one."""
    schedule: _Schedule | None = None
    """The shape of the step size over the run."""
    batch_size: int | None = None
    eval_every: int = 100
    eval_examples: int | None = None
    """How many of each set an evaluation looks at; by default all."""
    checkpoint_every: int = 1000
    max_rejected: int = 25
    """Stop after this many rejected steps in a row."""
    average: bool = False
    """Also evaluate an average of the iterates."""
    option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An option of the optimizer, such as probe=lagged; may be repeated."""
    data_dir: Path | None = None
    """Where the data is; by default $MEKA_DATA or the download cache."""
    writer: Annotated[
        tuple[Literal["tensorboard", "trackio"], ...], tyro.conf.UseAppendAction
    ] = ()
    """Also show the records to another tool, which must be installed."""

    def run(self, console: Console) -> int:
        """Train."""
        from meka.lab import progress, tables, workloads, writers
        from meka.lab.config import RunConfig
        from meka.lab.history import read
        from meka.lab.runfolder import is_run, read_config
        from meka.lab.train import train

        name = self.workload.replace("/", "_").replace(":", "-").replace(".py", "")
        out = self.out or Path("runs") / f"{name}-{self.optimizer}-{self.seed}"
        data_dir = None if self.data_dir is None else str(self.data_dir)

        def configured(steps: int) -> RunConfig:
            return RunConfig(
                workload=self.workload,
                optimizer=self.optimizer,
                steps=steps,
                seed=self.seed,
                seeds=self.seeds,
                batch_size=self.batch_size,
                learning_rate=self.learning_rate,
                schedule=self.schedule,
                options=_options(self.option),
                eval_every=self.eval_every,
                eval_examples=self.eval_examples,
                checkpoint_every=self.checkpoint_every,
                max_rejected=self.max_rejected,
                average=self.average,
                data_dir=data_dir,
            )

        # Everything that can be refused is refused before data is read.
        openers = [writers.find(name) for name in dict.fromkeys(self.writer)]
        config = configured(1 if self.steps is None else self.steps)
        resume = self.resume and is_run(out)
        if self.resume and not resume:
            console.print(f"{out} holds no run yet: starting one", markup=False)
        if resume:
            config = read_config(out)
            self._refuse_another(config, out)
        workload = workloads.load(
            self.workload, data_dir or config.data_dir, **_batch(config.batch_size)
        )
        if not resume:
            config = configured(self.steps or workload.steps)
        with progress.display(console) as display:
            watcher = display.watcher(
                f"{config.workload} {config.optimizer}", config.steps
            )
            train(
                config,
                out,
                resume=resume,
                watcher=watcher,
                workload=workload,
                writers=openers,
            )
        console.print(tables.runs_table([read(out)]))
        console.print(
            f"kept in {out}; look at it with: meka report {out}", markup=False
        )
        return 0

    def _refuse_another(self, found: RunConfig, out: Path) -> None:
        """Refuse to resume a run with other settings than it was begun with.

        What was not given is the run's own; the data may have been moved.
        """
        asked: dict[str, Any] = dataclasses.asdict(self)
        asked["options"] = _options(self.option)
        default = {field.name: field.default for field in dataclasses.fields(self)}
        default["options"] = {}
        for name, value in found.to_dict().items():
            mine = asked[name]
            if name == "workload":  # a file of one's own may have been moved, too
                mine, value = Path(mine).name, Path(value).name
            elif name == "data_dir" or mine == default[name]:
                continue
            if mine != value:
                raise UsageError(
                    f"{out} holds a run with {name} {value!r}, not {mine!r}; resume it "
                    "as it was begun, or choose another folder with --out"
                )


@dataclass(frozen=True)
class Compare:
    """Compare optimizers over their grids and several seeds, tuning costs included.

    Without arguments: auto, meka, adameka, Adam and momentum on the embedded digits.
    """

    workload: Annotated[str, tyro.conf.Positional] = "digits"
    optimizers: tuple[str, ...] = ("auto", "meka", "adameka", "adam", "momentum")
    """Names from `meka optimizers`, or `all`."""
    steps: int | None = None
    seeds: int = 3
    seed: int = 0
    tune: bool = True
    """Search each optimizer's grid (--no-tune: defaults only)."""
    schedule: _Schedule | None = None
    average: bool = False
    """Also evaluate an average of the iterates, for all alike."""
    eval_every: int | None = None
    out: Path | None = None
    """The folder for runs, table, pictures and page; by default meka-compare-WORKLOAD.

    If it holds an unfinished comparison, that is finished.
    """
    data_dir: Path | None = None

    def run(self, console: Console) -> int:
        """Compare."""
        from meka.lab import compare, plots, progress, tables, workloads
        from meka.lab import optimizers as table
        from meka.lab.cockpit.page import Preface, write_report

        names = tuple(table.TABLE) if self.optimizers == ("all",) else self.optimizers
        for name in names:
            table.check(name, schedule=None)
        label = Path(self.workload.rpartition(":")[0] or self.workload).stem
        out = self.out or Path(f"meka-compare-{label}")
        data_dir = None if self.data_dir is None else str(self.data_dir)
        options: dict[str, Any] = {
            "seeds": self.seeds,
            "seed": self.seed,
            "tune": self.tune,
            "schedule": self.schedule,
            "average": self.average,
            "eval_every": self.eval_every,
            "data_dir": data_dir,
        }
        # Refuse what can be refused before anything is loaded or written.
        steps = 1 if self.steps is None else self.steps
        compare.plan(self.workload, names, steps=steps, **options)
        if self.steps is None:
            steps = workloads.load(self.workload, data_dir).steps
        configs = compare.plan(self.workload, names, steps=steps, **options)
        with progress.display(console) as display:
            result = compare.compare(
                configs,
                out,
                watch=lambda config, number, count: display.watcher(
                    f"[{number + 1}/{count}] {config.optimizer}"
                    + (
                        ""
                        if config.learning_rate is None
                        else f" {config.learning_rate:g}"
                    ),
                    config.steps,
                ),
            )
        compare.save(result, out)
        picture = plots.overview(
            list(result.best.values()),
            out / "compare.png",
            title=f"{self.workload}: {steps} steps, {self.seeds} seeds",
            faint=[run for members in result.grid.values() for run in members],
            target=result.target,
        )
        page = write_report(
            [run.path for run in result.best.values()],
            out / "report.html",
            command=_command_line(),
            preface=Preface(
                f"{self.workload}: {steps} steps, {self.seeds} seeds",
                result.verdict,
                tables.COMPARISON_HEAD,
                tables.comparison_rows(result),
            ),
        )
        console.print(tables.comparison_table(result))
        tables.print_verdict(console, result)
        console.print(f"page: {page}", markup=False)
        console.print(f"picture: {picture}", markup=False)
        return 0


@dataclass(frozen=True)
class Show:
    """Print a table of runs and draw their curves."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""
    out: Path = Path("meka-show.png")
    """The picture to write."""

    def run(self, console: Console) -> int:
        """Show."""
        from meka.lab import plots, tables
        from meka.lab.history import read

        if not self.runs:
            raise UsageError("name at least one run folder")
        runs = [read(path) for path in self.runs]
        console.print(tables.runs_table(runs))
        picture = plots.overview(runs, self.out)
        console.print(f"picture: {picture}", markup=False)
        return 0


@dataclass(frozen=True)
class Report:
    """Write one HTML page about runs: curves to zoom, and what the numbers say."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""
    out: Path = Path("meka-report.html")
    """The page to write; it needs nothing beside it."""

    def run(self, console: Console) -> int:
        """Report."""
        if not self.runs:
            raise UsageError("name at least one run folder")
        _leave_accelerators_alone()
        from meka.lab.cockpit.page import write_report

        page = write_report(self.runs, self.out, command=_command_line())
        console.print(f"page: {page}", markup=False)
        return 0


@dataclass(frozen=True)
class Watch:
    """Follow runs while they train, on a page of your own machine or in the terminal.

    The runs may have begun, have ended, or not be there yet. Ctrl-C stops watching.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""
    terminal: bool = False
    """Show the runs here in place of a page."""
    port: int | None = None
    """By default 6352, or the next one that is free; 0 is any."""
    host: str = "127.0.0.1"
    """The address to listen on; others than this machine's own need --token."""
    token: str | None = None
    """What a visitor must know; by default $MEKA_TOKEN."""

    def run(self, console: Console) -> int:
        """Watch."""
        if not self.runs:
            raise UsageError("name at least one run folder")
        _leave_accelerators_alone()
        os.nice(10)  # where processors are few, the run that trains goes first
        if self.terminal:
            from meka.lab.cockpit.terminal import follow

            return follow(self.runs, console)
        import asyncio

        from meka.lab.cockpit.server import Server

        async def serve() -> None:
            token = self.token or os.environ.get("MEKA_TOKEN", "")
            server = Server(
                self.runs,
                host=self.host,
                port=self.port,
                token=token,
                command=_command_line(hide=token),
            )
            console.print(
                f"watching at {server.address} (Ctrl-C to stop)",
                markup=False,
                soft_wrap=True,
            )
            await server.run()

        try:
            asyncio.run(serve())
        except KeyboardInterrupt:
            console.print("stopped watching; the runs go on", markup=False)
        return 0


@dataclass(frozen=True)
class Reproduce:
    """Run the paper's experiments and say, with figures, whether each claim holds."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names from `meka reproduce --list`, or `all`."""
    scale: Literal["smoke", "desk", "full"] = "desk"
    """Seconds each, two cores (digits and MNIST), or the paper's own on a GPU."""
    out: Path | None = None
    """The folder for data, figures, verdicts and page; by default meka-reproduce-SCALE.

    What it holds already is not run again.
    """
    list: bool = False
    """Say what there is, and what each claims."""
    seeds: int | None = None
    """In the place of each experiment's own number of seeds."""
    epochs: float | None = None
    """In the place of each experiment's own length."""
    workloads: tuple[str, ...] = ()
    """Only these of the workloads an experiment trains."""
    optimizers: tuple[str, ...] = ()
    """Only these of the optimizers that all-optimizers trains."""
    finished: bool = False
    """Train nothing: show and judge what is finished, and say what is not."""
    data_dir: Path | None = None

    def run(self, console: Console) -> int:
        """Reproduce."""
        from meka.lab.reproduce import table

        if self.list:
            for row in table.TABLE.values():
                console.print(f"{row.name} ({row.paper})", markup=False)
                console.print(f"    {row.claim}", markup=False, highlight=False)
            return 0
        table.chosen(self.names)  # refuses what it can before jax is loaded
        from meka.lab import progress
        from meka.lab.reproduce import command

        with progress.display(console) as display:
            return command.reproduce(
                self.names,
                scale=self.scale,
                out=self.out or Path(f"meka-reproduce-{self.scale}"),
                seeds=self.seeds,
                epochs=self.epochs,
                workloads=self.workloads,
                optimizers=self.optimizers,
                finished=self.finished,
                data_dir=self.data_dir,
                command="meka " + shlex.join(sys.argv[1:]),
                watch=display.watcher,
                say=lambda text: console.print(text, markup=False, highlight=False),
            )


@dataclass(frozen=True)
class Data:
    """Download the data sets, or check the files that are there."""

    action: Annotated[Literal["fetch", "verify"], tyro.conf.Positional]
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ("mnist", "cifar10")
    data_dir: Path | None = None
    """The folder; by default $MEKA_DATA or the download cache."""

    def run(self, console: Console) -> int:
        """Fetch or verify."""
        from meka.lab import data, progress

        failed = False
        for name in self.names:
            if self.action == "fetch":
                with progress.downloads(console) as show:
                    data.fetch(name, self.data_dir, show)
            for check in data.verify(name, self.data_dir):
                mark = "ok " if check.ok else "BAD"
                console.print(f"{mark} {check.path} {check.message}", markup=False)
                failed |= not check.ok
        return 1 if failed else 0


@dataclass(frozen=True)
class Optimizers:
    """List the optimizers, their grids and options."""

    def run(self, console: Console) -> int:
        """List."""
        from rich.table import Table

        from meka.lab import optimizers

        table = Table(box=None, pad_edge=False)
        for name in ("name", "what it is", "grid"):
            table.add_column(name, overflow="fold")
        for entry in optimizers.TABLE.values():
            grid = " ".join(f"{x:g}" for x in entry.grid)
            fixed = "" if entry.default is None else f"{entry.default:g} (published)"
            table.add_row(entry.name, entry.summary, grid or fixed or "nothing to tune")
        console.print(table)
        return 0


@dataclass(frozen=True)
class Workloads:
    """List the workloads."""

    def run(self, console: Console) -> int:
        """List."""
        from meka.lab import workloads

        width = max(map(len, workloads.WORKLOADS))
        for name, summary in workloads.WORKLOADS.items():
            console.print(f"{name:{width}}  {summary}", markup=False, highlight=False)
        return 0


_Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Watch, tyro.conf.subcommand("watch")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Scorecard, tyro.conf.subcommand("scorecard")]
    | Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Optimizers, tyro.conf.subcommand("optimizers")]
    | Annotated[Workloads, tyro.conf.subcommand("workloads")]
)


def main() -> None:
    """Run the command line."""
    # Quiet unless asked: XLA's C++ log has nothing for a user of this command.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    command: Any = tyro.cli(
        _Command,  # pyright: ignore[reportArgumentType]
        prog="meka",
        description="Train neural networks without tuning the optimizer.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    from rich.console import Console

    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, soft_wrap=False)
    raise SystemExit(_guarded(command, console))


def _guarded(command: Any, console: Console) -> int:
    """Run a command; what a user can mend is one sentence, not a traceback."""
    try:
        return command.run(console)
    except KeyboardInterrupt:  # outside of training, which answers it itself
        print("meka: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"meka: {error}{_advice(error)}", file=sys.stderr)
        return code


def _advice(error: Exception) -> str:
    """What to do about a refusal of the disk that nobody has put into words yet."""
    if not isinstance(error, OSError):
        return ""
    from meka.lab.checkpoint import what_to_do

    return f". {what_to_do(error)}"


def _exit_code(error: Exception) -> int | None:
    """The exit code for an error that is the user's to mend, else None."""
    if isinstance(error, UsageError):
        return _USAGE
    if isinstance(error, OSError) and error.errno in _DISK_REFUSED:
        return _DISK
    module = type(error).__module__
    if not module.startswith("meka."):
        return None
    if hasattr(error, "exit_code"):
        # All is saved; a signal while the interpreter winds down must not change that.
        _ignore_signals()
        return int(error.exit_code)  # pyright: ignore[reportAttributeAccessIssue]
    return _STOPPED if type(error).__name__ == "TrainingStopped" else _USAGE


_DISK_REFUSED = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _leave_accelerators_alone() -> None:
    """Looking at a run must not take memory from the device that trains it."""
    os.environ["JAX_PLATFORMS"] = "cpu"


def _command_line(hide: str = "") -> str:
    words = [word for word in sys.argv[1:] if not hide or hide not in word]
    return "meka " + shlex.join(words)


def _options(pairs: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--option {pair!r}: write NAME=VALUE, as in probe=lagged")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def _batch(batch_size: int | None) -> dict[str, Any]:
    return {} if batch_size is None else {"batch_size": batch_size}
