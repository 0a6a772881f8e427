"""What watching costs the run that is watched, in seconds per step.

    python -m benchmarks.watch_cost [--rounds 12] [--seconds 3] [--out FILE.json]

One training process; one `meka watch` beside it with a reader that asks as often as a
page does. The watcher is stopped and continued (SIGSTOP, SIGCONT) in turns of a few
seconds, so that both halves see the same machine. Every chunk of steps belongs to the
turn in which it ended; the first of each turn is left out. For the noise, the quiet
turns are also compared with one another, every other one against the rest. Where others
use the machine, processor seconds say more than the clock: those of the watcher, as a
share of one core, and those of the training, per step (Linux only).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from meka.lab.loop import CHUNK
from meka.lab.train import TIMING

_PAUSE = 1.5  # seconds between two questions of a page


def paces(file: Path, seconds: float, read: int) -> tuple[list[float], int]:
    """Seconds per step of the chunks that end within the next seconds."""
    time.sleep(seconds)
    lines = file.read_text().splitlines()
    records = [json.loads(line) for line in lines[read:] if line.endswith("}")]
    found = [record["seconds"] / record["steps"] for record in records[1:]]
    return found, read + len(records)


def cpu(process: int) -> float:
    """Processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reader(address: str, answers: list[int], over: threading.Event) -> None:
    """Ask for news as a page does."""
    versions: list[int] = []
    while not over.wait(_PAUSE):
        known = ",".join(map(str, versions))
        try:
            with urllib.request.urlopen(f"{address}data?known={known}") as answer:
                body = answer.read()
        except OSError:
            continue
        versions = json.loads(body)["versions"]
        answers.append(len(body))


def measure(rounds: int, seconds: float, optimizer: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "meka"]
        train = ["train", "digits", "--optimizer", optimizer, "--steps", "10000000"]
        options = ["--eval-every", "1000000", "--checkpoint-every", "1000000"]
        training = subprocess.Popen(
            [*command, *train, *options, "--out", str(run)], stdout=subprocess.DEVNULL
        )
        watching = subprocess.Popen(
            [*command, "watch", str(run), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        over, answers = threading.Event(), []
        try:
            assert watching.stdout is not None
            address = watching.stdout.readline().split()[2]
            threading.Thread(
                target=reader, args=(address, answers, over), daemon=True
            ).start()
            # From when the watcher has compiled and answers with curves.
            while not (run / TIMING).exists() or max(answers, default=0) < 10_000:
                time.sleep(0.2)
            answers.clear()
            turns: dict[str, list[list[float]]] = {"watched": [], "quiet": []}
            spent = {"watched": [0.0, 0.0], "quiet": [0.0, 0.0]}
            steps = {"watched": 0, "quiet": 0}
            processes = (training.pid, watching.pid)
            read = len((run / TIMING).read_text().splitlines())
            for _ in range(rounds):
                for name, order in (
                    ("quiet", signal.SIGSTOP),
                    ("watched", signal.SIGCONT),
                ):
                    watching.send_signal(order)
                    before, first = list(map(cpu, processes)), read
                    found, read = paces(run / TIMING, seconds, read)
                    turns[name].append(found)
                    steps[name] += CHUNK * (read - first)
                    for k, process in enumerate(processes):
                        spent[name][k] += cpu(process) - before[k]
        finally:
            over.set()
            for process in (watching, training):
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait()
    cpu_share = spent["watched"][1] / (rounds * seconds)
    per_step = {name: 1e3 * spent[name][0] / steps[name] for name in steps}
    return {
        "watcher_share_of_a_core": cpu_share,
        "training_cpu_milliseconds_per_step": per_step,
        "training_cpu_watched_over_quiet": per_step["watched"] / per_step["quiet"],
        **summary(turns, answers),
    }


def summary(turns: dict[str, list[list[float]]], answers: list[int]) -> dict:
    def middle(parts: list[list[float]]) -> float:
        return statistics.median(pace for part in parts for pace in part)

    quiet, watched = turns["quiet"], turns["watched"]
    pairs = [
        statistics.median(w) / statistics.median(q)
        for q, w in zip(quiet, watched, strict=True)
        if q and w
    ]
    return {
        "chunks": {name: sum(map(len, parts)) for name, parts in turns.items()},
        "milliseconds_per_step": {
            name: 1e3 * middle(parts) for name, parts in turns.items()
        },
        "watched_over_quiet": middle(watched) / middle(quiet),
        "per_round": [round(pair, 3) for pair in pairs],
        "median_of_rounds": statistics.median(pairs),
        "quiet_over_quiet": middle(quiet[::2]) / middle(quiet[1::2]),
        "answers": len(answers),
        "bytes_an_answer": statistics.median(answers),
        "load": os.getloadavg()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--optimizer", default="adameka")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(args.rounds, args.seconds, args.optimizer), indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
