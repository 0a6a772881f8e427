"""What a run folder holds, as bytes to compare."""

from pathlib import Path


def outcome(path: Path) -> dict[str, bytes]:
    """Everything of a finished run that must be the same every time.

    The metrics, and the last checkpoint: parameters, optimizer state and averages.
    Random keys are not saved: they follow from the seed and the step number.
    """
    last = max(path.glob("checkpoints/step-????????"))
    files = [path / "metrics.jsonl", *sorted(last.iterdir())]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def everything(path: Path) -> dict[str, bytes]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
