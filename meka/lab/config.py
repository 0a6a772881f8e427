"""All that determines a run, checked before anything is written."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meka.lab import optimizers


class ConfigError(ValueError):
    """A configuration was refused; nothing has been written."""


_AT_LEAST_ONE = (
    "steps",
    "seeds",
    "batch_size",
    "eval_every",
    "eval_examples",
    "checkpoint_every",
    "max_rejected",
)
_MAY_BE_NONE = ("batch_size", "eval_examples")


@dataclass(frozen=True)
class RunConfig:
    """All that determines a run. Checked when made, so a bad one never exists.

    Attributes:
        workload: name of the problem, or ``file.py:name``.
        optimizer: a name of `meka.lab.optimizers.TABLE`.
        steps: how many steps to train.
        seed: the first random seed.
        seeds: how many seeds to run, counting up from ``seed``.
        batch_size: examples a step; None for the workload's own.
        learning_rate: None for the optimizer's default.
        schedule: a name of `meka.lab.optimizers.SCHEDULES`; None for the optimizer's.
        options: further options of the optimizer.
        eval_every: steps between evaluations.
        eval_examples: how many of each set an evaluation looks at; None for all.
        checkpoint_every: steps between checkpoints.
        data_dir: folder of the data; None for the cache.
        average: also keep and evaluate an average of the iterates.
        max_rejected: stop after this many rejected steps in a row.
    """

    workload: str
    optimizer: str
    steps: int
    seed: int = 0
    seeds: int = 1
    batch_size: int | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    eval_every: int = 100
    eval_examples: int | None = None
    checkpoint_every: int = 1000
    data_dir: str | None = None
    average: bool = False
    max_rejected: int = 25

    def __post_init__(self) -> None:
        for name in ("workload", "optimizer"):
            _expect(name, getattr(self, name), str, "text")
            if not getattr(self, name):
                raise ConfigError(f"{name} must not be empty")
        for name in ("schedule", "data_dir"):
            if getattr(self, name) is not None:
                _expect(name, getattr(self, name), str, "text")
        for name in _AT_LEAST_ONE:
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                _expect_integer(name, getattr(self, name), at_least=1)
        _expect("average", self.average, bool, "true or false")
        _expect_integer("seed", self.seed, at_least=0)
        _expect("options", self.options, dict, "a table of names and values")
        try:
            optimizers.check(
                self.optimizer,
                learning_rate=self.learning_rate,
                schedule=self.schedule,
                options=self.options,
            )
        except optimizers.OptimizerError as error:
            raise ConfigError(str(error)) from error
        # What config.json cannot give back as it was would make a resumed run another.
        if _json_round_trip(self.options) != self.options:
            raise ConfigError(
                f"options must be plain JSON values (text, numbers, true, false, null, "
                f"lists, tables), not {self.options!r}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Read a configuration, refusing unknown and missing keys by name."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration is a table, not {values!r}")
        known = {each.name: each for each in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown configuration key {key!r}{hint} "
                    f"(known: {', '.join(known)})"
                )
        for key in ("workload", "optimizer", "steps"):
            if key not in values:
                raise ConfigError(f"the configuration has no {key!r}")
        return cls(**dict(values))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain values; the inverse of `from_dict`."""
        return dataclasses.asdict(self)


def _expect(name: str, value: Any, kind: type, words: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} must be {words}, not {value!r}")


def _expect_integer(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    if value < at_least:
        raise ConfigError(f"{name} must be at least {at_least}, not {value}")


def _json_round_trip(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None
